"""Renders a conversation to a prompt with the model's chat template, and refuses to leave out anything that was said.

The Jinja environment is that of `apply_chat_template` in transformers, for which templates are written. This module
does not import transformers, so that a separate small process can render.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from common.text.chat_messages import NO_OPTIONS, ROLES, ChatMessage, TemplateOptions, Tool, ToolCall, json_object
from common.text.generic_tools import in_ordinary_messages, with_one_call_each

_MAX_CACHED_SHAPES = 256
_MAX_CHARS = 1 << 24


def _marker(index: int) -> str:
    return f"qz{index}zq"


_PRINTED_PART = re.compile(rf"""text['"]:\s*['"]{_marker(0)}""")
"""Matches a list of parts as Python or JSON prints it: the template printed the list instead of reading it."""
_PRINTED_ARGUMENT = re.compile(rf"""'{_marker(1)}':""")
"""Matches an object as Python prints it, which is not JSON."""
_TOOLS, _TOOLS_PLACE = -1, "tools"
_PROBE_ID = "000000000"  # some templates accept ids of this length only
_RARE = "\ua66e"
"""A letter that no template has in its own words, so it can be a marker of one character."""


class ChatRefused(ValueError):
    """The template cannot render this conversation, or would leave out some of it, for this `reason`. `field` names
    the wrong field.
    """

    def __init__(self, reason: str, field: str = "chat") -> None:
        super().__init__(reason if field == "chat" else f"{field.removeprefix('chat.')}: {reason}")
        self.reason = reason
        self.field = field


class TextTooLong(ValueError):
    """A text exceeds its limit."""


class _SaidPart(NamedTuple):
    """A part of a conversation: of the message with this index, or of the tools if the index is _TOOLS."""

    message: int
    what: str
    part: str = ""


class _Dropped(NamedTuple):
    """The parts that a template leaves out of conversations of one shape: the `first` that it has to keep, or None, and
    the words beside calls in `messages`, which it may leave out.
    """

    first: _SaidPart | None
    messages: frozenset[int] = frozenset()


class _CallsForm(NamedTuple):
    """The form in which a template gets tool calls: arguments as objects or as JSON text, empty content as null or as
    "", and an assistant's words beside its calls, or without them.
    """

    has_objects: bool
    has_null: bool
    has_words: bool = True


