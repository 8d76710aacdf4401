"""I3, I4, I6, I7, I9, I10, I12, I15 with an EagleWorker: what it drafts, commits and leaves, however its streams run.

The draft head is made of tags too: it is right for two choices in three, and wrong when anything it read was not what
it should be. So beside the tokens the drafts that are accepted are known beforehand, and must be just those.
"""

from __future__ import annotations

import gc
import random
from functools import partial

import pytest

from common.device.scripted import ScriptedDevice, pick_with, run_needed
from common.device.stream import Event
from common.errors import EngineFault
from common.model.attention import ForwardInput
from common.wire.handoff import KvSegment
from decode_service.messages import CallEnded, FrameArrived, SegmentsLanded
from decode_service.schedule_batch import ScheduleBatch
from decode_service.spec_info import SpecInfo
from tests.engine.harness import LaggingScheduleDevice, Outcome, ScriptedEngine
from tests.engine.mutants import bootstrap, relay, rows, speculation
from tests.engine.mutants.kinds import Check, Mutant, name_of
from tests.engine.tag_head import DRAFT, draft_kv_of
from tests.engine.tags import VOCAB_SIZE

CHAIN = SpecInfo.chain(2)
TREE = SpecInfo(num_steps=2, num_draft_tokens=5, topk=2)
NUM_SEEDS = 5


def assert_drafted_as_expected(outcome: Outcome) -> None:
    """With chains of CHAIN, when nothing was retracted."""
    assert outcome.token_ids == outcome.expected, "tokens were decoded wrongly"
    expected = outcome.expected_drafting(CHAIN.num_draft_tokens)
    assert outcome.drafting == expected, f"drafts were not those of the sequence: {outcome.drafting}, not {expected}"


def run_one_each(device: ScriptedDevice) -> None:
    for stream in device.ready_streams():
        stream.run_next()


# ---- I12: whatever happens ----------------------------------------------------------------------------------------


def check_speculated_tokens_are_the_oracles() -> None:
    """A dozen greedy and sampled requests through three rows, some aborted, some retracted, in any order of streams."""
    num_accepted = num_rejected = num_retractions = num_exact = 0
    for seed in range(NUM_SEEDS):
        for spec_info, overlap in ((CHAIN, True), (CHAIN, False), (TREE, True)):
            scripted = random_run(random.Random(seed), spec_info, overlap=overlap)
            for request_id, outcome in scripted.outcomes.items():
                wanted = outcome.expected[: len(outcome.token_ids)] if outcome.is_abandoned else outcome.expected
                assert outcome.token_ids == wanted, f"seed {seed}: {request_id} was decoded wrongly"
                if outcome.drafting is None or outcome.finished is None:
                    continue
                counts = outcome.finished.speculation
                assert counts is not None
                num_accepted += counts.num_accepted_tokens
                num_rejected += sum(counts.drafted_at) - counts.num_accepted_tokens
                is_always_deep = counts.drafted_at == (counts.num_verify_steps,) * spec_info.num_steps
                if spec_info is CHAIN and is_always_deep and not outcome.finished.timings.num_retractions:
                    num_exact += 1
                    assert_drafted_as_expected(outcome)
            num_retractions += scripted.engine.load().num_retractions
    assert num_accepted > 400 and num_rejected > 400 and num_exact > 30, "too few drafts to tell anything"
    assert num_retractions > 0, "nothing was retracted: the pool is too large for this test"


