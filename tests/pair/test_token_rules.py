"""Tests that `allowed_token_ids` and `bad_words` leave the output of the masked distribution, in every mode of the
pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import InvalidRequest
from common.grammar.grammar import TokenRules
from common.sampling.params import ResolvedSampling
from tests.support.drafted import SHAPES, Counts, Drafted
from tests.support.languages import LANGUAGES, NEW_TOKENS, PROMPTS, TOKENIZER
from tests.support.models import END_ID, SMALL_VOCAB_SIZE
from tests.support.pair import InProcessPair, MakePair, PairOptions

GRAMMAR_OF = {5: LANGUAGES[1], 6: LANGUAGES[2]}
"""The languages of the two requests that have a grammar besides their token rules, by the request's number."""


def spelled(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.convert_tokens_to_ids(list(text)))


RULES_BESIDE_GRAMMARS = {
    5: TokenRules(forbidden=(spelled("aa"), spelled("bcb"))),
    6: TokenRules(forbidden=(spelled("Aa"), spelled("Bb"), spelled("f"), spelled("aCc"))),
}


def allowed_after(output: Sequence[int], rules: TokenRules, number: int) -> list[int]:
    """Returns the tokens that may come next, found by trying each. A request with a grammar, by its `number`, must keep
    that too.
    """
    candidates = GRAMMAR_OF[number].allowed_after(output) if number in GRAMMAR_OF else range(SMALL_VOCAB_SIZE)
    return [
        token_id
        for token_id in candidates
        if token_id in (rules.allowed_ids or candidates)
        and not any(tuple([*output, token_id][-len(sequence) :]) == sequence for sequence in rules.forbidden)
    ]


def greedy(model: Any, prompt: Sequence[int], rules: TokenRules, number: int) -> list[int]:
    """Returns the greedy output after the prompt, with each choice limited to the tokens that the rules allow, computed
    by transformers.
    """
    output: list[int] = []
    while len(output) < NEW_TOKENS and END_ID not in output:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        allowed = allowed_after(output, rules, number)
        output.append(allowed[int(logits[allowed].argmax())])
    return output


@pytest.fixture(scope="module")
def model(leaning: Drafted) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(leaning.directory), dtype=torch.float32)


