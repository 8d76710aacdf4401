"""Invariant I12 when a draft head lags: before its next draft it reads every token that earlier steps left unread, at
the right position.

The tag head guesses nothing right when one of the tokens it should have read is missing, so the accepted drafts reveal
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_service.speculate.spec_info import SpecInfo
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import CHAIN_UNREAD, Outcome, ScriptedEngine
from tests.engine.mutants import draft_backlog
from tests.engine.speculating import CHAIN, NOTHING, SEED, ScriptedDepth
from tests.engine.tag_head import drafting_of


class _Run:
    """An engine whose draft depths follow a script. For each request it knows the step at which the request joined, and
    so which drafts must be accepted.
    """

    def __init__(self, spec_infos: Sequence[SpecInfo]) -> None:
        self.script = ScriptedDepth(spec_infos, deepest=CHAIN)
        self.scripted = ScriptedEngine(spec_info=CHAIN, depth=self.script)
        self.head_forwards: list[tuple[int, ...]] = []
        assert self.scripted.head is not None
        self.scripted.head.on_forward = lambda batch: self.head_forwards.append(batch.extend_lens or ())

    def check(self, outcome: Outcome, *, first_step: int) -> None:
        assert outcome.token_ids == outcome.expected, "tokens were decoded wrongly"
        expected = drafting_of(outcome.prompt, outcome.sampling, self.script.launches[first_step:])
        assert expected.num_accepted > 2, "too little was accepted to tell anything"
        assert outcome.drafting == expected, f"drafts were not those of the sequence: {outcome.drafting}"


@broken_by(draft_backlog.each_step_puts_in_the_same_place, "not those of")
@broken_by(draft_backlog.only_the_last_token_is_read, "not those of")
@broken_by(draft_backlog.backlog_has_no_end, "decoded wrongly")
@broken_by(draft_backlog.unread_tokens_stay_unread, "decoded wrongly")
def check_the_head_catches_up_before_it_drafts() -> None:
    """One request runs alone, for more steps than the backlog has room for."""
    run = _Run([CHAIN, *[NOTHING] * (CHAIN_UNREAD + 5), SEED, CHAIN])
    outcome = run.scripted.submit("a", [1, 2], 56)
    run.scripted.run()
    run.check(outcome, first_step=0)
    assert (CHAIN_UNREAD,) in run.head_forwards, "the backlog never filled"
    assert (6,) in run.head_forwards, "the head did not catch up at once"


@broken_by(draft_backlog.every_row_is_as_far_behind, "not those of")
def check_rows_catch_up_from_where_each_is() -> None:
    """A second row joins when the first row's head already lags. A third one later takes over the row and the batch
    index of the first, and its head lags there too.
    """
    run = _Run([CHAIN, *[NOTHING] * 9, SEED, *[CHAIN] * 6, NOTHING, NOTHING, SEED, CHAIN])
    first = run.scripted.submit("first", [1, 2], 40)
    run.scripted.start("first")
    for _ in range(3):
        run.scripted.step()
    second = run.scripted.submit("second", [3, 4, 5], 24)
    run.scripted.start("second")
    at_second = len(run.script.launches) - 1
    run.scripted.run()
    third = run.scripted.submit("third", [6], 30)
    run.script.script([CHAIN, NOTHING, NOTHING, SEED, CHAIN])
    at_third = len(run.script.launches)
    run.scripted.run()
    run.check(first, first_step=0)
    run.check(second, first_step=at_second)
    run.check(third, first_step=at_third)
    assert any(len(set(lens)) == 2 for lens in run.head_forwards), "no two rows were differently far behind"


def check_a_head_left_behind_computes_nothing() -> None:
    run = _Run([NOTHING])
    run.scripted.submit("a", [1, 2], CHAIN_UNREAD)
    run.scripted.run()
    assert run.head_forwards == [], f"the head ran: {run.head_forwards}"


@broken_by(draft_backlog.a_new_request_has_unread_tokens, "decoded wrongly")
def check_a_row_is_read_when_a_request_enters_it() -> None:
    """A request ends with unread tokens. The next one in its row drafts at once."""
    run = _Run([NOTHING])
    run.scripted.submit("a", [1, 2], 8)
    run.scripted.run()
    run.script.script([CHAIN])
    at_second = len(run.script.launches)
    second = run.scripted.submit("b", [3, 4], 24)
    run.scripted.run()
    run.check(second, first_step=at_second)


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
