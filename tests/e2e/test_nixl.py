"""Tests of a pair whose KV goes through NIXL. The tokens equal `generate`'s, and every byte of KV goes that way.

If a process is killed, either a service or the one that hosts NIXL, requests are retried and no token is lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from baton import Completion
from baton.local_pair import LocalPair
from baton.service_process import ServiceProcess
from common.nixl import transfer_process
from tests.support.models import save_tiny_model
from tests.support.reference import generate_greedily
from tests.support.running_pair import BOUND_S, RunningPair, prefill_counters, running_pair, wait_until

NUM_REQUESTS = 6
PROMPT_TOKENS = 300
NEW_TOKENS = 6
ALL, LENT = "baton_handoff_bytes_total", "baton_handoff_lent_bytes_total"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with much KV for its amount of computation: 4 KiB a token."""
    return save_tiny_model(tmp_path_factory.mktemp("large-kv"), "llama", num_hidden_layers=8, num_key_value_heads=4)


@pytest.fixture(scope="module")
def pair(model: Path, forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(
        model,
        kind=forked,
        num_prefill=2,
        shared_args=("--max-kv-tokens=8192",),
        prefill_args=("--kv-transport=nixl", "--chunk-tokens=64"),
        exposes_metrics=True,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return [generate_greedily(model, prompt(number), NEW_TOKENS).token_ids for number in range(NUM_REQUESTS)]


def prompt(number: int) -> list[int]:
    return [10 + (number * 37 + place * (number + 3)) % 240 for place in range(PROMPT_TOKENS)]


@contextmanager
def requests(pair: RunningPair) -> Iterator[list[Future[Completion]]]:
    options = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, "timeout_s": BOUND_S}
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        yield [
            clients.submit(pair.client.complete, token_ids=prompt(number), **options)  # type: ignore[arg-type]
            for number in range(NUM_REQUESTS)
        ]


def tokens(completions: list[Future[Completion]]) -> list[list[int]]:
    return [list(completion.result().token_ids) for completion in completions]


def nixl_of(service: ServiceProcess) -> list[psutil.Process]:
    """Returns the service's processes that host NIXL, once there are any: one for a prefill service, and one per
    replica in use for a decode service.
    """
    found: list[psutil.Process] = []

    def are_there() -> bool:
        children = psutil.Process(service.pid).children()
        found[:] = [child for child in children if not has_ended(child) and transfer_process.__name__ in command(child)]
        return bool(found)

    wait_until(are_there)
    return found


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also raised for a zombie
        return []


def has_ended(process: psutil.Process) -> bool:
    """Returns whether the process has ended, even if its parent has not noticed yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_tokens_are_those_of_generate_and_every_byte_went_through_nixl(
    pair: RunningPair, expected: list[list[int]]
) -> None:
    with requests(pair) as completions:
        assert tokens(completions) == expected
    assert [completion.result().timings.num_handoff_attempts for completion in completions] == [1] * NUM_REQUESTS
    expected_bytes = sum(completion.result().timings.kv_bytes for completion in completions)
    assert prefill_counters(pair)[ALL] == prefill_counters(pair)[LENT] == expected_bytes


def test_a_prefill_service_that_is_killed_takes_its_process_along_and_its_rows_are_read_from_the_other(
    pair: RunningPair, expected: list[list[int]]
) -> None:
    victim, _ = pair.processes.prefill
    (nixl,) = nixl_of(victim)
    before = prefill_counters(pair)[LENT]
    with requests(pair) as completions:
        wait_until(lambda: prefill_counters(pair)[LENT] > before)
        os.kill(victim.pid, signal.SIGKILL)
        assert tokens(completions) == expected
    assert victim.wait(BOUND_S)
    wait_until(lambda: has_ended(nixl))


def test_requests_go_on_where_the_processes_that_nixl_lives_in_are_killed(
    pair: RunningPair, expected: list[list[int]]
) -> None:
    (decode,), (_, prefill) = pair.processes.decode, pair.processes.prefill
    victims = [*nixl_of(decode), *nixl_of(prefill)]
    with requests(pair) as completions:
        wait_until(lambda: pair.load().rows.transferring > 0 or all(each.done() for each in completions))
        for victim in victims:
            with suppress(psutil.NoSuchProcess):  # the end of one may also end its peer
                victim.kill()
        assert tokens(completions) == expected
    assert decode.is_running and prefill.is_running