class ChatTemplate:
    """A model's chat template. It renders conversations, and checks that the text has everything that was said.

    A short content might occur in the text by chance, although the template leaves it out. So each sequence of roles is
    also rendered once with unmistakable markers as contents, and each role with contents of few characters.
    `parts_roles` are the roles whose content the template expects as a list of parts.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles and tries the template. Raises ChatRefused if it is invalid, or does not render a user's words."""
        self._special_tokens = special_tokens
        environment = _environment()
        with _refusing("is none"):
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        self._dropped = lru_cache(_MAX_CACHED_SHAPES)(self._find_dropped)
        self.parts_roles: frozenset[str] = frozenset()
        for role in ("user", *ROLES):
            self._choose_form(role)
        self._num_dropped = {role: self._find_num_dropped(role) for role in ROLES}

    def render(
        self, messages: Sequence[ChatMessage], options: TemplateOptions = NO_OPTIONS, *, max_chars: int = _MAX_CHARS
    ) -> str:
        """Renders the messages, by default up to where an assistant's answer begins. Raises ChatRefused or TextTooLong.

        The model is told of tools, calls and answers in ordinary messages where the template has no form for them, and
        of one call in each message where it has none for several.
        """
        places = [f"messages[{index}]" for index in range(len(messages))]
        leaves_out_tools = bool(options.tools) and not self._writes_tools
        if leaves_out_tools or (any(message.tool_calls for message in messages) and not self._writes_calls):
            messages, places = in_ordinary_messages(
                messages,
                options.tools if leaves_out_tools else (),
                has_answers=not leaves_out_tools and self._writes_tools and self._writes_answers,
                has_system=self._writes_system,
            )
            options = replace(options, tools=()) if leaves_out_tools else options
        if any(len(message.tool_calls) > 1 for message in messages) and not self._writes_several_calls:
            messages, places = with_one_call_each(messages, places)
        self._check_kwargs(options)
        text = self._render(messages, options, max_chars=max_chars)
        pieces = [tuple(_pieces(message)) for message in messages]
        # A template leaves parts out if there are tools, whichever they are, so the cache does not keep the tools.
        shape_options = replace(options, tools=(_MARKED_TOOL,)) if options.tools else options
        dropped = self._dropped(_shape(messages, pieces), shape_options)
        if (first := self._find_short(messages) or dropped.first) is not None:
            raise _left_out(first, places, "leaves out")
        pieces = [() if index in dropped.messages else said for index, said in enumerate(pieces)]
        has_objects = any(message.tool_calls for message in messages) and self._calls_form.has_objects
        missing = _find_missing(messages, pieces, options.tools, text, has_objects=has_objects)
        if missing is not None:
            raise _left_out(missing, places, "leaves out or changes some of")
        return text

    @property
    def variables(self) -> Sequence[str]:
        """The names of the variables that a request may set."""
        return sorted(self._variables - self._special_tokens.keys() - _OWN_VARIABLES)

    def _check_kwargs(self, options: TemplateOptions) -> None:
        """Raises ChatRefused for a variable that the template does not read, or that a request may not set."""
        for name in json_object(options.chat_template_kwargs) or ():
            if name not in self._variables:
                reason = f"the model's chat template does not read {name[:64]!r}"
            elif name in self._special_tokens or name in _OWN_VARIABLES:
                reason = f"{name!r} is not the request's to set"
            else:
                continue
            raise ChatRefused(reason, "chat.chat_template_kwargs")

    def _render(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions = NO_OPTIONS,
        *,
        form: _CallsForm | None = None,
        max_chars: int = _MAX_CHARS,
    ) -> str:
        if form is None:
            form = self._calls_form if any(message.tool_calls for message in messages) else _CALLS_FORMS[0]
        if options.continue_final_message:
            messages = [*messages[:-1], replace(messages[-1], content=messages[-1].content + _CUT)]
        variables = {
            **self._special_tokens,
            "documents": None,
            **(json_object(options.chat_template_kwargs) or {}),
            "messages": [self._as_read(message, form) for message in messages],
            "tools": [tool.as_read() for tool in options.tools] or None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        with _refusing("fails on it"):
            for piece in self._template.generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise TextTooLong(f"the rendered conversation has more than {max_chars} characters")
        text = "".join(pieces)
        if not options.continue_final_message:
            return text
        text, cut, _ = text.rpartition(_CUT)
        if not cut:
            raise ChatRefused("the model's chat template changes the last message", "chat.continue_final_message")
        return text

    def _as_read(self, message: ChatMessage, form: _CallsForm) -> dict[str, Any]:
        """Returns the message in the form that templates for transformers expect. Absent fields have no key."""
        says_nothing = bool(message.tool_calls) and not (form.has_words and message.content.strip())
        content: Any = "" if says_nothing else message.content
        if message.role in self.parts_roles:
            content = [{"type": "text", "text": content}]
        if says_nothing and form.has_null:
            content = None
        read = {"role": message.role, "content": content}
        if message.tool_calls:
            read["tool_calls"] = [_call_as_read(call, form) for call in message.tool_calls]
        if message.tool_call_id:
            read["tool_call_id"] = message.tool_call_id
        if message.name:
            read["name"] = message.name
        if message.reasoning:
            read["reasoning_content"] = message.reasoning
            if says_nothing or not message.tool_calls:  # gpt-oss' template takes words or thoughts beside calls
                read["thinking"] = message.reasoning
        return read

    def _choose_form(self, role: str) -> None:
        """Chooses how this role's content is passed: as a list of parts if the template renders only those, else as a
        string.

        Raises ChatRefused if the template keeps a user's words in neither form.
        """
        as_strings, reason = self.parts_roles, ""
        for parts_roles in (as_strings, as_strings | {role}):
            self.parts_roles = parts_roles
            for before, after in _AROUND[role]:
                try:
                    text = self._render([*before, _probe(role, _marker(0)), *after], form=_CALLS_FORMS[0])
                except (ChatRefused, TextTooLong) as error:
                    reason = reason or str(error)
                    continue
                if _marker(0) in text and not _PRINTED_PART.search(text):
                    return
        self.parts_roles = as_strings  # `render` checks this role in each conversation
        if role == "user":
            raise ChatRefused(
                reason or "the model's chat template leaves out what a user says, as a string and as a list of parts"
            )

    def _find_num_dropped(self, role: str) -> int:
        """Returns the length in characters of the longest content of this role that the template leaves out for being
        short, or 0 if there is none.
        """
        for around in _AROUND[role]:
            if self._keeps(role, _marker(0), around) and not self._keeps(role, _RARE, around):
                longer = range(2, len(_marker(0)))
                return max((num for num in longer if not self._keeps(role, num * _RARE, around)), default=1)
        return 0

    def _keeps(self, role: str, words: str, around: _Around) -> bool:
        before, after = around
        try:
            text = self._render([*before, _probe(role, words), *after], form=_CALLS_FORMS[0])
        except (ChatRefused, TextTooLong):
            return False
        return _Search(text).end_of(words, 0) >= 0

    @cached_property
    def _calls_form(self) -> _CallsForm:
        """The first of `_CALLS_FORMS` in which the template renders tool calls completely, without the words beside
        them if it renders calls in no form beside words.

        If there is none, this is the first form, and `render` finds what is left out of each conversation.
        """
        for form, text in self._texts_of_calls().items():
            if _has_calls(text):
                return form._replace(has_words=_has_calls(self._texts_of_calls("w").get(form, "")))
        return _CALLS_FORMS[0]

    def _texts_of_calls(self, words: str = "") -> Mapping[_CallsForm, str]:
        """Maps the forms in which the template renders a conversation with a call to its text.

        The text has the conversation several times, with and without a system message and a tool, because a template
        may write calls only with them.
        """
        calling, answer = _MARKED_CALLS
        texts: dict[_CallsForm, str] = {}
        for form, before, options in itertools.product(_CALLS_FORMS, _BEGINNINGS, _WITH_AND_WITHOUT_TOOL):
            with suppress(ChatRefused, TextTooLong):
                text = self._render([*before, _USER, replace(calling, content=words), answer], options, form=form)
                texts[form] = texts.get(form, "") + text
        return texts

    @cached_property
    def _writes_calls(self) -> bool:
        return any(_marker(0) in text for text in self._texts_of_calls().values())

    @cached_property
    def _writes_several_calls(self) -> bool:
        """Whether the template writes two calls in one message."""
        calling, answer = _MARKED_CALLS
        calling = replace(calling, tool_calls=[*calling.tool_calls, _SECOND_CALL])
        answers = (answer, replace(answer, tool_call_id=_SECOND_CALL.id))
        for before, options in itertools.product(_BEGINNINGS, _WITH_AND_WITHOUT_TOOL):
            with suppress(ChatRefused, TextTooLong):
                text = self._render([*before, _USER, calling, *answers], options)
                if _has_calls(text) and _SECOND_CALL.name in text:
                    return True
        return False

    @cached_property
    def _writes_tools(self) -> bool:
        """Whether the template tells the model of tools, in a conversation with or without a system message."""
        for before in _BEGINNINGS:
            with suppress(ChatRefused, TextTooLong):
                text = self._render([*before, _USER], TemplateOptions((_MARKED_TOOL,)))
                if all(marker in text for marker in _TOOL_MARKERS):
                    return True
        return False

    @cached_property
    def _writes_answers(self) -> bool:
        """Whether the template writes what a tool says after an assistant's words."""
        return self._keeps("tool", _marker(0), _AROUND["tool"][0])

    @cached_property
    def _writes_system(self) -> bool:
        return self._keeps("system", _marker(0), _AROUND["system"][0])

    def _find_short(self, messages: Sequence[ChatMessage]) -> _SaidPart | None:
        """Returns the first content that the template leaves out for being short, or None."""
        for index, message in enumerate(messages):
            if 0 < len(message.content.strip()) <= self._num_dropped[message.role]:
                return _contents_of(index, message.role)
        return None

    def _find_dropped(self, shape: bytes, options: TemplateOptions) -> _Dropped:
        """Returns what the template leaves out of a conversation of this `_shape`. Options that have tools have
        _MARKED_TOOL.

        It renders a conversation with markers as contents, and looks for the markers in the text. If the template
        refuses that conversation it has read the markers, so nothing counts as left out.
        """
        probes, said = _probes(shape)
        if options.tools:
            said |= dict.fromkeys(_TOOL_MARKERS, _SaidPart(_TOOLS, "the tools"))
        try:
            text = self._render(probes, options)
        except (ChatRefused, TextTooLong):
            return _Dropped(None)
        found = set(_ANY_MARKER.findall(text))
        dropped = [each for marker, each in said.items() if marker not in found]
        beside_calls = frozenset(
            each.message
            for each in dropped
            if each.message != _TOOLS and not each.part and probes[each.message].tool_calls
        )
        return _Dropped(
            next((each for each in dropped if each.part or each.message not in beside_calls), None), beside_calls
        )


_USER = ChatMessage("user", "u")
_CUT = _marker(1000)
"""Ends the message that the output continues."""
_TOOL_MARKERS = tuple(_marker(index) for index in range(1001, 1004))
_MARKED_TOOL = Tool(
    _TOOL_MARKERS[0],
    _TOOL_MARKERS[1],
    json.dumps({"type": "object", "properties": {_TOOL_MARKERS[2]: {"type": "string"}}}),
)
_MARKED_CALLS = (
    ChatMessage("assistant", tool_calls=[ToolCall(_marker(0), json.dumps({_marker(1): _marker(2)}), _PROBE_ID)]),
    ChatMessage("tool", "t", tool_call_id=_PROBE_ID, name="f"),
)
_SECOND_CALL = ToolCall(_marker(3), "{}", "000000001")
_BEGINNINGS: Sequence[Sequence[ChatMessage]] = ((), (ChatMessage("system", "s"),))
_WITH_AND_WITHOUT_TOOL = (NO_OPTIONS, TemplateOptions((_MARKED_TOOL,)))
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
_Around = tuple[Sequence[ChatMessage], Sequence[ChatMessage]]
_AROUND: Mapping[str, Sequence[_Around]] = {
    "user": (((), ()), ((ChatMessage("system", "s"),), ())),
    "system": (((), (_USER,)),),
    "developer": (((), (_USER,)),),
    "assistant": (((_USER,), (ChatMessage("user", "v"),)),),
    "tool": (
        ((_USER, ChatMessage("assistant", "a")), ()),
        ((_USER, ChatMessage("assistant", tool_calls=[ToolCall("f", "{}", _PROBE_ID)])), ()),
    ),
}
"""For each role, the messages before and after a trial message of this role."""
_CALLS_FORMS = tuple(_CallsForm(has_objects, has_null) for has_null in (False, True) for has_objects in (True, False))


def _has_calls(text: str) -> bool:
    """Returns whether a text of `_MARKED_CALLS` has the call completely, with arguments in JSON."""
    return all(_marker(index) in text for index in range(3)) and not _PRINTED_ARGUMENT.search(text)


def _probe(role: str, words: str) -> ChatMessage:
    return ChatMessage(role, words, tool_call_id=_PROBE_ID if role == "tool" else "")


def _call_as_read(call: ToolCall, form: _CallsForm) -> dict[str, Any]:
    arguments = _object_of(call.arguments) if form.has_objects else None
    function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    read: dict[str, Any] = {"type": "function", "function": function}
    return {"id": call.id, **read} if call.id else read


def _object_of(arguments: str) -> dict[str, Any] | None:
    """Parses the arguments of a tool call. Returns None if they are not a JSON object.

    Also returns None if the parsed object would lose something: if a name comes twice or a number is not finite.
    """
    if not arguments.strip():
        return {}  # some models write nothing if there are no arguments
    try:
        value = json.loads(
            arguments, object_pairs_hook=_without_repetition, parse_float=_finite, parse_constant=_finite
        )
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name comes twice")
    return value


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


_HAS_ID, _HAS_NAME, _SAYS, _IS_OBJECT, _CALL, _ROLE = 1, 2, 4, 4, 8, 16
_ANY_MARKER = re.compile(r"qz\d+zq")


def _shape(messages: Sequence[ChatMessage], pieces: Sequence[Sequence[str]]) -> bytes:
    """Encodes the form of a conversation without its words: one byte for each message and for each tool call.

    `pieces` has the `_pieces` of each message.
    """
    shape = bytearray()
    for message, said in zip(messages, pieces, strict=True):
        code = _ROLE * ROLES.index(message.role) | _SAYS * bool(said)
        shape.append(code | _HAS_ID * bool(message.tool_call_id) | _HAS_NAME * bool(message.name))
        for call in message.tool_calls:
            shape.append(_CALL | _HAS_ID * bool(call.id) | _IS_OBJECT * (_object_of(call.arguments) is not None))
    return bytes(shape)


def _probes(shape: bytes) -> tuple[list[ChatMessage], dict[str, _SaidPart]]:
    """Returns a conversation of this `_shape` whose contents are markers, and a mapping of each marker to the part of
    the conversation that it stands for.
    """
    probes: list[ChatMessage] = []
    said: dict[str, _SaidPart] = {}

    def marker_of(each: _SaidPart) -> str:
        said[marker := _marker(len(said))] = each
        return marker

    for code in shape:
        tool_call_id = _PROBE_ID if code & _HAS_ID else ""
        if code & _CALL:
            calls = probes[-1].tool_calls
            index, part = len(probes) - 1, f".tool_calls[{len(calls)}]"
            name = marker_of(_SaidPart(index, "the function's name", part))
            words = [marker_of(_SaidPart(index, "the arguments", part)) for _ in range(4)]
            arguments = json.dumps(dict([words[:2], words[2:]])) if code & _IS_OBJECT else " ".join(words)
            probes[-1] = replace(probes[-1], tool_calls=[*calls, ToolCall(name, arguments, tool_call_id)])
            continue
        role = ROLES[code // _ROLE]
        content = marker_of(_contents_of(len(probes), role)) if code & _SAYS else ""
        name = "f" if code & _HAS_NAME else ""
        probes.append(ChatMessage(role, content, tool_call_id=tool_call_id, name=name))
    return probes, said


def _contents_of(index: int, role: str) -> _SaidPart:
    return _SaidPart(index, f"what the {role} says")


def _left_out(said: _SaidPart, places: Sequence[str], how: str) -> ChatRefused:
    """Returns the error for a part that the template leaves out. `places` says where each message comes from."""
    place = _TOOLS_PLACE if said.message == _TOOLS else places[said.message]
    return ChatRefused(f"the model's chat template {how} {said.what} here", f"chat.{place}{said.part}")


_MAX_SEARCHED_CHARS = 1 << 28  # takes about 0.3 s
_END_OF_THOUGHTS = re.compile(
    r"</(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning)>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<channel\|>"
)
_ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
"""Matches a content whose answer is in <answer> tags, which some models write after their thoughts."""
_SWITCH = re.compile(r"/(?:(?:no_?)?think|system_override)\b")
"""Matches switches in a content, which turn thinking, or the template's own words, on or off. Some templates remove
them.
"""


def _find_missing(
    messages: Sequence[ChatMessage],
    pieces: Sequence[Sequence[str]],
    tools: Sequence[Tool],
    text: str,
    *,
    has_objects: bool,
) -> _SaidPart | None:
    """Returns the first part of the conversation that is missing from the text, or None.

    `pieces` has the `_pieces` of each message. `has_objects` says that the template got the arguments of tool
    calls as objects, and not as JSON text.

    The text must have the parts in this order: a turn goes from one user or system message to the next, and turns come
    in order. Within a turn each kind of part keeps its order: the assistant's words, its tool calls, and the tools'
    answers. An answer comes after the calls that it may answer. The assistant's words may come before or after its
    calls, because some templates write them last. A system message may be moved before all turns.
    """
    search = _Search(text)
    if (tool := _find_missing_of_tools(tools, search)) is not None:
        return tool
    ends = dict.fromkeys(("system", "assistant", "call", "tool"), 0)
    for index, (message, said) in enumerate(zip(messages, pieces, strict=True)):
        kind = "system" if message.role == "developer" else message.role
        if kind in ("system", "user"):
            ends["assistant"] = ends["call"] = ends["tool"] = max(ends["assistant"], ends["call"], ends["tool"])
        end = max(ends["tool"], ends["call"]) if kind == "tool" else ends["assistant" if kind == "user" else kind]
        for piece in said:
            if (end := search.end_of(piece, end)) < 0:
                return _contents_of(index, message.role)
        ends |= dict.fromkeys(("assistant", "call", "tool"), end) if kind == "user" else {kind: end}
        for number, call in enumerate(message.tool_calls):
            part = f".tool_calls[{number}]"
            words = _InAnyOrder(search, ends["call"])
            if not words.finds(call.name):
                return _SaidPart(index, "the function's name", part)
            arguments = _object_of(call.arguments) if has_objects else None
            if not all(map(words.finds, [call.arguments] if arguments is None else _leaves(arguments))):
                return _SaidPart(index, "the arguments", part)
            ends["call"] = words.end
    return None


def _find_missing_of_tools(tools: Sequence[Tool], search: _Search) -> _SaidPart | None:
    """Returns the first name or description of a tool, or name of a parameter, that is missing; None if all are there.

    Tools must come in order. Other parts of a schema are not looked for, because some templates write it in a language
    of types.
    """
    start = 0
    for number, tool in enumerate(tools):
        properties = tool.schema.get("properties")
        names = properties if isinstance(properties, dict) else {}
        said = [
            (tool.description, "what it says of itself"),
            *((name, "the names of its parameters") for name in names),
        ]
        for words, what in [(tool.name, "the function's name"), *said]:
            if words.strip() and search.end_of(words, start) < 0:
                return _SaidPart(_TOOLS, what, f"[{number}]")
        start = search.end_of(tool.name, start)
    return None


def _pieces(message: ChatMessage) -> Iterator[str]:
    """Returns the pieces of a message's content that every template must keep.

    Templates may drop blanks around the content, switches that turn thinking on or off (such as /no_think), and an
    assistant's thoughts.
    """
    content, end = message.content, 0
    if message.role == "assistant":
        for thoughts in _END_OF_THOUGHTS.finditer(message.content):
            end = thoughts.end()
        content = content[end:]
        if answer := _ANSWER.fullmatch(content.strip()):
            content = answer[1]
    for piece in _SWITCH.split(content):
        if piece := piece.strip():
            yield piece


def _leaves(value: Any) -> Iterator[str | float]:
    """Returns the names, texts and numbers in a JSON value, in order. A null is left out together with its name."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as entries:
                waiting += [
                    each for pair in reversed(entries.items()) if pair[1] is not None for each in reversed(pair)
                ]
            case list() as entries:
                waiting += reversed(entries)
            case bool() | None:  # not checked: templates write true, True or yes
                pass
            case leaf:
                yield leaf


_NUMBER = re.compile(r"(?:(?<!\w)-)?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LINE_ENDS = re.compile(r"[\r\n]+")
_QUOTED_LINE_ENDS = re.compile(r"\\(?:\\(?:\\\\)*+|(r(?:\\[rn])*+|n(?:\\[rn])++))")
"""Matches escaped line ends in quoted text, except a single `\\n`. It skips escaped backslashes."""
_NOT_QUOTED = re.compile(r"[ !#-&(-\[\]-~]*")
"""Matches words that JSON and Python write unchanged, without escapes."""
_NEAR_CHARS = 1024


def _quotings(words: str) -> Sequence[str]:
    """Returns the words as JSON, ASCII-only JSON and Python escape them. Forms without any escape are left out."""
    if _NOT_QUOTED.fullmatch(words):
        return ()
    quotings = [encode_basestring(words)[1:-1], encode_basestring_ascii(words)[1:-1], repr('"' + words)[2:-1]]
    if '"' not in words:  # Python chooses the outer quotes by those in the whole text
        quotings.append(repr(words)[1:-1])
    return [quoting for quoting in dict.fromkeys(quotings) if quoting != words]


class _Search:
    """Finds words in a text, unchanged or escaped. All kinds of line ends match, with or without blank lines.

    `_plain` is the text with each run of line ends replaced by one line end. `_quoted` is `_plain` with each run of
    escaped line ends replaced by one, too. The i-th replaced run ends at `_plain_ends[i]` and at `_quoted_ends[i]`.
    """

    def __init__(self, text: str) -> None:
        self._plain = _LINE_ENDS.sub("\n", text)
        self.chars_left = _MAX_SEARCHED_CHARS
        self._plain_ends: list[int] = []
        self._quoted_ends: list[int] = []
        pieces: list[str] = []
        start = end = 0
        for match in _QUOTED_LINE_ENDS.finditer(self._plain):
            if not match[1]:
                continue
            pieces += self._plain[start : match.start()], "\\n"
            end += match.start() - start + len("\\n")
            start = match.end()
            self._plain_ends.append(start)
            self._quoted_ends.append(end)
        self._quoted = "".join([*pieces, self._plain[start:]])

    def end_of(self, words: str, start: int) -> int:
        """Returns the end of the first occurrence of `words` that begins at `start` or later, or -1."""
        words = _LINE_ENDS.sub("\n", words.strip())
        quotings = _quotings(words)
        quoted_start = _moved(start, self._plain_ends, self._quoted_ends)
        done, stop = 0, len(words) + _NEAR_CHARS if quotings else len(self._plain)
        while True:  # searching all of the text for one form would be slow if another is near
            ends = []
            if (at := self._plain.find(words, start + max(0, done - len(words)), start + stop)) >= 0:
                ends.append(at + len(words))
            for quoting in quotings:
                first = quoted_start + max(0, done - len(quoting))
                if (at := self._quoted.find(quoting, first, quoted_start + stop)) >= 0:
                    ends.append(_moved(at + len(quoting), self._quoted_ends, self._plain_ends))
            if ends:
                return min(ends)
            if start + stop >= len(self._plain):
                return -1
            done, stop = stop, 2 * stop

    def end_of_number(self, number: str, start: int) -> int:
        """Returns the end of the first occurrence of `number` that begins at `start` or later, or -1.

        A number that is a part of another number is no occurrence.
        """
        starts = self._starts_of_numbers.get(number, [])
        index = bisect_left(starts, start)
        return starts[index] + len(number) if index < len(starts) else -1

    @cached_property
    def _starts_of_numbers(self) -> Mapping[str, Sequence[int]]:
        starts: dict[str, list[int]] = {}
        for match in _NUMBER.finditer(self._plain):
            starts.setdefault(match[0], []).append(match.start())
        return starts


def _moved(at: int, ends: Sequence[int], other_ends: Sequence[int]) -> int:
    """Converts position `at` in one text to the corresponding position in another.

    The texts differ only in some places. The i-th ends at `ends[i]` in the one and at `other_ends[i]` in the other.
    """
    index = bisect_right(ends, at)
    return at + other_ends[index - 1] - ends[index - 1] if index else at


class _InAnyOrder:
    """Finds words in any order from `start` on. Equal words must occur at different places.

    To search for many words in any order takes time quadratic in their number. So once very many characters have been
    searched, further words must come in order.
    """

    def __init__(self, search: _Search, start: int) -> None:
        self._search = search
        self._start = self.end = start
        self._ends: dict[str, int] = {}

    def finds(self, leaf: str | float) -> bool:
        words = leaf if isinstance(leaf, str) else json.dumps(leaf)
        end_of = self._search.end_of if isinstance(leaf, str) else self._search.end_of_number
        start = self._ends.get(words, self._start) if self._search.chars_left > 0 else self.end
        if (end := end_of(words, start)) < 0:
            return False
        self._search.chars_left -= end - start
        self._ends[words] = end
        self.end = max(self.end, end)
        return True


class _refusing:
    """A context that turns any exception of a template into ChatRefused. It lets TextTooLong pass.

    In the error's message, `otherwise` describes a failure that is not the template's own refusal.
    """

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        match error:
            case None | ChatRefused() | TextTooLong():
                return
            case MemoryError():
                raise ChatRefused("the model's chat template needs too much memory for it") from error
            case TemplateError() if not isinstance(error, TemplateSyntaxError):
                raise ChatRefused(f"the model's chat template refuses it: {error}") from error
            case Exception():
                message = f"the model's chat template {self._otherwise}: {type(error).__name__}: {error}"
                raise ChatRefused(message) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's words for training. Here it only renders its body."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """The `dict` function of templates, without the attributes of Python's type."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The `namespace` object of templates. It refuses names by which Python's own attributes could be reached."""

    def __init__(*args: Any, **entries: Any) -> None:  # no named `self`, as templates may call `namespace(self=...)`
        self, *rest = args
        attributes = dict(*rest, **entries)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
