"""Invariants I2, I3, I4, I6, I7 and I8: the relay, the device tensors through which a decode step passes tokens and
lengths to the next step.
"""

from __future__ import annotations

import pytest
import torch

from common.device.stream import Cell, DeviceTimeout, Scope
from common.errors import EngineFault
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.checks import breaking, broken_by, holding, in_cases
from tests.engine.harness import LaggingScheduleDevice, ScriptedEngine
from tests.engine.mutants import bootstrap, relay
from tests.engine.relay_rig import HIDDEN, make_batch, make_pool, make_relay
from tests.engine.speculating import CHAIN
from tests.engine.tags import VOCAB_SIZE
from tests.support.host_scalars import RefuseHostScalars
from tests.support.scripted_device import refuse

# ---- I2: one relay row per pool row -----------------------------------------------------------------------------


@broken_by(relay.relay_is_a_ring, "another one's relay row")
def check_rows_never_share_a_relay_row() -> None:
    """As many requests run as there are rows, for many more steps than there are rows."""
    scripted = ScriptedEngine(max_rows=4)
    for number in range(7):
        scripted.submit(str(number), [number + 1], 18)
    scripted.run()
    for outcome in scripted.outcomes.values():
        assert outcome.token_ids == outcome.expected, "a request read another one's relay row"


@broken_by(relay.relay_without_padding_row, "addressed by pool row")
def check_buffers_have_a_row_for_each_pool_row() -> None:
    future_map = make_relay(max_rows=5).future_map
    for buffer in (future_map.output_tokens, future_map.new_seq_lens_buf, *future_map.seeds.values()):
        assert buffer.shape[0] == 6, "a buffer is not addressed by pool row"


@broken_by(relay.row_zero_is_given_out, "row 0 was given out")
@broken_by(relay.padding_falls_on_the_last_row, "padding reached")
def check_row_zero_is_padding() -> None:
    pool = make_pool(max_rows=3)
    leases = [pool.reserve(1) for _ in range(3)]
    assert sorted(lease.row for lease in leases if lease) == [1, 2, 3], "row 0 was given out"
    relay = make_relay()
    relay.launch([3, 0, 0], [5, 1, 1], [30, 1, 2])
    relay.forward.run_all()
    assert relay.future_map.output_tokens[1:].tolist() == [0, 0, 30, 0], "padding reached a request's row"
    assert relay.future_map.new_seq_lens_buf[1:].tolist() == [0, 0, 5, 0], "padding reached a request's row"


# ---- I3 without drafts: the fence -------------------------------------------------------------------------------


@broken_by(relay.lengths_read_without_waiting, "before they were")
@broken_by(relay.fence_covers_draft_extend, "waited for draft-extend")
@broken_by(relay.only_the_device_twin_is_resolved, "only one twin")
def check_lengths_are_read_behind_publish_ready() -> None:
    relay = make_relay()
    batch = make_batch([2, 1], [4, 6])
    relay.launch([2, 1], [7, 8], [20, 10])
    relay.resolve(batch)
    assert batch.seq_lens.tolist() == [7, 8], "lengths were read before they were published"
    assert batch.seq_lens_cpu.tolist() == [7, 8], "only one twin was resolved"
    assert "draft_extend" in relay.forward.pending(), "the schedule side waited for draft-extend"


@broken_by(relay.lengths_read_without_waiting, "not reached")
def check_the_wait_for_publish_ready_is_bounded() -> None:
    relay = make_relay()
    relay.device.on_synchronize = refuse
    relay.launch([1], [7], [10])
    try:
        relay.resolve(make_batch([1], [4]))
    except DeviceTimeout:
        return
    raise AssertionError("lengths were taken although the fence was not reached")


# ---- I6: inputs come from the relay at forward entry ------------------------------------------------------------


@broken_by(relay.inputs_taken_at_launch, "when the step was launched")
def check_inputs_are_read_at_forward_entry() -> None:
    scripted = ScriptedEngine()
    outcome = scripted.submit("a", [1, 2], 4)
    scripted.start("a")
    changed = (outcome.expected[0] + 1) % VOCAB_SIZE
    scripted.engine.future_map.output_tokens[1] = changed  # after the launch, before the forward
    scripted.forward.run_next()
    scripted.forward.run_all()
    assert scripted.model.forwards[0].input_ids == [changed], "the input was taken when the step was launched"
    scripted.run()


@broken_by(relay.consumed_rows_not_poisoned, "stale token")
def check_a_row_read_twice_is_noticed() -> None:
    relay = make_relay(poisons_consumed_rows=True)
    relay.bootstrap([1, 2], [3, 3], [11, 12])
    row = torch.tensor([2])
    with RefuseHostScalars():
        first = relay.future_map.resolve_forward_inputs(row, with_seeds=True)
    assert (first.tokens.tolist(), first.is_invalid.tolist()) == ([12], [False])
    assert relay.future_map.resolve_forward_inputs(row, with_seeds=True).is_invalid.tolist() == [True], (
        "a stale token passed as new"
    )
    assert relay.future_map.resolve_forward_inputs(torch.tensor([1]), with_seeds=True).is_invalid.tolist() == [False]


