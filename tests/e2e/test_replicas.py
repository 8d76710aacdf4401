"""Tests in which two prefill and two decode services are drained, killed and replaced under load. Clients with `resume`
notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from baton import Client, Completion, Delta, errors
from baton.client import EventStream
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE, ServiceProcess
from tests.e2e.load import Workload, kill, load
from tests.support.running_pair import (
    BOUND_S,
    RECONNECT_AT_ONCE,
    RunningPair,
    is_empty,
    running_pair,
    stopped,
    wait_until,
)

pytestmark = pytest.mark.thorough

WORKLOAD = Workload(prompt_tokens=60, new_tokens=150)
ENDLESS = 3000
SEED = 6
"""A seed with which operators and fused forwards draw the same tokens of an endless stream. With 5 the 171st token
nearly ties: a service that has just started, and computes with operators, draws another one than the others do.
"""
GRACE_S = 1.0
"""The grace period in seconds. It is so short that streams are cut."""
NUM_TRIES = 5
"""On a busy machine the grace period may be over before a test has seen how a service drains."""


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(
        tiny_model_dir("llama"),
        kind=forked,
        num_prefill=2,
        num_decode=2,
        shared_args=(f"--grace-period-s={GRACE_S}", "--max-kv-tokens=8192"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(pair: RunningPair) -> list[Completion]:
    return WORKLOAD.undisturbed(pair.client)


@pytest.fixture
def client(pair: RunningPair) -> Iterator[Client]:
    """A client of both decode services."""
    address = ",".join(pair.processes.decode_addresses)
    with Client(address, resume=True, channel_overrides=RECONNECT_AT_ONCE) as client:
        yield client


def is_serving(service: ServiceProcess) -> bool:
    with Client(service.address, channel_overrides=RECONNECT_AT_ONCE) as client:
        return client.health(READY_SERVICE[service.role]) is HealthStatus.SERVING


def start(pair: RunningPair, services: Sequence[ServiceProcess]) -> None:
    """Starts the services in this order. Returns when all are ready and every decode service has found every prefill
    service.
    """
    for service in services:
        service.start()
    wait_until(lambda: all(map(is_serving, pair.processes.services)))
    wait_until(
        lambda: all(replica.is_ready for decode in pair.decodes for replica in decode.load().prefill_replicas),
        about=lambda: [decode.load() for decode in pair.decodes],
    )


def endless(client: Client) -> EventStream:
    """Returns a stream that has delivered something and will not end soon by itself."""
    stream = client.generate(token_ids=[10, 11], max_tokens=ENDLESS, ignore_eos=True, seed=SEED, timeout_s=BOUND_S)
    next(event for event in stream if isinstance(event, Delta))
    return stream


def error_of(stream: EventStream) -> errors.BatonError:
    with pytest.raises(errors.BatonError) as raised:
        list(stream)
    return raised.value


def refusal_of(client: Client) -> errors.Unavailable:
    """Makes requests until one is refused, and returns that refusal."""
    refusals: list[errors.Unavailable] = []

    def is_refused() -> bool:
        try:
            client.complete(token_ids=[10], max_tokens=1, timeout_s=BOUND_S)
        except errors.Unavailable as refusal:
            refusals.append(refusal)
        return bool(refusals)

    wait_until(is_refused)
    return refusals[0]


def health_of(client: Client) -> HealthStatus | None:
    """Returns what a service says of its process, or None if it cannot be reached."""
    with suppress(errors.Unavailable):
        return client.health("")
    return None


def num_cut(pair: RunningPair) -> int:
    return sum(service.log_file.read_text().count('"outcome": "draining"') for service in pair.processes.decode)


def test_a_rolling_restart_under_load_changes_no_output(
    pair: RunningPair, client: Client, undisturbed: list[Completion], capsys: pytest.CaptureFixture[str]
) -> None:
    with load(client, WORKLOAD, undisturbed) as outcomes:
        for service in (*pair.processes.prefill, *pair.processes.decode):
            held = [endless(pair.decodes[pair.processes.decode.index(service)])] if service.role == "decode" else []
            service.terminate()
            assert service.wait(BOUND_S)
            assert [error_of(stream).reason for stream in held] == ["DRAINING"] * len(held)
            outcomes.wait_for_more()
            start(pair, [service])
            outcomes.wait_for_more()
    assert outcomes.errors == []
    with capsys.disabled():
        print(f" [{outcomes.num_served} requests, {num_cut(pair)} streams cut and resumed]", end="")
    assert num_cut(pair) >= len(pair.processes.decode)


def test_a_draining_decode_service_cuts_what_is_left_with_its_reason_and_the_rest_of_the_output_is_elsewhere(
    pair: RunningPair,
) -> None:
    decode, other = pair.processes.decode[0], pair.decodes[1]
    for _ in range(NUM_TRIES):
        stream = endless(pair.decodes[0])
        decode.terminate()
        refused_with, is_ready, health = refusal_of(pair.client).reason, pair.is_ready(), health_of(pair.client)
        if not decode.wait(0.0):  # it was still draining while all that was asked
            break
        start(pair, [decode])
    assert refused_with == "DRAINING"
    assert not is_ready, "health must turn before the first refusal"
    assert health is HealthStatus.SERVING

    error = error_of(stream)

    assert isinstance(error, errors.Unavailable) and error.reason == "DRAINING"
    assert decode.wait(BOUND_S)
    progress = stream.progress
    num_left = 5
    rest = other.complete(
        token_ids=[10, 11],
        max_tokens=len(progress.generated_token_ids) + num_left,
        ignore_eos=True,
        seed=progress.seed,
        generated_token_ids=progress.generated_token_ids,
    )
    whole = other.complete(
        token_ids=[10, 11], max_tokens=len(progress.generated_token_ids) + num_left, ignore_eos=True, seed=SEED
    )
    assert (*progress.generated_token_ids, *rest.token_ids) == whole.token_ids
    assert rest.usage == whole.usage
    start(pair, [decode])


def test_a_killed_decode_service_loses_only_its_own_streams_and_prefill_frees_their_rows(
    pair: RunningPair, undisturbed: list[Completion]
) -> None:
    victim = pair.processes.decode[0]
    with load(pair.decodes[1], WORKLOAD, undisturbed, num_threads=2) as others:
        lost = endless(pair.decodes[0])
        with stopped(*pair.processes.prefill):
            handed_over = [pair.client.generate(token_ids=[10 + n] * 50, max_tokens=5) for n in range(4)]
            wait_until(lambda: sum(replica.num_rows for replica in pair.load().prefill_replicas) == 4, about=pair.load)
            kill(victim)
        others.wait_for_more()
    assert others.errors == []
    for stream in (lost, *handed_over):
        assert isinstance(error_of(stream), errors.Unavailable)
    assert lost.progress.seed == SEED and lost.progress.generated_token_ids
    wait_until(lambda: all(is_empty(prefill.load()) for prefill in pair.prefills), about=pair.prefill_load)
    start(pair, [victim])


@pytest.mark.parametrize("restarted_first", ["prefill", "decode"])
def test_all_services_killed_and_started_again_in_either_order_serve_again_and_no_request_is_lost(
    pair: RunningPair, client: Client, undisturbed: list[Completion], restarted_first: str
) -> None:
    services = sorted(pair.processes.services, key=lambda service: service.role != restarted_first)
    with load(client, WORKLOAD, undisturbed) as outcomes:
        for service in reversed(services):
            kill(service)
        for service in services:
            service.start()
        outcomes.wait_for_more(12)
    assert outcomes.errors == []
    start(pair, [])
