"""The reasoning of an output: a section at its beginning that a marker ends. The rest is the answer.

BEFORE ──start marker──▶ REASONING ──end marker──▶ ANSWER
   └──any other text──▶ UNREASONED: all of the output is the answer

Only the text's bytes decide, however tokens split it. A special token counts as the bytes of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import AnyStr

SPACE = " \t\r\n"
"""The white space around markers."""
MAX_MARKER_CHARS = 32
NUM_LAST_TOKENS = 4 * MAX_MARKER_CHARS + 32
"""The number of a prompt's last tokens that decide whether it ends with the start marker: enough for the marker's
bytes, and white space.
"""
_SPACE = SPACE.encode()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Where an output's reasoning is, and how long it may be.

    If `is_open`, the prompt ends inside the reasoning, so the output begins with reasoning. Otherwise the output has
    reasoning only if it begins with the text `start`, after white space at most. If `is_open` is None, the prompt
    decides (`after_prompt`). The reasoning ends with the text `end`.

    If the output has `max_tokens` tokens and is still in its reasoning, it must go on with `end`. None means no limit.
    With 0 there is no reasoning: `start` cannot be drawn, unless the grammar asks for it, and then it begins no
    reasoning.
    """

    start: str
    end: str
    is_open: bool | None = None
    max_tokens: int | None = None

    def after_prompt(self, last_bytes: bytes, *, continued: str = "") -> Reasoning:
        """Returns the same Reasoning with `is_open` set. `last_bytes` is the text of the prompt's last NUM_LAST_TOKENS
        tokens. If the output continues an answer, `continued` is that answer's text so far.
        """
        if self.is_open is not None:
            return self
        markers = Markers(self)
        place, _ = markers.after(markers.beginning, continued.encode())
        is_open = place.part is OutputPart.REASONING or last_bytes.rstrip(_SPACE).endswith(markers.start)
        return replace(self, is_open=is_open)

    def answer_in(self, text: str) -> str:
        """Returns what follows the reasoning in `text`, the whole text of an output; all of it if it has no reasoning.

        `is_open` must not be None.
        """
        if not self.may_begin:
            return text
        markers, whole = Markers(self), text.encode()
        place, num_answer = markers.after(markers.beginning, whole)
        is_reasoned = place.part in (OutputPart.REASONING, OutputPart.ANSWER)
        return whole[len(whole) - num_answer :].decode() if is_reasoned else text

    @property
    def may_begin(self) -> bool:
        return self.is_open is True or self.max_tokens != 0

    def fault(self) -> tuple[str, str] | None:
        """Returns the name of an invalid field, and what is wrong with it; None if all fields are valid."""
        if not self.end:
            return "end", "is empty"
        if not self.start and not self.is_open:
            return "start", "is empty, and is_open is not set"
        if self.start.startswith(tuple(SPACE)):
            return "start", "begins with white space"
        for name, marker in (("start", self.start), ("end", self.end)):
            if len(marker) > MAX_MARKER_CHARS:
                return name, f"has {len(marker)} characters, more than {MAX_MARKER_CHARS}"
        return None


class OutputPart(Enum):
    BEFORE = auto()  # nothing yet but white space and a beginning of the start marker
    REASONING = auto()
    ANSWER = auto()
    UNREASONED = auto()


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """A position in an output: the part that it is in, and how many bytes of the marker after this part have come."""

    part: OutputPart
    num_matched: int = 0


class Markers:
    """Follows the text of outputs from part to part, by the markers of the reasoning."""

    def __init__(self, reasoning: Reasoning) -> None:
        self.start = b"" if reasoning.is_open else reasoning.start.encode()
        self.end = reasoning.end.encode()

    @property
    def beginning(self) -> OutputPlace:
        return OutputPlace(OutputPart.BEFORE if self.start else OutputPart.REASONING)

    def after(self, place: OutputPlace, text: bytes) -> tuple[OutputPlace, int]:
        """Returns the place after `text`, and how many bytes at the end of `text` belong to the answer."""
        match place.part:
            case OutputPart.BEFORE:
                return self._after_before(place.num_matched, text)
            case OutputPart.REASONING:
                return self._after_reasoning(self.end[: place.num_matched] + text)
            case OutputPart.ANSWER | OutputPart.UNREASONED:
                return place, len(text)

    def _after_before(self, num_matched: int, text: bytes) -> tuple[OutputPlace, int]:
        begun = self.start[:num_matched] + text if num_matched else text.lstrip(_SPACE)
        if begun.startswith(self.start):
            return self._after_reasoning(begun[len(self.start) :])
        if self.start.startswith(begun):
            return OutputPlace(OutputPart.BEFORE, len(begun)), 0
        return OutputPlace(OutputPart.UNREASONED), len(text)

    def _after_reasoning(self, text: bytes) -> tuple[OutputPlace, int]:
        """Returns what `after` returns, for `text` that is inside the reasoning and begins with the bytes of the end
        marker that have come already.
        """
        if (found := text.find(self.end)) >= 0:
            return OutputPlace(OutputPart.ANSWER), len(text) - found - len(self.end)
        return OutputPlace(OutputPart.REASONING, len_of_begun(text, self.end)), 0


def len_of_begun(text: AnyStr, marker: AnyStr) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `marker`, or 0."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class ReasoningCount:
    """Counts the tokens of one output's reasoning: from its first token to the one that completes the end marker.

    `num_tokens` is 0 as long as no reasoning has begun.
    """

    def __init__(self, reasoning: Reasoning, bytes_of: Callable[[int], bytes]) -> None:
        """Starts the count at the beginning of an output. `bytes_of` returns the bytes of a token."""
        self.num_tokens = 0
        self._markers = Markers(reasoning)
        self._bytes_of = bytes_of
        self._place = self._markers.beginning if reasoning.may_begin else OutputPlace(OutputPart.UNREASONED)
        self._num_output_tokens = 0

    def add(self, token_id: int) -> None:
        if self._place.part in (OutputPart.ANSWER, OutputPart.UNREASONED):
            return
        self._num_output_tokens += 1
        self._place, _ = self._markers.after(self._place, self._bytes_of(token_id))
        if self._place.part in (OutputPart.REASONING, OutputPart.ANSWER):
            self.num_tokens = self._num_output_tokens
