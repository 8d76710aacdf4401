"""Invariants I9, I10 and I15: rows, slots and tensors that a stream may still touch are not reused. Most hold with and
without drafts, whose slots are those of their row.
"""

from __future__ import annotations

import gc
import random
from functools import partial

from common.attention.backend import ForwardInput
from common.device.stream import Event
from common.kv.pool import RowLease
from common.wire.handoff import KvSegment
from decode_service.messages import CallEnded, FrameArrived, SegmentsLanded
from decode_service.schedule.request import Request
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.checks import breaking, broken_by, holding, in_cases
from tests.engine.harness import Outcome, ScriptedEngine
from tests.engine.mutants import rows, speculation
from tests.engine.speculating import CHAIN, TREE, assert_drafted_as_expected
from tests.engine.tag_head import DRAFT, draft_kv_of
from tests.engine.tags import GROUP, kv_of
from tests.support.scripted_device import ScriptedDevice, run_needed

with_and_without_drafts = in_cases(plain=None, chain=CHAIN)

# ---- I9: reuse and conservation ---------------------------------------------------------------------------------


@broken_by(rows.quarantine_skipped, "given out while")
@broken_by(rows.quarantine_ends_too_early, "given out while")
@broken_by(rows.launch_does_not_hold_its_rows, "given out while")
@with_and_without_drafts
def check_nothing_is_reused_while_a_forward_holds_it(spec_info: SpecInfo | None) -> None:
    """The only row is aborted while its forward is in flight and another request waits for the row."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=16, spec_info=spec_info)
    scripted.submit("first", [1, 2, 3], 8)
    scripted.start("first")
    scripted.abort("first")
    second = scripted.submit("second", [4, 5], 5)
    seen = []

    def look(device: ScriptedDevice, event: Event) -> None:
        load = scripted.engine.load()
        seen.append((load.rows.quarantined, load.slots.quarantined, load.rows.reserved))
        run_needed(device, event)

    scripted.device.on_synchronize = look
    scripted.step()
    num_held = 3 + (1 if spec_info is None else spec_info.num_slots)
    assert seen == [(1, num_held, 0)], "a row or slot was given out while a forward may write it"
    assert scripted.engine.load().rows.free == 1, "quarantine outlasted the forward"
    scripted.device.on_synchronize = run_needed
    scripted.run()
    assert_right_with(spec_info, second)


def assert_right_with(spec_info: SpecInfo | None, outcome: Outcome) -> None:
    assert outcome.token_ids == outcome.expected, "tokens were decoded wrongly"
    if spec_info is not None:
        assert_drafted_as_expected(outcome, spec_info)


@broken_by(rows.grown_slot_leaks, "slots are lost")
@broken_by(rows.aborted_row_leaks, "not over")
@broken_by(rows.slots_released_twice, "not conserved|held twice")
def check_rows_and_slots_are_conserved() -> None:
    """Requests end by length, or are aborted while queued, landing or decoding. `step` and `run` check after each step
    that no row or slot was lost.
    """
    numbers = random.Random(5)
    scripted = ScriptedEngine(max_rows=3, max_kv_tokens=90)
    for arrival in range(24):
        scripted.submit(str(arrival), [arrival + 1] * numbers.randint(1, 6), numbers.randint(1, 9))
        if arrival % 3 == 0:
            scripted.abort(str(numbers.randint(0, arrival)))
        scripted.step_and_hand_over()
        if arrival % 2:
            scripted.landing.run_all()
    scripted.run()


@broken_by(speculation.slots_taken_anew_each_step, "slots held")
def check_rejected_drafts_leave_their_slots_to_the_next_step() -> None:
    """A row never holds more slots than its committed KV and one step's drafts need."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=64, spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2], 24)
    scripted.start("a")
    num_checked = 0
    while not outcome.has_ended:
        scripted.step()
        if scripted.forward.pending():
            num_committed = len(outcome.prompt) + len(outcome.token_ids) - 1
            held = scripted.engine.load().slots.running
            assert held == num_committed + CHAIN.num_slots, f"{held} slots held, {num_committed} committed"
            num_checked += 1
    assert num_checked > 3
    scripted.run()


