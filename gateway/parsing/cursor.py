"""Reads a text that arrives in pieces, as if it were there as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from common.grammar.reasoning import SPACE, len_of_begun

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads something and returns it. It yields when it needs more text."""
Take = Callable[[str], object]
"""A function that gets each piece of a text that was read."""

_SPACE_RUN = re.compile(rf"[{SPACE}]+")
_STRING_RUN = re.compile(r'[^"\\]+')
_RUN_BETWEEN_STRINGS = re.compile(r'[^"{}\[\]]+')
_CLOSING = {"{": "}", "[": "]"}


class Mismatch(Exception):
    """The text does not continue as expected. The character that does not fit is not taken."""


class TextEnded(Mismatch):
    """The text ended before the expected part was complete."""


class Cursor:
    """A place in a text that arrives in pieces. What its methods take does not depend on how the text is cut.

    `hold` marks a place, and `give_back` returns what was taken since then.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held_from: int | None = None
        self._has_ended = False

    def add(self, piece: str) -> None:
        used = self._at if self._held_from is None else self._held_from
        self._text = self._text[used:] + piece
        self._at -= used
        if self._held_from is not None:
            self._held_from = 0

    @property
    def is_holding(self) -> bool:
        """Whether there is text that came and is not yet taken for good."""
        return len(self._text) > (self._at if self._held_from is None else self._held_from)

    def end(self) -> None:
        """Says that no more text comes."""
        self._has_ended = True

    def hold(self, taken: str = "") -> None:
        """Marks the place before `taken`, which is what was taken last."""
        self._held_from = self._at - len(taken)

    def release(self) -> None:
        self._held_from = None

    def give_back(self) -> str:
        """Returns the text taken since `hold`, and ends the hold. It is not read again."""
        held = "" if self._held_from is None else self._text[self._held_from : self._at]
        self.release()
        return held

    def peek(self) -> Reading[str]:
        """Returns the next character without taking it, or "" at the end of the text."""
        while self._at == len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._at]

    def next(self) -> Reading[str]:
        """Takes and returns a character. Raises TextEnded."""
        char = yield from self.peek()
        if not char:
            raise TextEnded
        self._at += 1
        return char

    def literal(self, text: str) -> Reading[None]:
        """Takes `text`. Raises TextEnded, or Mismatch, after which none of it is taken."""
        for num_taken, expected in enumerate(text):
            char = yield from self.peek()
            if not char:
                raise TextEnded
            if char != expected:
                self._at -= num_taken
                raise Mismatch
            self._at += 1

    def one_of(self, chars: str) -> Reading[str]:
        """Takes one of these characters. Raises Mismatch."""
        char = yield from self.peek()
        if char and char not in chars:
            raise Mismatch
        return (yield from self.next())

    def run(self, pattern: re.Pattern[str], take: Take) -> Reading[None]:
        """Takes characters as long as they match `pattern`, which is `[...]+`."""
        while (yield from self.peek()) and (match := pattern.match(self._text, self._at)):
            self._at = match.end()
            take(match[0])

    def space(self) -> Reading[None]:
        yield from self.run(_SPACE_RUN, str)

    def until(self, markers: Sequence[str], take: Take) -> Reading[str]:
        """Takes the text before the first of `markers`, then that marker. Returns the marker, or "" without one.

        No marker may be part of another one.
        """
        pattern = _one_of(tuple(markers))
        while (found := pattern.search(self._text, self._at)) is None:
            rest = self._text[self._at :]
            unsure = 0 if self._has_ended else max(len_of_begun(rest, mark) for mark in markers)
            end = len(self._text) - unsure
            if end > self._at:
                take(self._text[self._at : end])
                self._at = end
            if self._has_ended:
                return ""
            yield
        if found.start() > self._at:
            take(self._text[self._at : found.start()])
        self._at = found.end()
        return found[0]

    def text_before(self, marker: str) -> Reading[str]:
        """Takes text and the marker after it. Returns the text. Raises TextEnded."""
        parts: list[str] = []
        if not (yield from self.until((marker,), parts.append)):
            raise TextEnded
        return "".join(parts)

    def json_string(self) -> Reading[str]:
        """Takes a string of JSON and returns its value. Raises Mismatch."""
        yield from self.one_of('"')
        written = ['"']
        while written[-1] != '"' or len(written) == 1:
            yield from self.run(_STRING_RUN, written.append)
            written.append((yield from self.next()))
            if written[-1] == "\\":
                written[-1] += yield from self.next()
        try:
            return str(json.loads("".join(written)))
        except ValueError:
            raise Mismatch from None

    def json_object(self, take: Take) -> Reading[None]:
        """Reads an object of JSON, and passes its text to `take` in pieces, as it is written. Raises Mismatch.

        Checks only strings and brackets, so a value may be anything. What was passed before a Mismatch stays passed.
        """
        if (yield from self.peek()) != "{":
            raise Mismatch
        closing: list[str] = []
        while True:
            yield from self.run(_RUN_BETWEEN_STRINGS, take)
            char = yield from self.peek()
            if char in _CLOSING:
                closing.append(_CLOSING[char])
            elif char in ("}", "]") and char != closing.pop():
                raise Mismatch
            take((yield from self.next()))
            if char == '"':
                yield from self._rest_of_string(take)
            if not closing:
                return

    def _rest_of_string(self, take: Take) -> Reading[None]:
        while True:
            yield from self.run(_STRING_RUN, take)
            char = yield from self.next()
            take(char)
            if char == '"':
                return
            take((yield from self.next()))


@lru_cache
def _one_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
