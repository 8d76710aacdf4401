"""Tests that output with reasoning before a grammar, or with a limit on reasoning, is that of the masked distribution,
token for token: wherever the reasoning ends in a chain of drafts, handed over or computed by decode alone, retracted,
or resumed at any token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.grammar.matcher import ALL_ALLOWED, Mask, Matcher
from common.grammar.reasoning import Markers, Part, Reasoning
from common.grammar.reasoning_matcher import MarkerTokens, ReasoningMatcher, TokenTexts
from common.sampling.params import ResolvedSampling
from common.text.tokenizer import TextTokenizer
from tests.support.drafted import SHAPES, Counts, Drafted
from tests.support.languages import LANGUAGES, PROMPTS, TOKENIZER, Language
from tests.support.models import END_ID, SMALL_VOCAB_SIZE
from tests.support.pair import InProcessPair, MakePair, NewMatcher, PairOptions, grammars_of, pairs_that_keep_all

NUM_TOKENS = 24
PIECES: list[str] = TOKENIZER.convert_ids_to_tokens(range(SMALL_VOCAB_SIZE))
NO_LETTERS = [token_id for token_id, piece in enumerate(PIECES) if not piece.isascii() or not piece.isalnum()]
NO_LETTERS.remove(END_ID)
LOGIT_BIAS = tuple((token_id, -100.0) for token_id in NO_LETTERS)
EVERY = range(SMALL_VOCAB_SIZE)


def text_of(output_ids: Sequence[int]) -> str:
    return "".join(PIECES[each] for each in output_ids)


@dataclass(frozen=True)
class Case:
    """The reasoning options and the language of a request. It computes the tokens that may come next without a matcher,
    so that matchers can be compared with it.
    """

    reasoning: Reasoning
    language: Language | None

    @property
    def free(self) -> list[int]:
        """The tokens that may come where neither the grammar nor a marker restricts them. With a grammar the end token
        is not among them.
        """
        return [each for each in EVERY if each != END_ID or self.language is None]

    def num_reasoning(self, output_ids: Sequence[int]) -> int | None:
        """Returns the number of tokens up to the end of the reasoning, or None if it has not ended or not begun."""
        start = "" if self.reasoning.is_open else self.reasoning.start
        for number in range(len(output_ids) + 1):
            text = text_of(output_ids[:number])
            if text.startswith(start) and self.reasoning.end in text.removeprefix(start):
                return number
        return None

    def allowed_after(self, output_ids: Sequence[int]) -> list[int]:
        reasoning, text = self.reasoning, text_of(output_ids)
        if (num_reasoning := self.num_reasoning(output_ids)) is not None:
            return self.free if self.language is None else self.language.allowed_after(output_ids[num_reasoning:])
        if not reasoning.is_open and not text.startswith(reasoning.start):
            return self._allowed_before(output_ids)
        if reasoning.max_tokens is not None and len(output_ids) >= reasoning.max_tokens:
            begun = max(n for n in range(len(reasoning.end)) if text.endswith(reasoning.end[:n]))
            return [PIECES.index(reasoning.end[begun])]
        return self.free

    def _allowed_before(self, output_ids: Sequence[int]) -> list[int]:
        start, text = self.reasoning.start, text_of(output_ids)
        opening = [PIECES.index(start[len(text)])] if start.startswith(text) else []
        if self.language is None:
            is_forbidden = self.reasoning.max_tokens == 0 and len(text) == len(start) - 1
            return [each for each in self.free if not (is_forbidden and each in opening)]
        of_answer = self.language.allowed_after
        is_answer = all(each in of_answer(output_ids[:place]) for place, each in enumerate(output_ids))
        return sorted({*opening, *(of_answer(output_ids) if is_answer else [])})


def cases_of(free: Sequence[Sequence[int]]) -> list[Case]:
    """Returns a case for each prompt. Its reasoning begins or ends where the prompt's unrestricted output contains some
    text.
    """

    def text_at(number: int, place: int) -> str:
        """Returns two characters of the output that occur for the first time at index `place` or shortly after it."""
        text = text_of(free[number])
        return next(text[at : at + 2] for at in range(place, len(text)) if text.find(text[at : at + 2]) == at)

    return [
        Case(Reasoning("", text_at(0, 4), is_open=True), LANGUAGES[0]),
        Case(Reasoning(text_of(free[1][:2]), text_at(1, 7), max_tokens=20), LANGUAGES[2]),
        Case(Reasoning("", "0Z5", is_open=True, max_tokens=5), LANGUAGES[1]),
        Case(Reasoning("", "0Z5", is_open=True, max_tokens=7), None),
        Case(Reasoning("05", "0"), LANGUAGES[1]),
        Case(Reasoning("", "Zz", is_open=True, max_tokens=0), LANGUAGES[2]),
        Case(Reasoning("", text_of(free[6][5:6]) + "06", is_open=True, max_tokens=6), LANGUAGES[0]),
        Case(Reasoning(text_of(free[7][:2]), "0", max_tokens=0), None),
    ]


def sampling_of(number: int, case: Case | None, *, temperature: float = 0.0) -> ResolvedSampling:
    return ResolvedSampling(
        seed=number,
        max_tokens=NUM_TOKENS,
        min_tokens=0 if case else NUM_TOKENS,
        temperature=temperature,
        eos_token_ids=(END_ID,),
        logit_bias=LOGIT_BIAS,
        grammar=case.language.grammar if case and case.language else None,
        reasoning=case.reasoning if case else None,
    )


def submit_all(
    pair: InProcessPair, cases: Sequence[Case], *, temperature: float = 0.0, at_once: bool = True
) -> InProcessPair:
    """Runs each prompt with its case (request "3 bound") and without ("3 free"), together or one after another."""
    for number, prompt in enumerate(PROMPTS):
        of_number = {"bound": cases[number] if cases else None, "free": None}
        for name, case in of_number.items():
            pair.submit(f"{number} {name}", prompt, sampling_of(number, case, temperature=temperature), cache_salt="")
            if not at_once:
                pair.run()
    pair.run()
    return pair


@pytest.fixture(scope="module")
def model(leaning: Drafted) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(leaning.directory), dtype=torch.float32)


def greedy(model: Any, prompt: Sequence[int], allowed_after: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
    """Returns the greedy output after the prompt, with each choice limited to the allowed tokens, computed by
    transformers.
    """
    output: list[int] = []
    while len(output) < NUM_TOKENS and END_ID not in output:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        logits[NO_LETTERS] -= 100
        allowed = list(allowed_after(output))
        output.append(allowed[int(logits[allowed].argmax())])
    return output


def free_outputs(make_pair: MakePair, drafted: Drafted, *, temperature: float = 0.0) -> list[list[int]]:
    options = PairOptions(overlap=False, prefill_caches=False, decode_caches=False)
    pair = submit_all(make_pair(drafted.target, options), (), temperature=temperature)
    return [pair.outcomes[f"{number} free"].token_ids for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def cases(leaning: Drafted) -> list[Case]:
    with pairs_that_keep_all() as make_pair:
        return cases_of(free_outputs(make_pair, leaning))


@pytest.fixture(scope="module")
def expected(model: Any, cases: list[Case]) -> list[list[int]]:
    with torch.no_grad():
        return [greedy(model, prompt, case.allowed_after) for prompt, case in zip(PROMPTS, cases, strict=True)]


def check_greedy(
    make_pair: MakePair,
    leaning: Drafted,
    cases: list[Case],
    expected: list[list[int]],
    options: PairOptions,
    **others: Any,
) -> InProcessPair:
    pair = submit_all(make_pair(leaning.target, options, **others), cases)
    for number, token_ids in enumerate(expected):
        assert pair.outcomes[f"{number} bound"].token_ids == token_ids, f"{number} differs"
    return pair


@pytest.mark.parametrize(
    ("local_prefill_tokens", "shape", "overlap"),
    [
        *[(0, shape, overlap) for shape in (None, "chain-4", "tree-4x3-15") for overlap in (True, False)],
        (40, None, False),
        (40, "chain-4", True),
    ],
)
def test_greedy_output_is_the_likeliest_that_reasoning_and_grammar_allow(
    local_prefill_tokens: int,
    shape: str | None,
    overlap: bool,
    make_pair: MakePair,
    leaning: Drafted,
    cases: list[Case],
    expected: list[list[int]],
) -> None:
    options = PairOptions(overlap=overlap, local_prefill_tokens=local_prefill_tokens, **SHAPES.get(shape or "", {}))
    pair = check_greedy(make_pair, leaning, cases, expected, options, draft=leaning.head if shape else None)
    ends = [case.num_reasoning(token_ids) for case, token_ids in zip(cases, expected, strict=True)]
    assert [end is not None for end in ends] == [True, True, True, True, False, True, True, False]
    assert (ends[2], ends[3], ends[5], ends[6]) == (8, 10, 2, 8), "the limit, and what is left of the marker"
    if shape:
        counts = Counts.of(pair.outcomes[f"{number} bound"] for number in range(len(PROMPTS)))
        assert counts.num_accepted > 10 and counts.num_rejected > 10


@pytest.mark.parametrize(
    ("head", "shape", "temperature"),
    [
        ("leaning", "chain-4", 0.9),
        ("leaning", "tree-4x3-15", 0.9),
        ("copying_layers", "chain-5", 0.0),
        ("copying_layers", "chain-5", 0.9),
    ],
)
def test_output_is_the_same_in_every_mode(
    head: str, shape: str, temperature: float, make_pair: MakePair, request: pytest.FixtureRequest
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    options = PairOptions(**SHAPES[shape])
    cold = replace(options, prefill_caches=False, decode_caches=False, overlap=False)
    cases = cases_of(free_outputs(make_pair, drafted, temperature=temperature))

    def outcomes(options: PairOptions, *, has_head: bool = True, at_once: bool = True) -> InProcessPair:
        pair = make_pair(drafted.target, options, draft=drafted.head if has_head else None)
        return submit_all(pair, cases, temperature=temperature, at_once=at_once)

    plain = outcomes(cold, has_head=False, at_once=False)
    modes = {"with overlap": outcomes(options), "without": outcomes(replace(options, overlap=False))}
    bound = [f"{number} bound" for number in range(len(PROMPTS))]
    for mode, pair in modes.items():
        for name, outcome in plain.outcomes.items():
            assert pair.outcomes[name].token_ids == outcome.token_ids, (mode, name)
    assert Counts.of(modes["with overlap"].outcomes[name] for name in bound).num_accepted > 0
    for case, name in zip(cases, bound, strict=True):
        output_ids = plain.outcomes[name].token_ids
        for place, token_id in enumerate(output_ids):
            assert token_id in case.allowed_after(output_ids[:place]), name


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_retracted_request_goes_on_where_it_was(
    temperature: float, make_pair: MakePair, leaning: Drafted, cases: list[Case]
) -> None:
    def outcomes(decode_tokens: int) -> InProcessPair:
        pair = make_pair(leaning.target, PairOptions(decode_tokens=decode_tokens), draft=leaning.head)
        for number in (1, 3, 5, 7, 0, 2, 4, 6):  # the first may be as long as they like
            sampling = sampling_of(number, cases[number], temperature=temperature)
            pair.submit(str(number), PROMPTS[number], replace(sampling, max_tokens=40, min_tokens=40))
        pair.finish_prefill()
        pair.run()
        return pair

    undisturbed, pair = outcomes(2048), outcomes(112)
    assert undisturbed.decode.load().num_retractions == 0 < pair.decode.load().num_retractions
    for name, outcome in undisturbed.outcomes.items():
        assert pair.outcomes[name].token_ids == outcome.token_ids


@pytest.mark.parametrize("number", [0, 1, 2, 3, 6])
def test_a_request_is_resumed_at_every_place_around_the_end_of_its_reasoning(
    number: int, make_pair: MakePair, leaning: Drafted, cases: list[Case], expected: list[list[int]]
) -> None:
    case, whole, prompt = cases[number], expected[number], PROMPTS[number]
    end = case.num_reasoning(whole)
    assert end is not None
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    for num_brought in range(1, min(end + 4, len(whole))):
        brought = [*prompt, *whole[:num_brought]]
        pair.submit(str(num_brought), brought, sampling_of(number, case), prompt_len=len(prompt))
    pair.run()
    for name, outcome in pair.outcomes.items():
        assert [*whole[: int(name)], *outcome.token_ids] == whole, f"resumed with {name}"


class LateMatcher:
    """A wrong matcher: its grammar takes effect one token late."""

    failure = ""

    def __init__(self, grammar: Matcher, *, has_begun: bool = False) -> None:
        self._grammar = grammar
        self._has_begun = has_begun

    def copy(self) -> LateMatcher:
        return LateMatcher(self._grammar.copy(), has_begun=self._has_begun)

    def accept(self, token_id: int) -> bool:
        if self._has_begun:
            return self._grammar.accept(token_id)
        self._has_begun = True
        self._grammar.accept(token_id)
        return True

    def fill(self, mask: Mask) -> None:
        if self._has_begun:
            self._grammar.fill(mask)
        else:
            mask[:] = ALL_ALLOWED

    def forced(self) -> Sequence[int]:
        return self._grammar.forced() if self._has_begun else ()


class TwiceMatcher:
    """A wrong matcher: it accepts the first token, which comes with the handoff, twice."""

    failure = ""

    def __init__(self, matcher: Matcher, *, has_begun: bool = False) -> None:
        self._matcher = matcher
        self._has_begun = has_begun

    def copy(self) -> TwiceMatcher:
        return TwiceMatcher(self._matcher.copy(), has_begun=self._has_begun)

    def accept(self, token_id: int) -> bool:
        is_allowed = self._matcher.accept(token_id)
        if not self._has_begun:
            self._matcher.accept(token_id)
        self._has_begun = True
        return is_allowed

    def fill(self, mask: Mask) -> None:
        self._matcher.fill(mask)

    def forced(self) -> Sequence[int]:
        return self._matcher.forced()


class ForgetfulMatcher:
    """A wrong matcher: its copies, which follow drafts, do not notice the end of the reasoning."""

    failure = ""

    def __init__(self, matcher: Matcher, without_grammar: Matcher, reasoning: Reasoning) -> None:
        self._matcher = matcher
        self._without_grammar = without_grammar
        self._markers = Markers(reasoning)
        self._place = self._markers.beginning

    def copy(self) -> Matcher:
        return (self._matcher if self._place.part is Part.ANSWER else self._without_grammar).copy()

    def accept(self, token_id: int) -> bool:
        self._place, _ = self._markers.after(self._place, PIECES[token_id].encode())
        self._without_grammar.accept(token_id)
        return self._matcher.accept(token_id)

    def fill(self, mask: Mask) -> None:
        self._matcher.fill(mask)

    def forced(self) -> Sequence[int]:
        return self._matcher.forced()


def grammar_unknown_to_drafts(sampling: ResolvedSampling, output_ids: Sequence[int]) -> Matcher:
    grammars, reasoning = grammars_of(SMALL_VOCAB_SIZE), sampling.reasoning
    assert reasoning is not None and not output_ids
    without_grammar = grammars.matcher(None, (), reasoning)
    return ForgetfulMatcher(grammars.matcher(sampling.grammar, (), reasoning), without_grammar, reasoning)


def grammar_one_token_late(sampling: ResolvedSampling, output_ids: Sequence[int]) -> Matcher:
    tokenizer, grammars = TextTokenizer(TOKENIZER), grammars_of(SMALL_VOCAB_SIZE)
    bytes_of = [tokenizer.bytes_of(each) for each in EVERY]
    grammar = LateMatcher(grammars.matcher(sampling.grammar)) if sampling.grammar else None
    assert sampling.reasoning is not None
    tokens = MarkerTokens(
        sampling.reasoning, TokenTexts(bytes_of), lambda text: [PIECES.index(char) for char in text.decode()]
    )
    matcher = ReasoningMatcher(tokens, sampling.reasoning, grammar, (END_ID,))
    assert all(map(matcher.accept, output_ids))
    return matcher


def first_token_counted_twice(sampling: ResolvedSampling, output_ids: Sequence[int]) -> Matcher:
    return TwiceMatcher(grammars_of(SMALL_VOCAB_SIZE).matcher(sampling.grammar, output_ids, sampling.reasoning))


@pytest.mark.parametrize("mutant", [grammar_one_token_late, grammar_unknown_to_drafts, first_token_counted_twice])
def test_it_is_seen(
    mutant: NewMatcher, make_pair: MakePair, leaning: Drafted, cases: list[Case], expected: list[list[int]]
) -> None:
    with pytest.raises(AssertionError, match="differs"):
        check_greedy(make_pair, leaning, cases, expected, PairOptions(), draft=leaning.head, new_matcher=mutant)


@pytest.mark.parametrize("has_limit", [True, False])
def test_an_output_is_no_shorter_than_asked_for(has_limit: bool, make_pair: MakePair, leaning: Drafted) -> None:
    """`min_tokens` is enforced by the masks if the reasoning has a limit, and otherwise when the token is drawn."""
    reasoning = Reasoning("", "05", is_open=True, max_tokens=3 if has_limit else None)
    sampling = replace(sampling_of(0, Case(reasoning, None)), logit_bias=((END_ID, 100.0),), min_tokens=9)
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    outcome = pair.submit("short", PROMPTS[0], sampling)
    pair.run()
    assert outcome.token_ids.index(END_ID) == 9
    assert has_limit == (outcome.token_ids[3:5] == [PIECES.index("0"), PIECES.index("5")])
