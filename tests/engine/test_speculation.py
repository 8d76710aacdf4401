"""Invariants I3, I4, I6, I7 and I12 with an EAGLE head: the tokens it drafts, commits and relays, in any order of the
streams.

The draft head is made of tags too. It is right two times in three, and wrong whenever it read anything it should not
have. So the accepted drafts are known beforehand, as the tokens are, and both are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.device.stream import Event
from common.telemetry.stats import SpeculationStats
from decode_service.schedule.step import LaunchedStep, SealedStep
from decode_service.speculate.depth import FixedDepth
from decode_service.speculate.spec_info import SpecInfo, Unread
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import Damage, ScriptedEngine
from tests.engine.mutants import bootstrap, grammars, relay, speculation
from tests.engine.mutants.kinds import instead_of
from tests.engine.speculating import (
    CHAIN,
    NOTHING,
    SEED,
    TREE,
    ScriptedDepth,
    assert_drafted_as_expected,
)
from tests.engine.tag_head import TagHead
from tests.engine.tags import VOCAB_SIZE
from tests.support.scripted_device import ScriptedDevice, run_needed

# ---- I12: the same tokens in every case ---------------------------------------------------------------------------


# ---- I12: grammars look ahead --------------------------------------------------------------------------------------


@broken_by(grammars.matchers_ahead_stay_ahead, "the retry failed")
def check_tokens_that_were_looked_at_ahead_are_forgotten_with_their_row() -> None:
    """A step of a request with a grammar gives unusable logits. The row is retried, from before that step's tokens."""
    scripted = ScriptedEngine(spec_info=CHAIN)
    damage = Damage(scripted)
    failing = scripted.submit("failing", [5, 1], 9, cache_salt="salt", is_constrained=True)
    scripted.step()
    scripted.hand_over("failing", num_cached=1)
    scripted.start()
    while len(failing.token_ids) < 4:
        scripted.step()
    damage.is_due = True
    while failing.error is None and "failing" not in scripted.handoffs:
        scripted.step()
        scripted.forward.run_all()
    scripted.run()
    assert failing.error is None, f"the retry failed: {failing.error}"
    assert failing.token_ids == failing.expected, "tokens were decoded wrongly"


@broken_by(grammars.forced_tokens_are_not_read, "were not those of")
@broken_by(grammars.forced_branches_are_not_read, "were not those of")
def check_the_head_goes_on_after_forced_tokens() -> None:
    """The grammar forces an odd number of tokens now and then, so that some steps draft one of them and one of the
    head's.
    """
    for spec_info in (CHAIN, TREE):
        num_own = 0
        for seed in range(10):
            scripted = ScriptedEngine(spec_info=spec_info)
            outcome = scripted.submit("a", [seed, 5], 30, is_constrained=True, temperature=1.0, seed=seed)
            scripted.run()
            assert_drafted_as_expected(outcome, spec_info)
            assert outcome.finished is not None and outcome.finished.speculation is not None
            counts = outcome.finished.speculation
            num_own += counts.num_accepted_tokens - counts.num_forced_tokens
        assert num_own > 20, "too few of the head's drafts were accepted to tell anything"


def test_forced_tokens_after_the_last_one_asked_for_are_not_counted() -> None:
    """Prefill's token is followed by two that are forced and drafted, but the step gives the request only one more."""
    scripted = ScriptedEngine(spec_info=CHAIN)
    outcome = scripted.submit("a", [2, 1], 2, is_constrained=True)
    scripted.run()
    assert outcome.token_ids == outcome.expected == [2, 3]
    assert outcome.finished is not None and outcome.finished.speculation is not None
    counts = outcome.finished.speculation
    assert (counts.num_verify_steps, counts.num_accepted_tokens, counts.num_forced_tokens) == (1, 0, 0)


class SecondGuessHead(TagHead):
    """Its second guess at each position is the position's number, and its first guess is another token."""

    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor:
        logits = torch.full((hidden.shape[0], VOCAB_SIZE), -9.0)
        logits[:, VOCAB_SIZE - 1] = 4.0
        return logits.scatter(1, hidden[:, 1:2].long() + 2, 3.0)


