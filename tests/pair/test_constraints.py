"""Tests that an output under a grammar, with reasoning, or with rules for its tokens is that of the masked
distribution, token for token, in every mode of the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import InvalidRequest
from common.grammar.grammar import Grammar, GrammarKind, TokenRules
from common.grammar.matcher import ALL_ALLOWED, Mask, Matcher
from common.grammar.reasoning import Markers, OutputPart, Reasoning
from common.grammar.reasoning_matcher import MarkerTokens, ReasoningMatcher, TokenTexts
from common.sampling.params import ResolvedSampling
from common.telemetry.stats import SpeculationCounts
from common.text.grammars import Work
from common.text.tokenizer import TextTokenizer
from decode_service.schedule import grammars
from tests.pair.constraints import (
    EVERY,
    PIECES,
    UNBOUND,
    UNBOUND_LETTERS,
    Constraint,
    constraints_against,
    greedy,
    spelled,
    text_of,
)
from tests.support.drafted import SHAPES, Counts, Drafted
from tests.support.languages import END, LANGUAGES, NEW_TOKENS, PROMPTS, TOKENIZER, sampling_of, submit_all
from tests.support.models import END_ID, SMALL_VOCAB_SIZE
from tests.support.pair import InProcessPair, MakePair, NewMatcher, Outcome, PairOptions, grammars_of

thorough = pytest.mark.thorough


@pytest.fixture(autouse=True)
def masks_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine takes longer than masks may, and then forces nothing."""
    monkeypatch.setattr(Work, "is_too_much", False)


@pytest.fixture(scope="module")
def model(leaning: Drafted) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(leaning.directory), dtype=torch.float32)


@pytest.fixture(scope="module")
def free(model: Any) -> list[list[int]]:
    return greedy(model, PROMPTS, [UNBOUND] * len(PROMPTS))


@pytest.fixture(scope="module")
def constraints(model: Any, free: list[list[int]]) -> dict[str, Constraint]:
    return constraints_against(free, greedy(model, PROMPTS, [UNBOUND_LETTERS] * len(PROMPTS)))


@pytest.fixture(scope="module")
def expected(model: Any, constraints: dict[str, Constraint]) -> dict[str, list[int]]:
    outputs = greedy(model, [*map(prompt_of, constraints)], [*constraints.values()])
    return dict(zip(constraints, outputs, strict=True))


def prompt_of(name: str) -> list[int]:
    return PROMPTS[int(name.split()[1])]


def check_greedy(pair: InProcessPair, constraints: dict[str, Constraint], expected: dict[str, list[int]]) -> None:
    """Runs all prompts with their constraints, beside prompts without any, and checks the tokens."""
    for number, prompt in enumerate(PROMPTS):
        pair.submit(f"free {number}", prompt, Constraint().sampling(number), cache_salt="")
    for name, constraint in constraints.items():
        pair.submit(name, prompt_of(name), constraint.sampling(0), cache_salt="")
    pair.run()
    for name, token_ids in expected.items():
        assert pair.outcomes[name].token_ids == token_ids, f"{name} differs: {pair.outcomes[name].error}"


@pytest.mark.parametrize(
    ("local_prefill_tokens", "shape", "overlap"),
    [
        (0, "chain-4", True),
        (40, None, False),
        *(
            pytest.param(*each, marks=thorough)
            for each in [(0, None, True), (0, "chain-4", False), (40, "chain-4", True)]
        ),
        *(pytest.param(0, "tree-4x3-15", overlap, marks=thorough) for overlap in (True, False)),
    ],
)
def test_greedy_output_is_the_likeliest_that_is_allowed(
    local_prefill_tokens: int,
    shape: str | None,
    overlap: bool,
    make_pair: MakePair,
    leaning: Drafted,
    constraints: dict[str, Constraint],
    expected: dict[str, list[int]],
) -> None:
    options = PairOptions(overlap=overlap, local_prefill_tokens=local_prefill_tokens, **SHAPES.get(shape or "", {}))
    pair = make_pair(leaning.target, options, draft=leaning.head if shape else None)
    check_greedy(pair, constraints, expected)
    if shape:
        counts = Counts.of(pair.outcomes[name] for name in expected)
        assert counts.num_accepted > 30 and counts.num_rejected > 30


