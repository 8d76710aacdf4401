"""The parts of an output, in the order in which the model wrote them. The texts of one kind add up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


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
