"""The prefill engine with receivers on its host: what is in the slots, and that all of them are free at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from common.device.factory import open_device
from common.model.sampling_params import ResolvedSampling
from common.model.target import TargetModel
from common.wire.handoff import HandoffRow, KvSegment
from common.wire.kv_ring import BLOCK_BYTES, KvRing
from prefill_service.messages import (
    CallDone,
    CancelCallRows,
    CloseCall,
    Command,
    FrameReady,
    OpenCall,
    SegmentBytesSent,
    SlotsReturned,
)
from prefill_service.scheduler import PrefillEngine
from tests.engine.tags import CONTEXT_TOKENS, GROUP, TagModel, kv_of

PROMPT = tuple(range(1, 25))
NUM_SEGMENTS = len(PROMPT) // 2
BOUND_S = 30.0
IDLE_STEP_S = 0.001


class Sending:
    """An engine that computes two tokens at a time, and a receiver of one call that does only what the test says."""

    def __init__(self, ring: KvRing) -> None:
        self.ring = ring
        self.engine = PrefillEngine(
            model=cast(TargetModel, TagModel()),
            device=open_device("cpu", num_threads=1),
            max_rows=2,
            max_kv_tokens=CONTEXT_TOKENS,
            max_context_tokens=CONTEXT_TOKENS,
            chunk_tokens=2,
            max_batch_tokens=4,
            max_segment_bytes=2 * GROUP.token_bytes,
            debug_checks=True,
            ring=ring,
        )
        self.segments: list[KvSegment] = []
        self.is_done = False
        rows = tuple(
            HandoffRow(name, 0, PROMPT, len(PROMPT), ResolvedSampling(seed=0, max_tokens=4)) for name in ("0", "1")
        )
        self.step(OpenCall("call", rows, shares_memory=True))

    @property
    def num_out(self) -> int:
        return (self.ring.num_bytes - self.ring.num_free_bytes) // BLOCK_BYTES

    def step(self, *commands: Command) -> None:
        for event in self.engine.step(commands):
            if isinstance(event, FrameReady) and isinstance(event.frame, KvSegment):
                self.segments.append(event.frame)
            self.is_done = self.is_done or isinstance(event, CallDone)

    def step_until_nothing_moves(self, *commands: Command) -> None:
        self.step(*commands)
        num_quiet = 0
        give_up_s = time.monotonic() + BOUND_S
        while time.monotonic() < give_up_s:
            time.sleep(min(self.engine.idle_timeout_s(), IDLE_STEP_S))  # the streams' threads run meanwhile
            before = (len(self.segments), self.num_out, self.engine.load().num_steps)
            self.step()
            is_quiet = before == (len(self.segments), self.num_out, self.engine.load().num_steps)
            num_quiet = num_quiet + 1 if is_quiet and self.engine.idle_timeout_s() > 0.01 else 0
            if num_quiet == 3:
                return
        raise AssertionError("it does not come to rest")

    def release(self, segments: Sequence[KvSegment]) -> SlotsReturned:
        return SlotsReturned("call", tuple(s.slot.ticket.generation for s in segments if s.slot is not None))


@pytest.fixture
def sending(tmp_path: Path) -> Iterator[Sending]:
    ring = KvRing(num_bytes=5 * BLOCK_BYTES, directory=tmp_path)
    sending = Sending(ring)
    yield sending
    sending.engine.close()
    ring.close()


def test_a_call_has_as_many_segments_out_as_the_ring_holds_and_goes_on_as_they_return(sending: Sending) -> None:
    sending.step_until_nothing_moves()
    assert len(sending.segments) == sending.num_out == 5
    num_read = 0
    while num_read < len(sending.segments):
        unread = sending.segments[num_read:]
        for segment in unread:
            assert segment.slot is not None and segment.slot.is_current
            tokens = slice(segment.token_start, segment.token_start + segment.num_tokens)
            sent = np.frombuffer(bytes(segment.payload), np.float32)
            assert sent.tolist() == kv_of(PROMPT)[:, :, tokens].ravel().tolist()
        num_read += len(unread)
        num_bytes = sum(segment.num_bytes for segment in unread)
        sending.step_until_nothing_moves(SegmentBytesSent("call", num_bytes), sending.release(unread))
    assert num_read == 2 * NUM_SEGMENTS
    assert sending.is_done and sending.num_out == 0 and sending.engine.load().unsent_bytes == 0


def test_a_row_cancelled_with_slots_out_keeps_them_until_they_return(sending: Sending) -> None:
    sending.step_until_nothing_moves()
    sending.step_until_nothing_moves(CancelCallRows("call", (0, 1)))
    assert sending.is_done and sending.num_out == 5
    sending.step_until_nothing_moves(sending.release(sending.segments))
    assert sending.num_out == 0


def test_copies_under_way_when_their_rows_are_cancelled_give_their_slots_back(tmp_path: Path) -> None:
    for num_steps in range(12):
        ring = KvRing(num_bytes=5 * BLOCK_BYTES, directory=tmp_path)
        sending = Sending(ring)
        for _ in range(num_steps):
            sending.step()
        sending.step_until_nothing_moves(CancelCallRows("call", (0, 1)))
        sending.step_until_nothing_moves(sending.release(sending.segments))
        assert sending.num_out == 0
        sending.engine.close()
        ring.close()


def test_a_call_that_is_lost_at_any_step_leaves_no_slot_behind(tmp_path: Path) -> None:
    for num_steps in range(12):
        ring = KvRing(num_bytes=5 * BLOCK_BYTES, directory=tmp_path)
        sending = Sending(ring)
        for _ in range(num_steps):
            sending.step()
        sending.step_until_nothing_moves(CloseCall("call"))
        load = sending.engine.load()
        assert (sending.num_out, load.unsent_bytes) == (0, 0)
        assert (load.rows.free, load.slots.free) == (load.rows.total, load.slots.total)
        sending.engine.close()
        ring.close()


def test_a_segment_meant_for_the_full_ring_is_cut_to_what_a_frame_may_hold(sending: Sending) -> None:
    sending.step_until_nothing_moves()
    row = HandoffRow("late", 0, PROMPT, len(PROMPT), ResolvedSampling(seed=0, max_tokens=4))
    whole = PrefillEngine(
        model=cast(TargetModel, TagModel()),
        device=open_device("cpu", num_threads=1),
        max_rows=2,
        max_kv_tokens=CONTEXT_TOKENS,
        max_context_tokens=CONTEXT_TOKENS,
        max_segment_bytes=2 * GROUP.token_bytes,
        ring=sending.ring,
    )
    sending.engine, own = whole, sending.engine
    sending.segments.clear()
    sending.step_until_nothing_moves(OpenCall("call", (row,), shares_memory=True))
    own.close()
    assert [segment.slot for segment in sending.segments] == [None] * NUM_SEGMENTS
    assert {segment.num_bytes for segment in sending.segments} == {2 * GROUP.token_bytes}
    assert sending.is_done
