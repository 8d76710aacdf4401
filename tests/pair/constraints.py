"""What restricts an output: a grammar, reasoning before it or with a limit, rules for its tokens, or several of these.

The tokens that may come next are found without a matcher, so that matchers can be compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from common.grammar.grammar import TokenRules
from common.grammar.reasoning import Reasoning
from common.sampling.params import ResolvedSampling
from tests.support.languages import LANGUAGES, NEW_TOKENS, PROMPTS, TOKENIZER, Language
from tests.support.models import END_ID, SMALL_VOCAB_SIZE

PIECES: list[str] = TOKENIZER.convert_ids_to_tokens(range(SMALL_VOCAB_SIZE))
EVERY = range(SMALL_VOCAB_SIZE)
NO_LETTERS = [
    token_id
    for token_id, piece in enumerate(PIECES)
    if not (piece.isascii() and piece.isalnum()) and token_id != END_ID
]
LOGIT_BIAS = -100.0


def text_of(output_ids: Sequence[int]) -> str:
    return "".join(PIECES[each] for each in output_ids)


def spelled(text: str) -> tuple[int, ...]:
    return tuple(map(PIECES.index, text))


@dataclass(frozen=True)
class Constraint:
    """The restrictions of one output. With `letters_only`, which reasoning needs, tokens that are no letter and no
    digit are unlikely, because markers are looked for in the text.
    """

    language: Language | None = None
    reasoning: Reasoning | None = None
    rules: TokenRules | None = None
    letters_only: bool = False

    def sampling(self, seed: int, **options: Any) -> ResolvedSampling:
        return ResolvedSampling(
            **{
                "seed": seed,
                "max_tokens": NEW_TOKENS,
                "temperature": 0.0,
                "eos_token_ids": (END_ID,),
                "logit_bias": tuple((token_id, LOGIT_BIAS) for token_id in NO_LETTERS if self.letters_only),
                "grammar": self.language and self.language.grammar,
                "reasoning": self.reasoning,
                "token_rules": self.rules,
                **options,
            }
        )

    def allowed_after(self, output_ids: Sequence[int]) -> list[int]:
        """Returns the tokens that may come next."""
        allowed = self._allowed_by_text(output_ids) if self.reasoning else self._allowed_in_answer(output_ids)
        if self.rules is None:
            return allowed
        return [
            token_id
            for token_id in allowed
            if token_id in (self.rules.allowed_ids or EVERY)
            and not any(tuple([*output_ids, token_id][-len(ids) :]) == ids for ids in self.rules.forbidden)
        ]

    def num_reasoning(self, output_ids: Sequence[int]) -> int | None:
        """Returns the number of tokens up to the end of the reasoning, or None if it has not ended or not begun."""
        assert self.reasoning is not None
        start = "" if self.reasoning.is_open else self.reasoning.start
        for number in range(len(output_ids) + 1):
            text = text_of(output_ids[:number])
            if text.startswith(start) and self.reasoning.end in text.removeprefix(start):
                return number
        return None

    @property
    def _free(self) -> list[int]:
        """The tokens that may come in reasoning. Before a grammar's answer, the end token is not among them."""
        return [each for each in EVERY if each != END_ID or self.language is None]

    def _allowed_in_answer(self, output_ids: Sequence[int]) -> list[int]:
        return list(EVERY) if self.language is None else self.language.allowed_after(output_ids)

    def _allowed_by_text(self, output_ids: Sequence[int]) -> list[int]:
        reasoning, text = self.reasoning, text_of(output_ids)
        assert reasoning is not None
        if (num_reasoning := self.num_reasoning(output_ids)) is not None:
            return self._allowed_in_answer(output_ids[num_reasoning:])
        if not reasoning.is_open and not text.startswith(reasoning.start):
            return self._allowed_before_reasoning(output_ids)
        if reasoning.max_tokens is not None and len(output_ids) >= reasoning.max_tokens:
            begun = max(n for n in range(len(reasoning.end)) if text.endswith(reasoning.end[:n]))
            return [PIECES.index(reasoning.end[begun])]
        return self._free

    def _allowed_before_reasoning(self, output_ids: Sequence[int]) -> list[int]:
        assert self.reasoning is not None
        start, text = self.reasoning.start, text_of(output_ids)
        opening = [PIECES.index(start[len(text)])] if start.startswith(text) else []
        if self.language is None:
            is_forbidden = self.reasoning.max_tokens == 0 and len(text) == len(start) - 1
            return [each for each in self._free if not (is_forbidden and each in opening)]
        of_answer = self.language.allowed_after
        is_answer = all(each in of_answer(output_ids[:place]) for place, each in enumerate(output_ids))
        return sorted({*opening, *(of_answer(output_ids) if is_answer else [])})


