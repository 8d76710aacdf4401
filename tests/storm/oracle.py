"""Requests whose every token is known beforehand. They share beginnings with, continue or repeat earlier ones.

The expected tokens come from running each request alone in one process, without overlap, drafts and prefix cache.
Greedy ones are also compared with transformers' `generate`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from baton.requests import SamplingOptions
from common.grammar.grammar import Grammar, GrammarKind
from common.sampling.params import ResolvedSampling
from tests.support.loading import load_target
from tests.support.models import END_ID
from tests.support.pair import InProcessPair, PairOptions
from tests.support.reference import generate_greedily

LOGPROB_TOLERANCE = 1e-4
FIRST_ID = 4  # lower ids are special tokens
KINDS: tuple[SamplingOptions, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.875, "logprobs": 2},
    {"temperature": 0.0},
    {"temperature": 0.75, "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 1.25, "min_p": 0.03125, "top_k": 40, "logit_bias": {9: 2.0, 11: -3.0}, "logprobs": 0},
    {"temperature": 0.0, "regex": "([A-F][a-f])+"},
    {"temperature": 1.0, "top_p": 0.875, "regex": "(a|bc)*d", "logprobs": 1},
)
"""Sampling options whose numbers a float on the wire holds exactly. Under a grammar, the output has its full length
unless the grammar ends it.
"""

SALTS = (None, "a", None, "b")
"""The cache salts of new conversations, in turn. With None the service chooses the namespace."""

OTHER_SALT = "c"
MIN_SHARED_PROMPT = 6


class Relation(Enum):
    """The beginning that a case's prompt shares with an earlier case. It is in that case's namespace, if not said
    otherwise.
    """

    NONE = auto()
    BEGINNING = auto()  # a third to two thirds of its prompt
    CONVERSATION = auto()  # its prompt and its output: the next turn
    BEGINNING_ONLY = auto()  # a beginning, in another namespace
    PROMPT = auto()  # it is another choice of the same prompt
    UNCACHED = auto()  # a beginning, but no cached KV is used nor left


RELATIONS = (
    Relation.NONE,
    Relation.BEGINNING,
    Relation.CONVERSATION,
    Relation.BEGINNING_ONLY,
    Relation.BEGINNING,
    Relation.PROMPT,
    Relation.UNCACHED,
    Relation.BEGINNING,
)
"""The relation of each case to an earlier one. The cases take these in turn."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its expected output. `logprobs` are those of the chosen tokens, and empty if none are asked for.
    Unless it `is_cached`, the request has `cache_prompt` False.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingOptions
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cache_salt: str | None = None
    choice_index: int = 0
    is_cached: bool = True

    @property
    def cache_key(self) -> tuple[str | None, tuple[int, ...]]:
        """The namespace and the tokens that decide what the prefix cache may contain. Requests with the same key find
        each other's whole prompt.
        """
        return self.cache_salt, self.prompt

    def check(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_whole: bool) -> str | None:
        """Describes what is wrong with an output, or returns None. If the output is not `is_whole`, only its beginning
        arrived.
        """
        wanted = self.token_ids if is_whole else self.token_ids[: len(token_ids)]
        if tuple(token_ids) != wanted:
            return f"case {self.number}: tokens {list(token_ids)}, not {list(wanted)}"
        if len(logprobs) != (len(token_ids) if self.logprobs else 0):
            return f"case {self.number}: {len(logprobs)} log-probabilities for {len(token_ids)} tokens"
        pairs = zip(logprobs, self.logprobs, strict=False)
        if any(abs(value - known) > LOGPROB_TOLERANCE for value, known in pairs):
            return f"case {self.number}: other log-probabilities"
        return None


_PROMPT_LENS, _OUTPUT_LENS = range(1, 25), range(8, 73)


