"""The scenarios that are explored, and which of them shows which mutant."""

from __future__ import annotations

from tests.engine.mutants import batches, bootstrap, lengths, relay, rows, speculation, tokens
from tests.engine.mutants.kinds import Mutant
from tests.engine.speculating import CHAIN, TREE
from tests.interleavings import scenarios
from tests.interleavings.scenarios import Scenario

NUM_ORDERS = 60
"""Random ones in which a mutant must show, and in which a large scenario is looked at by the test suite."""

_beside = Scenario(scenarios.two_requests, 2, 60)
_beside_lagging = Scenario(scenarios.two_requests, 2, 60, lags=True)
_beside_chain = Scenario(scenarios.two_requests, 2, 60, CHAIN)
_aborted = Scenario(scenarios.one_aborted, 1, 16)
_aborted_by_frames = Scenario(scenarios.one_aborted, 1, 16, frames_come_apart=True)
_growing = Scenario(scenarios.growing_beside_an_abort, 2, 60)

EXHAUSTIVE: tuple[Scenario, ...] = (
    Scenario(scenarios.one_request, 1, 16),
    Scenario(scenarios.one_request, 1, 16, lags=True),
    Scenario(scenarios.one_request, 1, 24, CHAIN),
    Scenario(scenarios.one_request, 1, 24, CHAIN, lags=True),
    Scenario(scenarios.two_requests, 1, 16),
    Scenario(scenarios.two_requests, 1, 16, lags=True),
    _beside,
    _aborted,
)
"""Each order of theirs is run."""

LARGE: tuple[Scenario, ...] = (
    Scenario(scenarios.two_requests, 2, 80, TREE),
    Scenario(scenarios.two_requests, 2, 60, overlap=False),
    Scenario(scenarios.one_aborted, 2, 60, CHAIN),
    Scenario(scenarios.one_aborted, 2, 60, CHAIN, lags=True),
    Scenario(scenarios.short_of_slots, 2, 10),
    Scenario(scenarios.short_of_slots, 2, 14, CHAIN),
    _beside_lagging,
    _beside_chain,
    _aborted_by_frames,
    _growing,
)

CAUGHT_BY: tuple[tuple[Mutant, Scenario], ...] = (
    (relay.lengths_read_without_waiting, _beside_chain),
    (relay.inputs_taken_at_launch, _beside),
    (relay.relay_is_a_ring, _beside),
    (relay.row_zero_is_given_out, _beside),
    (bootstrap.forward_ignores_the_schedule_side, _beside_lagging),
    (bootstrap.bootstrap_writes_no_tokens, _beside),
    (bootstrap.bootstrap_writes_no_lengths, _beside_chain),
    (bootstrap.bootstrap_writes_no_seeds, _beside_chain),
    (rows.quarantine_skipped, _aborted),
    (rows.quarantine_ends_too_early, _aborted),
    (rows.launch_does_not_hold_its_rows, _aborted),
    (rows.landing_does_not_hold_its_row, _growing),
    (rows.row_merged_before_its_copies, _beside),
    (rows.landing_into_a_released_row, _aborted_by_frames),
    (rows.live_table_rewritten, _beside),
    (rows.grown_slot_leaks, _beside),
    (rows.aborted_row_leaks, _aborted_by_frames),
    (lengths.cpu_twin_not_updated, _beside),
    (lengths.lengths_changed_in_place_under_the_forward, _beside),
    (tokens.results_in_another_order, _beside),
    (batches.forgetful("filter_batch", "seq_lens"), _beside),
    (batches.forgetful("merge_batch", "req_pool_indices"), _beside),
    (speculation.seeds_stashed_on_another_stream, _beside_chain),
    (speculation.no_slots_for_drafts, _beside_chain),
    (speculation.rejected_slots_given_back, _beside_chain),
    (speculation.drafts_kv_not_awaited, Scenario(scenarios.one_request, 1, 24, CHAIN, frames_come_apart=True)),
)
