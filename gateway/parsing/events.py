"""The parts of an output, in the order in which the model wrote them. The pieces of a text add up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _NewText:
    """A piece of text. If it `is_new`, it begins another text after an earlier one of its kind."""

    text: str
    is_new: bool = False

    @property
    def as_line(self) -> str:
        """The piece as it continues the earlier ones of its kind: a new text is on a line of its own."""
        return f"\n{self.text}" if self.is_new else self.text


@dataclass(frozen=True, slots=True)
class ReasoningText(_NewText):
    pass


@dataclass(frozen=True, slots=True)
class ContentText(_NewText):
    pass


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the function `name`. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call: JSON, as the model wrote it."""

    index: int
    text: str


OutputEvent = ReasoningText | ContentText | CallBegun | CallArguments
