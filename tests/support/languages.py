"""Small regular languages as grammars, with a matcher of their own that uses no library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import Mask
from common.sampling.params import ResolvedSampling
from tests.support.models import END_ID, SMALL_VOCAB_SIZE, make_tokenizer
from tests.support.pair import InProcessPair

NEW_TOKENS = 40
TOKENIZER = make_tokenizer(SMALL_VOCAB_SIZE)
END = "<end>"
PROMPTS = [[4 + (7 * number + 3 * place) % 56 for place in range(6 + number)] for number in range(8)]


@dataclass(frozen=True)
class Language:
    """A regular expression and, as an independent second definition, the characters that may follow a text in its
    language.
    """

    regex: str
    following: Callable[[str], str]

    @property
    def grammar(self) -> Grammar:
        return Grammar(GrammarKind.REGEX, self.regex)

    def allowed_after(self, output_ids: Sequence[int]) -> list[int]:
        """Returns the tokens that may come next."""
        following = self.following("".join(TOKENIZER.convert_ids_to_tokens(output_ids)))
        allowed: list[int] = TOKENIZER.convert_tokens_to_ids(list(following.removesuffix(END)))
        return [*allowed, END_ID] if following.endswith(END) else allowed


def _runs(text: str) -> str:
    return {"b": "c", "d": END}.get(text[-1:], "abd")


def _keys(text: str) -> str:
    place = len(text) % 8
    return "KEYNAME"[place - 1] if place else "abc" + (END if text else "")


LANGUAGES = (
    Language("[abc]{9}z", lambda text: "abc" if len(text) < 9 else "z" if len(text) == 9 else END),
    Language("(a|bc)*d", _runs),
    Language("([A-F][a-f])+", lambda text: "abcdef" if len(text) % 2 else "ABCDEF" + (END if text else "")),
    Language("([abc]KEYNAME)+", _keys),
)


def sampling_of(number: int, *, temperature: float, is_free: bool = False, **options: Any) -> ResolvedSampling:
    return ResolvedSampling(
        seed=number,
        max_tokens=NEW_TOKENS,
        temperature=temperature,
        eos_token_ids=(END_ID,),
        grammar=None if is_free else LANGUAGES[number % len(LANGUAGES)].grammar,
        **options,
    )


def submit_all(
    pair: InProcessPair, *, temperature: float = 0.0, at_once: bool = True, **sampling: Any
) -> InProcessPair:
    """Runs each prompt with a grammar (request "3 bound") and without one ("3 free"), together or one after another."""
    for number, prompt in enumerate(PROMPTS):
        for is_free in (True, False):  # what the first leaves in the cache, the second finds
            name = f"{number} {'free' if is_free else 'bound'}"
            pair.submit(
                name, prompt, sampling_of(number, temperature=temperature, is_free=is_free, **sampling), cache_salt=""
            )
            if not at_once:
                pair.run()
    pair.finish_prefill()
    pair.run()
    return pair


class LanguageMatcher:
    """A Matcher of one of LANGUAGES, which it finds by the grammar."""

    failure = ""

    def __init__(self, grammar: Grammar, output_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._language = next(language for language in LANGUAGES if language.grammar == grammar)
        self._output_ids = list(output_ids)

    @classmethod
    def of(cls, sampling: ResolvedSampling, output_ids: Sequence[int]) -> LanguageMatcher:
        assert sampling.grammar is not None
        return cls(sampling.grammar, output_ids)

    def copy(self) -> LanguageMatcher:
        return LanguageMatcher(self._grammar, self._output_ids)

    def accept(self, token_id: int) -> bool:
        is_allowed = token_id != END_ID and token_id in self._language.allowed_after(self._output_ids)
        if is_allowed:
            self._output_ids.append(token_id)
        return is_allowed

    def forced(self) -> Sequence[int]:
        ahead = self._output_ids.copy()
        while len(allowed := self._language.allowed_after(ahead)) == 1 and allowed != [END_ID]:
            ahead += allowed
        return ahead[len(self._output_ids) :]

    def fill(self, mask: Mask) -> None:
        mask[:] = 0
        for token_id in self._language.allowed_after(self._output_ids):
            mask.view(np.uint8)[token_id // 8] |= 1 << token_id % 8