def random_run(numbers: random.Random, spec_info: SpecInfo, *, overlap: bool) -> ScriptedEngine:
    def run_some(device: ScriptedDevice) -> None:
        while numbers.random() < 0.3 and (ready := device.ready_streams()):
            numbers.choice(ready).run_next()

    device = ScriptedDevice(on_synchronize=pick_with(numbers.choice), on_host_call=run_some)
    scripted = ScriptedEngine(device=device, max_rows=3, max_kv_tokens=80, overlap=overlap, spec_info=spec_info)
    for arrival in range(12):
        prompt = [numbers.randrange(1, 900) for _ in range(numbers.randint(1, 7))]
        temperature = numbers.choice([0.0, 0.0, 1.0])
        scripted.submit(str(arrival), prompt, numbers.choice([1, 2, 6, 20, 40]), temperature=temperature, seed=arrival)
        for _ in range(numbers.randint(0, 4)):
            scripted.step()
            for waiting in list(scripted.handoffs):
                if numbers.random() < 0.7:
                    scripted.hand_over(waiting, last=numbers.choice(["target", "draft"]))
        if numbers.random() < 0.3:
            scripted.abort(str(numbers.randint(0, arrival)))
    scripted.run(advance=run_one_each)
    return scripted


# ---- I3, I4: the fence, and what needs none -----------------------------------------------------------------------


def pending_when_blocking(scripted: ScriptedEngine) -> list[list[str]]:
    """One step, with run_needed: what is left on the forward stream each time the schedule side begins to wait."""
    seen = []

    def look(device: ScriptedDevice, event: Event) -> None:
        seen.append(scripted.forward.pending())
        run_needed(device, event)

    scripted.device.on_synchronize = look
    scripted.step()
    scripted.device.on_synchronize = run_needed
    return seen


def check_the_next_step_is_launched_before_draft_extend() -> None:
    scripted = ScriptedEngine(spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2], 12)
    scripted.start("a")
    for _ in range(3):
        for_lengths, for_results = pending_when_blocking(scripted)
        assert "verify" in for_lengths, "lengths were read before they were published"
        assert for_results[0] == "extend", f"the schedule side waited for draft-extend: {for_results}"
        assert for_results.count("extend") == 2, f"the next step was not launched: {for_results}"
    scripted.run()
    assert_drafted_as_expected(outcome)


def check_seeds_reach_the_next_forward_by_stream_order() -> None:
    """The next forward is launched before draft-extend has run, with nothing to wait for between the two."""
    scripted = ScriptedEngine(spec_info=CHAIN, debug_checks=False)
    first, second = scripted.submit("first", [1, 2], 12), scripted.submit("second", [3, 4, 5], 9, temperature=1.0)
    scripted.start("first", "second")
    _, for_results = pending_when_blocking(scripted)
    assert for_results[0] == "extend" and for_results.index("resolve") > for_results.index("extend")
    scripted.run()
    for outcome in (first, second):
        assert_drafted_as_expected(outcome)


# ---- I6: inputs and seeds come from the relay at forward entry ----------------------------------------------------


def check_seeds_are_read_at_forward_entry() -> None:
    scripted = ScriptedEngine(spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2], 4)
    scripted.start("a")
    first, drafted = outcome.expected[0], int(scripted.engine.future_map.seeds["topk_index"][1])
    changed = (drafted + 1) % VOCAB_SIZE
    scripted.engine.future_map.seeds["topk_index"][1] = changed  # after the launch, before the forward
    scripted.forward.run_all()
    verified = scripted.model.forwards[0].input_ids
    assert verified[:2] == [first, changed], "the seed was taken when the step was launched"
    scripted.run()
    assert outcome.token_ids == outcome.expected, "a wrong draft changed the tokens"


def check_a_verified_step_that_was_not_stashed_is_noticed() -> None:
    """Debug builds: a step whose bonus token never reached the relay fails its request at the next."""
    scripted = ScriptedEngine(spec_info=CHAIN, debug_checks=True)
    outcome = scripted.submit("a", [1, 2], 16)
    scripted.start("a")
    for piece in ("reset", "resolve"):
        assert scripted.forward.run_next() == piece
    poisoned = scripted.engine.future_map.output_tokens.clone()
    assert not 0 <= poisoned[1] < VOCAB_SIZE, "a consumed row was not poisoned"
    scripted.forward.run_all()
    scripted.engine.future_map.output_tokens.copy_(poisoned)  # as if nothing had been stashed
    scripted.run()
    assert isinstance(outcome.error, EngineFault), "a poisoned token was decoded"
    assert outcome.token_ids == outcome.expected[: len(outcome.token_ids)] != []


