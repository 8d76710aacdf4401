"""A matcher that enforces a request's rules about single tokens and sequences of tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

from common.errors import InvalidRequest
from common.grammar.grammar import TokenRules
from common.grammar.matcher import Mask, Matcher, allows, forbid, mask_of


class TokenRulesMatcher:
    """A Matcher that allows a token if both the rules and the matcher `text` allow it.

    `text` follows a grammar or a limit on reasoning; None if the request has neither.
    """

    def __init__(
        self, text: Matcher | None, rules: TokenRules, output_ids: Sequence[int] = (), *, vocab_size: int
    ) -> None:
        """Makes a matcher after the request's earlier output, which `text` has accepted already.

        Raises InvalidRequest if the output breaks the rules.
        """
        # Tokens that are allowed wherever they come: forbidden sequences of one token are taken out.
        self._always = mask_of(rules.allowed_ids or range(vocab_size), vocab_size)
        forbid(self._always, (sequence[0] for sequence in rules.forbidden if len(sequence) == 1))
        self._after = _by_beginning(rules.forbidden)
        self._lens = sorted(set(map(len, self._after)))
        self._longest = max(self._lens, default=0)
        self._tail: tuple[int, ...] = ()  # the last tokens of the output, as many as a forbidden sequence begins with
        self._text = text
        self._allows_none = False
        for place, token_id in enumerate(output_ids):
            if not self._allows(token_id):
                raise InvalidRequest("generated_token_ids", f"token {token_id} at index {place} is not allowed")
            self._follow(token_id)

    @property
    def failure(self) -> str:
        if self._text is not None and self._text.failure:
            return self._text.failure
        return "no token that might come next is allowed" if self._allows_none else ""

    def copy(self) -> TokenRulesMatcher:
        other = copy.copy(self)
        other._text = None if self._text is None else self._text.copy()
        return other

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id) or not (self._text is None or self._text.accept(token_id)):
            return False
        self._follow(token_id)
        return True

    def fill(self, mask: Mask) -> None:
        if self._text is None:
            mask[:] = self._always
        else:
            self._text.fill(mask)
            mask &= self._always
        forbid(mask, chain.from_iterable(self._forbidden_now()))
        self._allows_none = not mask.any()

    def forced(self) -> Sequence[int]:
        return () if self._text is None else self._text.forced()

    def _follow(self, token_id: int) -> None:
        if self._longest:
            self._tail = (*self._tail, token_id)[-self._longest :]

    def _allows(self, token_id: int) -> bool:
        return allows(self._always, token_id) and not any(token_id in ids for ids in self._forbidden_now())

    def _forbidden_now(self) -> Iterator[Set[int]]:
        """Yields sets of tokens: those that would now complete a forbidden sequence of several tokens."""
        for length in self._lens:
            if found := self._after.get(self._tail[-length:]):
                yield found


def _by_beginning(sequences: Iterable[tuple[int, ...]]) -> Mapping[tuple[int, ...], Set[int]]:
    """Maps the tokens before the last one of each sequence to all possible last tokens. Sequences of a single token are
    left out.
    """
    found: dict[tuple[int, ...], set[int]] = {}
    for *beginning, last in sequences:
        if beginning:
            found.setdefault(tuple(beginning), set()).add(last)
    return found
