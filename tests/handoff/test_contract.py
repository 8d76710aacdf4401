"""Tests the contract of HandoffTransport with every implementation, all with the same scripted prefill engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from baton.v1 import prefill_pb2
from common.errors import EngineFault, PrefillUnavailable
from common.wire.handoff import Accepted, Frame
from decode_service.handoff.nixl_pool import NixlPool
from decode_service.messages import (
    BreakCall,
    CallEnded,
    CancelHandoffRows,
    ReplicasChanged,
    SegmentsLanded,
    StartHandoff,
)
from prefill_service.messages import CancelCallRows, OpenCall
from tests.handoff.homes import GrpcHome, NixlHome, NixlPeers, SharedMemoryHome
from tests.handoff.samples import (
    FINGERPRINT,
    ROOMY_BUDGET_BYTES,
    SEGMENT_BYTES,
    failed,
    logprobs,
    prebuilt,
    row,
    segment,
)
from tests.handoff.scripted_prefill import RecordingDecode, ScriptedPrefill
from tests.wire.strategies import comparable


@dataclass(frozen=True)
class Pair:
    home: GrpcHome
    prefill: ScriptedPrefill
    decode: RecordingDecode

    def start(self, *rows: object, call_id: str = "call") -> str:
        """Starts a call over `rows` (one by default), and returns the prefill engine's id of the call."""
        opened = len([command for command in self.prefill.commands.all() if isinstance(command, OpenCall)])
        self.home.transport.start(StartHandoff(call_id, self.home.address, rows or (row(),)))  # type: ignore[arg-type]
        return self.prefill.opened(opened + 1)[-1].call_id

    def exchange_another_call(self, call_id: str) -> None:
        """Runs a whole call without payload, from one side to the other and back. Afterwards everything that was sent
        before, and that nothing holds back, has arrived.
        """
        call = self.start(call_id=call_id)
        self.prefill.emit(call, failed(0))
        self.prefill.finish(call)
        assert self.decode.ended(call_id).error is None

    def land(self, num_bytes: int, call_id: str = "call") -> None:
        self.home.transport.landed(SegmentsLanded(call_id, num_bytes))


MakePair = Callable[[int], Pair]


@pytest.fixture(scope="module")
def nixl_peers() -> Iterator[NixlPeers]:
    """One lender and one reader, shared by all homes that use NIXL."""
    peers = NixlPeers(FINGERPRINT.layer_groups)
    kept: list[NixlPool] = []
    opened, close = NixlPool.opened, NixlPool.close

    async def kept_open(offer: prefill_pb2.NixlPool, **options: Any) -> NixlPool:
        if not kept:
            kept.append(await opened(offer, **options))
        return kept[0]

    async def kept_closed(_pool: NixlPool) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlPool, "opened", kept_open)
        patch.setattr(NixlPool, "retire", lambda _pool: None)
        patch.setattr(NixlPool, "close", kept_closed)
        yield peers
    peers.loop.run(close(kept[0]))
    peers.close()