# ---- I7: bootstrap beside a speculative forward in flight ---------------------------------------------------------


def check_bootstrap_beside_draft_extend_leaves_the_fence() -> None:
    scripted = ScriptedEngine(spec_info=CHAIN)
    scripted.submit("a", [1, 2], 16)
    scripted.start("a")
    scripted.submit("b", [3, 4, 5], 8)
    scripted.step()
    scripted.hand_over("b")
    scripted.step()
    scripted.landing.run_all()
    future_map = scripted.engine.future_map
    bootstraps = future_map.bootstrap
    merged = []

    def watched(prebuilt: ScheduleBatch, payload: object) -> None:
        armed = future_map.publish_ready
        assert scripted.forward.pending()[0] == "extend", "the schedule side waited for draft-extend"
        bootstraps(prebuilt, payload)  # type: ignore[arg-type]
        assert future_map.publish_ready is armed, "bootstrap touched publish_ready"
        merged.append(prebuilt.batch_size)

    future_map.bootstrap = watched  # type: ignore[assignment]
    scripted.step()
    assert merged == [1]
    scripted.run()


def check_rows_bootstrapped_beside_a_forward_keep_what_they_came_with() -> None:
    """One joins a batch whose draft-extend is still to run. Another is merged when no slots are left to launch with."""
    scripted = ScriptedEngine(spec_info=CHAIN)
    first, beside = scripted.submit("first", [1, 2], 16), scripted.submit("beside", [3, 4, 5], 8)
    scripted.step()
    scripted.hand_over("first")
    scripted.step()
    scripted.landing.run_all()
    scripted.step()
    scripted.hand_over("beside")
    scripted.step()
    scripted.landing.run_all()
    scripted.run()
    assert_drafted_as_expected(first)
    assert_drafted_as_expected(beside)


def check_a_row_bootstrapped_and_not_launched_keeps_its_length() -> None:
    """It is merged when the slots of its first step are still those of an aborted row, whose forward is in flight."""
    scripted = ScriptedEngine(spec_info=CHAIN, max_rows=2, max_kv_tokens=44)
    scripted.submit("gone", [1, 2], 40)
    scripted.start("gone")
    outcome = scripted.submit("kept", [3, 4, 5, 6, 7], 4)
    scripted.step()
    scripted.hand_over("kept")
    while scripted.engine.pool.num_free_slots:
        scripted.step()
    scripted.landing.run_all()
    scripted.abort("gone")
    scripted.step()
    load = scripted.engine.load()
    assert (load.num_running, load.num_retractions, scripted.forward.pending()) == (1, 0, []), "it was launched"
    lengths: list[tuple[int, ...] | None] = []
    scripted.model.on_forward = lambda batch: lengths.append(batch.prefix_lens)
    scripted.run()
    assert lengths[0] == (5,), f"a bootstrapped length was lost: {lengths[0]}"
    assert_drafted_as_expected(outcome)


def check_a_speculative_forward_waits_for_the_schedule_side() -> None:
    device = LaggingScheduleDevice()
    scripted = ScriptedEngine(device=device, spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2], 6)
    scripted.step()
    scripted.hand_over("a")
    scripted.step()
    assert not scripted.landing.is_ready, "KV may land before the schedule side is done with the slots"
    device.schedule.run_all()
    scripted.landing.run_all()
    scripted.step()
    assert scripted.forward.pending() and not scripted.forward.is_ready, "the forward may run before bootstrap"
    device.schedule.run_all()
    assert scripted.forward.blocked_on is None
    scripted.run(advance=lambda device: device.run_all())
    assert_drafted_as_expected(outcome)


# ---- I9: rows, and the slots of drafts ----------------------------------------------------------------------------


