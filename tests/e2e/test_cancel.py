"""Tests that a request whose client leaves or whose time is up, in any phase, leaves nothing behind on either
service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from baton import errors
from baton.client import EventStream
from baton.events import Delta
from baton.local_pair import LocalPair
from baton.server_info import InferenceLoad
from benchmarks.cancellation import (
    CHUNK_TOKENS,
    NEW_TOKENS,
    NUM_TRIES,
    PROMPT_TOKENS,
    CancellationRig,
    Phase,
    cancellation_rig,
)
from tests.support.running_pair import BOUND_S, RunningPair, is_empty, wait_until

TIMEOUTS_S = (1.0, 4.0, 16.0)
"""Time limits in seconds that are too short to generate NEW_TOKENS. The first leaves time for some where nothing else
runs, the last on any machine.
"""
WAITING_TIMEOUT_S = 0.2


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, forked: Callable[..., LocalPair]) -> Iterator[CancellationRig]:
    with cancellation_rig(tmp_path_factory.mktemp("slow"), kind=forked) as rig:
        yield rig


@pytest.fixture(scope="module")
def pair(rig: CancellationRig) -> RunningPair:
    return rig.pair


def loads_until_free(pair: RunningPair) -> list[InferenceLoad]:
    """Returns the loads that the decode service reports from now on, until it holds nothing."""
    loads: list[InferenceLoad] = []

    def is_free() -> bool:
        loads.append(pair.load())
        return is_empty(loads[-1])

    wait_until(is_free, about=pair.load)
    return loads


def steps_of_a_dropped_request(rig: CancellationRig, phase: Phase) -> tuple[int, int]:
    """Brings a request into the phase, closes its stream, and waits until both services hold nothing. Returns how many
    steps decode and prefill have made for it.
    """
    before: list[tuple[int, int]] = []
    streams = rig.catch(
        phase, on_try=lambda: before.append((rig.pair.load().num_steps, rig.pair.prefill_load().num_steps))
    )
    steps_before, prefill_steps_before = before[-1]
    for stream in streams:
        stream.close()
    loads = loads_until_free(rig.pair)
    wait_until(rig.pair.holds_nothing, about=rig.pair.prefill_load)

    after_the_drop = next(load for load in loads if load.num_running == 0)
    assert loads[-1].num_steps - after_the_drop.num_steps <= 2
    return rig.pair.load().num_steps - steps_before, rig.pair.prefill_load().num_steps - prefill_steps_before


@pytest.mark.parametrize(
    "phase",
    [
        Phase.QUEUED,
        pytest.param(Phase.PREFILLING, marks=pytest.mark.thorough),
        pytest.param(Phase.TRANSFERRING, marks=pytest.mark.thorough),
        Phase.DECODING,
    ],
)
def test_dropping_the_stream_frees_both_sides(rig: CancellationRig, phase: Phase) -> None:
    """On a busy machine the phase may be over before the stream is closed, so it may take several tries to stop it."""
    for _ in range(NUM_TRIES):
        num_steps, num_prefill_steps = steps_of_a_dropped_request(rig, phase)
        match phase:
            case Phase.PREFILLING:
                was_stopped = num_prefill_steps < PROMPT_TOKENS // CHUNK_TOKENS
            case Phase.TRANSFERRING:
                was_stopped = num_steps == 0
            case Phase.DECODING | Phase.QUEUED:
                was_stopped = num_steps < NEW_TOKENS - 1
        if was_stopped:
            break
    else:
        raise AssertionError(f"{phase.value} went on to the end, {NUM_TRIES} times")
    assert len(rig.pair.client.complete(token_ids=[10, 11], max_tokens=2, ignore_eos=True).token_ids) == 2


def test_a_deadline_frees_both_sides_whether_the_request_runs_or_waits(rig: CancellationRig) -> None:
    def generate(timeout_s: float) -> EventStream:
        return rig.pair.client.generate(
            token_ids=[10, 11], timeout_s=timeout_s, max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0
        )

    def num_tokens_in(timeout_s: float) -> int:
        num_tokens = 0
        with pytest.raises(errors.DeadlineExceeded):
            for event in generate(timeout_s):
                num_tokens += isinstance(event, Delta)
        return num_tokens

    assert any(num_tokens_in(timeout_s) for timeout_s in TIMEOUTS_S), "it did not run"
    wait_until(rig.pair.holds_nothing, about=rig.pair.prefill_load)

    with generate(BOUND_S) as running:
        assert any(isinstance(event, Delta) for event in running)
        with pytest.raises(errors.DeadlineExceeded):
            list(generate(WAITING_TIMEOUT_S))
        assert rig.pair.load().num_running == 1, "it did not wait"
    wait_until(rig.pair.holds_nothing, about=rig.pair.prefill_load)