LIMITED = (
    Constraint(LANGUAGES[1], Reasoning("", "0Z5", is_open=True, max_tokens=5), letters_only=True),
    Constraint(None, Reasoning("", "0Z5", is_open=True, max_tokens=7), letters_only=True),
    Constraint(LANGUAGES[2], Reasoning("", "Zz", is_open=True, max_tokens=0), letters_only=True),
)
"""Reasoning that its limit ends, whatever the output."""

RULES_BESIDE_GRAMMARS = (
    Constraint(LANGUAGES[1], rules=TokenRules(forbidden=(spelled("aa"), spelled("bcb")))),
    Constraint(LANGUAGES[2], rules=TokenRules(forbidden=(*map(spelled, ("Aa", "Bb", "f", "aCc")),))),
)
UNBOUND = Constraint(rules=TokenRules(tuple(each for each in EVERY if each != END_ID)))
"""Forbids an end alone."""
UNBOUND_LETTERS = replace(UNBOUND, letters_only=True)


def greedy(model: Any, prompts: Sequence[Sequence[int]], constraints: Sequence[Constraint]) -> list[list[int]]:
    """Returns the greedy output after each prompt, with each choice limited to the tokens that the constraint allows,
    computed by transformers. The prompts form one batch, padded on the left.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(NEW_TOKENS):
        rows = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        width = max(map(len, rows))
        token_ids = torch.tensor([[END_ID] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(token_ids, attention_mask=mask, position_ids=positions).logits[:, -1]
        for output, constraint, of_row in zip(outputs, constraints, logits, strict=True):
            if END_ID not in output:
                of_row[NO_LETTERS] += LOGIT_BIAS * constraint.letters_only
                allowed = constraint.allowed_after(output)
                output.append(allowed[int(of_row[allowed].argmax())])
    return outputs


def constraints_against(free: Sequence[Sequence[int]], letters: Sequence[Sequence[int]]) -> dict[str, Constraint]:
    """Returns constraints by kind and number, given the outputs after PROMPTS with UNBOUND and with UNBOUND_LETTERS.
    The prompt of each is the one of PROMPTS with its number.

    Reasoning begins or ends where the unrestricted output has some text, and rules forbid what that output has: its
    first token, something in its middle, and several sequences.
    """
    reasoning = (
        Constraint(LANGUAGES[0], Reasoning("", _new_text(letters[0], 4), is_open=True)),
        Constraint(LANGUAGES[2], Reasoning(text_of(letters[1][:2]), _new_text(letters[1], 7), max_tokens=20)),
        LIMITED[0],
        LIMITED[1],
        Constraint(LANGUAGES[1], Reasoning("05", "0")),
        LIMITED[2],
        Constraint(LANGUAGES[0], Reasoning("", text_of(letters[6][5:6]) + "06", is_open=True, max_tokens=6)),
        Constraint(None, Reasoning(text_of(letters[7][:2]), "0", max_tokens=0)),
    )
    return {
        **{f"grammar {number}": Constraint(LANGUAGES[number % len(LANGUAGES)]) for number in range(len(PROMPTS))},
        **{f"reasoning {number}": replace(each, letters_only=True) for number, each in enumerate(reasoning)},
        **{f"rules {number}": _rules_against(output, number) for number, output in enumerate(free)},
    }


def _new_text(output_ids: Sequence[int], place: int) -> str:
    """Returns two characters of the output that occur for the first time at index `place` or shortly after it."""
    text = text_of(output_ids)
    return next(text[at : at + 2] for at in range(place, len(text)) if text.find(text[at : at + 2]) == at)


def _rules_against(output: Sequence[int], number: int) -> Constraint:
    pairs = tuple(pairwise(output))
    kinds = (
        TokenRules(allowed_ids=tuple(range(0, SMALL_VOCAB_SIZE, 2))),
        TokenRules(forbidden=((output[0],), (output[-2],))),
        TokenRules(forbidden=(pairs[1], pairs[-2], tuple(output[-4:-1]))),
        TokenRules(allowed_ids=tuple(sorted({END_ID, *output, 9, 12, 30})), forbidden=pairs[:3]),
    )
    beside = {5: RULES_BESIDE_GRAMMARS[0], 6: RULES_BESIDE_GRAMMARS[1]}
    return beside.get(number, Constraint(rules=kinds[number % len(kinds)]))
