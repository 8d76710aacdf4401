"""The scenarios that are explored, and the scenario that shows each mutant. A mutant is the engine with one rule
removed.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.engine.mutants import (
    bootstrap,
    grammars,
    local_prefill,
    memory,
    prefill,
    prefixes,
    relay,
    rows,
    windows,
)
from tests.engine.mutants.kinds import Mutant
from tests.engine.speculating import CHAIN, TREE
from tests.interleavings import prefill_scenarios, scenarios
from tests.interleavings.prefill_scenarios import PrefillScenario
from tests.interleavings.random_lives import PREFIX, RandomLife
from tests.interleavings.scenarios import (
    BOOTSTRAPPED_BEFORE_DRAFT_EXTEND,
    COMPUTED_HERE,
    EVICTED,
    LAUNCHED_BEFORE_DRAFT_EXTEND,
    LAUNCHED_BESIDE_A_CHUNK,
    NOT_READY,
    RESOLVED_BEFORE_DRAFT_EXTEND,
    RETRACTED,
    RETRIED,
    REUSED,
    RelayAlone,
    Scenario,
)

AnyScenario = Scenario | RelayAlone | PrefillScenario | RandomLife

NUM_ORDERS = 40
"""Each mutant must fail within this many random orders of its scenario. The test suite also runs this many orders of
each large scenario.
"""

_one = Scenario(scenarios.one_request, 1, 16)
_one_lagging = Scenario(scenarios.one_request, 1, 16, lags=True)
_one_chain = Scenario(scenarios.one_request, 1, 24, CHAIN)
_beside = Scenario(scenarios.two_requests, 2, 60)
_beside_lagging = Scenario(scenarios.two_requests, 2, 60, lags=True)
_beside_chain = Scenario(scenarios.two_requests, 2, 60, CHAIN)
_aborted = Scenario(scenarios.one_aborted, 1, 16)
_aborted_by_frames = Scenario(scenarios.one_aborted, 1, 16, frames_come_apart=True)
_relay = RelayAlone()
_lost = Scenario(scenarios.handoff_lost, 1, 16)
_short = Scenario(scenarios.short_of_slots, 2, 36)
_short_chain = Scenario(scenarios.short_of_slots, 2, 36, CHAIN)
_soon_short = Scenario(scenarios.soon_short_of_slots, 2, 5, headroom_tokens=1)
_aborted_when_short = Scenario(scenarios.aborted_when_short_of_slots, 2, 7, headroom_tokens=1)
_growing = Scenario(scenarios.growing_beside_an_abort, 2, 60)
_at_once = Scenario(scenarios.one_request, 1, 24, at_once=True)
_at_once_chain = Scenario(scenarios.two_requests, 2, 60, CHAIN, at_once=True)
_growing_at_once_by_frames = Scenario(scenarios.growing_beside_an_abort, 2, 60, at_once=True, frames_come_apart=True)
_aborted_at_once = Scenario(scenarios.one_aborted, 1, 16, at_once=True)

_prompt_in_a_budget = PrefillScenario(prefill_scenarios.one_prompt, 1, 8, 2)
_prompts_at_once = PrefillScenario(prefill_scenarios.two_prompts, 2, 16, at_once=True)
_cancelled = PrefillScenario(prefill_scenarios.one_cancelled, 1, 8)
_cancelled_in_a_budget = PrefillScenario(prefill_scenarios.one_cancelled, 1, 8, 2)

_reused_beside_an_abort = Scenario(scenarios.reused_beside_an_abort, 2, 8, headroom_tokens=1)
_reused_beside_an_abort_chain = Scenario(scenarios.reused_beside_an_abort, 2, 40, CHAIN)
_reused_lost = Scenario(scenarios.reused_by_a_handoff_lost, 2, 12, headroom_tokens=1)
_reused_short = Scenario(scenarios.reused_when_short, 2, 8, headroom_tokens=1)
_reused_short_tree = Scenario(scenarios.reused_when_short, 2, 14, TREE, headroom_tokens=1)
_reused_prompts = PrefillScenario(prefill_scenarios.reused, 2, 8)
_reused_prompts_cancelled = PrefillScenario(prefill_scenarios.reused_beside_a_cancellation, 2, 9, 2)
_kept_prompts_cancelled = PrefillScenario(prefill_scenarios.kept_beside_a_cancellation, 2, 6)

_salts = Scenario(scenarios.same_tokens_in_two_namespaces, 2, 10, headroom_tokens=1)
_chunk_aborted = Scenario(scenarios.aborted_in_a_chunk, 2, 12, headroom_tokens=1, local_prefill_tokens=4)
_chunk_aborted_tree = Scenario(scenarios.aborted_in_a_chunk, 2, 24, TREE, headroom_tokens=1, local_prefill_tokens=4)
_chunks_aborted = Scenario(
    scenarios.aborted_between_chunks, 2, 30, headroom_tokens=1, prefill_fallback=True, replicas=NOT_READY
)
_chunk_retracted = Scenario(
    scenarios.retracted_in_a_chunk, 2, 18, headroom_tokens=1, prefill_fallback=True, replicas=NOT_READY
)
_continued_lost = Scenario(scenarios.continued_after_a_handoff_lost, 2, 14, headroom_tokens=1, local_prefill_tokens=2)
_continued_lost_chain = Scenario(scenarios.continued_after_a_handoff_lost, 2, 30, CHAIN, local_prefill_tokens=3)
_replica_lost = Scenario(scenarios.continued_beside_a_replica_lost, 2, 24, headroom_tokens=1, prefill_fallback=True)

_constrained = Scenario(scenarios.constrained_beside_a_free_one, 2, 60)
_constrained_chain = Scenario(scenarios.constrained_beside_a_free_one, 2, 60, CHAIN)
_constrained_stopped = Scenario(scenarios.constrained_and_stopped, 2, 60)
_constrained_short = Scenario(scenarios.constrained_when_short, 2, 5, headroom_tokens=1)
_constrained_chunk = Scenario(scenarios.constrained_in_a_chunk, 2, 24, headroom_tokens=1, local_prefill_tokens=4)

_windows = Scenario(scenarios.windows_beside_an_abort, 3, 60, headroom_tokens=1, max_window_tokens=12)
_windows_tree = Scenario(scenarios.windows_beside_an_abort, 3, 80, TREE, headroom_tokens=1, max_window_tokens=46)
_windows_at_once = Scenario(
    scenarios.windows_beside_an_abort, 3, 60, headroom_tokens=1, max_window_tokens=12, at_once=True
)
_windows_back = Scenario(scenarios.windows_lost_and_got_back, 2, 24, headroom_tokens=1, max_window_tokens=14)
_windows_back_local = Scenario(
    scenarios.windows_lost_and_got_back, 2, 24, headroom_tokens=1, max_window_tokens=14, local_prefill_tokens=4
)
_windows_back_chain = Scenario(
    scenarios.windows_lost_and_got_back, 2, 60, CHAIN, headroom_tokens=1, max_window_tokens=20, local_prefill_tokens=4
)
_windows_cancelled = PrefillScenario(prefill_scenarios.windows_beside_a_cancellation, 2, 16, 2, max_window_tokens=10)
_windows_cancelled_at_once = PrefillScenario(
    prefill_scenarios.windows_beside_a_cancellation, 2, 16, max_window_tokens=10, at_once=True
)

EXHAUSTIVE: dict[AnyScenario, int] = {
    _relay: 2,
    _one: 7,
    _one_lagging: 21,
    _one_chain: 62,
    Scenario(scenarios.one_request, 1, 24, CHAIN, lags=True): 186,
    Scenario(scenarios.two_requests, 1, 16): 49,
    Scenario(scenarios.two_requests, 1, 16, lags=True): 441,
    _at_once: 4,
    _beside: 929,
    _aborted: 1463,
    Scenario(scenarios.one_stopped, 1, 16): 1463,
    _lost: 196,
    _soon_short: 765,
    _chunk_aborted: 53,
    _chunks_aborted: 81,
    _chunk_retracted: 3,
    _continued_lost: 222,
    Scenario(scenarios.one_constrained, 1, 16): 7,
    _constrained_chunk: 13,
    PrefillScenario(prefill_scenarios.one_prompt, 1, 8): 154,
    _prompt_in_a_budget: 70,
    PrefillScenario(prefill_scenarios.two_prompts, 1, 8, 2): 1584,
}
"""The small scenarios, each with the number of its distinct orders. All these orders are run.

