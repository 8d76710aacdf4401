"""The forms in which families of models write reasoning and tool calls. A model's chat template shows its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Section:
    """The markers around a part of an output. `closes` is "" if only its own syntax ends the part."""

    opens: str
    closes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """How a family of models marks the parts of an output.

    An output may begin with `reasoning`. In the answer after it, `calls` are the markers around a tool call, or around
    several. With `has_bare_calls` the answer may also begin with a call that has no marker. With `has_channels` an
    output is a sequence of messages instead, and the header of each names its channel; `reasoning` is then the first
    message, if it is one of reasoning.
    """

    name: str
    reasoning: Section | None = None
    calls: Section | None = None
    has_bare_calls: bool = False
    has_channels: bool = False
    inner_markers: Sequence[str] = ()
    """Markers that occur inside calls and messages only."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers that an output in this format may have. In some models' vocabularies they are special tokens."""
        if self.has_channels:
            return tuple(self.inner_markers)
        around = [mark for each in (self.reasoning, self.calls) if each for mark in (each.opens, each.closes) if mark]
        return (*around, *self.inner_markers)


TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID, ARGUMENTS = "[CALL_ID]", "[ARGS]"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")

_THINK = Section("<think>", "</think>")
CALL = Section("<tool_call>", "</tool_call>")

NONE = OutputFormat(name="none")
HERMES = OutputFormat(name="hermes", reasoning=_THINK, calls=CALL)
LLAMA3 = OutputFormat(name="llama3", reasoning=_THINK, calls=Section("<|python_tag|>"), has_bare_calls=True)
MISTRAL = OutputFormat(
    name="mistral",
    reasoning=Section("[THINK]", "[/THINK]"),
    calls=Section(TOOL_CALLS),
    inner_markers=(CALL_ID, ARGUMENTS),
)
HARMONY = OutputFormat(
    name="harmony",
    reasoning=Section(f"{CHANNEL}analysis{MESSAGE}", MESSAGE_ENDS[0]),
    has_channels=True,
    inner_markers=(START, CHANNEL, CONSTRAIN, MESSAGE, *MESSAGE_ENDS),
)
JSON = OutputFormat(name="json", reasoning=_THINK, has_bare_calls=True)

FORMATS: Mapping[str, OutputFormat] = {each.name: each for each in (NONE, HERMES, LLAMA3, MISTRAL, HARMONY, JSON)}

_SIGNS: Sequence[tuple[Sequence[str], OutputFormat]] = (
    ((CHANNEL, MESSAGE), HARMONY),
    ((TOOL_CALLS,), MISTRAL),
    ((CALL.opens,), HERMES),
    (("<|python_tag|>",), LLAMA3),
    (("<|start_header_id|>", '"parameters"'), LLAMA3),
)
"""Texts that the chat templates of each family contain. The first family whose texts are all there counts."""


def without_header(answer: str) -> str:
    """Returns an answer without the header that a model with channels writes before its final message."""
    has_header = answer.startswith((START, CHANNEL)) and FINAL in answer
    return answer.partition(FINAL)[2] if has_header else answer


def shows_calls(source: str) -> bool:
    """Returns whether a chat template shows a form of calls that is read."""
    return _shown(source) is not None


def format_of_template(source: str, *others: str) -> OutputFormat:
    """Returns the format of the models with this chat template for chats with tools, and `others` for other chats.

    A template without tools gets the Hermes format, because such models are told to write calls in that form. The
    format has no reasoning if no template contains the markers of reasoning.
    """
    form = _shown(source) or HERMES
    markers = () if form.reasoning is None else (form.reasoning.opens, form.reasoning.closes)
    reasons = any(marker in each for marker in markers for each in (source, *others))
    return form if reasons else replace(form, reasoning=None)


def _shown(source: str) -> OutputFormat | None:
    return next((form for signs, form in _SIGNS if all(sign in source for sign in signs)), None)