def check_nothing_is_reused_while_a_speculative_forward_holds_it() -> None:
    """The only row is aborted with verify and draft-extend still to run, and another request waits for it."""
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


def check_rejected_drafts_leave_their_slots_to_the_next_step() -> None:
    """A row never has more slots than its committed KV and one step's drafts need."""
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


def check_slots_are_conserved_under_speculation() -> None:
    """Requests end by length, by abort while queued, landing and decoding; `step` and `run` count each time."""
    for seed in range(3):
        random_run(random.Random(seed), CHAIN, overlap=True)


# ---- I10: the pool is written by its engine, for rows it holds ----------------------------------------------------


def check_a_forward_writes_to_slots_of_its_rows() -> None:
    """Of the target and of the head, drafts included."""
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
    held = {lease.row: lease.slots for lease in (*pool._held.values(), *pool._quarantined.values())}
    written = batch.out_cache_loc.view(batch.req_pool_indices.shape[0], -1).tolist()
    for row, slots in zip(batch.req_pool_indices.tolist(), written, strict=True):
        assert set(slots) <= set(held[row]), f"row {row} holds {held[row]}, a forward writes to {slots}"


def check_a_late_copy_does_not_meet_another_requests_drafts() -> None:
    """A request is aborted with its KV still being copied; another one needs the slots."""
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


def check_a_released_row_takes_none_of_the_heads_segments() -> None:
    """Frames that cross with the abort are dropped, and their bytes given back."""
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


def check_a_row_runs_only_when_the_heads_kv_is_there() -> None:
    """The target's KV has landed; of the head's the frames have not come, then they have and are not copied."""
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


def check_a_speculating_rows_table_only_grows() -> None:
    scripted = ScriptedEngine(max_rows=2, spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2, 3], 20)
    scripted.start("a")
    table = scripted.engine.pool.rows.req_to_token[1]
    before: list[int] = []
    while not outcome.has_ended:
        lease = next(iter(scripted.engine.pool._held.values()))
        assert lease.slots[: len(before)] == before, "a live row's slots were taken away"
        assert table[: len(lease.slots)].tolist() == lease.slots, "a live row's table was rewritten"
        before = list(lease.slots)
        scripted.step()
    assert len(before) > 12
    scripted.run()