def make_cases(model_dir: Path, num_cases: int) -> list[Case]:
    """Returns cases of every relation, output length and kind of sampling. The number of tokens that a prompt adds to
    what it shares is in `_PROMPT_LENS`. Greedy requests with nearly tied choices are left out.
    """
    draw = random.Random(0)
    target = load_target(model_dir, device="cpu", dtype="float32")
    longest = 2 * _PROMPT_LENS[-1] + _OUTPUT_LENS[-1]
    pair = InProcessPair(
        target,
        options=PairOptions(overlap=False, context_tokens=longest),
    )
    cases: list[Case] = []
    try:
        while len(cases) < num_cases:
            number = len(cases)
            sampling: SamplingOptions = {
                "max_tokens": draw.choice(_OUTPUT_LENS),
                "ignore_eos": True,
                "seed": (1 << 62) + number,
                **KINDS[number % len(KINDS)],
            }
            if "regex" in sampling:
                sampling["ignore_eos"] = False
                sampling["min_tokens"] = sampling["max_tokens"]
            own = tuple(draw.randrange(FIRST_ID, target.vocab_size) for _ in range(draw.choice(_PROMPT_LENS)))
            case = Case(number, own, sampling, (), (), cache_salt=SALTS[number // len(RELATIONS) % len(SALTS)])
            case = _related(case, cases, RELATIONS[number % len(RELATIONS)], draw, max_tokens=2 * _PROMPT_LENS[-1])
            if (known := _run(pair, model_dir, case)) is not None:
                cases.append(known)
    finally:
        pair.close()
    return cases


def _related(case: Case, cases: Sequence[Case], relation: Relation, draw: random.Random, *, max_tokens: int) -> Case:
    """Returns the case with another prompt, of at most `max_tokens` tokens, which has this relation to the prompt of
    one of `cases`.
    """
    if relation is Relation.PROMPT and (sampled := [each for each in cases if each.sampling["temperature"]]):
        other = draw.choice(sampled)
        return replace(
            case,
            prompt=other.prompt,
            sampling=other.sampling,
            cache_salt=other.cache_salt,
            choice_index=other.choice_index + 1,
        )
    others = [each for each in cases if each.is_cached and len(each.prompt) >= MIN_SHARED_PROMPT]
    if relation is Relation.NONE or not others:
        return case
    other = draw.choice(others)
    case = replace(case, cache_salt=other.cache_salt)
    if relation is Relation.CONVERSATION:
        said = (*other.prompt, *other.token_ids)
        return replace(case, prompt=(*said[: max_tokens - len(case.prompt)], *case.prompt))
    length = len(other.prompt)
    shared = other.prompt[: draw.randint(-(-length // 3), 2 * length // 3)]
    case = replace(case, prompt=(*shared, *case.prompt)[: max(max_tokens // 2, len(shared) + 1)])
    if relation is Relation.BEGINNING_ONLY:
        return replace(case, cache_salt=OTHER_SALT)
    return replace(case, is_cached=relation is not Relation.UNCACHED)


def _run(pair: InProcessPair, model_dir: Path, case: Case) -> Case | None:
    prompt, sampling = list(case.prompt), case.sampling
    outcome = pair.submit(str(case.number), prompt, _resolved(sampling), choice_index=case.choice_index)
    pair.run()
    pair.outcomes.clear()
    assert outcome.error is None, outcome.error
    if (
        sampling == {**sampling, **KINDS[0]}
        and "regex" not in sampling
        and not _is_generates(model_dir, prompt, outcome.token_ids)
    ):
        return None
    logprobs = tuple(entry.chosen for entry in outcome.logprobs)
    return replace(case, token_ids=tuple(outcome.token_ids), logprobs=logprobs)


def _is_generates(model_dir: Path, prompt: list[int], token_ids: list[int]) -> bool:
    """Returns True if `generate` gives these tokens, and False if its choices nearly tie. Raises AssertionError if it
    clearly gives other tokens.
    """
    try:
        reference = generate_greedily(model_dir, prompt, len(token_ids))
    except AssertionError:
        return False
    assert reference.token_ids == token_ids, f"{prompt}: generate gives {reference.token_ids}, not {token_ids}"
    return True


def _resolved(sampling: SamplingOptions) -> ResolvedSampling:
    """Returns the options in the form into which the edge resolves them for the engine."""
    resolved = ("ignore_eos", "logprobs", "logit_bias", "regex")
    values = {name: value for name, value in sampling.items() if name not in resolved}
    regex = sampling.get("regex")
    return ResolvedSampling(
        **values,  # type: ignore[arg-type]
        eos_token_ids=() if sampling["ignore_eos"] else (END_ID,),
        grammar=None if regex is None else Grammar(GrammarKind.REGEX, regex),
        num_logprobs=sampling.get("logprobs"),
        logit_bias=tuple(sorted((sampling.get("logit_bias") or {}).items())),
    )
