"""Splits a model's output into parts while it arrives, for all families of models.

output ─▶ reasoning ─▶ words ─▶ marker ─▶ name ─▶ arguments ─▶ end
                       ▲ ▲                  │                   │
                       │ └─ no call: words ◀┘                   │
                       └────────────────────────────────────────┘

A call begins when its function's name is known to be declared, and its arguments have begun. Until then the text is
held back. If it is no call, it counts as words: plain text, just as written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jiter

from common.grammar.reasoning import SPACE
from common.text.json_objects import References
from common.text.output_formats import (
    ARGUMENTS,
    CALL_ID,
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    MESSAGE_ENDS,
    START,
    OutputFormat,
    Section,
)
from gateway.parsing.cursor import Cursor, Mismatch, Reading, TextEnded
from gateway.parsing.events import CallArguments, CallBegun, ContentText, OutputEvent, ReasoningText

_ARGUMENTS_KEYS = ("arguments", "parameters")
_IGNORED_KEYS = ("id", "type")
_ANY_RUN = re.compile(r"(?s:.)+")
_NAME_RUN = re.compile(r'[^\s\[\]{}<>"]+')
_BETWEEN_MESSAGES = (START, CHANNEL, *MESSAGE_ENDS)
_MAX_HEADER_CHARS = 256
_HEADER = re.compile(
    rf"(?:{re.escape(START)}assistant)?(?:\s*to=(?P<early>[^\s<]+))?\s*"
    rf"(?:{re.escape(CHANNEL)}(?P<channel>analysis|commentary|final))?(?:\s*to=(?P<late>[^\s<]+))?\s*"
    rf"(?:{re.escape(CHANNEL)}(?:analysis|commentary|final)\s*)?"
    rf"(?:{re.escape(CONSTRAIN)}\s*)?(?:json|code)?\s*{re.escape(MESSAGE)}"
)
"""Matches the header of a message in a channel. gpt-oss often writes `code` where the arguments are JSON, and at times
two channels, of which the first counts.
"""


class OutputParser:
    """Parses one output. Its events do not depend on how the output's text is cut into pieces.

    `functions` maps the names of the declared functions to the JSON schemas of their arguments. A call of another
    function counts as words (plain text). `is_reasoning_open` says that the prompt has opened the reasoning that the
    output begins with. White space beside markers is dropped.

    With `has_only_calls` the model can write only reasoning and calls, in channels also words before the calls. Any
    other text is then the rest of a call that the output's end cut off, and is dropped.

    With `only_whole_calls` a call's arguments come in one event, and must be a JSON object that can be written again;
    else the call counts as words.
    """

    def __init__(
        self,
        form: OutputFormat,
        *,
        functions: Mapping[str, Any],
        is_reasoning_open: bool = False,
        has_only_calls: bool = False,
        only_whole_calls: bool = False,
    ) -> None:
        self._form = form
        self._functions = functions
        self._references: dict[str, References] = {}
        self._only_whole_calls = only_whole_calls
        self._cursor = Cursor()
        self._events: list[OutputEvent] = []
        self._reasoning = _Text(lambda *piece: self._events.append(ReasoningText(*piece)), at_border=True)
        self._content = _Text(lambda *piece: self._events.append(ContentText(*piece)), at_border=False)
        self._add_other: Callable[[str], object] = str if has_only_calls else self._content.add
        """Takes text that is neither reasoning, a call, nor a channel's message."""
        self._num_calls = 0
        self._machine = self._messages() if form.has_channels else self._output(is_reasoning_open)
        next(self._machine)

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._num_calls

    @property
    def holds_text(self) -> bool:
        """Whether text is held back because it may not be words."""
        return self._cursor.is_holding or self._content.holds_text

    def push(self, text: str) -> list[OutputEvent]:
        """Returns the events that `text` makes certain."""
        if not text:
            return []
        self._cursor.add(text)
        next(self._machine)
        return self._new_events()

    def end(self) -> list[OutputEvent]:
        """Returns the last events. Call it once, after the last `push`."""
        self._cursor.end()
        for _ in self._machine:
            raise AssertionError("waits for text after the end")
        self._reasoning.finish()
        self._content.finish()
        return self._new_events()

    def _new_events(self) -> list[OutputEvent]:
        """Returns the new events, with adjacent events that belong together joined."""
        events, self._events = self._events, []
        joined: list[OutputEvent] = []
        for event in events:
            match joined[-1:], event:
                case [ReasoningText(before, is_new)], ReasoningText(text, False):
                    joined[-1] = ReasoningText(before + text, is_new)
                case [ContentText(before, is_new)], ContentText(text, False):
                    joined[-1] = ContentText(before + text, is_new)
                case [CallArguments(index, before)], CallArguments(_, text):
                    joined[-1] = CallArguments(index, before + text)
                case _:
                    joined.append(event)
        return joined

    # ---- families whose output has sections ---------------------------------------------------------------------

    def _output(self, is_reasoning_open: bool) -> Reading[None]:
        if self._form.reasoning is not None:
            yield from self._read_reasoning(self._form.reasoning, is_open=is_reasoning_open)
        calls = self._form.calls if self._functions else None
        if self._functions and self._form.has_bare_calls:
            yield from self._try_bare_calls()
        if calls is None:
            self._content.finish()
            yield from self._cursor.run(_ANY_RUN, self._add_other)
            return
        while marker := (yield from self._cursor.until((calls.opens,), self._add_other)):
            self._cursor.hold(marker)
            yield from self._try_calls(calls.closes)

    def _read_reasoning(self, section: Section, *, is_open: bool) -> Reading[None]:
        """Reads the reasoning at the output's beginning, if any. The output may repeat the prompt's opening marker."""
        self._cursor.hold()
        try:
            yield from self._cursor.space()
            yield from self._cursor.literal(section.opens)
        except Mismatch:
            (self._reasoning.add if is_open else self._add_other)(self._cursor.give_back())
            if not is_open:
                return
        self._cursor.release()
        yield from self._cursor.until((section.closes,), self._reasoning.add)
        self._reasoning.cut()
        self._content.cut()

    def _try_bare_calls(self) -> Reading[None]:
        self._cursor.hold()
        yield from self._cursor.space()
        if (yield from self._cursor.peek()) in ("{", "["):
            yield from self._try_calls("")
        else:
            self._add_other(self._cursor.give_back())

    # ---- calls --------------------------------------------------------------------------------------------------

    def _try_calls(self, closes: str) -> Reading[None]:
        """Reads calls and the marker after them. If that fails, the held text becomes words."""
        num_before = self._num_calls
        try:
            yield from self._read_calls(closes)
        except Mismatch as failure:
            rest = self._cursor.give_back()
            # A call is whole even if the text ends within the marks after its arguments.
            is_whole = isinstance(failure, TextEnded) and self._num_calls > num_before
            if not (is_whole and closes.startswith(rest.lstrip(f"{SPACE}}}];"))):
                self._add_other(rest)
        else:
            self._cursor.release()

    def _read_calls(self, closes: str) -> Reading[None]:
        cursor = self._cursor
        yield from cursor.space()
        match (yield from cursor.peek()):
            case "[":
                yield from self._read_list()
            case "{":
                yield from self._read_objects()
            case "<":
                yield from self._read_tags()
            case _:
                yield from self._read_named()
        cursor.hold()
        yield from cursor.space()
        yield from cursor.literal(closes)

    def _read_list(self) -> Reading[None]:
        """Reads [{...}, {...}]."""
        cursor = self._cursor
        yield from cursor.literal("[")
        while True:
            yield from cursor.space()
            yield from self._read_object()
            cursor.hold()
            yield from cursor.space()
            if (yield from cursor.one_of(",]")) == "]":
                return

    def _read_objects(self) -> Reading[None]:
        """Reads {...}; {...}, where the semicolon may be missing."""
        cursor = self._cursor
        while True:
            yield from self._read_object()
            cursor.hold()
            yield from cursor.space()
            match (yield from cursor.peek()):
                case ";":
                    yield from cursor.literal(";")
                    yield from cursor.space()
                case "{":
                    pass
                case _:
                    return

    def _read_object(self) -> Reading[None]:
        """Reads {"name": ..., "arguments": {...}}, in any order. Missing arguments count as {}."""
        cursor = self._cursor
        name: str | None = None
        arguments: str | None = None
        yield from cursor.literal("{")
        while True:
            yield from cursor.space()
            key = yield from cursor.json_string()
            yield from cursor.space()
            yield from cursor.literal(":")
            yield from cursor.space()
            if key == "name" and name is None:
                name = self._declared((yield from cursor.json_string()))
                if arguments is not None:
                    self._call(name, arguments)
            elif key in _ARGUMENTS_KEYS and arguments is None:
                arguments = ""
                if name is None:
                    arguments = yield from self._whole_arguments()
                else:
                    yield from self._read_arguments(name)
            elif key in _IGNORED_KEYS:
                yield from cursor.json_string()
            else:
                raise Mismatch
            yield from cursor.space()
            if (yield from cursor.one_of(",}")) == "}":
                break
        if name is None:
            raise Mismatch
        if arguments is None:
            self._call(name, "{}")

    def _read_tags(self) -> Reading[None]:
        """Reads <function=NAME><parameter=KEY>VALUE</parameter>...</function>. Begins the call only then."""
        cursor = self._cursor
        yield from cursor.literal("<function=")
        name = self._declared((yield from cursor.text_before(">")))
        parameters = self._references.setdefault(name, References(self._functions[name]))
        members: dict[str, str] = {}
        while True:
            yield from cursor.space()
            yield from cursor.literal("<")
            if (yield from cursor.peek()) == "/":
                yield from cursor.literal("/function>")
                break
            yield from cursor.literal("parameter=")
            key = yield from cursor.text_before(">")
            value = yield from cursor.text_before("</parameter>")
            if key in members:
                raise Mismatch
            members[key] = _as_json(value.removeprefix("\n").removesuffix("\n"), parameters, key)
        written = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items())
        self._call(name, "{" + ", ".join(written) + "}")

    def _read_named(self) -> Reading[None]:
        """Reads NAME[CALL_ID]ID[ARGS]{...}, where both markers may be missing."""
        cursor = self._cursor
        parts: list[str] = []
        yield from cursor.run(_NAME_RUN, parts.append)
        name = self._declared("".join(parts))
        if (yield from cursor.peek()) == "[":
            yield from cursor.literal("[")
            if (yield from cursor.peek()) == CALL_ID[1]:
                yield from cursor.literal(CALL_ID[1:])
                yield from cursor.run(_NAME_RUN, parts.append)
                yield from cursor.literal("[")
            yield from cursor.literal(ARGUMENTS[1:])
        yield from cursor.space()
        yield from self._read_arguments(name)

    def _read_arguments(self, name: str) -> Reading[None]:
        """Reads a call's arguments and passes them on, in pieces or whole. Then holds what follows them."""
        begin = yield from self._cursor.peek()
        if self._only_whole_calls or begin == '"':
            self._call(name, (yield from self._whole_arguments()))
            return
        if begin != "{":
            raise Mismatch
        self._call(name, "")
        self._cursor.release()
        yield from self._cursor.json_object(self._add_arguments)
        self._cursor.hold()

    def _whole_arguments(self) -> Reading[str]:
        """Reads an object of JSON, or a string of JSON with an object, as Granite 4 writes it. Returns the object."""
        if (yield from self._cursor.peek()) == '"':
            text = yield from self._cursor.json_string()
            if not _is_object(text):
                raise Mismatch
            return text
        parts: list[str] = []
        yield from self._cursor.json_object(parts.append)
        return "".join(parts)

    def _declared(self, name: str) -> str:
        """Returns the name of a function. Raises Mismatch if no such function is declared."""
        if name not in self._functions:
            raise Mismatch
        return name

    def _call(self, name: str, arguments: str) -> None:
        """Begins a call, which includes the held text. Raises Mismatch if the arguments must be JSON and are not."""
        if self._only_whole_calls and not _is_object(arguments):
            self._add_other = self._content.add  # the call is whole, so it and the marks after it are words
            raise Mismatch
        self._cursor.hold()
        self._content.cut()
        self._events.append(CallBegun(self._num_calls, name))
        self._num_calls += 1
        if arguments:
            self._add_arguments(arguments)

    def _add_arguments(self, text: str) -> None:
        self._events.append(CallArguments(self._num_calls - 1, text))

    # ---- families whose output is messages in channels ----------------------------------------------------------

    def _messages(self) -> Reading[None]:
        marker = yield from self._cursor.until(_BETWEEN_MESSAGES, self._add_other)
        while marker:
            try:
                if marker not in MESSAGE_ENDS:
                    self._cursor.hold(marker)
                    marker = yield from self._read_message(marker)
                    continue
            except Mismatch:
                self._add_other(self._cursor.give_back())
            marker = yield from self._cursor.until(_BETWEEN_MESSAGES, self._add_other)

    def _read_message(self, marker: str) -> Reading[str]:
        """Reads a message whose header begins with `marker`. Returns the next marker, or "" at the end of the text."""
        cursor = self._cursor
        header = marker
        while not header.endswith(MESSAGE):
            if len(header) > _MAX_HEADER_CHARS or header.endswith(MESSAGE_ENDS):
                raise Mismatch
            header += yield from cursor.next()
        read = _HEADER.fullmatch(header)
        if read is None:
            raise Mismatch
        recipient = read["early"] or read["late"]
        if recipient is not None:
            name = self._declared(recipient.removeprefix("functions."))
            yield from cursor.space()
            yield from self._read_arguments(name)
            cursor.release()
            return (yield from cursor.until(_BETWEEN_MESSAGES, self._add_other))
        cursor.release()
        text = self._reasoning if read["channel"] == "analysis" else self._content
        text.cut()
        following = yield from cursor.until(_BETWEEN_MESSAGES, text.add)
        if following:
            text.cut()
        return following


