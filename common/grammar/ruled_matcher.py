"""A matcher that keeps an output to the rules about its tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

from common.errors import InvalidRequest
from common.grammar.matcher import Mask, Matcher, allows, forbid, mask_of
from common.grammar.token_rules import TokenRules


class RuledMatcher:
    """A Matcher of TokenRules beside `text`, that of a grammar or a limit on reasoning: what it allows, both do."""

    def __init__(self, rules: TokenRules, text: Matcher | None, *, vocab_size: int) -> None:
        # Tokens that are allowed wherever they come: forbidden sequences of one token are taken out.
        self._always = mask_of(rules.allowed_ids or range(vocab_size), vocab_size)
        forbid(self._always, (sequence[0] for sequence in rules.forbidden if len(sequence) == 1))
        self._after = _by_last_but_one(rules.forbidden)
        self._longest = max(map(len, rules.forbidden), default=1) - 1
        self._tail: tuple[int, ...] = ()  # the last tokens of the output, as many as a forbidden sequence begins with
        self._text = text
        self._is_stuck = False

    @property
    def failure(self) -> str:
        if self._text is not None and self._text.failure:
            return self._text.failure
        return "no token that might come next is allowed" if self._is_stuck else ""

    def copy(self) -> RuledMatcher:
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
        forbid(mask, self._forbidden_now())
        self._is_stuck = not mask.any()

    def replay(self, output_ids: Sequence[int]) -> None:
        """Follows output that `text` has accepted already. Raises InvalidRequest for output against the rules."""
        for place, token_id in enumerate(output_ids):
            if not self._allows(token_id):
                raise InvalidRequest("generated_token_ids", f"token {token_id} at index {place} is not allowed")
            self._follow(token_id)

    def _follow(self, token_id: int) -> None:
        if self._longest:
            self._tail = (*self._tail, token_id)[-self._longest :]

    def _allows(self, token_id: int) -> bool:
        return allows(self._always, token_id) and token_id not in self._forbidden_now()

    def _forbidden_now(self) -> Iterator[int]:
        """Yields the tokens that would complete a forbidden sequence of several tokens."""
        for beginning, token_id in self._after.get(self._tail[-1], ()) if self._tail else ():
            if self._tail[-len(beginning) :] == beginning:
                yield token_id


def ruled(text: Matcher | None, rules: TokenRules, output_ids: Sequence[int], *, vocab_size: int) -> RuledMatcher:
    """Returns a matcher of `rules` beside `text`. Both have accepted `output_ids`. Raises InvalidRequest for output
    against the rules.
    """
    matcher = RuledMatcher(rules, text, vocab_size=vocab_size)
    matcher.replay(output_ids)
    return matcher


def _by_last_but_one(
    sequences: Sequence[tuple[int, ...]],
) -> Mapping[int, Sequence[tuple[tuple[int, ...], int]]]:
    """Returns the sequences of several tokens as (beginning, last token), by the last token of the beginning."""
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for *beginning, last in sequences:
        if beginning:
            found.setdefault(beginning[-1], []).append((tuple(beginning), last))
    return found