@pytest.fixture(params=[GrpcHome, SharedMemoryHome, NixlHome], ids=["grpc", "shared_memory", "nixl"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[MakePair]:
    homes: list[GrpcHome] = []
    peers = (request.getfixturevalue("nixl_peers"),) if request.param is NixlHome else ()

    def make(receive_budget_bytes: int) -> Pair:
        prefill, decode = ScriptedPrefill(), RecordingDecode()
        homes.append(request.param(prefill, decode, FINGERPRINT, receive_budget_bytes, *peers))
        return Pair(homes[-1], prefill, decode)

    yield make
    for home in homes:
        home.close()


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair(ROOMY_BUDGET_BYTES)


def test_the_rows_reach_the_prefill_engine_as_they_are(pair: Pair) -> None:
    rows = (row("first"), row("second", num_tokens=3))
    pair.start(*rows)
    assert pair.prefill.opened()[0].rows == rows


def test_accepted_is_the_first_frame(pair: Pair) -> None:
    call = pair.start()
    pair.prefill.emit(call, failed(0))
    pair.decode.frames("call", 1)
    accepted, *_ = pair.decode.arrived("call")
    assert isinstance(accepted, Accepted)
    assert accepted.instance_id


@pytest.mark.parametrize(
    "emitted",
    [
        [segment(0, 2), segment(1, 0), segment(0, 0), segment(1, 1), segment(0, 1), prebuilt(0, 1)],
        [logprobs(0, 1, 64), segment(0, 0), segment(1, 0), logprobs(0, 64, 128), segment(0, 1), prebuilt(0, 1)],
        [segment(0, 0), segment(1, 0), prebuilt(0, 1), segment(1, 1), segment(0, 1)],
    ],
    ids=["segments out of order", "log-probabilities between", "the batch before the last segments"],
)
def test_frames_arrive_as_they_are_emitted(pair: Pair, emitted: list[Frame]) -> None:
    call = pair.start(row("first", num_prompt_logprobs=2), row("second"))
    pair.prefill.emit(call, *emitted)
    pair.prefill.finish(call)
    assert pair.decode.ended("call").error is None
    frames = pair.decode.frames("call", len(emitted))
    assert [comparable(frame) for frame in frames] == [comparable(frame) for frame in emitted]


def test_a_row_fails_alone(pair: Pair) -> None:
    call = pair.start(row("first"), row("second"))
    pair.prefill.emit(call, failed(1), prebuilt(0))
    pair.prefill.finish(call)
    assert pair.decode.ended("call").error is None
    assert pair.decode.frames("call", 2)[0] == failed(1)


def test_cancelling_a_row_midway_reaches_the_prefill_engine_and_spares_the_others(pair: Pair) -> None:
    call = pair.start(row("first"), row("second"))
    pair.prefill.emit(call, segment(1, 0))
    pair.decode.frames("call", 1)
    pair.home.transport.cancel_rows(CancelHandoffRows("call", (1,)))
    pair.prefill.commands.wait_until(lambda commands: CancelCallRows(call, (1,)) in commands)
    pair.prefill.emit(call, failed(1, retryable=False), prebuilt(0))
    pair.prefill.finish(call)
    assert pair.decode.ended("call").error is None


def test_a_call_that_ends_well_is_not_closed(pair: Pair) -> None:
    call = pair.start()
    pair.prefill.emit(call, prebuilt(0))
    pair.prefill.finish(call)
    pair.decode.ended("call")
    broken = pair.start(call_id="another")
    pair.home.transport.break_call(BreakCall("another", "to have something to wait for"))
    pair.prefill.closed(broken)
    assert pair.prefill.num_closed() == 1


def test_breaking_a_call_frees_the_prefill_side_and_ends_it_once(pair: Pair) -> None:
    call = pair.start()
    pair.home.transport.break_call(BreakCall("call", "a segment came twice"))
    end = pair.decode.ended("call")
    assert isinstance(end.error, EngineFault)
    assert "a segment came twice" in str(end.error)
    pair.prefill.closed(call)
    pair.home.transport.break_call(BreakCall("call", "again"))
    pair.prefill.emit(call, prebuilt(0))
    pair.prefill.finish(call)
    other = pair.start(call_id="other")
    pair.prefill.finish(other)
    pair.decode.ended("other")
    assert pair.decode.num_ends("call") == 1
    pair.prefill.closed(call)


def test_losing_the_peer_ends_every_call_and_marks_the_replica(pair: Pair) -> None:
    call = pair.start(call_id="one")
    pair.start(call_id="two")
    pair.prefill.emit(call, segment(0, 0))
    pair.decode.frames("one", 1)
    pair.home.lose_peer()
    for call_id in ("one", "two"):
        assert isinstance(pair.decode.ended(call_id).error, PrefillUnavailable)
    replica = pair.decode.latest_replica(lambda replica: not replica.is_ready)
    assert isinstance(replica.error, PrefillUnavailable)

    reports = pair.decode.reports.all()
    first_end = next(place for place, report in enumerate(reports) if isinstance(report, CallEnded))
    states = [report for report in reports[:first_end] if isinstance(report, ReplicasChanged)]
    assert not states[-1].replicas[0].is_ready, "a retry would go there"

    pair.home.transport.start(StartHandoff("late", pair.home.address, (row(),)))
    assert isinstance(pair.decode.ended("late").error, PrefillUnavailable)
    assert pair.decode.arrived("late") == []


def test_a_slow_receiver_holds_the_sender_back_and_resumes(make_pair: MakePair) -> None:
    budget, num_segments = 2, 40
    pair = make_pair(budget * SEGMENT_BYTES)
    call = pair.start(row(num_tokens=num_segments * 32))
    pair.prefill.emit(call, *(segment(0, place) for place in range(num_segments)))
    pair.prefill.finish(call)
    pair.decode.wait_for_segments(budget)
    for number in range(8):
        pair.exchange_another_call(f"another {number}")
    for landed in range(num_segments):
        pair.decode.wait_for_segments(min(landed + budget, num_segments))
        assert len(pair.decode.segments()) <= landed + budget
        assert pair.prefill.sent_bytes() <= (landed + budget + pair.home.most_under_way) * SEGMENT_BYTES
        pair.land(SEGMENT_BYTES)
    assert pair.decode.ended("call").error is None
    assert pair.prefill.sent_bytes() == num_segments * SEGMENT_BYTES
    assert [frame.token_start // 32 for frame in pair.decode.segments()] == list(range(num_segments))


def test_the_budget_is_shared_by_all_calls_in_the_order_they_came(make_pair: MakePair) -> None:
    pair = make_pair(SEGMENT_BYTES)
    first = pair.start(call_id="first")
    second = pair.start(call_id="second")
    pair.prefill.emit(first, segment(0, 0))
    pair.decode.frames("first", 1)
    pair.prefill.emit(second, segment(0, 0))
    pair.prefill.emit(second, failed(0))
    pair.prefill.finish(second)
    pair.exchange_another_call("third")  # frames without payload need no budget
    assert len(pair.decode.segments()) == 1
    pair.land(SEGMENT_BYTES, "first")
    pair.decode.frames("second", 2)
    assert pair.decode.ended("second").error is None


def test_bytes_that_land_together_let_several_calls_go_on(make_pair: MakePair) -> None:
    pair = make_pair(2 * SEGMENT_BYTES)
    first, second, third = (pair.start(call_id=call_id) for call_id in ("first", "second", "third"))
    pair.prefill.emit(first, segment(0, 0), segment(0, 1))
    pair.decode.frames("first", 2)
    for call in (second, third):
        pair.prefill.emit(call, segment(0, 0))
    pair.exchange_another_call("another")
    pair.land(2 * SEGMENT_BYTES, "first")
    pair.decode.frames("second", 1)
    pair.decode.frames("third", 1)


def test_a_segment_larger_than_the_whole_budget_still_passes(make_pair: MakePair) -> None:
    pair = make_pair(1)
    call = pair.start()
    pair.prefill.emit(call, segment(0, 0), segment(0, 1))
    pair.prefill.finish(call)
    pair.decode.frames("call", 1)
    assert len(pair.decode.segments()) == 1
    pair.land(SEGMENT_BYTES)
    assert pair.decode.ended("call").error is None


def test_a_call_that_breaks_while_it_waits_for_budget_leaves_the_line(make_pair: MakePair) -> None:
    pair = make_pair(SEGMENT_BYTES)
    first, waiting, last = (pair.start(call_id=call_id) for call_id in ("first", "waiting", "last"))
    pair.prefill.emit(first, segment(0, 0))
    pair.decode.frames("first", 1)
    pair.prefill.emit(waiting, segment(0, 0))
    pair.home.transport.break_call(BreakCall("waiting", "no longer wanted"))
    pair.decode.ended("waiting")
    pair.prefill.closed(waiting)
    pair.prefill.emit(last, segment(0, 0))
    pair.prefill.finish(last)
    pair.land(SEGMENT_BYTES, "first")
    assert pair.decode.ended("last").error is None


def test_bytes_of_an_ended_call_are_owed_until_they_land(make_pair: MakePair) -> None:
    pair = make_pair(SEGMENT_BYTES)
    ended = pair.start(call_id="ended")
    pair.prefill.emit(ended, segment(0, 0))
    pair.prefill.finish(ended)
    pair.decode.ended("ended")
    call = pair.start(call_id="next")
    pair.prefill.emit(call, segment(0, 1))
    pair.exchange_another_call("another")
    assert len(pair.decode.segments()) == 1
    pair.land(SEGMENT_BYTES, "ended")
    pair.decode.wait_for_segments(2)


def test_closing_ends_the_calls_that_are_left(make_pair: MakePair) -> None:
    pair = make_pair(ROOMY_BUDGET_BYTES)
    call = pair.start()
    pair.home.close_transport()
    assert isinstance(pair.decode.ended("call").error, PrefillUnavailable)
    pair.prefill.closed(call)


def test_a_call_to_an_unknown_replica_ends_at_once(pair: Pair) -> None:
    pair.home.transport.start(StartHandoff("lost", "127.0.0.1:1", (row(),)))
    assert isinstance(pair.decode.ended("lost").error, PrefillUnavailable)