@pytest.fixture(scope="module")
def free(model: Any) -> list[list[int]]:
    """The output of each prompt without rules."""
    with torch.no_grad():
        return [greedy(model, prompt, TokenRules(), number) for number, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def rules(free: list[list[int]]) -> list[TokenRules]:
    """Rules for each prompt that its free output breaks: at its first token, in its middle, and several times."""
    found = []
    for number, output in enumerate(free):
        pairs = tuple(pairwise(output))
        kinds = (
            TokenRules(allowed_ids=tuple(range(0, SMALL_VOCAB_SIZE, 2))),
            TokenRules(forbidden=((output[0],), (output[-2],))),
            TokenRules(forbidden=(pairs[1], pairs[-2], tuple(output[-4:-1]))),
            TokenRules(allowed_ids=tuple(sorted({END_ID, *output, 9, 12, 30})), forbidden=pairs[:3]),
        )
        found.append(RULES_BESIDE_GRAMMARS.get(number, kinds[number % 4]))
    return found


@pytest.fixture(scope="module")
def expected(model: Any, rules: list[TokenRules]) -> list[list[int]]:
    with torch.no_grad():
        return [greedy(model, prompt, rules[number], number) for number, prompt in enumerate(PROMPTS)]


def sampling_of(number: int, rules: TokenRules, **options: Any) -> ResolvedSampling:
    language = GRAMMAR_OF.get(number)
    return ResolvedSampling(
        **{
            "seed": number,
            "max_tokens": NEW_TOKENS,
            "temperature": 0.0,
            "eos_token_ids": (END_ID,),
            "grammar": None if language is None else language.grammar,
            "token_rules": rules,
            **options,
        }
    )


def run(pair: InProcessPair, rules: list[TokenRules], *, at_once: bool = True, **options: Any) -> dict[str, list[int]]:
    """Runs each prompt with its rules (request "3 bound") and without ("3 free"), together or one after another."""
    for number, prompt in enumerate(PROMPTS):
        free = ResolvedSampling(seed=number, max_tokens=NEW_TOKENS, temperature=0.0, eos_token_ids=(END_ID,))
        pair.submit(f"{number} free", prompt, free, cache_salt="")
        pair.submit(f"{number} bound", prompt, sampling_of(number, rules[number], **options), cache_salt="")
        if not at_once:
            pair.run()
    pair.run()
    return {name: outcome.token_ids for name, outcome in pair.outcomes.items()}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("shape", [None, "chain-4", "tree-4x3-15"])
@pytest.mark.parametrize("local_prefill_tokens", [0, 40])
def test_greedy_output_is_the_likeliest_that_the_rules_allow(
    local_prefill_tokens: int,
    shape: str | None,
    overlap: bool,
    make_pair: MakePair,
    leaning: Drafted,
    rules: list[TokenRules],
    expected: list[list[int]],
) -> None:
    options = PairOptions(overlap=overlap, local_prefill_tokens=local_prefill_tokens, **SHAPES.get(shape or "", {}))
    pair = make_pair(leaning.target, options, draft=leaning.head if shape else None)
    token_ids = run(pair, rules)
    for number, each in enumerate(expected):
        assert token_ids[f"{number} bound"] == each, number
        if number not in GRAMMAR_OF:
            assert token_ids[f"{number} free"] != each, "the rules changed nothing"
    if shape:
        bound = [outcome for name, outcome in pair.outcomes.items() if name.endswith("bound")]
        assert Counts.of(bound).num_accepted > 10


@pytest.mark.parametrize("shape", ["chain-4", "tree-4x3-15"])
def test_sampled_output_is_the_same_in_every_mode(
    shape: str, make_pair: MakePair, leaning: Drafted, rules: list[TokenRules]
) -> None:
    options = PairOptions(**SHAPES[shape])
    cold = replace(options, prefill_caches=False, decode_caches=False, overlap=False)
    sampling = {"temperature": 0.9, "top_p": 0.95, "min_tokens": 20}
    plain = run(make_pair(leaning.target, cold), rules, at_once=False, **sampling)
    assert run(make_pair(leaning.target, options, draft=leaning.head), rules, **sampling) == plain
    for number in range(len(PROMPTS)):
        output = plain[f"{number} bound"]
        for place, token_id in enumerate(output):
            assert token_id in allowed_after(output[:place], rules[number], number)
        if number not in GRAMMAR_OF:
            assert END_ID not in output[:20]


def test_a_retracted_request_keeps_its_rules(make_pair: MakePair, leaning: Drafted, rules: list[TokenRules]) -> None:
    def outcomes(decode_tokens: int) -> InProcessPair:
        pair = make_pair(leaning.target, PairOptions(decode_tokens=decode_tokens), draft=leaning.head)
        for number, prompt in enumerate(PROMPTS):
            pair.submit(str(number), prompt, sampling_of(number, rules[number], temperature=0.9))
        pair.finish_prefill()
        pair.run()
        return pair

    undisturbed, pair = outcomes(2048), outcomes(128)
    assert undisturbed.decode.load().num_retractions == 0 < pair.decode.load().num_retractions
    for name, outcome in undisturbed.outcomes.items():
        assert pair.outcomes[name].token_ids == outcome.token_ids


@pytest.mark.parametrize("num_brought", [1, 3])
def test_a_resumed_request_keeps_its_rules(
    num_brought: int, make_pair: MakePair, leaning: Drafted, rules: list[TokenRules], expected: list[list[int]]
) -> None:
    """A forbidden sequence may begin in the output of the earlier stream."""
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    for number, prompt in enumerate(PROMPTS):
        if END_ID not in (brought := expected[number][:num_brought]):
            sampling = sampling_of(number, rules[number])
            pair.submit(str(number), [*prompt, *brought], sampling, prompt_len=len(prompt))
    pair.run()
    assert len(pair.outcomes) > 4
    for name, outcome in pair.outcomes.items():
        assert [*expected[int(name)][:num_brought], *outcome.token_ids] == expected[int(name)]


@pytest.mark.parametrize("local_prefill_tokens", [0, 40])
@pytest.mark.parametrize("has_head", [True, False])
def test_rules_that_leave_no_token_fail_their_request_alone(
    has_head: bool, local_prefill_tokens: int, make_pair: MakePair, leaning: Drafted
) -> None:
    """The rules `later` allow only tokens 9 and 12, in turns, and no more than three of them."""
    options = PairOptions(local_prefill_tokens=local_prefill_tokens)
    pair = make_pair(leaning.target, options, draft=leaning.head if has_head else None)
    at_once = TokenRules(allowed_ids=(9,), forbidden=((9,),))
    later = TokenRules(allowed_ids=(9, 12), forbidden=((9, 9), (12, 12), (9, 12, 9, 12), (12, 9, 12, 9)))
    failing = {
        name: pair.submit(name, PROMPTS[2], sampling_of(0, rules), cache_salt="")
        for name, rules in (("at once", at_once), ("later", later), ("later again", later))
    }
    other = pair.submit("other", PROMPTS[2], sampling_of(1, TokenRules(forbidden=((9,),))), cache_salt="")
    pair.run()
    for name, outcome in failing.items():
        assert isinstance(outcome.error, InvalidRequest) and outcome.error.field == "sampling.allowed_token_ids", name
        assert outcome.token_ids in ([], [9], [12], [9, 12], [12, 9], [9, 12, 9], [12, 9, 12])
    assert other.finished is not None
    assert pair.decode.load().num_row_retries == 0


def test_rules_that_leave_no_token_after_accepted_drafts_fail_their_request_too(
    make_pair: MakePair, leaning: Drafted, free: list[list[int]]
) -> None:
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    expected = {}
    for number, (prompt, output) in enumerate(zip(PROMPTS, free, strict=True)):
        ends = [place for place in range(4, len(output) - 1) if output[place] not in output[:place]]
        for end in ends[:3] if number not in GRAMMAR_OF else ():
            allowed = tuple(sorted(set(output)))
            rules = TokenRules(allowed, tuple((output[end], token_id) for token_id in allowed))
            name = f"{number} {end}"
            expected[name] = output[: end + 1]
            pair.submit(name, prompt, sampling_of(0, rules))
    pair.run()
    assert len(expected) > 10
    for name, outcome in pair.outcomes.items():
        assert isinstance(outcome.error, InvalidRequest), (name, outcome.error)
        assert outcome.token_ids == expected[name][: len(outcome.token_ids)]
    assert any(len(outcome.token_ids) < len(expected[name]) for name, outcome in pair.outcomes.items())
