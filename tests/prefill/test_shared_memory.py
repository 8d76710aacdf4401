"""The prefill engine with receivers on its host: what is lent, and that a row keeps its slots until all came back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from common.device.factory import open_device
from common.kv.shared_pool import SharedPool
from common.model.sampling_params import ResolvedSampling
from common.model.target import TargetModel
from common.wire.handoff import HandoffRow, KvSegment
from prefill_service.messages import (
    CallDone,
    CancelCallRows,
    CloseCall,
    Command,
    FrameReady,
    OpenCall,
    SegmentsReturned,
)
from prefill_service.schedule.scheduler import PrefillEngine
from tests.engine.tags import CONTEXT_TOKENS, GROUP, TagModel, kv_of

PROMPT = tuple(range(1, 25))
BOUND_S = 30.0
IDLE_STEP_S = 0.001


class Sending:
    """An engine that computes two tokens at a time, and a receiver of one call that does only what the test says."""

    def __init__(self, memory: SharedPool) -> None:
        self.engine = PrefillEngine(
            model=cast(TargetModel, TagModel()),
            device=open_device("cpu", num_threads=1),
            max_rows=2,
            max_kv_tokens=CONTEXT_TOKENS,
            max_context_tokens=CONTEXT_TOKENS,
            chunk_tokens=2,
            max_batch_tokens=4,
            debug_checks=True,
            shared_pool=memory,
        )
        self.segments: list[KvSegment] = []
        self.is_done = False
        rows = tuple(
            HandoffRow(name, 0, PROMPT, len(PROMPT), ResolvedSampling(seed=0, max_tokens=4)) for name in ("0", "1")
        )
        self.step(OpenCall("call", rows, shares_memory=True))

    @property
    def num_held_slots(self) -> int:
        slots = self.engine.load().slots
        return slots.total - slots.free

    def step(self, *commands: Command) -> None:
        for event in self.engine.step(commands):
            if isinstance(event, FrameReady) and isinstance(event.frame, KvSegment):
                self.segments.append(event.frame)
            self.is_done = self.is_done or isinstance(event, CallDone)

    def step_until(self, condition: Callable[[], bool], *commands: Command) -> None:
        self.step(*commands)
        give_up_s = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < give_up_s, "it does not come to that"
            time.sleep(min(self.engine.idle_timeout_s(), IDLE_STEP_S))  # the streams' threads run meanwhile
            self.step()

    def step_until_all_is_lent(self) -> None:
        num_bytes = 2 * len(PROMPT) * GROUP.token_bytes
        self.step_until(lambda: sum(segment.num_bytes for segment in self.segments) == num_bytes)

    def returned(self, segments: Sequence[KvSegment]) -> SegmentsReturned:
        return SegmentsReturned("call", tuple(s.shared.ticket.number for s in segments if s.shared is not None))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedPool]:
    memory = SharedPool(groups=[GROUP], num_slots=CONTEXT_TOKENS, directory=tmp_path)
    yield memory
    memory.close()


@pytest.fixture
def sending(memory: SharedPool) -> Iterator[Sending]:
    sending = Sending(memory)
    yield sending
    sending.engine.close()


def test_what_is_lent_is_the_prompts_kv_where_the_forward_wrote_it(sending: Sending) -> None:
    sending.step_until_all_is_lent()
    for segment in sending.segments:
        assert segment.shared is not None and segment.shared.is_current and not len(segment.payload)
        layers = slice(segment.layer_start, segment.layer_start + segment.num_layers)
        tokens = slice(segment.token_start, segment.token_start + segment.num_tokens)
        lent = segment.shared.layers[:, :, list(segment.shared.ticket.slots)].view(np.float32)
        assert lent.ravel().tolist() == kv_of(PROMPT)[layers, :, tokens].ravel().tolist()
    assert sending.engine.load().unsent_bytes == 0, "nothing was copied"


def test_a_row_keeps_its_slots_until_the_last_of_its_segments_came_back_and_then_the_call_ends(
    sending: Sending,
) -> None:
    sending.step_until_all_is_lent()
    first = [segment for segment in sending.segments if segment.row == 0]
    others = [segment for segment in sending.segments if segment.row == 1]
    sending.step(sending.returned(first[1:]))
    assert sending.num_held_slots == 2 * len(PROMPT)
    sending.step_until(lambda: sending.num_held_slots == len(PROMPT), sending.returned(first[:1]))
    assert not sending.is_done
    sending.step_until(lambda: sending.is_done, sending.returned(others))
    assert sending.num_held_slots == 0


def test_what_comes_back_twice_counts_once(sending: Sending) -> None:
    sending.step_until_all_is_lent()
    for _ in range(len(sending.segments)):
        sending.step(sending.returned(sending.segments[:1]))
    assert sending.num_held_slots == 2 * len(PROMPT)


def test_a_row_cancelled_with_segments_lent_frees_its_slots_and_their_return_frees_no_others(sending: Sending) -> None:
    sending.step_until_all_is_lent()
    sending.step_until(lambda: sending.num_held_slots == len(PROMPT), CancelCallRows("call", (0,)))
    sending.step(sending.returned([segment for segment in sending.segments if segment.row == 0]))
    assert sending.num_held_slots == len(PROMPT) and not sending.is_done


def test_the_next_row_in_the_slots_is_noticed_by_who_still_reads_there(sending: Sending) -> None:
    sending.step_until_all_is_lent()
    lent, sending.segments = sending.segments, []
    sending.step_until(lambda: sending.num_held_slots == 0, CloseCall("call"))
    row = HandoffRow("next", 0, PROMPT, len(PROMPT), ResolvedSampling(seed=0, max_tokens=4))
    sending.step(OpenCall("other", (row,), shares_memory=True))
    assert sending.num_held_slots == len(PROMPT)
    stale = [segment for segment in lent if segment.shared is not None and not segment.shared.is_current]
    assert {segment.row for segment in stale} == {0} or {segment.row for segment in stale} == {1}


@pytest.mark.parametrize("command", [CloseCall("call"), CancelCallRows("call", (0, 1))], ids=["lost", "cancelled"])
def test_a_call_that_ends_at_any_step_leaves_no_slot_behind(memory: SharedPool, command: Command) -> None:
    for num_steps in range(12):
        sending = Sending(memory)
        for _ in range(num_steps):
            sending.step()
        sending.step_until(lambda: sending.engine.idle_timeout_s() > 0.01, command)  # noqa: B023 - run at once
        load = sending.engine.load()
        assert (load.rows.free, load.slots.free) == (load.rows.total, load.slots.total)
        assert load.unsent_bytes == 0
        sending.engine.close()


def test_layers_that_are_ready_together_are_one_loan(memory: SharedPool) -> None:
    engine = PrefillEngine(
        model=cast(TargetModel, TagModel()),
        device=open_device("cpu", num_threads=1),
        max_rows=1,
        max_kv_tokens=CONTEXT_TOKENS,
        max_context_tokens=CONTEXT_TOKENS,
        max_segment_bytes=len(PROMPT) * GROUP.layer_token_bytes,
        shared_pool=memory,
    )
    row = HandoffRow("row", 0, PROMPT, len(PROMPT), ResolvedSampling(seed=0, max_tokens=4))
    engine.step([OpenCall("call", (row,), shares_memory=True)])
    engine._in_flight[0].end.synchronize(BOUND_S)
    frames = [event.frame for event in engine.step([]) if isinstance(event, FrameReady)]
    assert [frame.num_layers for frame in frames if isinstance(frame, KvSegment)] == [GROUP.num_layers]
    engine.close()