@broken_by(grammars.forced_tokens_have_twins, "siblings were alike")
def check_a_forced_token_that_the_head_guesses_second_is_drafted_once() -> None:
    """Siblings in a tree must differ. The grammar forces the numbers of the positions, up to 6."""
    scripted = ScriptedEngine(spec_info=TREE, head=SecondGuessHead())
    outcome = scripted.submit("a", [2, 1], 5, is_constrained=True)
    scripted.run()
    assert outcome.expected == [2, 3, 4, 5, 6]
    assert outcome.error is None, f"siblings were alike: {outcome.error}"
    assert outcome.token_ids == outcome.expected, "tokens were decoded wrongly"
    assert outcome.finished is not None and outcome.finished.speculation is not None
    assert outcome.finished.speculation.num_forced_tokens > 1, "no forced token was drafted"


def test_the_head_does_not_run_for_drafts_that_are_all_forced() -> None:
    """It reads their step's tokens as always."""
    for is_constrained, expected in ((True, [False]), (False, [True, False])):
        scripted = ScriptedEngine(spec_info=CHAIN)
        assert scripted.head is not None
        are_drafting: list[bool] = []
        scripted.head.on_forward = lambda batch, seen=are_drafting: seen.append(batch.is_decode)  # type: ignore[misc]
        outcome = scripted.submit("a", [2, 1], 4, is_constrained=is_constrained)
        scripted.run()
        assert outcome.token_ids == outcome.expected
        assert are_drafting[: len(expected)] == expected
        assert is_constrained is (True not in are_drafting)


# ---- I3, I4: the fence, and steps without one ---------------------------------------------------------------------


def pending_when_blocking(scripted: ScriptedEngine) -> list[list[str]]:
    """Takes one step with run_needed. Returns the work left on the forward stream each time the schedule side starts to
    wait.
    """
    seen = []

    def look(device: ScriptedDevice, event: Event) -> None:
        seen.append(scripted.forward.pending())
        run_needed(device, event)

    scripted.device.on_synchronize = look
    scripted.step()
    scripted.device.on_synchronize = run_needed
    return seen


@broken_by(relay.fence_covers_draft_extend, "waited for draft-extend")
@broken_by(relay.published_after_draft_extend, "waited for draft-extend")
def check_the_next_step_is_launched_before_draft_extend() -> None:
    scripted = ScriptedEngine(spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2], 12)
    scripted.start("a")
    for _ in range(3):
        for_lengths, for_results = pending_when_blocking(scripted)
        assert "verify" in for_lengths, "lengths were read before they were published"
        assert for_results[0] == "read", f"the schedule side waited for draft-extend: {for_results}"
        assert for_results.count("read") == 2, f"the next step was not launched: {for_results}"
    scripted.run()
    assert_drafted_as_expected(outcome)


@broken_by(speculation.an_earlier_steps_fence_stays_armed, "an earlier step's lengths")
@broken_by(relay.fence_covers_draft_extend, "an earlier step's lengths")
def check_lengths_of_a_step_without_drafts_are_not_waited_for() -> None:
    """The lengths after a step without drafts are known at its launch, whatever an earlier step published."""
    depth = ScriptedDepth([CHAIN, SEED, CHAIN, *[NOTHING] * 6, SEED, CHAIN], deepest=CHAIN)
    scripted = ScriptedEngine(spec_info=CHAIN, depth=depth)
    outcome = scripted.submit("a", [1, 2], 30)
    scripted.start("a")
    num_waits = []
    for _ in range(9):
        waits = pending_when_blocking(scripted)
        assert outcome.error is None, f"an earlier step's lengths were taken: {outcome.error}"
        assert waits[-1].count("verify") >= 1, "the next step was not launched before this one was waited for"
        num_waits.append(len(waits))
    assert num_waits == [2, 1, 2, 1, 1, 1, 1, 1, 1], f"waits a step: {num_waits}"
    scripted.run()
    assert outcome.token_ids == outcome.expected, "tokens were decoded wrongly"


