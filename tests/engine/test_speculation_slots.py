"""Invariants I9, I10 and I15 for a speculating engine: its rows, tensors and slots, including those of drafts. A mutant
breaks each one.
"""

from __future__ import annotations

import gc
from functools import partial

from common.attention.backend import ForwardInput
from common.device.scripted import ScriptedDevice, run_needed
from common.device.stream import Event
from common.wire.handoff import KvSegment
from decode_service.messages import CallEnded, FrameArrived, SegmentsLanded
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import ScriptedEngine
from tests.engine.mutants import rows, speculation
from tests.engine.speculating import CHAIN, TREE, assert_drafted_as_expected
from tests.engine.tag_head import DRAFT, draft_kv_of

# ---- I9: rows, and the slots of drafts ----------------------------------------------------------------------------


@broken_by(rows.quarantine_skipped, "given out while")
@broken_by(rows.quarantine_ends_too_early, "given out")
@broken_by(rows.launch_does_not_hold_its_rows, "given out")
def check_nothing_is_reused_while_a_speculative_forward_holds_it() -> None:
    """The only row is aborted before its verify and draft-extend have run, and another request waits for the row."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=16, spec_info=CHAIN)
    scripted.submit("first", [1, 2, 3], 8)
    scripted.start("first")
    scripted.abort("first")
    second = scripted.submit("second", [4, 5], 5)
    seen = []

    def look(device: ScriptedDevice, event: Event) -> None:
        load = scripted.engine.load()
        seen.append((load.rows.quarantined, load.slots.quarantined, load.rows.reserved, scripted.forward.pending()[0]))
        run_needed(device, event)

    scripted.device.on_synchronize = look
    scripted.step()
    assert seen == [(1, 3 + CHAIN.num_slots, 0, "reset")], "a row or slot was given out while a forward may write it"
    scripted.device.on_synchronize = run_needed
    scripted.run()
    assert_drafted_as_expected(second)


@broken_by(speculation.slots_taken_anew_each_step, "slots held")
def check_rejected_drafts_leave_their_slots_to_the_next_step() -> None:
    """A row never holds more slots than its committed KV and one step's drafts need."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=64, spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2], 24)
    scripted.start("a")
    num_checked = 0
    while not outcome.has_ended:
        num_committed = len(outcome.prompt) + len(outcome.token_ids) - 1
        scripted.step()
        if scripted.forward.pending():
            num_committed = len(outcome.prompt) + len(outcome.token_ids) - 1
            held = scripted.engine.load().slots.running
            assert held == num_committed + CHAIN.num_slots, f"{held} slots held, {num_committed} committed"
            num_checked += 1
    assert num_checked > 3
    scripted.run()


# ---- I10: the pool is written by its engine, for rows it holds ----------------------------------------------------


@broken_by(speculation.no_slots_for_drafts, "a forward writes to")
@broken_by(speculation.rejected_slots_given_back, "a forward writes to")
def check_a_forward_writes_to_slots_of_its_rows() -> None:
    """Checks that the forwards of the target and of the head write only to slots of their own rows, which include those
    of drafts.
    """
    for spec_info in (CHAIN, TREE):
        scripted = ScriptedEngine(spec_info=spec_info)
        assert scripted.head is not None
        scripted.model.on_forward = scripted.head.on_forward = partial(assert_slots_are_held, scripted)
        for number in range(3):
            scripted.submit(str(number), range(1, number + 3), 12)
        scripted.run()
        for outcome in scripted.outcomes.values():
            assert outcome.token_ids == outcome.expected, str(outcome.error)


def assert_slots_are_held(scripted: ScriptedEngine, batch: ForwardInput) -> None:
    pool = scripted.engine.pool
    held = {lease.row: lease.slots.tolist() for lease in (*pool._held.values(), *pool._quarantined.values())}
    written = batch.out_cache_loc.view(batch.req_pool_indices.shape[0], -1).tolist()
    for row, slots in zip(batch.req_pool_indices.tolist(), written, strict=True):
        assert set(slots) <= set(held[row]), f"row {row} holds {held[row]}, a forward writes to {slots}"


