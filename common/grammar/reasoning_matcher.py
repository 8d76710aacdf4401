"""A matcher that limits only the length of the reasoning, and hands the answer on to a grammar's matcher."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy

from common.grammar.matcher import ALL_ALLOWED, Mask, Matcher, allow, allows, forbid, mask_of
from common.grammar.reasoning import Markers, OutputPart, OutputPlace, Reasoning

Spell = Callable[[bytes], Sequence[int]]
"""Returns tokens whose joined bytes are exactly these, or none if there are no such tokens."""


class MarkerRefused(Exception):
    """The model has no tokens that spell the end marker."""


class TokenTexts:
    """The bytes of each token of a vocabulary. Tokens with a given beginning are found by bisection."""

    def __init__(self, bytes_of: Sequence[bytes]) -> None:
        self.bytes_of = bytes_of
        self._ids = sorted(range(len(bytes_of)), key=bytes_of.__getitem__)
        self._sorted = [bytes_of[each] for each in self._ids]

    def beginning_with(self, text: bytes) -> Sequence[int]:
        first = bisect_left(self._sorted, text)
        stop = bisect_right(self._sorted, text, first, key=lambda each: each[: len(text)])
        return self._ids[first:stop]

    def containing(self, text: bytes) -> Sequence[int]:
        return [token_id for token_id, each in enumerate(self.bytes_of) if text in each]


class MarkerTokens:
    """Tables that say what each token leads to, at each place of an output before its answer. They never change.

    `bytes_of` has the bytes of each token. `past_end` maps a place to the mask of the tokens that complete the end
    marker and contain more text after it. `completing` maps a place before the reasoning to the mask of the tokens that
    complete the start marker. `opening` and `closing` map the number of bytes of the start or the end marker that have
    come already to the usual token that continues the marker. `opening` has no entry where no tokens spell the rest.
    """

    def __init__(self, reasoning: Reasoning, texts: TokenTexts, spell: Spell) -> None:
        """Makes the tables. Raises MarkerRefused."""
        self.markers = markers = Markers(reasoning)
        self.bytes_of = bytes_of = texts.bytes_of
        self.past_end: dict[OutputPlace, Mask] = {}
        self.completing: dict[OutputPlace, Mask] = {}
        for num_matched, candidates in _that_may_complete(markers.start, texts):
            place = OutputPlace(OutputPart.BEFORE, num_matched)
            after = {each: markers.after(place, bytes_of[each]) for each in candidates}
            past_end = [each for each, (to, num_answer) in after.items() if to.part is OutputPart.ANSWER and num_answer]
            completing = [
                each for each, (to, _) in after.items() if to.part in (OutputPart.REASONING, OutputPart.ANSWER)
            ]
            self.past_end[place] = self._mask(past_end)
            self.completing[place] = self._mask(completing)
        for num_matched, candidates in _that_may_complete(markers.end, texts):
            place = OutputPlace(OutputPart.REASONING, num_matched)
            past_end = [each for each in candidates if markers.after(place, bytes_of[each])[1]]
            self.past_end[place] = self._mask(past_end)
        self.opening = _next_tokens(markers.start, bytes_of, spell)
        self.closing = _next_tokens(markers.end, bytes_of, spell)
        if 0 not in self.closing:
            raise MarkerRefused
        for num_matched in range(len(markers.end)):
            self.closing.setdefault(num_matched, self.closing[0])  # a new marker, where no tokens spell the rest

    def _mask(self, token_ids: Iterable[int]) -> Mask:
        return mask_of(token_ids, len(self.bytes_of))


def _that_may_complete(marker: bytes, texts: TokenTexts) -> Iterator[tuple[int, set[int]]]:
    """Yields each number of bytes of `marker` that may have come already, with the tokens that may then complete
    `marker`: tokens that begin with the rest of it, or contain all of it.
    """
    containing = set(texts.containing(marker)) if marker else set()
    for num_matched in range(len(marker)):
        # The last bytes may be several beginnings of the marker, of which the longest has `num_matched` bytes.
        begun = marker[:num_matched]
        beginnings = (length for length in range(1, num_matched + 1) if begun.endswith(marker[:length]))
        yield num_matched, containing.union(*(texts.beginning_with(marker[length:]) for length in beginnings))


def _next_tokens(marker: bytes, bytes_of: Sequence[bytes], spell: Spell) -> dict[int, int]:
    """Maps the number of bytes of `marker` that have come already to the usual token that continues it. Numbers at
    which no tokens spell the rest are left out.
    """
    rests = {place: spell(marker[place:]) for place in range(len(marker))}
    following = {place: token_ids[0] for place, token_ids in rests.items() if token_ids}
    place = 0
    for token_id in rests.get(0, ()):
        following[place] = token_id
        place += len(bytes_of[token_id])
    return following


class ReasoningMatcher:
    """A Matcher for an output with reasoning. It limits the reasoning's length, and allows in the answer what `grammar`
    allows, or everything if there is none.

    `grammar` must not advance: copies of it follow outputs. With a grammar, no token may end the output inside the
    reasoning, and no token may contain text after the end marker, because the grammar begins with the next token. An
    output whose reasoning is not open may begin with its answer, or with the usual tokens of the start marker.
    """

    def __init__(
        self, tokens: MarkerTokens, reasoning: Reasoning, grammar: Matcher | None, end_ids: Collection[int]
    ) -> None:
        """Makes a matcher at the beginning of an output. `end_ids` are the tokens that end an output."""
        self._tokens = tokens
        self._reasoning = reasoning
        self._grammar = grammar
        self._end_ids = end_ids
        self._place = tokens.markers.beginning
        self._num_tokens = 0
        # Follows the answer or, before the reasoning, text that may be the answer. None without a grammar or such text.
        self._answer = grammar.copy() if grammar is not None and self._place.part is OutputPart.BEFORE else None

    @property
    def failure(self) -> str:
        return "" if self._answer is None else self._answer.failure

    def copy(self) -> ReasoningMatcher:
        other = copy(self)
        if self._answer is not None:
            other._answer = self._answer.copy()
        return other

    def accept(self, token_id: int) -> bool:
        match self._place.part:
            case OutputPart.BEFORE:
                is_allowed = self._accept_before(token_id)
            case OutputPart.REASONING:
                is_allowed = self._may_go_on_with(token_id)
            case OutputPart.ANSWER | OutputPart.UNREASONED:
                return self._grammar is None or (self._answer is not None and self._answer.accept(token_id))
        if not is_allowed:
            return False
        self._num_tokens += 1
        self._place, _ = self._tokens.markers.after(self._place, self._tokens.bytes_of[token_id])
        if self._place.part is OutputPart.REASONING:
            self._answer = None
        elif self._place.part is OutputPart.ANSWER and self._grammar is not None:
            self._answer = self._grammar.copy()
        return True

    def fill(self, mask: Mask) -> None:
        match self._place.part:
            case OutputPart.BEFORE:
                self._fill_before(mask)
            case OutputPart.REASONING if self._is_used_up:
                mask[:] = 0
                allow(mask, self._tokens.closing[self._place.num_matched])
            case OutputPart.REASONING if self._grammar is not None:
                mask[:] = ~self._tokens.past_end[self._place]
                forbid(mask, self._end_ids)
            case _ if self._answer is not None:
                self._answer.fill(mask)
            case _:
                mask[:] = ALL_ALLOWED

    def forced(self) -> Sequence[int]:
        if self._place.part is OutputPart.REASONING and self._is_used_up:
            return self._closing_tokens()
        return () if self._answer is None or self._place.part is OutputPart.BEFORE else self._answer.forced()

    def _closing_tokens(self) -> Sequence[int]:
        """Returns the tokens of the end marker that are left, and those with which the grammar begins.

        Where no tokens spell the rest, a marker may begin anew endlessly. Then it returns the tokens up to the first
        place that repeats.
        """
        found, place, seen = list[int](), self._place, set[OutputPlace]()
        while place.part is OutputPart.REASONING:
            if place in seen:
                return found
            seen.add(place)
            found.append(self._tokens.closing[place.num_matched])
            place, _ = self._tokens.markers.after(place, self._tokens.bytes_of[found[-1]])
        return found if self._grammar is None else [*found, *self._grammar.copy().forced()]

    @property
    def _is_used_up(self) -> bool:
        return self._reasoning.max_tokens is not None and self._num_tokens >= self._reasoning.max_tokens

    def _may_go_on_with(self, token_id: int) -> bool:
        """Returns whether this token may come next in the reasoning."""
        if self._is_used_up:
            return token_id == self._tokens.closing[self._place.num_matched]
        if self._grammar is None:
            return True
        return token_id not in self._end_ids and not allows(self._tokens.past_end[self._place], token_id)

    def _accept_before(self, token_id: int) -> bool:
        if self._grammar is None:
            return self._reasoning.may_begin or not allows(self._tokens.completing[self._place], token_id)
        if allows(self._tokens.past_end[self._place], token_id):
            return False
        if self._answer is not None and self._answer.accept(token_id):
            return True
        if token_id != self._tokens.opening.get(self._place.num_matched):
            return False
        self._answer = None
        return True

    def _fill_before(self, mask: Mask) -> None:
        if self._grammar is None:
            mask[:] = ALL_ALLOWED if self._reasoning.may_begin else ~self._tokens.completing[self._place]
            return
        if self._answer is None:
            mask[:] = 0
        else:
            self._answer.fill(mask)
        mask &= ~self._tokens.past_end[self._place]
        if (opening := self._tokens.opening.get(self._place.num_matched)) is not None:
            allow(mask, opening)