def test_a_request_that_ended_is_kept_by_nobody() -> None:
    """The request ends with its first token, so it never takes part in a decode forward."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=16)
    scripted.submit("one token", [1, 2, 3], 1)
    scripted.run()
    gc.collect()
    assert "one token" not in [thing.request_id for thing in gc.get_objects() if type(thing) is Request]


# ---- I10: the pool is written by its engine, for rows it holds --------------------------------------------------


@broken_by(speculation.no_slots_for_drafts, "a forward writes to")
@broken_by(speculation.rejected_slots_given_back, "a forward writes to")
@in_cases(chain=CHAIN, tree=TREE)
def check_a_forward_writes_to_slots_of_its_rows(spec_info: SpecInfo) -> None:
    """Checks that the forwards of the target and of the head write only to slots of their own rows, which include those
    of drafts.
    """
    scripted = ScriptedEngine(spec_info=spec_info)
    leases: dict[int, RowLease] = {}
    reserve = scripted.engine.pool.reserve

    def noting(num_tokens: int, **options: object) -> RowLease | None:
        lease = reserve(num_tokens, **options)
        if lease is not None:
            leases[lease.row] = lease
        return lease

    scripted.engine.pool.reserve = noting
    assert scripted.head is not None
    scripted.model.on_forward = scripted.head.on_forward = partial(assert_slots_are_held, leases)
    for number in range(3):
        scripted.submit(str(number), range(1, number + 3), 12)
    scripted.run()
    for outcome in scripted.outcomes.values():
        assert outcome.token_ids == outcome.expected, str(outcome.error)


def assert_slots_are_held(leases: dict[int, RowLease], batch: ForwardInput) -> None:
    written = batch.out_cache_loc.view(batch.req_pool_indices.shape[0], -1).tolist()
    for row, slots in zip(batch.req_pool_indices.tolist(), written, strict=True):
        held = leases[row].slots.tolist()
        assert set(slots) <= set(held), f"row {row} holds {held}, a forward writes to {slots}"


@broken_by(rows.landing_does_not_hold_its_row, "landed in slots")
@broken_by(rows.quarantine_skipped, "landed in slots")
@with_and_without_drafts
def check_a_late_copy_does_not_meet_another_request(spec_info: SpecInfo | None) -> None:
    """A request is aborted while its KV is still being copied, and another one needs its slots."""
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=60, spec_info=spec_info)
    long = scripted.submit("long", [1, 2, 3], 30)
    scripted.start("long")
    scripted.submit("gone", [9] * 4, 2)
    scripted.step()
    scripted.hand_over("gone", last=DRAFT.name)
    scripted.step()
    assert scripted.landing.pending(), "the copies should be pending"
    scripted.abort("gone")
    for _ in range(8 if spec_info is None else 6):  # the copies stand still while "long" grows
        scripted.step()
    scripted.landing.run_all()
    scripted.run()
    assert long.token_ids == long.expected, "a copy landed in slots that another request held"
    assert_right_with(spec_info, long)


@broken_by(rows.landing_into_a_released_row, "does not follow")
@broken_by(rows.frames_matched_by_row_number_alone, "was given up")
@with_and_without_drafts
def check_a_released_row_takes_no_further_segment(spec_info: SpecInfo | None) -> None:
    """A request is aborted. Frames that arrive for it later are dropped, and their bytes are given back."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=32, spec_info=spec_info)
    scripted.submit("gone", [9, 9, 9, 9], 2)
    scripted.step()
    stale = scripted.handoffs.pop("gone")
    scripted.abort("gone")
    second = scripted.submit("second", [1, 2, 3, 4], 6)
    scripted.step()
    group, kv_made_of = (GROUP, kv_of) if spec_info is None else (DRAFT, draft_kv_of)
    kv = kv_made_of([9, 9, 9, 9])
    late = KvSegment(stale.row, group.name, 0, group.num_layers, 0, 4, kv.tobytes())
    scripted.post(FrameArrived(stale.call_id, late))
    events = scripted.step()
    assert scripted.landing.pending() == [], "a segment was copied for a row that was given up"
    scripted.post(CallEnded(stale.call_id, None))
    events += scripted.step()
    assert SegmentsLanded(stale.call_id, kv.nbytes) in events, "the bytes were not given back"
    scripted.run()
    assert_right_with(spec_info, second)


@broken_by(rows.row_merged_before_its_copies, "before the row's KV had landed")
@broken_by(speculation.drafts_kv_not_awaited, "before the row's KV had come", only="chain")
@with_and_without_drafts
def check_a_row_runs_only_when_its_kv_is_there(spec_info: SpecInfo | None) -> None:
    """At first some frames have not arrived: of the head's KV, if there are drafts. Later they have, but are not copied
    yet. Nothing may be launched in either case.
    """
    scripted = ScriptedEngine(spec_info=spec_info)
    outcome = scripted.submit("a", [1, 2, 3, 4], 6)
    scripted.step()
    scripted.hand_over("a", last=DRAFT.name)
    late = scripted.hold_back(2 if spec_info is None else 3)  # one segment or the head's two, and the call's end
    for _ in range(2):
        scripted.step()
        scripted.landing.run_all()
        assert scripted.forward.pending() == [], "a forward was launched before the row's KV had come"
    for command in late:
        scripted.post(command)
    scripted.step()
    assert len(scripted.landing.pending()) == len(late) - 1
    while scripted.landing.pending():
        assert scripted.forward.pending() == [], "a forward was launched before the row's KV had landed"
        scripted.landing.run_next()
        if scripted.landing.pending():
            scripted.step()
    scripted.run()
    assert_right_with(spec_info, outcome)


# ---- I15: referenced until the end event ------------------------------------------------------------------------


@broken_by(rows.tensors_dropped_before_the_end, "was dropped")
@broken_by(rows.tensors_kept_for_ever, "still holds")
@with_and_without_drafts
def check_tensors_live_until_the_end_event(spec_info: SpecInfo | None) -> None:
    scripted = ScriptedEngine(spec_info=spec_info)
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
@with_and_without_drafts
def check_a_live_rows_table_only_grows(spec_info: SpecInfo | None) -> None:
    scripted = ScriptedEngine(max_rows=2, spec_info=spec_info)
    outcome = scripted.submit("a", [1, 2, 3], 20)
    scripted.start("a")
    table = scripted.engine.pool.rows.req_to_token[1]
    (req,) = scripted.engine.lives.requests.values()
    before: list[int] = []
    while req.lease is not None:
        slots = req.lease.slots.tolist()
        assert slots[: len(before)] == before, "a live row's slots were taken away"
        assert table[: len(slots)].tolist() == slots, "a live row's table was rewritten"
        before = slots
        scripted.step()
    assert len(before) > 12 and outcome.has_ended
    scripted.run()


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
