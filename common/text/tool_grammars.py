"""Writes the grammar of an output that calls tools, in the form in which the model's family writes calls.

If a call is required, the output consists of calls. Otherwise it consists of words and calls or, if the answer has a
grammar, is either such an answer or calls. In calls, the names are those of tools, and the arguments fit the tools'
schemas where they must. For families that write an answer after a header, the module also makes the grammar of an
answer without tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llguidance import regex_to_lark

from common.errors import InvalidRequest
from common.grammar.grammar import Grammar, GrammarKind
from common.text.chat_messages import NO_OBJECT, Tool, ToolChoice, json_object
from common.text.output_formats import (
    ARGUMENTS,
    CHANNEL,
    CONSTRAIN,
    FINAL,
    MESSAGE,
    MESSAGE_ENDS,
    START,
    TOOL_CALLS,
    OutputFormat,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """The texts that surround the names and the arguments of tool calls.

    opens  before NAME between ARGUMENTS after  separator  before NAME between ARGUMENTS after  closes

    If `separator` is None, an output has one call at most.
    """

    opens: str = ""
    before: str = '{"name": "'
    between: str = '", "arguments": '
    after: str = "}"
    separator: str | None = None
    closes: str = ""


_CALLS: Mapping[str, _Calls] = {
    "llama3": _Calls(between='", "parameters": ', separator="; "),
    "mistral": _Calls(opens=f"{TOOL_CALLS}[", separator=", ", closes="]"),
    "harmony": _Calls(before=f"{CHANNEL}commentary to=functions.", between=f" {CONSTRAIN}json{MESSAGE}", after=""),
    "json": _Calls(separator="\n"),
}
"""How calls are written, by the name of the OutputFormat. In other formats only the markers stand around a call."""
_LATER_MISTRAL = _Calls(before=TOOL_CALLS, between=ARGUMENTS, after="", separator="")
_WORDS = r"/(.|\n)*/"
_WORDS_BUT_NO_CALL = r"/[ \t\r\n]*([^ \t\r\n{\[](.|\n)*)?/"
_AFTER_REASONING = r"/\n{1,2}/"  # as models write
_ANY_OBJECT = {"type": "object"}


class ToolGrammars:
    """Makes the grammars of one model's outputs. `special_ids` maps the names of special tokens to their ids."""

    def __init__(self, form: OutputFormat, special_ids: Mapping[str, int]) -> None:
        self._form = form
        self._special_ids = special_ids
        self._special = re.compile("|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) or "(?!)")

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, answer: Grammar | None) -> Grammar | None:
        """Returns the grammar of an output that may call `tools`, or None if the output may be anything.

        `answer` is the grammar that an output without calls must fit, or None. Raises InvalidRequest, naming the field.
        """
        functions = {i: tool for i, tool in enumerate(tools) if not choice.names or tool.name in choice.names}
        is_free = not choice.required and choice.parallel and len(functions) == len(tools)
        if is_free and answer is None and not any(tool.strict for tool in tools):
            return None
        calls = self._calls
        lines = [*self._start(calls, choice, answer)]
        fields = {} if answer is None else {len(lines): answer.request_field}
        for index, tool in functions.items():
            schema = {**_ANY_OBJECT, **tool.schema} if tool.strict or choice.required else _ANY_OBJECT
            lines.append(f"f{index}: {self._text(tool.name + calls.between)} %json {json.dumps(schema)}")
            fields[len(lines)] = f"chat.tools[{index}].parameters"
        lines.append(f"function: {' | '.join(f'f{index}' for index in functions)}")
        return Grammar(GrammarKind.LARK, "\n".join(lines), made_of="chat.tools", fields_of_lines=fields)

    def answer(self, grammar: Grammar | None) -> Grammar | None:
        """Returns the grammar of a chat's output without tools. `grammar` is that of its answer, or None.

        For a family that writes an answer after a header, the result has the header too. Grammars in Lark and EBNF
        describe the whole output, so they are returned unchanged. Raises InvalidRequest.
        """
        if grammar is None or not self._form.has_channels:
            return grammar
        lines: list[str] = []
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                answer = _answer(grammar)
            case GrammarKind.REGEX if grammar.text:
                answer = f"/{regex_to_lark(grammar.text, use_ascii='')}/"
            case GrammarKind.CHOICE if grammar.choices and all(grammar.choices):
                answer = "CHOICE"
                lines.append(f"CHOICE: {' | '.join(map(json.dumps, grammar.choices))}")
            case _:
                return grammar
        lines += self._messages(self._final(answer))
        return Grammar(GrammarKind.LARK, "\n".join(lines), made_of=grammar.request_field)

    @property
    def _calls(self) -> _Calls:
        """The texts around calls in the model's form. Raises InvalidRequest if the form of calls is not known."""
        form = self._form
        if form.name == "mistral" and ARGUMENTS in self._special_ids:
            return _LATER_MISTRAL
        if form.name in _CALLS:
            return _CALLS[form.name]
        if form.calls is None:
            raise InvalidRequest("chat.tool_choice", "the form in which this model writes calls is not known")
        before, after = f'{form.calls.opens}\n{{"name": "', f"}}\n{form.calls.closes}"
        return _Calls(before=before, after=after, separator="\n")

    def _start(self, calls: _Calls, choice: ToolChoice, answer: Grammar | None) -> Iterator[str]:
        """Yields the rules of an output, except the rule `function`: a tool's name with its arguments."""
        opens, before, after, closes = map(self._text, (calls.opens, calls.before, calls.after, calls.closes))
        is_several = choice.parallel and calls.separator is not None
        more = f"({self._text(calls.separator or '')} call)*" if is_several else ""
        yield f"call: {before} function {after}"
        all_calls = f"{opens} call {more} {closes}"
        form = self._form
        marker = "" if form.calls is None else form.calls.opens
        if not f"{calls.opens}{calls.before}".startswith(marker):
            marker = ""  # calls are written without it
        if form.has_channels:
            final = "" if choice.required else f" | {self._final(_answer(answer) or _WORDS)}"
            yield from self._messages(f"{all_calls}{final}")
        elif choice.required:
            yield f"start: {_AFTER_REASONING}? {all_calls}"
        elif answer is not None:
            yield f"start: {_answer(answer)} | {_AFTER_REASONING}? {all_calls}"
        elif not marker:
            yield f"start: {_WORDS_BUT_NO_CALL} | {_AFTER_REASONING}? {all_calls}"
        else:
            is_lazy = "" if marker in self._special_ids else "[lazy]"  # text ends where the marker is complete
            yield f"begun{is_lazy}: {_WORDS} {self._text(marker)}"
            rest = self._text(f"{calls.opens}{calls.before}".removeprefix(marker))
            if calls.opens:
                yield f"start: {_WORDS} | begun {rest} function {after} {more} {closes}"
            elif is_several:
                yield f"start: (begun {rest} function {after})* {_WORDS}"
            else:
                yield f"start: {_WORDS} | begun {rest} function {after}"

    def _messages(self, last: str) -> Iterator[str]:
        """Yields the rules of an output that is a sequence of messages. `last` is the definition of the last one."""
        new, head, body = (self._text(each) for each in (f"{START}assistant", CHANNEL, MESSAGE))
        # The first message may lack its start marker: the prompt, or reasoning before the grammar begins, has it then.
        yield f'thought: {head} ("analysis" | "commentary") {body} {_WORDS} {self._text(MESSAGE_ENDS[0])} {new}'
        yield f"start: ({new})? thought* ({last})"

    def _final(self, answer: str) -> str:
        return f"{self._text(FINAL)} {answer}"

    def _text(self, text: str) -> str:
        """Returns a text as Lark writes it: as strings, and as token ids where it has the names of special tokens."""
        parts: list[str] = []
        place = 0
        for found in [*self._special.finditer(text), None]:
            end = len(text) if found is None else found.start()
            if end > place:
                parts.append(json.dumps(text[place:end]))
            if found is not None:
                parts.append(f"<[{self._special_ids[found[0]]}]>")
                place = found.end()
        return " ".join(parts)


def _answer(grammar: Grammar | None) -> str:
    """Returns the grammar of an answer as a part of a larger grammar; "" without one. Raises InvalidRequest unless it
    is a JSON schema.
    """
    if grammar is None:
        return ""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidRequest(
            grammar.request_field, "does not go with tools that the output need not call, json_schema does"
        )
    schema = json_object(grammar.text)
    if schema is None:
        raise InvalidRequest(grammar.request_field, NO_OBJECT)
    return f"%json {json.dumps(schema)}"