def test_reasoning_ends_by_itself_at_its_limit_and_not_at_all_and_rules_change_outputs(
    free: list[list[int]], constraints: dict[str, Constraint], expected: dict[str, list[int]]
) -> None:
    ends = [constraints[f"reasoning {number}"].num_reasoning(expected[f"reasoning {number}"]) for number in range(8)]
    assert [end is not None for end in ends] == [True, True, True, True, False, True, True, False]
    assert (ends[2], ends[3], ends[5], ends[6]) == (8, 10, 2, 8), "the limit, and what is left of the marker"
    assert all(expected[f"rules {number}"] != output for number, output in enumerate(free))


def test_a_request_is_resumed_at_every_place_around_the_end_of_its_reasoning(
    make_pair: MakePair, leaning: Drafted, constraints: dict[str, Constraint], expected: dict[str, list[int]]
) -> None:
    """A forbidden sequence may begin in the output of the earlier stream too."""
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    for name, constraint in constraints.items():
        whole = expected[name]
        end = constraint.num_reasoning(whole) if constraint.reasoning else None
        for num_brought in (1, 3, 4) if end is None else range(1, end + 4):
            if END_ID not in (brought := whole[:num_brought]) and num_brought < len(whole):
                prompt = prompt_of(name)
                sampling = constraint.sampling(0)
                pair.submit(f"{name} {num_brought}", [*prompt, *brought], sampling, prompt_len=len(prompt))
    pair.run()
    assert len(pair.outcomes) > 60
    for key, outcome in pair.outcomes.items():
        name, _, num_brought = key.rpartition(" ")
        assert [*expected[name][: int(num_brought)], *outcome.token_ids] == expected[name], key


# ---- matchers that err -----------------------------------------------------------------------------------------------


class WrongMatcher:
    """Passes on what another matcher says. Subclasses err."""

    failure = ""

    def __init__(self, matcher: Matcher, *, has_begun: bool = False) -> None:
        self._matcher = matcher
        self._has_begun = has_begun

    def copy(self) -> Matcher:
        return type(self)(self._matcher.copy(), has_begun=self._has_begun)

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept(token_id)

    def fill(self, mask: Mask) -> None:
        self._matcher.fill(mask)

    def forced(self) -> Sequence[int]:
        return self._matcher.forced()


class LateMatcher(WrongMatcher):
    """Its grammar takes effect one token late."""

    def accept(self, token_id: int) -> bool:
        is_allowed = self._matcher.accept(token_id) or not self._has_begun
        self._has_begun = True
        return is_allowed

    def fill(self, mask: Mask) -> None:
        mask[:] = ALL_ALLOWED
        if self._has_begun:
            self._matcher.fill(mask)

    def forced(self) -> Sequence[int]:
        return self._matcher.forced() if self._has_begun else ()


class TwiceMatcher(WrongMatcher):
    """It accepts the first token, which comes with the handoff, twice."""

    def accept(self, token_id: int) -> bool:
        is_allowed = self._matcher.accept(token_id)
        if not self._has_begun:
            self._matcher.accept(token_id)
        self._has_begun = True
        return is_allowed


class ForgetfulMatcher(WrongMatcher):
    """Its copies, which follow drafts, do not notice the end of the reasoning."""

    def __init__(self, matcher: Matcher, without_grammar: Matcher, reasoning: Reasoning) -> None:
        super().__init__(matcher)
        self._without_grammar = without_grammar
        self._markers = Markers(reasoning)
        self._place = self._markers.beginning

    def copy(self) -> Matcher:
        return (self._matcher if self._place.part is OutputPart.ANSWER else self._without_grammar).copy()

    def accept(self, token_id: int) -> bool:
        self._place, _ = self._markers.after(self._place, PIECES[token_id].encode())
        self._without_grammar.accept(token_id)
        return self._matcher.accept(token_id)


def grammar_unknown_to_drafts(sampling: ResolvedSampling, output_ids: Sequence[int]) -> Matcher:
    library, reasoning = grammars_of(SMALL_VOCAB_SIZE), sampling.reasoning
    assert reasoning is not None and not output_ids
    without_grammar = library.matcher(None, (), reasoning)
    return ForgetfulMatcher(library.matcher(sampling.grammar, (), reasoning), without_grammar, reasoning)


