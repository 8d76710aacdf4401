"""Tests of field rule A9: processes are killed with SIGKILL or stopped while rows are handed off. The streams continue
with the tokens that they would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from baton import Completion, errors
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus, PrefillLoad
from baton.service_process import READY_SERVICE, ServiceProcess
from common.config.settings import DecodeSettings
from decode_service import main as decode_main
from tests.e2e.load import Workload, has_rows_with, kill, tokens
from tests.support.free_ports import free_address
from tests.support.running_pair import RunningPair, is_empty, running_pair, stopped, wait_until
from tests.support.services_here import serving_here

WORKLOAD = Workload(prompt_tokens=300, new_tokens=12, num_kinds=16, caches=False)
SILENT_TIMEOUT_S = 3
NUM_TRIES = 5


@pytest.fixture(scope="module")
def pair(large_kv_model: Path, forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    """A pair whose KV lands one segment at a time."""
    with running_pair(
        large_kv_model,
        kind=forked,
        num_prefill=2,
        shared_args=("--max-rows=32", "--max-kv-tokens=8192"),
        prefill_args=(
            "--kv-transport=shared_memory",
            "--max-segment-bytes=65536",
            "--send-budget-bytes=262144",
            "--chunk-tokens=64",
            f"--stall-timeout-s={SILENT_TIMEOUT_S}",
        ),
        decode_args=(
            "--receive-budget-bytes=1",
            "--disabled-fast-paths=prefix_routing",  # else one replica may have all prompts cached, and get all rows
            "--prefill-timeout-s=2",
            f"--handoff-progress-timeout-s={SILENT_TIMEOUT_S}",
        ),
    ) as running:
        yield running


def outcome(completion: Future[Completion]) -> tuple[int, ...] | BaseException:
    error = completion.exception()
    return completion.result().token_ids if error is None else error


@pytest.fixture(scope="module")
def undisturbed(pair: RunningPair) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in WORKLOAD.undisturbed(pair.client)]


def start(pair: RunningPair, services: Sequence[ServiceProcess]) -> None:
    for service in services:
        service.start()
    wait_until(lambda: all(replica.is_ready for replica in pair.load().prefill_replicas), about=pair.load)
    wait_until(pair.is_ready, about=pair.load)


def tries(pair: RunningPair, victims: Sequence[ServiceProcess]) -> Iterator[int]:
    """Yields the numbers of tries. A further try is needed if the last row arrived between the check and the kill; the
    victims are then restarted.
    """
    yield 1
    for number in range(2, NUM_TRIES + 1):
        start(pair, victims)
        yield number


def have_ended(completions: Sequence[Future[Completion]]) -> bool:
    return all(completion.done() for completion in completions)


def is_sending(load: PrefillLoad) -> bool:
    """Returns whether the prefill service still holds KV that is fully computed but not yet received."""
    return load.rows.transferring > 0 and load.slots.transferring > 0


def test_requests_of_a_killed_replica_are_computed_by_the_other_and_it_is_used_again_when_it_is_back(
    pair: RunningPair, undisturbed: list[tuple[int, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    victim = pair.processes.prefill[0]
    for _ in tries(pair, [victim]):
        num_retries_before = pair.load().num_row_retries
        with WORKLOAD.at_once(pair.client) as completions:
            wait_until(lambda: has_rows_with(pair, 0) or have_ended(completions), about=pair.load)
            kill(victim)
            assert tokens(completions) == undisturbed
        load = pair.load()
        num_interrupted = load.num_row_retries - num_retries_before
        if num_interrupted:
            break

    with capsys.disabled():
        print(f" [{num_interrupted} rows of {WORKLOAD.num_kinds} interrupted]", end="")
    assert num_interrupted > 0
    attempts = [completion.result().timings.num_handoff_attempts for completion in completions]
    assert sum(attempts) == WORKLOAD.num_kinds + num_interrupted
    wait_until(lambda: [replica.is_ready for replica in pair.load().prefill_replicas] == [False, True], about=pair.load)

    start(pair, [victim])
    num_steps_before = pair.prefill_load(0).num_steps
    with WORKLOAD.at_once(pair.client) as completions:
        assert tokens(completions) == undisturbed
    assert pair.prefill_load(0).num_steps > num_steps_before


@pytest.mark.thorough
def test_while_no_prefill_is_there_decode_is_not_ready_and_requests_are_unavailable(
    pair: RunningPair, undisturbed: list[tuple[int, ...]]
) -> None:
    for _ in tries(pair, pair.processes.prefill):
        with WORKLOAD.at_once(pair.client) as completions:
            wait_until(lambda: has_rows_with(pair, 0) or have_ended(completions), about=pair.load)
            for service in pair.processes.prefill:
                kill(service)
            wait_until(lambda: not pair.is_ready(), about=pair.load)
            assert pair.client.health("") is HealthStatus.SERVING
            # After the bound of two seconds, the client's own deadline would have ended them.
            ended = [outcome(completion) for completion in completions]
        if any(isinstance(end, errors.Unavailable) for end in ended):
            break
    assert any(isinstance(end, errors.Unavailable) for end in ended)
    for end, expected in zip(ended, undisturbed, strict=True):
        assert isinstance(end, errors.Unavailable) or end == expected

    with pytest.raises(errors.Unavailable):
        WORKLOAD.complete(pair.client, 0)
    assert all(not replica.is_ready and replica.reason for replica in pair.load().prefill_replicas)
    wait_until(pair.holds_nothing, about=pair.load)

    start(pair, pair.processes.prefill)
    with WORKLOAD.at_once(pair.client) as completions:
        assert tokens(completions) == undisturbed


@pytest.mark.thorough
def test_when_decode_is_killed_prefill_frees_everything_and_serves_the_next_one(
    pair: RunningPair, undisturbed: list[tuple[int, ...]]
) -> None:
    (decode,) = pair.processes.decode
    for _ in tries(pair, [decode]):
        with WORKLOAD.at_once(pair.client) as completions:
            wait_until(
                lambda: any(is_sending(client.load()) for client in pair.prefills) or have_ended(completions),
                about=pair.prefill_load,
            )
            kill(decode)
            ended = [outcome(completion) for completion in completions]
        if any(isinstance(end, errors.Unavailable) for end in ended):
            break
    assert any(isinstance(end, errors.Unavailable) for end in ended)
    wait_until(lambda: all(is_empty(client.load()) for client in pair.prefills))

    start(pair, [decode])
    with WORKLOAD.at_once(pair.client) as completions:
        assert tokens(completions) == undisturbed


# ---- stopped: the process exists and its connections are open, but it is silent ------------------------------------


@pytest.mark.thorough
def test_rows_of_a_stopped_replica_are_computed_by_the_other(
    pair: RunningPair, undisturbed: list[tuple[int, ...]]
) -> None:
    for _ in tries(pair, []):
        num_retries_before = pair.load().num_row_retries
        with WORKLOAD.at_once(pair.client) as completions:
            wait_until(lambda: has_rows_with(pair, 0) or have_ended(completions), about=pair.load)
            with stopped(pair.processes.prefill[0]):
                wait_until(lambda: not pair.load().prefill_replicas[0].is_ready, about=pair.load)
                assert tokens(completions) == undisturbed
        if pair.load().num_row_retries > num_retries_before:
            break
    assert pair.load().num_row_retries > num_retries_before


@pytest.mark.thorough
def test_while_every_replica_is_stopped_decode_is_not_ready_and_what_waits_ends(
    pair: RunningPair, undisturbed: list[tuple[int, ...]]
) -> None:
    with stopped(*pair.processes.prefill), WORKLOAD.at_once(pair.client) as completions:
        wait_until(lambda: not pair.is_ready(), about=pair.load)
        for completion in completions:
            assert isinstance(outcome(completion), errors.Unavailable)
    start(pair, [])
    with WORKLOAD.at_once(pair.client) as completions:
        assert tokens(completions) == undisturbed


@pytest.mark.thorough
async def test_when_decode_is_stopped_prefill_frees_what_it_had_and_serves_another_and_decode_goes_on_when_it_can(
    pair: RunningPair, undisturbed: list[tuple[int, ...]]
) -> None:
    (decode,) = pair.processes.decode
    settings = DecodeSettings(
        model=pair.client.model_info().model,
        dtype="float32",
        listen=free_address(),
        prefill=pair.processes.prefill_addresses,
        num_threads=1,
        max_kv_tokens=8192,
        local_prefill_tokens=0,
    )
    async with serving_here(decode_main, settings, READY_SERVICE["decode"]) as other:
        await other.turns(HealthStatus.SERVING)
        for _ in tries(pair, []):
            with WORKLOAD.at_once(pair.client) as completions:
                wait_until(
                    lambda: any(is_sending(client.load()) for client in pair.prefills) or have_ended(completions),
                    about=pair.prefill_load,
                )
                with stopped(decode):
                    were_sending = [is_sending(client.load()) for client in pair.prefills]
                    served = await other.client.complete(**WORKLOAD.options(1))
                    assert served.token_ids == undisturbed[1]
                    wait_until(lambda: all(is_empty(client.load()) for client in pair.prefills))
                assert tokens(completions) == undisturbed
            if any(were_sending):
                break
    assert any(were_sending)
