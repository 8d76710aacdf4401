"""Invariants I9, I10 and I15: rows, slots and tensors that a stream may still touch are not reused."""

from __future__ import annotations

import gc
import random

import numpy as np

from common.device.scripted import ScriptedDevice, run_needed
from common.device.stream import Event
from common.wire.handoff import KvSegment
from decode_service.messages import CallEnded, FrameArrived, SegmentsLanded
from decode_service.schedule.request import Request
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import ScriptedEngine
from tests.engine.mutants import rows
from tests.engine.relay_rig import make_pool
from tests.engine.tags import GROUP, kv_of

# ---- I9: reuse and conservation ---------------------------------------------------------------------------------


@broken_by(rows.quarantine_skipped, "given out while")
@broken_by(rows.quarantine_ends_too_early, "given out while")
@broken_by(rows.launch_does_not_hold_its_rows, "given out while")
def check_nothing_is_reused_while_a_forward_holds_it() -> None:
    """The only row is aborted while its forward is in flight and another request waits for the row."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=16)
    scripted.submit("first", [1, 2, 3], 8)
    scripted.start("first")
    scripted.abort("first")
    scripted.submit("second", [4, 5], 3)
    seen = []

    def look(device: ScriptedDevice, event: Event) -> None:
        load = scripted.engine.load()
        seen.append((load.rows.quarantined, load.slots.quarantined, load.rows.reserved))
        run_needed(device, event)

    scripted.device.on_synchronize = look
    scripted.step()
    assert seen == [(1, 4, 0)], "a row or slot was given out while a forward may write it"
    assert scripted.engine.load().rows.free == 1, "quarantine outlasted the forward"
    scripted.run()


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
        scripted.step()
        for request_id in list(scripted.handoffs):
            scripted.hand_over(request_id)
        if arrival % 2:
            scripted.landing.run_all()
    scripted.run()


def test_a_request_that_ended_is_kept_by_nobody() -> None:
    """The request ends with its first token, so it never takes part in a decode forward."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=16)
    scripted.submit("one token", [1, 2, 3], 1)
    scripted.run()
    gc.collect()
    assert "one token" not in [thing.request_id for thing in gc.get_objects() if type(thing) is Request]


# ---- I10: the pool is written by its engine, for rows it holds --------------------------------------------------


@broken_by(rows.landing_does_not_hold_its_row, "landed in slots")
@broken_by(rows.quarantine_skipped, "landed in slots")
def check_a_late_copy_does_not_meet_another_request() -> None:
    """A request is aborted while its KV is still being copied, and another one needs its slots."""
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=60)
    long = scripted.submit("long", [1, 2, 3], 30)
    scripted.start("long")
    scripted.submit("gone", [9] * 4, 2)
    scripted.step()
    scripted.hand_over("gone")
    scripted.step()
    assert scripted.landing.pending(), "the copies should be pending"
    scripted.abort("gone")
    for _ in range(8):  # the copies stand still while "long" grows
        scripted.step()
    scripted.landing.run_all()
    scripted.run()
    assert long.token_ids == long.expected, "a copy landed in slots that another request held"


@broken_by(rows.landing_into_a_released_row, "does not follow")
@broken_by(rows.frames_matched_by_row_number_alone, "was given up")
def check_a_released_row_takes_no_further_segment() -> None:
    """A request is aborted. Frames that arrive for it later are dropped, and their bytes are given back."""
    scripted = ScriptedEngine(max_rows=1, max_kv_tokens=32)
    scripted.submit("gone", [9, 9, 9, 9], 2)
    scripted.step()
    stale = scripted.handoffs.pop("gone")
    scripted.abort("gone")
    second = scripted.submit("second", [1, 2, 3, 4], 6)
    scripted.step()
    kv = kv_of([9, 9, 9, 9])
    late = KvSegment(stale.row, GROUP.name, 0, GROUP.num_layers, 0, 4, kv.tobytes())
    scripted.post(FrameArrived(stale.call_id, late))
    events = scripted.step()
    assert scripted.landing.pending() == [], "a segment was copied for a row that was given up"
    scripted.post(CallEnded(stale.call_id, None))
    events += scripted.step()
    assert SegmentsLanded(stale.call_id, kv.nbytes) in events, "the bytes were not given back"
    scripted.run()
    assert second.token_ids == second.expected


@broken_by(rows.row_merged_before_its_copies, "before the row's KV")
def check_a_row_runs_only_when_its_kv_is_there() -> None:
    """Both segments and the PrebuiltBatch entry have arrived, but their copies have not run. Nothing may be
    launched.
    """
    scripted = ScriptedEngine()
    outcome = scripted.submit("a", [1, 2, 3, 4], 4)
    scripted.step()
    scripted.hand_over("a")
    for _ in range(3):
        scripted.step()
        assert scripted.forward.pending() == [], "a forward was launched before the row's KV had landed"
    scripted.landing.run_next()
    scripted.step()
    assert scripted.forward.pending() == [], "a forward was launched before the row's KV had landed"
    scripted.run()
    assert outcome.token_ids == outcome.expected


# ---- I15: referenced until the end event ------------------------------------------------------------------------


@broken_by(rows.tensors_dropped_before_the_end, "was dropped")
@broken_by(rows.tensors_kept_for_ever, "still holds")
def check_tensors_live_until_the_end_event() -> None:
    scripted = ScriptedEngine()
    scripted.submit("a", [1, 2], 5)
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


@broken_by(rows.live_table_rewritten, "was rewritten")
def check_a_live_rows_table_only_grows() -> None:
    pool = make_pool()
    lease = pool.reserve(3)
    assert lease is not None
    table = pool.rows.req_to_token[lease.row]
    before = table[:3].tolist()
    for length in (4, 5, 6):
        assert pool.grow(np.array([lease.row]), np.array([length]))
        assert table[:3].tolist() == before == lease.slots[:3].tolist(), "a live row's table was rewritten"
        pool.check_conservation()


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