class _Text:
    """The texts of one kind, without the white space at their borders with other parts of the output.

    `emit` gets each piece, and whether it begins a further text.
    """

    def __init__(self, emit: Callable[[str, bool], None], *, at_border: bool) -> None:
        self._emit = emit
        self._at_border = at_border
        self._has_text = False
        self._may_be_cut = True
        self._space = ""  # what was added last; held back, because a border may follow

    @property
    def holds_text(self) -> bool:
        return bool(self._space)

    def add(self, text: str) -> None:
        is_new = False
        if self._at_border:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._at_border = False
            is_new = self._has_text
        text = self._space + text
        shown = text.rstrip(SPACE) if self._may_be_cut else text
        self._space = text[len(shown) :]
        if shown:
            self._has_text = True
            self._emit(shown, is_new)

    def cut(self) -> None:
        """Says that another part of the output begins or ends here."""
        self._space = ""
        self._at_border = True

    def finish(self) -> None:
        """Says that no border follows."""
        self._may_be_cut = False
        if self._space:
            self._emit(self._space, False)
            self._space = ""


def _as_json(written: str, parameters: References, key: str) -> str:
    """Returns an argument as JSON: as the text `written` or as the JSON in it, whichever the function's schema allows.

    If it allows neither, the value of an allowed type counts. If both fit equally, the text counts where a keyword is
    about strings only, such as `pattern`; else too, unless the JSON is null or the schema does not restrict the
    argument. Branches that say nothing of the argument do not count.

    True, False and None, which Qwen3-Coder's own template writes, are JSON only where the text is not allowed.
    """
    word = _PYTHONS_WORDS.get(written.strip())
    try:
        value = json.loads(word or written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)
    is_text = is_value = False
    schema = _MemberSchema(parameters, key).schema
    for by_type, by_keyword in ((False, False), (True, False), (True, True)):
        allowed = _Allowed(parameters, by_type=by_type, by_keyword=by_keyword)
        is_text, is_value = allowed(schema, written), allowed(schema, value)
        if is_text != is_value:
            break
    else:
        allows_all = all(allowed(schema, each) for each in _ANY_VALUES)
        is_text = word is not None or (is_text and value is not None and not allows_all)
    return json.dumps(written, ensure_ascii=False) if is_text else word or written.strip()