def grammar_one_token_late(sampling: ResolvedSampling, output_ids: Sequence[int]) -> Matcher:
    tokenizer, library = TextTokenizer(TOKENIZER), grammars_of(SMALL_VOCAB_SIZE)
    texts = TokenTexts([tokenizer.bytes_of(each) for each in EVERY])
    grammar = LateMatcher(library.matcher(sampling.grammar)) if sampling.grammar else None
    assert sampling.reasoning is not None
    tokens = MarkerTokens(sampling.reasoning, texts, lambda text: [*spelled(text.decode())])
    matcher = ReasoningMatcher(tokens, sampling.reasoning, grammar, (END_ID,))
    assert all(map(matcher.accept, output_ids))
    return matcher


def first_token_accepted_twice(sampling: ResolvedSampling, output_ids: Sequence[int]) -> Matcher:
    return TwiceMatcher(grammars_of(SMALL_VOCAB_SIZE).matcher(sampling.grammar, output_ids, sampling.reasoning))


@pytest.mark.parametrize("mutant", [grammar_one_token_late, grammar_unknown_to_drafts, first_token_accepted_twice])
def test_it_is_seen(
    mutant: NewMatcher,
    make_pair: MakePair,
    leaning: Drafted,
    constraints: dict[str, Constraint],
    expected: dict[str, list[int]],
) -> None:
    reasoning = {name: each for name, each in constraints.items() if each.reasoning}
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head, new_matcher=mutant)
    with pytest.raises(AssertionError, match="differs"):
        check_greedy(pair, reasoning, {name: expected[name] for name in reasoning})


# ---- what a grammar forces -------------------------------------------------------------------------------------------

FORCED_TEXT = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456A"


@pytest.mark.parametrize(
    ("head", "shape", "num_a_step", "num_brought", "options"),
    [
        ("leaning", "chain-4", 5, 0, {}),
        ("leaning", "tree-4x3-15", 4, 0, {}),
        pytest.param("leaning", "chain-4", 5, 0, {"overlap": False}, marks=thorough),
        pytest.param("leaning", "chain-4", 5, 0, {"local_prefill_tokens": 40}, marks=thorough),
        pytest.param("leaning", "chain-4", 5, 10, {}, marks=thorough),
        pytest.param("copying_layers", "chain-5", 6, 0, {}, marks=thorough),
    ],
)
def test_what_a_grammar_forces_takes_no_steps_of_its_own(
    head: str,
    shape: str,
    num_a_step: int,
    num_brought: int,
    options: dict[str, Any],
    make_pair: MakePair,
    request: pytest.FixtureRequest,
) -> None:
    """Whatever the head guesses, each step commits as many tokens as it can, beside rows of other requests too."""
    drafted: Drafted = request.getfixturevalue(head)
    pair = make_pair(drafted.target, PairOptions(**SHAPES[shape], **options), draft=drafted.head)
    grammar = Grammar(GrammarKind.REGEX, FORCED_TEXT)
    sampling = replace(sampling_of(0, temperature=0.9), grammar=grammar, max_tokens=80)
    token_ids = [*spelled(FORCED_TEXT), END_ID]
    brought, expected = token_ids[:num_brought], token_ids[num_brought:]
    prompt = PROMPTS[0]
    outcome = pair.submit("forced", [*prompt, *brought], sampling, prompt_len=len(prompt))
    undrafted = pair.submit("undrafted", [*prompt, *brought], sampling, prompt_len=len(prompt), wants_drafts=False)
    for number, other in enumerate(PROMPTS[1:4], start=1):
        pair.submit(str(number), other, sampling_of(number, temperature=0.0, is_free=number < 3))
    pair.run()
    assert outcome.token_ids == undrafted.token_ids == expected
    assert outcome.finished is not None and undrafted.finished is not None
    counts = outcome.finished.speculation
    num_steps, num_left = divmod(len(expected) - 1, num_a_step)  # the first token comes with the handoff
    assert counts is not None and num_left == 0
    assert counts.num_verify_steps == num_steps
    assert counts.num_forced_tokens == counts.num_accepted_tokens == num_steps * (num_a_step - 1)
    assert counts.drafted_at == counts.accepted_at == (), "the head is judged by what the grammar forced"
    assert undrafted.finished.speculation is None