A smaller number would mean that some shared memory is no longer noticed. The number also changes when the engine's
thread makes other calls to the device.
"""

LARGE: tuple[AnyScenario, ...] = (
    Scenario(scenarios.two_requests, 2, 80, TREE),
    Scenario(scenarios.two_requests, 2, 60, overlap=False),
    Scenario(scenarios.one_aborted, 2, 60, CHAIN),
    Scenario(scenarios.one_aborted, 2, 60, CHAIN, lags=True),
    _short,
    _short_chain,
    Scenario(scenarios.one_aborted, 1, 24, CHAIN),
    Scenario(scenarios.one_aborted, 2, 80, TREE),
    Scenario(scenarios.one_stopped, 1, 16, lags=True),
    Scenario(scenarios.one_stopped, 2, 60, CHAIN),
    Scenario(scenarios.handoff_lost, 2, 60),
    _aborted_when_short,
    _beside_lagging,
    _beside_chain,
    _aborted_by_frames,
    _growing,
    Scenario(scenarios.two_requests, 2, 60, at_once=True),
    Scenario(scenarios.soon_short_of_slots, 2, 5, headroom_tokens=1, at_once=True),
    _at_once_chain,
    _aborted_at_once,
    _growing_at_once_by_frames,
    _prompts_at_once,
    PrefillScenario(prefill_scenarios.one_cancelled, 1, 8, 2, at_once=True),
    PrefillScenario(prefill_scenarios.two_prompts, 2, 16),
    PrefillScenario(prefill_scenarios.one_cancelled, 1, 8, 2, lags=True),
    _cancelled,
    _cancelled_in_a_budget,
    _reused_beside_an_abort,
    _reused_beside_an_abort_chain,
    Scenario(scenarios.reused_beside_an_abort, 2, 8, headroom_tokens=1, lags=True),
    _reused_lost,
    _reused_short,
    _reused_short_tree,
    _reused_prompts,
    _reused_prompts_cancelled,
    _kept_prompts_cancelled,
    _salts,
    _chunk_aborted_tree,
    _continued_lost_chain,
    _replica_lost,
    _constrained,
    _constrained_chain,
    Scenario(scenarios.constrained_and_aborted, 1, 24, CHAIN, lags=True),
    _constrained_stopped,
    _constrained_short,
    _windows,
    _windows_tree,
    _windows_at_once,
    _windows_back,
    _windows_back_local,
    _windows_back_chain,
    _windows_cancelled,
    _windows_cancelled_at_once,
)

CAUGHT_BY: tuple[tuple[Mutant, AnyScenario, str], ...] = (
    # One for each symptom that the explorer sees and for each kind of device, though a check of tests/engine shows it.
    (rows.quarantine_skipped, _aborted, "a race for .*token table"),
    (rows.grown_slot_leaks, _beside, "not conserved"),
    (prefixes.sources_are_waited_for_for_ever, _reused_beside_an_abort, "not over after"),
    (prefixes.namespaces_are_one, _salts, "holds KV of another namespace"),
    (prefixes.held_tokens_are_asked_for, _replica_lost, "the handoff broke the protocol"),
    (relay.lengths_read_without_waiting, _relay, "a race for .*relay 1"),
    (bootstrap.forward_ignores_the_schedule_side, _beside_lagging, "a race for .*schedule_side"),
    (bootstrap.forward_ignores_the_schedule_side, _at_once, "a race for .*schedule side.*forward"),
    (rows.landing_into_a_released_row, _aborted_by_frames, "does not follow|holds no row"),
    # What no check of tests/engine shows.
    (prefill.kv_leaves_before_it_is_computed, _prompt_in_a_budget, "a race for .*kv of target|wrong KV was sent"),
    (prefill.sending_does_not_hold_its_row, _cancelled, "a race for .*kv of target"),
    (prefill.chunk_does_not_hold_its_row, _cancelled_in_a_budget, "a race for .*token table"),
    (prefill.first_tokens_taken_early, _prompt_in_a_budget, "a fence is missing"),
    (prefill.cancelled_row_is_sent, _cancelled, "a segment of row 0, which was cancelled"),
    (memory.tokens_dropped_at_launch, _at_once, "a race for .*schedule.*resolve"),
    (memory.rows_dropped_at_launch, _at_once_chain, "a race for .*schedule.*forward"),
    (memory.chunks_dropped_at_launch, _prompts_at_once, "a race for .*schedule.*forward"),
    (rows.waiting_segments_are_not_counted, _growing_at_once_by_frames, "a race for .*kv of target.*landing"),
    (rows.waiting_segments_land_in_rows_given_up, _growing_at_once_by_frames, "a race for .*kv of target.*landing"),
    (local_prefill.given_up_prompts_are_computed_on, _chunk_retracted, "the prefix was let go"),
    (grammars.masks_of_the_last_step, _constrained, "the grammar forbids|decoded wrongly"),
    (grammars.masks_of_another_row, _constrained_chain, "the grammar forbids|decoded wrongly"),
    (grammars.forced_tokens_one_too_far, _constrained_chain, "drafts were not those"),
    (grammars.nobody_looks_ahead, _constrained_chain, "drafts were not those"),
    (grammars.tokens_accepted_ahead_are_accepted_again, _constrained_chain, "the grammar forbids"),
    (grammars.first_token_not_accepted, _constrained_chunk, "the grammar forbids|decoded wrongly"),
    (grammars.rows_not_held_until_their_draw, _constrained_stopped, "a race for .*token table|not conserved|wrongly"),
    (windows.tokens_leave_a_window_too_early, _windows, "decoded wrongly"),
    (windows.tokens_never_leave_a_window, _windows, "a row takes more than it was promised"),
    (windows.windows_end_with_their_requests, _windows, "a race for .*kv of target_3"),
    (windows.stale_translation, _windows, "decoded wrongly"),
    (windows.prefix_is_used_without_its_window, _windows_back_local, "decoded wrongly|counted wrongly"),
    (windows.kv_is_found_before_it_is_there, _windows_back, "decoded wrongly"),
    (windows.drafts_move_without_their_windows, _windows_tree, "decoded wrongly"),
    (windows.promises_are_not_counted, _windows, "more slots are promised than there are"),
)
"""(mutant, scenario, symptom): with the mutant, some order of the scenario fails with a message that matches the
symptom.
"""

SOME_ORDER_HAS: dict[AnyScenario, frozenset[str]] = {
    _beside_chain: frozenset({LAUNCHED_BEFORE_DRAFT_EXTEND, BOOTSTRAPPED_BEFORE_DRAFT_EXTEND}),
    _relay: frozenset({RESOLVED_BEFORE_DRAFT_EXTEND}),
    _lost: frozenset({RETRIED}),
    _short: frozenset({RETRACTED}),
    _short_chain: frozenset({RETRACTED}),
    _soon_short: frozenset({RETRACTED}),
    _aborted_when_short: frozenset({RETRACTED}),
    _reused_beside_an_abort: frozenset({REUSED, EVICTED}),
    _reused_beside_an_abort_chain: frozenset({REUSED}),
    _reused_lost: frozenset({REUSED, EVICTED, RETRIED}),
    _reused_short: frozenset({REUSED, EVICTED, RETRACTED}),
    _reused_short_tree: frozenset({REUSED, EVICTED}),
    _reused_prompts: frozenset({REUSED, EVICTED}),
    _reused_prompts_cancelled: frozenset({REUSED}),
    _kept_prompts_cancelled: frozenset({EVICTED}),
    _salts: frozenset({REUSED, EVICTED}),
    _chunk_aborted: frozenset({REUSED, COMPUTED_HERE, LAUNCHED_BESIDE_A_CHUNK}),
    _chunk_aborted_tree: frozenset({REUSED, COMPUTED_HERE, LAUNCHED_BESIDE_A_CHUNK}),
    _chunks_aborted: frozenset({REUSED, COMPUTED_HERE, LAUNCHED_BESIDE_A_CHUNK}),
    _chunk_retracted: frozenset({RETRACTED, REUSED, COMPUTED_HERE, LAUNCHED_BESIDE_A_CHUNK}),
    _continued_lost: frozenset({RETRIED, REUSED, COMPUTED_HERE, LAUNCHED_BESIDE_A_CHUNK}),
    _continued_lost_chain: frozenset({RETRIED, REUSED, COMPUTED_HERE}),
    _replica_lost: frozenset({RETRIED, REUSED, COMPUTED_HERE}),
    _constrained_short: frozenset({RETRACTED}),
    _constrained_chunk: frozenset({REUSED, COMPUTED_HERE, LAUNCHED_BESIDE_A_CHUNK}),
    _windows: frozenset({RETRACTED}),
    _windows_back: frozenset({REUSED}),
    _windows_back_local: frozenset({REUSED, COMPUTED_HERE}),
    _windows_back_chain: frozenset({REUSED, COMPUTED_HERE, LAUNCHED_BEFORE_DRAFT_EXTEND}),
}
"""For each scenario, what at least one of its orders must show. This proves that the engine does not simply wait for
everything: an engine that does would be right in every order too.
"""

NO_ORDER_HAS: tuple[tuple[Mutant, AnyScenario], ...] = ((bootstrap.bootstrap_rearms_publish_ready, _relay),)
"""(mutant, scenario): mutants that only make the engine wait. The tokens stay right in every order, but no order shows
what SOME_ORDER_HAS demands.
"""

SHORT: frozenset[AnyScenario] = frozenset(
    {
        _relay,
        _one,
        _one_lagging,
        _one_chain,
        _at_once,
        _chunk_retracted,
        _constrained_chunk,
        _prompt_in_a_budget,
        Scenario(scenarios.two_requests, 1, 16),
        Scenario(scenarios.reused_beside_an_abort, 2, 8, headroom_tokens=1, lags=True),
        _reused_prompts_cancelled,
        _reused_short,
        _growing_at_once_by_frames,
    }
)
"""The scenarios whose orders and mutants are run with every change. The thorough run has them all."""


def each(scenarios: Iterable[AnyScenario]) -> list[object]:
    """Returns one set of parameters for each scenario. It is thorough unless the scenario is a short one."""
    return [pytest.param(scenario, id=scenario.name, marks=marks_of(scenario)) for scenario in scenarios]


def marks_of(scenario: AnyScenario) -> tuple[pytest.MarkDecorator, ...]:
    return () if scenario in SHORT else (pytest.mark.thorough,)


SCENARIOS: dict[str, AnyScenario] = {
    scenario.name: scenario for scenario in (*EXHAUSTIVE, *LARGE, *(scenario for _, scenario, _ in CAUGHT_BY))
}
"""All scenarios, by name."""


def scenario_named(name: str) -> AnyScenario:
    """Returns the scenario with this name: one of the catalogue, or a random life, whose name contains its seed. Raises
    ValueError for any other name.
    """
    if name.startswith(PREFIX):
        return RandomLife(name.removeprefix(PREFIX))
    if name not in SCENARIOS:
        raise ValueError(f"scenario {name!r}: not one of {', '.join(sorted(SCENARIOS))}, or {PREFIX} and a seed")
    return SCENARIOS[name]
