"""Tests that after the receiver cancels a row, no more of it is sent, and its bytes return to the send budget."""

from __future__ import annotations

from collections.abc import Sequence

from common.telemetry.tracing import NO_TRACER
from common.wire.handoff import Frame, unsent_bytes
from prefill_service.edge.call import HandoffCall, RowNumbering
from prefill_service.edge.observer import RowTraces
from prefill_service.messages import CallDone, FrameReady
from tests.handoff.samples import SEGMENT_BYTES, failed, logprobs, row, segment

CALL_ID = "call"
BOUND_S = 60.0


def bytes_of(dropped: Sequence[Frame]) -> int:
    return sum(map(unsent_bytes, dropped))


async def frames_of(call: HandoffCall) -> list[Frame]:
    call.take(CallDone(CALL_ID))
    frames = []
    while (frame := await call.next_frame(stall_timeout_s=BOUND_S)) is not None:
        frames.append(frame)
    return frames


async def test_segments_of_a_cancelled_row_are_dropped_whether_they_came_before_or_come_after() -> None:
    call = HandoffCall(CALL_ID, RowNumbering([row("kept"), row("cancelled")]), RowTraces(NO_TRACER))
    kept = [segment(0, 0), segment(0, 1), failed(1)]
    assert call.take(FrameReady(CALL_ID, kept[0])) == ()
    for place in range(3):
        assert call.take(FrameReady(CALL_ID, segment(1, place))) == ()

    assert bytes_of(call.cancel([1])) == 3 * SEGMENT_BYTES

    assert bytes_of(call.cancel([1])) == 0, "no byte goes back twice"
    assert bytes_of(call.take(FrameReady(CALL_ID, segment(1, 3)))) == SEGMENT_BYTES
    assert call.take(FrameReady(CALL_ID, kept[1])) == ()
    assert call.take(FrameReady(CALL_ID, kept[2])) == ()
    assert await frames_of(call) == kept


async def test_log_probabilities_of_a_cancelled_row_are_dropped_too() -> None:
    call = HandoffCall(CALL_ID, RowNumbering([row("cancelled"), row("kept")]), RowTraces(NO_TRACER))
    kept = logprobs(1, 1, 5)
    dropped = [logprobs(0, 1, 5), logprobs(0, 5, 7)]
    for frame in (dropped[0], kept):
        assert call.take(FrameReady(CALL_ID, frame)) == ()
    assert call.cancel([0]) == dropped[:1]
    assert call.take(FrameReady(CALL_ID, dropped[1])) == (dropped[1],)
    assert await frames_of(call) == [kept]


async def test_rows_are_cancelled_by_the_receivers_numbers() -> None:
    """The engine never sees a row that the edge refused, so it numbers the rows after it differently from the
    receiver.
    """
    call = HandoffCall(CALL_ID, RowNumbering([failed(0), row("cancelled")]), RowTraces(NO_TRACER))
    call.take(FrameReady(CALL_ID, segment(0, 0)))
    assert bytes_of(call.cancel([1])) == SEGMENT_BYTES
    assert await frames_of(call) == []