def drafting_of(outcome: Outcome) -> SpeculationCounts:
    """Returns what was drafted for a request, without the times."""
    assert outcome.finished is not None and outcome.finished.speculation is not None
    return replace(outcome.finished.speculation, draft_s=0.0, verify_s=0.0, extend_s=0.0)


@thorough
def test_a_head_of_several_layers_drafts_for_rows_of_mixed_steps_as_for_one_alone(
    make_pair: MakePair, leaning_layers: Drafted
) -> None:
    """Steps have rows with forced drafts, rows under a grammar without any, and free rows."""
    options = PairOptions(**SHAPES["chain-4"])
    together, alone = (
        submit_all(make_pair(leaning_layers.target, options, draft=leaning_layers.head), min_tokens=30, at_once=at_once)
        for at_once in (True, False)
    )
    are_mixed = [
        any(step.speculation.num_forced) and step.masks.num_rows < step.batch_size
        for step in together.decode_steps
        if step.speculation is not None and step.masks is not None
    ]
    assert are_mixed.count(True) > 5
    for name, expected in alone.outcomes.items():
        counts = drafting_of(together.outcomes[name])
        assert (together.outcomes[name].token_ids, counts) == (expected.token_ids, drafting_of(expected)), name
        if name.endswith("free"):
            assert counts.num_forced_tokens == 0 < counts.num_accepted_tokens
    keys = [drafting_of(together.outcomes[name]) for name in ("3 bound", "7 bound")]
    assert all(counts.num_forced_tokens >= 4 * (NEW_TOKENS // 8) for counts in keys), "a key has seven forced tokens"


# ---- lengths and limits ----------------------------------------------------------------------------------------------


def test_an_output_is_no_shorter_than_asked_for_unless_the_grammar_ends(make_pair: MakePair, leaning: Drafted) -> None:
    pair = submit_all(make_pair(leaning.target, draft=leaning.head), min_tokens=20)
    for number in range(len(PROMPTS)):
        outcome, language = pair.outcomes[f"{number} bound"], LANGUAGES[number % len(LANGUAGES)]
        if END_ID in outcome.token_ids[:20]:
            assert language.following(text_of(outcome.token_ids[:-1])) == END, "it could have gone on"
        assert outcome.finished is not None


@pytest.mark.parametrize("max_tokens", [3, None])
def test_an_output_with_reasoning_is_no_shorter_than_asked_for(
    max_tokens: int | None, make_pair: MakePair, leaning: Drafted
) -> None:
    """`min_tokens` is enforced by the masks if the reasoning has a limit, and otherwise when the token is drawn."""
    constraint = Constraint(reasoning=Reasoning("", "05", is_open=True, max_tokens=max_tokens))
    pair = make_pair(leaning.target, draft=leaning.head)
    sampling = constraint.sampling(0, logit_bias=((END_ID, 100.0),), min_tokens=9)
    outcome = pair.submit("short", PROMPTS[0], sampling)
    pair.run()
    assert outcome.token_ids.index(END_ID) == 9
    assert (tuple(outcome.token_ids[3:5]) == spelled("05")) == (max_tokens is not None)


ENDLESS = Grammar(GrammarKind.REGEX, "(a{1,1000}){1,1000}")
WIDE = Grammar(GrammarKind.LARK, "start: /a/ " + "b? " * 3000 + '\nb: "b"')
NARROWING = TokenRules(allowed_ids=(9, 12), forbidden=((9, 9), (12, 12), (9, 12, 9, 12), (12, 9, 12, 9)))
"""Rules that allow only tokens 9 and 12, in turns, and no more than three of them."""

ENDS_OF_WAYS: dict[str, tuple[dict[str, Any], str, range]] = {
    "a grammar that grows too large": ({"grammar": ENDLESS}, "sampling.regex", range(11, 200)),
    "a grammar whose next token is too wide": ({"grammar": WIDE}, "sampling.lark", range(1, 200)),
    "rules that allow nothing": (
        {"token_rules": TokenRules(allowed_ids=(9,), forbidden=((9,),))},
        "sampling.allowed_token_ids",
        range(1),
    ),
    "rules that allow nothing later": ({"token_rules": NARROWING}, "sampling.allowed_token_ids", range(4)),
}
"""Restrictions under which no token is left, the field that the error names, and the numbers of tokens before."""


@pytest.mark.parametrize(
    ("has_head", "local_prefill_tokens"),
    [(True, 0), (False, 40), *(pytest.param(*each, marks=thorough) for each in ((True, 40), (False, 0)))],
)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[thorough] if "too large" in way else []) for way in ENDS_OF_WAYS]
)
def test_a_request_that_cannot_go_on_fails_alone(
    way: str, has_head: bool, local_prefill_tokens: int, make_pair: MakePair, leaning: Drafted
) -> None:
    """The error is the request's own fault. The request is not retried, and no KV is forgotten as damaged."""
    restriction, field, num_tokens = ENDS_OF_WAYS[way]
    options = PairOptions(local_prefill_tokens=local_prefill_tokens)
    pair = make_pair(leaning.target, options, draft=leaning.head if has_head else None)
    sampling = Constraint().sampling(0, max_tokens=200, min_tokens=200, **restriction)
    failing = [pair.submit(f"failing {number}", PROMPTS[2], sampling, cache_salt="") for number in range(2)]
    other = pair.submit("other", PROMPTS[2], sampling_of(1, temperature=0.0))
    pair.run()
    pair.settle()
    for outcome in failing:
        assert isinstance(outcome.error, InvalidRequest) and outcome.error.field == field
        assert len(outcome.token_ids) in num_tokens
    assert other.finished is not None
    assert pair.decode.load().num_row_retries == 0
    assert max(engine.load().slots.cached for engine in (pair.decode, pair.prefill)) > 0


