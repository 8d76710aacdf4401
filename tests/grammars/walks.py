"""Draws random outputs under a grammar, as a model would that knows nothing but the masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.grammar.matcher import Matcher, num_words
from common.text.tokenizer import TextTokenizer

_CLOSING = frozenset(b'"}]')
_HOSTILE = frozenset(b'"\\{}[],:/\x00\x01\x1f\x7f')


@dataclass(frozen=True, slots=True)
class Walk:
    """A random output, and whether it ended by an end token. `failure` is the matcher's, or "" if it has none."""

    output: bytes
    is_complete: bool
    failure: str = ""


class Walker:
    """Draws random outputs (walks) of one tokenizer's tokens under the masks of a matcher.

    A walk draws uniformly among the allowed tokens, or is hostile: it prefers tokens that end in the middle of a
    character, that escape, or that hold several parts of a document. Both kinds sometimes prefer tokens that close
    something, because few walks would end otherwise.
    """

    def __init__(self, tokenizer: TextTokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._bytes = [tokenizer.bytes_of(token_id) for token_id in range(vocab_size)]
        self._num_words = num_words(vocab_size)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._is_closing = np.array([token[:1] != b"" and token[0] in _CLOSING for token in self._bytes])
        self._is_hostile = np.array([_is_hostile(token) for token in self._bytes])

    def allowed(self, matcher: Matcher) -> NDArray[np.int64]:
        """Returns the tokens that the matcher allows next."""
        mask = np.zeros(self._num_words, np.int32)
        matcher.fill(mask)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))

    def may_end(self, matcher: Matcher) -> bool:
        return not self._eos_token_ids.isdisjoint(self.allowed(matcher).tolist())

    def walk(self, matcher: Matcher, draw: random.Random, *, is_hostile: bool, max_tokens: int) -> Walk:
        output = b""
        for _ in range(max_tokens):
            allowed = self.allowed(matcher)
            if matcher.failure or not len(allowed):
                return Walk(output, is_complete=False, failure=matcher.failure or "nothing may come next")
            forced = matcher.forced()
            assert not forced or allowed.tolist() == [forced[0]], (
                f"after {output!r} the mask allows more than is forced"
            )
            ends = [token_id for token_id in self._eos_token_ids if token_id in allowed]
            if ends and (len(allowed) == len(ends) or draw.random() < 0.5):
                return Walk(output, is_complete=True)
            token_id = self._drawn(allowed, draw, is_hostile)
            if not matcher.accept(token_id):
                assert matcher.failure, f"after {output!r} the mask allows {self._bytes[token_id]!r}"
                return Walk(output, is_complete=False, failure=matcher.failure)
            output += self._bytes[token_id]
        return Walk(output, is_complete=False)

    def _drawn(self, allowed: NDArray[np.int64], draw: random.Random, is_hostile: bool) -> int:
        chance = draw.random()
        preferred = allowed
        if chance < 0.3:
            preferred = allowed[self._is_closing[allowed]]
        elif is_hostile and chance < 0.9:
            preferred = allowed[self._is_hostile[allowed]]
        choices = preferred if len(preferred) else allowed
        while (token_id := int(draw.choice(choices))) in self._eos_token_ids:
            pass
        return token_id


def _is_hostile(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return True
    return len(_HOSTILE.intersection(token)) > 0