@broken_by(speculation.rows_at_their_limit_are_launched, "at its limit was launched")
def check_a_row_at_its_limit_is_not_launched() -> None:
    """The published lengths show that a row has all its tokens before the step's results are taken."""
    for max_tokens in range(8, 14):  # with some of them the last step adds several
        scripted = ScriptedEngine(spec_info=CHAIN)
        outcome = scripted.submit("a", [1, 2], max_tokens)
        lengths: list[int] = []
        scripted.model.on_forward = lambda batch, seen=lengths: seen.extend(batch.prefix_lens or ())  # type: ignore[misc]
        scripted.run()
        assert lengths and max(lengths) + 1 < 2 + max_tokens, f"a row at its limit was launched: {lengths}"
        assert_drafted_as_expected(outcome)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_the_stream_waits_for_a_step_is_measured_from_the_step_before(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's idle time before a step is measured only if the previous step was in flight at the launch. Otherwise
    the stream had nothing to do anyway.
    """
    idle: list[float | None] = []
    ends: list[Event] = []
    begins: list[Event] = []

    class NotingDepth(FixedDepth):
        def observe(self, spec_info: SpecInfo, *, unread: Unread, stats: SpeculationStats) -> None:
            idle.append(stats.idle_s)

    @instead_of(LaunchedStep, "seal")
    def noting(seal: Callable[..., SealedStep], self: LaunchedStep, **given: Any) -> SealedStep:
        step = seal(self, **given)
        ends.append(step.end)
        begins.append(step.output.marks.get()[0])
        return step

    noting(monkeypatch)
    scripted = ScriptedEngine(spec_info=CHAIN, overlap=overlap, depth=NotingDepth(CHAIN))
    scripted.submit("a", [1, 2], 12)
    scripted.run()
    assert len(idle) > 3
    waits = [begin.seconds_since(end) for end, begin in zip(ends, begins[1:], strict=False)]
    assert idle == [None, *(waits if overlap else [None] * len(waits))]


@broken_by(speculation.seeds_stashed_on_another_stream, "not those of")
def check_seeds_reach_the_next_forward_by_stream_order() -> None:
    """The next forward is launched before draft-extend has run. Only the order of the stream makes it wait for the
    seed.
    """
    scripted = ScriptedEngine(spec_info=CHAIN, debug_checks=False)
    first, second = scripted.submit("first", [1, 2], 12), scripted.submit("second", [3, 4, 5], 9, temperature=1.0)
    scripted.start("first", "second")
    _, for_results = pending_when_blocking(scripted)
    assert for_results[0] == "read" and for_results.index("resolve") > for_results.index("read")
    scripted.run()
    for outcome in (first, second):
        assert_drafted_as_expected(outcome)


# ---- I6: inputs and seeds come from the relay at forward entry ----------------------------------------------------


@broken_by(relay.inputs_taken_at_launch, "when the step was launched")
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


# ---- I7: bootstrap while a speculative forward is in flight -------------------------------------------------------


@broken_by(bootstrap.bootstrap_writes_no_lengths, "bootstrapped length was lost")
def check_a_row_bootstrapped_and_not_launched_keeps_its_length() -> None:
    """The row joins the batch while the slots of its first step still belong to an aborted row, whose forward is in
    flight.
    """
    scripted = ScriptedEngine(spec_info=CHAIN, max_rows=2, max_kv_tokens=46)
    scripted.submit("gone", [1, 2], 40)
    scripted.start("gone")
    outcome = scripted.submit("kept", [3, 4, 5, 6, 7], 4)
    scripted.step()
    scripted.hand_over("kept")
    while scripted.engine.pool.num_free_slots:
        scripted.step()
    assert scripted.engine.future_map.publish_ready is not None, "the step in flight has no drafts"
    scripted.landing.run_all()
    scripted.abort("gone")
    scripted.step()
    load = scripted.engine.load()
    assert (load.num_running, load.num_retractions, scripted.forward.pending()) == (1, 0, []), "it was launched"
    lengths: list[tuple[int, ...] | None] = []
    scripted.model.on_forward = lambda batch: lengths.append(batch.prefix_lens)
    scripted.run()
    assert outcome.error is None, f"a bootstrapped length was lost: {outcome.error}"
    assert lengths[0] == (5,), f"a bootstrapped length was lost: {lengths[0]}"
    assert_drafted_as_expected(outcome)


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