@pytest.mark.parametrize("ends_by", [None, "max_tokens", "stop_token_ids"])
def test_where_drafts_find_no_token_allowed_those_before_are_delivered(
    ends_by: str | None, make_pair: MakePair, leaning: Drafted, free: list[list[int]]
) -> None:
    """If the output ends there, nothing need be allowed after it. Otherwise the request fails, as without drafts."""
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    expected = {}
    for number, (prompt, output) in enumerate(zip(PROMPTS, free, strict=True)):
        ends = [place for place in range(4, len(output) - 1) if output[place] not in output[:place]]
        for end in ends[:3]:
            allowed = tuple(sorted(set(output)))
            rules = TokenRules(allowed, tuple((output[end], token_id) for token_id in allowed))
            name = f"{number} {end}"
            expected[name] = output[: end + 1]
            limits: dict[str | None, Any] = {"max_tokens": end + 1, "stop_token_ids": (output[end],)}
            limit = {} if ends_by is None else {ends_by: limits[ends_by]}
            pair.submit(name, prompt, Constraint(rules=rules).sampling(0, **limit))
    pair.run()
    assert len(expected) > 10
    for name, outcome in pair.outcomes.items():
        assert isinstance(outcome.error, InvalidRequest) == (ends_by is None), (name, outcome.error)
        assert (outcome.finished is None) == (ends_by is None)
        assert outcome.token_ids == expected[name], name


class LimitedMatcher(WrongMatcher):
    """A copy of a request's matcher that reaches a limit with its first token."""

    failure = "too large"

    def accept(self, token_id: int) -> bool:
        return self._has_begun

    def fill(self, mask: Mask) -> None:
        mask[:] = 0


class LimitedAhead(WrongMatcher):
    """Its copies, which follow drafts, reach a limit. With `accepts` they do so when they fill a mask."""

    def copy(self) -> Matcher:
        return LimitedMatcher(self._matcher, has_begun=self._has_begun)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_limit_that_only_drafts_reach_is_told_as_that(
    accepts: bool, make_pair: MakePair, leaning: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's limits on one call count what it has not computed before. So a copy that follows the drafts may
    fail where the request's own matcher does not, later.
    """
    fill_nodes = grammars.fill_nodes

    def fill_limited(matcher: Matcher, *others: Any) -> dict[int, str]:
        return fill_nodes(LimitedAhead(matcher, has_begun=accepts), *others)

    monkeypatch.setattr(grammars, "fill_nodes", fill_limited)
    pair = make_pair(leaning.target, draft=leaning.head)
    grammar = Grammar(GrammarKind.REGEX, "[a-zA-Z ]*")
    outcome = pair.submit("drafted", PROMPTS[2], Constraint().sampling(0, grammar=grammar), cache_salt="")
    pair.run()
    assert isinstance(outcome.error, InvalidRequest) and outcome.error.field == "sampling.regex", outcome
    assert "too large" in str(outcome.error)