@broken_by(rows.landing_does_not_hold_its_row, "landed in|wrongly")
@broken_by(rows.quarantine_skipped, "landed in")
def check_a_late_copy_does_not_meet_another_requests_drafts() -> None:
    """A request is aborted while its KV is still being copied, and another one needs its slots."""
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=60, spec_info=CHAIN)
    long = scripted.submit("long", [1, 2, 3], 30)
    scripted.start("long")
    scripted.submit("gone", [9] * 4, 2)
    scripted.step()
    scripted.hand_over("gone", last="draft")
    scripted.step()
    assert scripted.landing.pending(), "the copies should be pending"
    scripted.abort("gone")
    for _ in range(6):  # the copies stand still while "long" grows
        scripted.step()
    scripted.landing.run_all()
    scripted.run()
    assert long.token_ids == long.expected, "a copy landed in slots that another request held"
    assert_drafted_as_expected(long)


@broken_by(rows.landing_into_a_released_row, "does not follow")
@broken_by(rows.frames_matched_by_row_number_alone, "given up")
def check_a_released_row_takes_none_of_the_heads_segments() -> None:
    """A request is aborted. Frames that arrive for it later are dropped, and their bytes are given back."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=32, spec_info=CHAIN)
    scripted.submit("gone", [9, 9, 9, 9], 2)
    scripted.step()
    stale = scripted.handoffs.pop("gone")
    scripted.abort("gone")
    second = scripted.submit("second", [1, 2, 3, 4], 6)
    scripted.step()
    kv = draft_kv_of([9, 9, 9, 9])
    scripted.post(FrameArrived(stale.call_id, KvSegment(stale.row, DRAFT.name, 0, 1, 0, 4, kv.tobytes())))
    events = scripted.step()
    assert scripted.landing.pending() == [], "a segment was copied for a row that was given up"
    scripted.post(CallEnded(stale.call_id, None))
    events += scripted.step()
    assert SegmentsLanded(stale.call_id, kv.nbytes) in events, "the bytes were not given back"
    scripted.run()
    assert_drafted_as_expected(second)


@broken_by(rows.row_merged_before_its_copies, "before the head's KV")
@broken_by(speculation.drafts_kv_not_awaited, "before the head's KV")
def check_a_row_runs_only_when_the_heads_kv_is_there() -> None:
    """The target's KV has landed. At first the head's frames have not arrived; later they have, but are not copied yet.
    Nothing may be launched in either case.
    """
    scripted = ScriptedEngine(spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2, 3, 4], 6)
    scripted.step()
    scripted.hand_over("a", last=DRAFT.name)
    late = scripted.hold_back(3)  # the head's two segments, and the call's end
    for _ in range(2):
        scripted.step()
        scripted.landing.run_all()
        assert scripted.forward.pending() == [], "a forward was launched before the head's KV had come"
    for command in late:
        scripted.post(command)
    for num_copies in (2, 1):
        scripted.step()
        assert scripted.forward.pending() == [], "a forward was launched before the head's KV had landed"
        assert len(scripted.landing.pending()) == num_copies
        scripted.landing.run_next()
    scripted.run()
    assert_drafted_as_expected(outcome)


# ---- I15: referenced until the end event --------------------------------------------------------------------------


@broken_by(rows.tensors_dropped_before_the_end, "was dropped")
@broken_by(rows.tensors_kept_for_ever, "still holds")
def check_tensors_live_until_a_speculative_step_ends() -> None:
    scripted = ScriptedEngine(spec_info=CHAIN)
    scripted.submit("a", [1, 2], 9)
    scripted.start("a")
    while scripted.forward.pending() != ["copy_results"]:
        scripted.forward.run_next()
    step = scripted.model.forwards[0]
    gc.collect()
    assert all(tensor() is not None for tensor in step.handed), "a tensor of a step in flight was dropped"
    scripted.step()  # launches the next one, waits for this one's end and takes its results
    gc.collect()
    assert all(tensor() is None for tensor in step.handed), "a finished step still holds its tensors"
    scripted.run()


@broken_by(rows.live_table_rewritten, "was rewritten|taken away")
def check_a_speculating_rows_table_only_grows() -> None:
    scripted = ScriptedEngine(max_rows=2, spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2, 3], 20)
    scripted.start("a")
    table = scripted.engine.pool.rows.req_to_token[1]
    before: list[int] = []
    while not outcome.has_ended:
        lease = next(iter(scripted.engine.pool._held.values()))
        assert lease.slots[: len(before)].tolist() == before, "a live row's slots were taken away"
        assert table[: len(lease.slots)].tolist() == lease.slots.tolist(), "a live row's table was rewritten"
        before = lease.slots.tolist()
        scripted.step()
    assert len(before) > 12
    scripted.run()


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