def _is_object(text: str) -> bool:
    """Returns whether a text is an object of JSON that can be written as JSON again."""
    try:
        value = jiter.from_json(text.encode(), allow_inf_nan=False)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return isinstance(value, dict)


_PYTHONS_WORDS = {"True": "true", "False": "false", "None": "null"}
_ANY_VALUES: tuple[Any, ...] = ("", 0, True, [], {})
_IS_OF_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int | float) and value % 1 == 0 and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_OF_STRINGS = frozenset({"pattern", "minLength", "maxLength"})
_OF_OTHERS = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("items", "prefixItems", "minItems", "maxItems", "properties", "additionalProperties", "required"),
    }
)
_MAX_SCHEMAS, _MAX_SCHEMA_DEPTH = 1000, 100


class _MemberSchema:
    """Finds what a JSON schema of objects says of the member `key`.

    `schema` is the member's schema, None if nothing is said of it. A schema that is too large or too deep says nothing.
    """

    def __init__(self, references: References, key: str) -> None:
        self._references = references
        self._key = key
        self._num_left = _MAX_SCHEMAS
        self.schema = self._said(references.schema, 0)

    def _said(self, schema: Any, depth: int) -> Any:
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0 or depth > _MAX_SCHEMA_DEPTH:
            return None
        said = self._said_directly(schema)
        if "$ref" in schema:
            said.append(self._said(self._references.referred(schema["$ref"]), depth + 1))
        for keyword, branches in self._branches(schema):
            if isinstance(branches, list):
                told = [self._said(branch, depth + 1) for branch in branches]
                if keyword == "allOf" or not any(said):  # else a branch that says nothing allows what is said here
                    told = [each for each in told if each is not None]
                told = [True if each is None else each for each in told]
                said.append({"allOf" if keyword == "allOf" else "anyOf": told} if told else None)
        said = [each for each in said if each is not None]
        return {"allOf": said} if said else None

    def _branches(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the schemas for the same object by keyword, those under a condition as one of `anyOf`."""
        yield from ((keyword, schema.get(keyword)) for keyword in ("allOf", "anyOf", "oneOf"))
        if "if" in schema:
            yield "anyOf", [schema.get("then"), schema.get("else")]
        for keyword in ("dependentSchemas", "dependencies"):
            if isinstance(by_name := schema.get(keyword), Mapping):
                yield from (("anyOf", [each, True]) for each in by_name.values())

    def _said_directly(self, schema: Mapping[str, Any]) -> list[Any]:
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        said = [properties[self._key]] if isinstance(properties, Mapping) and self._key in properties else []
        if isinstance(patterns, Mapping) and len(patterns) == 1:  # which of several the key matches is not looked at
            said = said or [*patterns.values()]
        others = schema.get("additionalProperties")
        return said or [others if isinstance(others, Mapping) else None]


class _Allowed:
    """Tells whether a JSON schema allows a value, as far as types, enumerations, references and branches say.

    With `by_type`, an enumeration allows any value that has the type of an entry. With `by_keyword`, a schema without
    `type` allows only strings if it has a keyword about strings, and members of objects do not count. A schema that is
    too large or too deep allows everything.
    """

    def __init__(self, references: References, *, by_type: bool, by_keyword: bool) -> None:
        self._references = references
        self._by_type = by_type
        self._by_keyword = by_keyword
        self._num_left = 0

    def __call__(self, schema: Any, value: Any) -> bool:
        self._num_left = _MAX_SCHEMAS
        return self._allows(schema, value, 0)

    def _allows(self, schema: Any, value: Any, depth: int) -> bool:
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0 or depth > _MAX_SCHEMA_DEPTH:
            return schema is not False
        if value is None and schema.get("nullable") is True:
            return True

        def allows(part: Any, value: Any = value) -> bool:
            return self._allows(part, value, depth + 1)

        is_of_strings = self._by_keyword and not _OF_STRINGS.isdisjoint(schema) and _OF_OTHERS.isdisjoint(schema)
        types = schema.get("type", "string" if is_of_strings else None)
        names = [each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)]
        if names and not any(name in _IS_OF_TYPE and _IS_OF_TYPE[name](value) for name in names):
            return False
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and not any(self._is_same(value, each) for each in values):
            return False
        if "$ref" in schema and not allows(self._references.referred(schema["$ref"])):
            return False
        excluded = schema.get("not")
        if isinstance(excluded, Mapping) and excluded.keys() == {"type"} and allows(excluded):
            return False
        for keyword, of in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            if isinstance(branches := schema.get(keyword), list) and not of(map(allows, branches)):
                return False
        if self._by_keyword or not isinstance(value, dict):
            return True
        properties = schema.get("properties")
        others = True if "patternProperties" in schema else schema.get("additionalProperties")
        return all(
            allows(properties[key] if isinstance(properties, Mapping) and key in properties else others, each)
            for key, each in value.items()
        )

    def _is_same(self, value: Any, other: Any) -> bool:
        if self._by_type:
            return any(is_of(value) and is_of(other) for is_of in _IS_OF_TYPE.values())
        return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