CHECKS = [
    check_speculated_tokens_are_the_oracles,
    check_the_next_step_is_launched_before_draft_extend,
    check_seeds_reach_the_next_forward_by_stream_order,
    check_seeds_are_read_at_forward_entry,
    check_a_verified_step_that_was_not_stashed_is_noticed,
    check_bootstrap_beside_draft_extend_leaves_the_fence,
    check_rows_bootstrapped_beside_a_forward_keep_what_they_came_with,
    check_a_row_bootstrapped_and_not_launched_keeps_its_length,
    check_a_speculative_forward_waits_for_the_schedule_side,
    check_nothing_is_reused_while_a_speculative_forward_holds_it,
    check_rejected_drafts_leave_their_slots_to_the_next_step,
    check_slots_are_conserved_under_speculation,
    check_a_forward_writes_to_slots_of_its_rows,
    check_a_late_copy_does_not_meet_another_requests_drafts,
    check_a_released_row_takes_none_of_the_heads_segments,
    check_a_row_runs_only_when_the_heads_kv_is_there,
    check_tensors_live_until_a_speculative_step_ends,
    check_a_speculating_rows_table_only_grows,
]


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_holds(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "mutant", "symptom"),
    [
        (check_speculated_tokens_are_the_oracles, relay.lengths_read_without_waiting, "wrongly|not those|not positive"),
        (check_speculated_tokens_are_the_oracles, rows.row_merged_before_its_copies, "wrongly|not those"),
        (check_speculated_tokens_are_the_oracles, rows.live_table_rewritten, "wrongly|not those"),
        (
            check_the_next_step_is_launched_before_draft_extend,
            relay.fence_covers_draft_extend,
            "waited for draft-extend",
        ),
        (
            check_seeds_reach_the_next_forward_by_stream_order,
            speculation.seeds_stashed_on_another_stream,
            "not those of",
        ),
        (check_seeds_are_read_at_forward_entry, relay.inputs_taken_at_launch, "when the step was launched"),
        (check_a_verified_step_that_was_not_stashed_is_noticed, relay.consumed_rows_not_poisoned, "not poisoned"),
        (check_a_verified_step_that_was_not_stashed_is_noticed, relay.row_flag_dropped, "poisoned token was decoded"),
        (
            check_bootstrap_beside_draft_extend_leaves_the_fence,
            bootstrap.bootstrap_rearms_publish_ready,
            "touched publish_ready",
        ),
        (
            check_rows_bootstrapped_beside_a_forward_keep_what_they_came_with,
            bootstrap.bootstrap_writes_no_tokens,
            "decoded wrongly",
        ),
        (
            check_rows_bootstrapped_beside_a_forward_keep_what_they_came_with,
            bootstrap.bootstrap_writes_no_seeds,
            "not those of the sequence",
        ),
        (
            check_a_row_bootstrapped_and_not_launched_keeps_its_length,
            bootstrap.bootstrap_writes_no_lengths,
            "bootstrapped length was lost",
        ),
        (
            check_a_speculative_forward_waits_for_the_schedule_side,
            bootstrap.forward_ignores_the_schedule_side,
            "before bootstrap",
        ),
        (
            check_a_speculative_forward_waits_for_the_schedule_side,
            bootstrap.landing_ignores_the_schedule_side,
            "KV may land",
        ),
        (check_nothing_is_reused_while_a_speculative_forward_holds_it, rows.quarantine_skipped, "given out while"),
        (check_nothing_is_reused_while_a_speculative_forward_holds_it, rows.quarantine_ends_too_early, "given out"),
        (check_nothing_is_reused_while_a_speculative_forward_holds_it, rows.launch_does_not_hold_its_rows, "given out"),
        (
            check_rejected_drafts_leave_their_slots_to_the_next_step,
            speculation.slots_taken_anew_each_step,
            "slots held",
        ),
        (check_slots_are_conserved_under_speculation, rows.grown_slot_leaks, "slots are lost"),
        (check_slots_are_conserved_under_speculation, rows.aborted_row_leaks, "not over"),
        (check_a_forward_writes_to_slots_of_its_rows, speculation.no_slots_for_drafts, "a forward writes to"),
        (check_a_forward_writes_to_slots_of_its_rows, speculation.rejected_slots_given_back, "a forward writes to"),
        (
            check_a_late_copy_does_not_meet_another_requests_drafts,
            rows.landing_does_not_hold_its_row,
            "landed in|wrongly",
        ),
        (check_a_late_copy_does_not_meet_another_requests_drafts, rows.quarantine_skipped, "landed in"),
        (check_a_released_row_takes_none_of_the_heads_segments, rows.landing_into_a_released_row, "was given up"),
        (check_a_released_row_takes_none_of_the_heads_segments, rows.frames_matched_by_row_number_alone, "given up"),
        (check_a_row_runs_only_when_the_heads_kv_is_there, rows.row_merged_before_its_copies, "before the head's KV"),
        (check_a_row_runs_only_when_the_heads_kv_is_there, speculation.drafts_kv_not_awaited, "before the head's KV"),
        (check_tensors_live_until_a_speculative_step_ends, rows.tensors_dropped_before_the_end, "was dropped"),
        (check_tensors_live_until_a_speculative_step_ends, rows.tensors_kept_for_ever, "still holds"),
        (check_a_speculating_rows_table_only_grows, rows.live_table_rewritten, "was rewritten|taken away"),
    ],
    ids=name_of,
)
def test_is_broken_by(check: Check, mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=symptom) as failure:
        check()
    print(f"{mutant.__name__}: {str(failure.value).splitlines()[0]}")
