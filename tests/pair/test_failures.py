"""Tests that failures stay contained: a failed step ends only its own requests, a failed row only its request, and a
lost replica no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from common.device.stream import Device
from common.drain import Drain
from common.errors import BatonError, EngineFault, FingerprintMismatch, PrefillUnavailable
from common.kv.shared_pool import SharedPool
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, KvSegment
from decode_service.messages import CallEnded, Replica, ReplicasChanged
from tests.faults.device import FaultyDevice
from tests.faults.injector import Injector
from tests.faults.plan import Action, Fault, FaultPlan
from tests.support.engines import cpu_device
from tests.support.faulty_target import FailsFirst, FaultyTarget, is_decode
from tests.support.pair import InProcessPair, MakePair, PairOptions

Tiny = Callable[[str], TargetModel]
NAMES = "abcd"
NEW_TOKENS = 12
NARROW = PairOptions(
    num_replicas=2,
    chunk_tokens=8,
    max_batch_tokens=8,
    max_segment_bytes=2048,
    send_budget_bytes=2048,
    receive_budget_bytes=2048,
)
"""Options under which KV leaves 4 tokens at a time, so that a row's transfer takes many steps."""


class Clock:
    """A clock that moves only when the test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def prompt_of(name: str) -> list[int]:
    return [20 + ord(name) % 50 + place for place in range(30 + ord(name) % 7)]


def submit(pair: InProcessPair, names: str) -> None:
    for name in names:
        pair.submit(name, prompt_of(name), ResolvedSampling(seed=ord(name), max_tokens=NEW_TOKENS))


@pytest.fixture
def undisturbed(make_pair: MakePair, tiny_target: Tiny) -> dict[str, list[int]]:
    """The tokens of every request when nothing fails."""
    pair = make_pair(tiny_target("llama"))
    submit(pair, f"{NAMES}l")
    pair.run()
    return tokens_of(pair)


def tokens_of(pair: InProcessPair) -> dict[str, list[int]]:
    return {name: outcome.token_ids for name, outcome in pair.outcomes.items()}


def assert_it_serves_on(pair: InProcessPair, undisturbed: dict[str, list[int]]) -> None:
    """Asserts that the engines still work: a new request gets its tokens."""
    submit(pair, "l")
    pair.run()
    assert pair.outcomes["l"].token_ids == undisturbed["l"]


# ---- forwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_a_failing_decode_forward_fails_the_requests_of_that_step_alone(
    overlap: bool, make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    model = FaultyTarget(tiny_target("llama"))
    pair = make_pair(model, PairOptions(overlap=overlap, decode_rows=2))
    submit(pair, NAMES)  # two run, two wait
    pair.run(until=lambda: all(len(pair.outcomes[name].token_ids) >= 3 for name in "ab"))
    model.fails = FailsFirst(is_decode)
    pair.run()
    for name in "ab":
        outcome = pair.outcomes[name]
        assert isinstance(outcome.error, EngineFault) and "planted" in str(outcome.error)
        num_delivered = len(outcome.token_ids)
        assert 3 <= num_delivered < NEW_TOKENS
        assert outcome.token_ids == undisturbed[name][:num_delivered], "no token of the failed step"
    for name in "cd":
        assert pair.outcomes[name].token_ids == undisturbed[name]
    assert_it_serves_on(pair, undisturbed)


def test_a_failing_prefill_forward_is_retried_and_counted(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    model, clock = FaultyTarget(tiny_target("llama")), Clock()
    model.fails = FailsFirst(lambda batch: not is_decode(batch))
    pair = make_pair(model, PairOptions(chunk_tokens=16), clock=clock)
    submit(pair, NAMES)
    pair.run(until=lambda: pair.decode.load().num_row_retries == len(NAMES))
    assert pair.decode.load().num_queued == len(NAMES), "not before the replica's own delay has passed"
    clock.now_s += 1
    pair.run()
    for name in NAMES:
        outcome = pair.outcomes[name]
        assert outcome.token_ids == undisturbed[name]
        assert outcome.finished is not None and outcome.finished.timings.num_handoff_attempts == 2
    assert pair.decode.load().num_row_retries == len(NAMES)


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_attempts_are_bounded(max_attempts: int, make_pair: MakePair, tiny_target: Tiny) -> None:
    model, clock = FaultyTarget(tiny_target("llama")), Clock()
    num_forwards = 0

    def fails(batch: object) -> bool:
        nonlocal num_forwards
        num_forwards += 1
        return True

    model.fails = fails
    pair = make_pair(model, PairOptions(max_handoff_attempts=max_attempts), clock=clock)
    submit(pair, "a")
    while not pair.outcomes["a"].has_ended:
        pair.step()
        clock.now_s += 0.3
    assert isinstance(pair.outcomes["a"].error, EngineFault)
    assert num_forwards == max_attempts
    assert pair.decode.load().num_row_retries == max_attempts - 1


# ---- copies ----------------------------------------------------------------------------------------------------------


def devices_whose_first_fails(point: str) -> Callable[[], Device]:
    """Returns a function that makes CPU devices. The first piece (unit of stream work) with this name on any of them
    raises.
    """
    injector = Injector(FaultPlan(faults=(Fault(point=point, action=Action.RAISE, at=1),)))
    return lambda: FaultyDevice(cpu_device(), injector)


def test_a_failing_copy_out_of_the_prefill_pool_is_retried(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    new_device = devices_whose_first_fails("stream.sending.copy_out")
    pair = make_pair(tiny_target("llama"), PairOptions(chunk_tokens=16), new_device=new_device)
    submit(pair, NAMES)
    pair.run()
    assert tokens_of(pair).items() <= undisturbed.items()
    assert pair.decode.load().num_row_retries == 1


def test_a_failing_copy_into_the_decode_pool_fails_its_request_alone(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    new_device = devices_whose_first_fails("stream.landing.land")
    pair = make_pair(tiny_target("llama"), PairOptions(chunk_tokens=16), new_device=new_device)
    submit(pair, NAMES)
    pair.run()
    (failed,) = [outcome for outcome in pair.outcomes.values() if outcome.error is not None]
    assert isinstance(failed.error, EngineFault) and "stream.landing.land" in str(failed.error)
    assert failed.token_ids == []
    for name, outcome in pair.outcomes.items():
        assert outcome is failed or outcome.token_ids == undisturbed[name]
    assert_it_serves_on(pair, undisturbed)


# ---- replicas -------------------------------------------------------------------------------------------------------


def until_prefilling(pair: InProcessPair) -> None:
    pair.run(until=lambda: all(replica.engine.load().num_running for replica in pair.replicas))


def until_transferring(pair: InProcessPair) -> None:
    pair.finish_prefill()
    pair.run(until=lambda: pair.decode.load().rows.transferring == len(NAMES))


@pytest.mark.parametrize("until_phase", [until_prefilling, until_transferring])
def test_rows_of_a_lost_replica_are_retried_elsewhere_with_the_same_tokens(
    until_phase: Callable[[InProcessPair], None],
    make_pair: MakePair,
    tiny_target: Tiny,
    undisturbed: dict[str, list[int]],
) -> None:
    pair = make_pair(tiny_target("llama"), NARROW)
    submit(pair, NAMES)
    until_phase(pair)
    pair.replicas[1].lose()
    pair.run()
    assert pair.decode.load().num_row_retries == 2, "two of the four rows were with the lost replica"
    attempts = []
    for name in NAMES:
        outcome = pair.outcomes[name]
        assert outcome.token_ids == undisturbed[name]
        assert outcome.finished is not None
        attempts.append(outcome.finished.timings.num_handoff_attempts)
    assert sorted(attempts) == [1, 1, 2, 2]


def test_a_request_that_loses_every_replica_in_turn_fails_as_unavailable(
    make_pair: MakePair, tiny_target: Tiny
) -> None:
    options = PairOptions(num_replicas=3, max_handoff_attempts=2, chunk_tokens=4, max_batch_tokens=4)
    pair = make_pair(tiny_target("llama"), options)
    submit(pair, "a")
    for _ in range(2):
        pair.run(until=lambda: any(replica.engine.load().num_running for replica in pair.replicas))
        (working,) = [replica for replica in pair.replicas if replica.engine.load().num_running]
        working.lose()
        pair.step_decode()
        pair.step_prefill()
    assert isinstance(pair.outcomes["a"].error, PrefillUnavailable), (
        "a third replica is ready, the attempts are used up"
    )
    assert pair.decode.load().num_row_retries == 1


def test_a_running_request_does_not_need_the_replica_any_more(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    pair = make_pair(tiny_target("llama"))
    submit(pair, "a")
    pair.run(until=lambda: len(pair.outcomes["a"].token_ids) >= 2)
    pair.replicas[0].lose()
    pair.run()
    assert pair.outcomes["a"].token_ids == undisturbed["a"]


def test_without_a_ready_replica_a_request_fails_when_its_wait_is_over(make_pair: MakePair, tiny_target: Tiny) -> None:
    clock = Clock()
    pair = make_pair(tiny_target("llama"), clock=clock)
    pair.replicas[0].lose()
    pair.step()
    clock.now_s += 100
    submit(pair, "a")
    pair.step()
    clock.now_s += 9.9
    pair.step()
    assert not pair.outcomes["a"].has_ended, "its own wait counts, not how long the replicas have been away"
    clock.now_s += 0.2
    pair.step()
    error = pair.outcomes["a"].error
    assert isinstance(error, PrefillUnavailable) and "killed" in str(error)
    assert pair.decode.load().num_queued == 0


def test_a_replica_that_refuses_is_asked_again_until_the_wait_is_over_however_often(
    make_pair: MakePair, tiny_target: Tiny
) -> None:
    """A replica refuses at once. If refusals counted as attempts, a rolling restart would end requests within a
    second.
    """
    clock = Clock()
    pair = make_pair(tiny_target("llama"), PairOptions(max_handoff_attempts=2), clock=clock)
    pair.prefill.step([Drain()])
    submit(pair, "a")
    began_s = clock.now_s
    while not pair.outcomes["a"].has_ended:
        assert clock.now_s < began_s + 20, "a refusal is not asked about for ever"
        pair.step()
        clock.now_s += 0.05
    assert isinstance(pair.outcomes["a"].error, BatonError)
    assert clock.now_s - began_s >= 10
    assert pair.decode.load().num_row_retries > 2
    pair.settle()


def test_a_mismatch_of_every_replica_fails_a_request_at_once_and_of_one_does_not(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(num_replicas=2), clock=Clock())
    mismatched = [
        Replica(replica.address, False, error=FingerprintMismatch("weights", "ours", "theirs"))
        for replica in pair.replicas
    ]
    pair.step()
    pair.post(ReplicasChanged((mismatched[0], Replica(pair.replicas[1].address, True))))
    submit(pair, "a")
    pair.run()
    assert pair.outcomes["a"].token_ids == undisturbed["a"]
    pair.post(ReplicasChanged(tuple(mismatched)))
    submit(pair, "b")
    pair.step()
    assert isinstance(pair.outcomes["b"].error, FingerprintMismatch)


def test_a_mismatch_behind_a_name_is_waited_out_for_another_replica_may_come(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    """A replica has another fingerprint. That occurs when a deployment's prefill services are replaced before or after
    its decode services.
    """
    clock = Clock()
    pair = make_pair(tiny_target("llama"), PairOptions(), clock=clock)
    (replica,) = pair.replicas
    mismatch = Replica(replica.address, False, error=FingerprintMismatch("weights", "ours", "theirs"))
    pair.step()
    pair.post(ReplicasChanged((mismatch,), others_may_come=True))
    submit(pair, "ab")
    clock.now_s += 9.9
    pair.step()
    assert not pair.outcomes["a"].has_ended
    pair.post(ReplicasChanged((Replica(replica.address, True),), others_may_come=True))
    pair.run()
    assert pair.outcomes["a"].token_ids == undisturbed["a"]

    pair.post(ReplicasChanged((mismatch,), others_may_come=True))
    submit(pair, "c")
    pair.step()
    clock.now_s += 10.0
    pair.step()
    assert isinstance(pair.outcomes["c"].error, FingerprintMismatch)


def test_a_call_that_meets_another_fingerprint_is_retried_elsewhere(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    """Another process now listens at the replica's address, or the answer was damaged. The other replicas are
    unaffected.
    """
    pair = make_pair(tiny_target("llama"), PairOptions(num_replicas=2))
    submit(pair, "a")
    pair.step()
    pair.post(CallEnded("call-0", FingerprintMismatch("weights", "ours", "theirs")))
    pair.run()
    assert pair.outcomes["a"].token_ids == undisturbed["a"]
    assert pair.decode.load().num_row_retries == 1


def test_slots_in_shared_memory_used_again_before_they_were_read_cost_a_retry_and_no_token(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]], tmp_path: Path
) -> None:
    model = tiny_target("llama")
    memory = SharedPool(groups=[model.layer_group], num_slots=16, directory=tmp_path)
    reused: list[KvSegment] = []

    def lend_and_use_again(frame: Frame) -> list[Frame]:
        if not isinstance(frame, KvSegment) or reused:
            return [frame]
        slots = range(1, 1 + frame.num_tokens)
        layers = slice(frame.layer_start, frame.layer_start + frame.num_layers)
        memory.stamp(frame.layer_group, slots)
        shared = memory.lend(frame.layer_group, layers, slots)
        reused.append(replace(frame, payload=b"", shared=shared))
        memory.stamp(frame.layer_group, [2])
        return [*reused]

    pair = make_pair(model, PairOptions(chunk_tokens=16))
    pair.tamper = lend_and_use_again
    submit(pair, NAMES)
    pair.run()
    assert tokens_of(pair).items() <= undisturbed.items()
    assert pair.decode.load().num_row_retries == 1
    memory.close()


# ---- draining --------------------------------------------------------------------------------------------------------


def test_what_was_admitted_is_finished_while_it_drains(make_pair: MakePair, tiny_target: Tiny) -> None:
    """No replica is ready, so the prompts wait for their turn in the decode engine."""
    pair = make_pair(tiny_target("llama"), PairOptions(prefill_fallback=True))
    pair.replicas[0].lose()
    submit(pair, NAMES)
    outcomes = dict(pair.outcomes)
    pair.step()
    pair.post(Drain())
    pair.abort("c")
    pair.run()
    assert [name for name, outcome in outcomes.items() if outcome.finished is not None] == ["a", "b", "d"]