@broken_by(relay.consumed_rows_not_poisoned, "not poisoned")
@broken_by(relay.row_flag_dropped, "poisoned token was decoded")
@in_cases(plain=None, chain=CHAIN)
def check_a_step_that_was_not_stashed_is_noticed(spec_info: SpecInfo | None) -> None:
    """In debug builds, a step whose last token never reached the relay fails its requests at the next step."""
    scripted = ScriptedEngine(debug_checks=True, spec_info=spec_info)
    outcome = scripted.submit("a", [1, 2], 16)
    scripted.start("a")
    for piece in ("reset", "resolve"):  # the second consumes the row, and poisons it
        assert scripted.forward.run_next() == piece
    poisoned = scripted.engine.future_map.output_tokens.clone()
    assert not 0 <= poisoned[1] < VOCAB_SIZE, "a consumed row was not poisoned"
    scripted.forward.run_all()
    scripted.engine.future_map.output_tokens.copy_(poisoned)  # as if nothing had been stashed
    scripted.run()
    assert isinstance(outcome.error, EngineFault), "a poisoned token was decoded"
    assert outcome.token_ids == outcome.expected[: len(outcome.token_ids)] != []


@broken_by(relay.row_flag_dropped, "unusable token")
def check_an_unusable_token_fails_its_row_alone() -> None:
    """In builds without debug checks, a flag among the step's results reports the unusable token."""
    scripted = ScriptedEngine(debug_checks=False)
    bad, good = scripted.submit("bad", [1, 2], 6), scripted.submit("good", [3], 6)
    scripted.start("bad", "good")
    scripted.engine.future_map.output_tokens[1] = VOCAB_SIZE
    scripted.run()
    assert isinstance(bad.error, EngineFault), "an unusable token was decoded"
    assert good.token_ids == good.expected


# ---- I7: bootstrap while a forward is in flight -----------------------------------------------------------------


@broken_by(bootstrap.bootstrap_rearms_publish_ready, "touched publish_ready")
def check_bootstrap_does_not_move_the_fence() -> None:
    relay = make_relay()
    relay.launch([1, 2], [7, 8], [10, 20])
    armed = relay.future_map.publish_ready
    relay.bootstrap([3], [5], [30])
    assert relay.future_map.publish_ready is armed, "bootstrap touched publish_ready"
    running = make_batch([1, 2, 3], [5, 5, 5])
    relay.resolve(running)
    assert "draft_extend" in relay.forward.pending(), "the schedule side waited for draft-extend"


@broken_by(bootstrap.bootstrap_writes_no_lengths, "length was lost")
@broken_by(bootstrap.bootstrap_on_another_stream, "length was lost")
@broken_by(bootstrap.bootstrap_writes_no_tokens, "token was lost")
@broken_by(bootstrap.bootstrap_writes_no_seeds, "seed was lost")
def check_rows_bootstrapped_since_keep_their_lengths() -> None:
    relay = make_relay()
    relay.launch([1, 2], [7, 8], [10, 20])
    relay.bootstrap([3], [5], [30])
    running = make_batch([1, 2, 3], [4, 4, 5])
    relay.resolve(running)
    assert running.seq_lens.tolist() == running.seq_lens_cpu.tolist() == [7, 8, 5], "a bootstrapped length was lost"
    relay.forward.run_all()
    inputs = relay.future_map.resolve_forward_inputs(torch.tensor([3, 1, 2]), with_seeds=True)
    assert inputs.tokens.tolist() == [30, 10, 20], "a bootstrapped token was lost"
    assert inputs.seeds[HIDDEN.name].tolist() == [[30, 30], [10, 10], [20, 20]], "a seed was lost"


@broken_by(bootstrap.forward_ignores_the_schedule_side, "before bootstrap")
@broken_by(bootstrap.landing_ignores_the_schedule_side, "KV may land")
@in_cases(plain=None, chain=CHAIN)
def check_a_forward_waits_for_the_schedule_side(spec_info: SpecInfo | None) -> None:
    """Device work enqueued by bootstrap and by table writes runs before the forward that reads its results."""
    device = LaggingScheduleDevice()
    scripted = ScriptedEngine(device=device, spec_info=spec_info)
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
    assert outcome.token_ids == outcome.expected


# ---- I8: empty batches ------------------------------------------------------------------------------------------


@broken_by(relay.empty_batch_publishes, "armed the fence")
@broken_by(relay.empty_batch_stashes, "enqueued something")
@broken_by(relay.empty_batch_resolves, "waited for a fence")
def check_an_empty_batch_does_nothing() -> None:
    relay = make_relay(poisons_consumed_rows=True)
    relay.launch([], [], [])
    assert relay.future_map.publish_ready is None, "an empty batch armed the fence"
    assert relay.forward.pending() == [], "an empty batch enqueued something"
    relay.launch([1], [7], [10])
    armed = relay.future_map.publish_ready
    relay.launch([], [], [])
    assert relay.future_map.publish_ready is armed, "an empty batch armed the fence"
    relay.resolve(make_batch([], []))
    assert relay.forward.pending()[0] == "verify", "an empty batch waited for a fence"
    relay.bootstrap([], [], [])
    before = relay.future_map.output_tokens.clone()
    assert relay.future_map.resolve_forward_inputs(
        torch.tensor([], dtype=torch.int64), with_seeds=True
    ).tokens.shape == (0,)
    assert torch.equal(relay.future_map.output_tokens, before)


def check_an_idle_step_enqueues_nothing() -> None:
    scripted = ScriptedEngine()
    scripted.step()
    assert scripted.forward.pending() == [] and scripted.landing.pending() == []
    assert scripted.engine.load().num_steps == 0


def test_a_failed_verify_publishes_nothing_and_leaves_its_failure_to_the_steps_end() -> None:
    relay = make_relay()
    scope = Scope("step")

    def verify() -> None:
        raise ValueError("no kernel")

    relay.forward.enqueue(verify, scope)
    relay.future_map.publish(torch.tensor([1]), Cell(), scope)
    end = relay.forward.record(scope)
    relay.resolve(make_batch([1], [4]))
    assert relay.future_map.new_seq_lens_buf.tolist() == [0, 0, 0, 0, 0]
    with pytest.raises(EngineFault, match="no kernel"):
        end.synchronize(1.0)


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
