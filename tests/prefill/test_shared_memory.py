"""Tests of the prefill engine with receivers on its own host: it lends KV, and a row keeps its slots until all loans
are returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from common.kv.shared_pool import SharedPool
from common.wire.handoff import KvSegment
from prefill_service.messages import (
    CancelCallRows,
    CloseCall,
    Command,
    SegmentsReturned,
)
from tests.engine.tags import CONTEXT_TOKENS, GROUP, TagModel, kv_of
from tests.support.engines import PrefillHalf
from tests.support.scripted_device import ScriptedDevice

PROMPT = tuple(range(1, 25))
BOUND_S = 30.0
IDLE_STEP_S = 0.001


class Sending(PrefillHalf):
    """An engine that computes two tokens at a time, and a call whose receiver does only what the test says."""

    def __init__(self, memory: SharedPool) -> None:
        super().__init__(
            TagModel(),
            max_rows=2,
            max_kv_tokens=CONTEXT_TOKENS,
            max_context_tokens=CONTEXT_TOKENS,
            chunk_tokens=2,
            max_batch_tokens=4,
            shared_pool=memory,
        )
        self.open("call", [PROMPT, PROMPT], shares_memory=True)

    @property
    def num_held_slots(self) -> int:
        slots = self.engine.load().slots
        return slots.total - slots.free

    def step_until(self, condition: Callable[[], bool], *commands: Command) -> None:
        self.step(*commands)
        give_up_s = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < give_up_s, "it does not come to that"
            time.sleep(min(self.engine.idle_timeout_s(), IDLE_STEP_S))  # lets the streams' threads run
            self.step()

    def step_until_all_is_lent(self) -> None:
        num_bytes = 2 * len(PROMPT) * GROUP.token_bytes
        self.step_until(lambda: sum(segment.num_bytes for segment in self.segments) == num_bytes)

    def returned(self, segments: Sequence[KvSegment]) -> SegmentsReturned:
        return SegmentsReturned("call", tuple(s.shared.ticket.number for s in segments if s.shared is not None))


@pytest.mark.parametrize("numbers", [(), (1,)])
def test_an_engine_that_lends_nothing_ignores_what_is_given_back(numbers: tuple[int, ...]) -> None:
    """A peer may send any numbers, and none of them may end the engine."""
    half = PrefillHalf(TagModel())
    try:
        half.step(SegmentsReturned("call", numbers))
        assert half.engine.load().num_steps == 0
    finally:
        half.close()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedPool]:
    memory = SharedPool(groups=[GROUP], num_slots=CONTEXT_TOKENS, directory=tmp_path)
    yield memory
    memory.close()


@pytest.fixture
def sending(memory: SharedPool) -> Iterator[Sending]:
    sending = Sending(memory)
    yield sending
    sending.close()


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
    assert not sending.ended_calls
    sending.step_until(lambda: bool(sending.ended_calls), sending.returned(others))
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
    assert sending.num_held_slots == len(PROMPT) and not sending.ended_calls


def test_the_next_row_in_the_slots_is_noticed_by_who_still_reads_there(sending: Sending) -> None:
    sending.step_until_all_is_lent()
    lent = sending.segments
    sending.step_until(lambda: sending.num_held_slots == 0, CloseCall("call"))
    sending.open("other", [PROMPT], shares_memory=True)
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
        assert sending.is_empty
        sending.close()


def test_layers_that_are_ready_together_are_one_loan(memory: SharedPool) -> None:
    device = ScriptedDevice()
    prefill = PrefillHalf(
        TagModel(),
        device,
        max_rows=1,
        max_kv_tokens=CONTEXT_TOKENS,
        max_context_tokens=CONTEXT_TOKENS,
        max_segment_bytes=len(PROMPT) * GROUP.layer_token_bytes,
        shared_pool=memory,
    )
    prefill.open("call", [PROMPT], shares_memory=True)
    device.run_all()
    prefill.step()
    assert [segment.num_layers for segment in prefill.segments] == [GROUP.num_layers]
    prefill.close()
