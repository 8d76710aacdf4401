"""A model's chat template: a conversation to the text of its prompt, and nothing that somebody said left out.

The environment is the one that `apply_chat_template` of transformers renders in: templates are written for it. This
module needs none of its libraries, so that a process of its own can render.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from common.chat_messages import ROLES, ChatMessage, ToolCall

_MAX_CACHED_SHAPES = 256
_MAX_CHARS = 1 << 24


def _marker(index: int) -> str:
    return f"qz{index}zq"


_PRINTED_PART = re.compile(rf"""text['"]:\s*['"]{_marker(0)}""")
"""A list of parts as Python or JSON writes it."""
_PRINTED_ARGUMENT = re.compile(rf"""'{_marker(1)}':""")
"""An object as Python writes it, and no JSON does."""
_PROBE_ID = "000000000"  # some templates take no id of another length


class ChatRefused(ValueError):
    """The template cannot render this conversation, or would drop some of it."""


class TextTooLong(ValueError):
    """A text is longer than it may be."""


class _Said(NamedTuple):
    place: str
    what: str


class _CallsForm(NamedTuple):
    """How a template reads a message with tool calls. `has_null`: null for a content that says nothing."""

    has_objects: bool
    has_null: bool


class ChatTemplate:
    """`parts_roles`: the roles whose content the template reads as a list of parts. None: find it out.

    Each rendered text must have all that is said in it, and each order of roles is rendered once with markers for
    contents: a short word might be in the text by chance.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, parts_roles: Sequence[str] | None = None
    ) -> None:
        """Raises ChatRefused when it is no template, or cannot say what a user says."""
        self._special_tokens = special_tokens
        with _refusing("is none"):
            self._template = _environment().from_string(source)
        self._dropped = lru_cache(_MAX_CACHED_SHAPES)(self._find_dropped)
        self.parts_roles: frozenset[str] = frozenset(parts_roles or ())
        if parts_roles is None:
            for role in ("user", *ROLES):
                self._choose_form(role)

    def render(self, messages: Sequence[ChatMessage], *, max_chars: int = _MAX_CHARS) -> str:
        """Ends where the assistant's turn begins. Raises ChatRefused, or TextTooLong."""
        text = self._render(messages, max_chars=max_chars)
        if (dropped := self._dropped(_shape(messages))) is not None:
            place, what = dropped
            raise ChatRefused(f"{place}: the model's chat template leaves out {what} here")
        if (missing := _find_missing(messages, text)) is not None:
            place, what = missing
            raise ChatRefused(f"{place}: the model's chat template leaves out or changes some of {what} here")
        return text

    def _render(
        self, messages: Sequence[ChatMessage], *, form: _CallsForm | None = None, max_chars: int = _MAX_CHARS
    ) -> str:
        if form is None:
            form = self._calls_form if any(message.tool_calls for message in messages) else _CALLS_FORMS[0]
        conversation = [self._as_read(message, form) for message in messages]
        pieces: list[str] = []
        num_chars = 0
        with _refusing("fails on it"):
            for piece in self._template.generate(
                messages=conversation, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise TextTooLong(f"the rendered conversation has more than {max_chars} characters")
        return "".join(pieces)

    def _as_read(self, message: ChatMessage, form: _CallsForm) -> dict[str, Any]:
        """As templates for transformers expect it. What a message does not have is no key."""
        says_nothing = bool(message.tool_calls) and not message.content.strip()
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
        return read

    def _choose_form(self, role: str) -> None:
        """A string, unless only parts are kept. Raises ChatRefused when a user's words are kept in neither form."""
        as_strings, reason = self.parts_roles, ""
        for parts_roles in (as_strings, as_strings | {role}):
            self.parts_roles = parts_roles
            for before, after in _AROUND[role]:
                probe = ChatMessage(role, _marker(0), tool_call_id=_PROBE_ID if role == "tool" else "")
                try:
                    text = self._render([*before, probe, *after], form=_CALLS_FORMS[0])
                except (ChatRefused, TextTooLong) as error:
                    if parts_roles == as_strings:
                        reason = str(error)
                    continue
                if _marker(0) in text and not _PRINTED_PART.search(text):
                    return
        self.parts_roles = as_strings  # what it keeps of this role, if anything, each conversation shows
        if role == "user":
            raise ChatRefused(
                reason or "the model's chat template leaves out what a user says, as a string and as a list of parts"
            )

    @cached_property
    def _calls_form(self) -> _CallsForm:
        """The first that keeps a call. If none does, each conversation shows what is left out."""
        call = ToolCall(_marker(0), json.dumps({_marker(1): _marker(2)}), _PROBE_ID)
        conversation = [
            _USER,
            ChatMessage("assistant", tool_calls=[call]),
            ChatMessage("tool", "t", tool_call_id=_PROBE_ID, name=call.name),
        ]
        for form in _CALLS_FORMS:
            try:
                text = self._render(conversation, form=form)
            except (ChatRefused, TextTooLong):
                continue
            if all(_marker(index) in text for index in range(3)) and not _PRINTED_ARGUMENT.search(text):
                return form
        return _CALLS_FORMS[0]

    def _find_dropped(self, shape: bytes) -> _Said | None:
        """What is the first that is not in the text, of a conversation of this shape. A template that refuses the
        markers, but not the contents, has read these.
        """
        probes, said = _probes(shape)
        try:
            text = self._render(probes)
        except (ChatRefused, TextTooLong):
            return None
        found = {match[0] for match in _ANY_MARKER.finditer(_QUOTED.sub(_unquoted, text))}
        return next((each for marker, each in said.items() if marker not in found), None)


_USER = ChatMessage("user", "u")
_AROUND: Mapping[str, Sequence[tuple[Sequence[ChatMessage], Sequence[ChatMessage]]]] = {
    "user": (((), ()), ((ChatMessage("system", "s"),), ())),
    "system": (((), (_USER,)),),
    "developer": (((), (_USER,)),),
    "assistant": (((_USER,), (ChatMessage("user", "v"),)),),
    "tool": (
        ((_USER, ChatMessage("assistant", "a")), ()),
        ((_USER, ChatMessage("assistant", tool_calls=[ToolCall("f", "{}", _PROBE_ID)])), ()),
    ),
}
"""What is said before and after a message of that role, to try its form."""
_CALLS_FORMS = tuple(_CallsForm(has_objects, has_null) for has_null in (False, True) for has_objects in (True, False))


def _call_as_read(call: ToolCall, form: _CallsForm) -> dict[str, Any]:
    arguments = _object_of(call.arguments) if form.has_objects else None
    function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    read: dict[str, Any] = {"type": "function", "function": function}
    return {"id": call.id, **read} if call.id else read


def _object_of(arguments: str) -> dict[str, Any] | None:
    """None where it is no JSON object, or has something that an object would not keep."""
    if not arguments.strip():
        return {}  # as models write it that call a function without any
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


_HAS_ID, _HAS_NAME, _IS_OBJECT, _CALL, _ROLE = 1, 2, 4, 8, 16
_LONG = 8
"""So many characters and more are marked by so many: a word of fewer might be in the template's own."""
_PRIVATE, _NUM_PRIVATE = 0x100000, 65_534
"""Characters that no text has: each marks one short content."""
_ANY_MARKER = re.compile(rf"qz\d+zq|([{chr(_PRIVATE)}-{chr(_PRIVATE + _NUM_PRIVATE - 1)}])\1*")
_QUOTED = re.compile(r"\\u(db[c-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})|\\U(0010[0-9a-f]{4})")
"""Such a character as JSON writes it in ASCII, or as Python does."""


def _unquoted(match: re.Match[str]) -> str:
    high, low, whole = match.groups()
    if whole:
        return chr(int(whole, 16))
    return bytes.fromhex(high + low).decode("utf-16-be")


def _shape(messages: Sequence[ChatMessage]) -> bytes:
    """What a template may tell apart without the words: two bytes for each message, the second how many characters it
    says where they are few, and one for each call after it.
    """
    shape = bytearray()
    for message in messages:
        shape.append(
            _ROLE * ROLES.index(message.role) | _HAS_ID * bool(message.tool_call_id) | _HAS_NAME * bool(message.name)
        )
        num_chars = len(message.content.strip())
        shape.append(num_chars if num_chars < _LONG else _LONG)
        for call in message.tool_calls:
            shape.append(_CALL | _HAS_ID * bool(call.id) | _IS_OBJECT * (_object_of(call.arguments) is not None))
    return bytes(shape)


def _probes(shape: bytes) -> tuple[list[ChatMessage], dict[str, _Said]]:
    """A conversation of that shape in which all that has to be kept is a marker, and what each marker stands for."""
    probes: list[ChatMessage] = []
    said: dict[str, _Said] = {}

    def marker_of(place: str, what: str, *, num_chars: int = _LONG) -> str:
        marker = _marker(len(said)) if num_chars == _LONG else num_chars * chr(_PRIVATE + len(said) % _NUM_PRIVATE)
        said[marker] = _Said(place, what)
        return marker

    codes = iter(shape)
    for code in codes:
        tool_call_id = _PROBE_ID if code & _HAS_ID else ""
        if code & _CALL:
            calls = probes[-1].tool_calls
            place = f"messages[{len(probes) - 1}].tool_calls[{len(calls)}]"
            name = marker_of(place, "the function's name")
            words = [marker_of(place, "the arguments") for _ in range(4)]
            arguments = json.dumps(dict([words[:2], words[2:]])) if code & _IS_OBJECT else " ".join(words)
            probes[-1] = replace(probes[-1], tool_calls=[*calls, ToolCall(name, arguments, tool_call_id)])
            continue
        role = ROLES[code // _ROLE]
        num_chars = next(codes)
        place = f"messages[{len(probes)}]"
        content = marker_of(place, f"what the {role} says", num_chars=num_chars) if num_chars else ""
        name = "f" if code & _HAS_NAME else ""
        probes.append(ChatMessage(role, content, tool_call_id=tool_call_id, name=name))
    return probes, said


_END_OF_THOUGHTS = re.compile(
    r"</(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning)>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<channel\|>"
)
_ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
"""Some models put what they say after their thoughts into this."""
_SWITCH = re.compile(r"/(?:(?:no_?)?think|system_override)\b")
"""Some templates take these out of a content: they switch thinking, or the template's own words, on or off."""


def _find_missing(messages: Sequence[ChatMessage], text: str) -> _Said | None:
    """What is the first that is not in the text. It comes in order, but a template may move a system's words."""
    search = _Search(text)
    end = end_of_systems = 0
    for index, message in enumerate(messages):
        is_systems = message.role in ("system", "developer")
        start = end_of_systems if is_systems else end
        at = furthest = start
        for piece in _pieces(message):
            if (at := search.end_of(piece, start=at, kind=message.role)) < 0:
                return _Said(f"messages[{index}]", f"what the {message.role} says")
            furthest = at
        at = start  # calls may come before what is said beside them
        for number, call in enumerate(message.tool_calls):
            place = f"messages[{index}].tool_calls[{number}]"
            if (end_of_name := search.end_of(call.name, start=at, kind="name")) < 0:
                return _Said(place, "the function's name")
            if (end_of_arguments := _end_of_arguments(search, call.arguments, start=at)) < 0:
                return _Said(place, "the arguments")
            at = max(end_of_name, end_of_arguments)
        if is_systems:
            end_of_systems = furthest
        else:
            end = max(furthest, at)
    return None


def _pieces(message: ChatMessage) -> Iterator[str]:
    """What no template may leave out of a content: all but outer blanks, switches, and what an assistant thought."""
    content = message.content
    if message.role == "assistant":
        for thoughts in _END_OF_THOUGHTS.finditer(message.content):
            content = message.content[thoughts.end() :]
        if answer := _ANSWER.fullmatch(content.strip()):
            content = answer[1]
    for piece in _SWITCH.split(content):
        if piece := piece.strip():
            yield piece


def _end_of_arguments(search: _Search, arguments: str, *, start: int) -> int:
    """Where they first end in the text, or -1: all that is in the object, as it comes or sorted, or the text of it."""
    values = _object_of(arguments)
    writings = [] if values is None else [_leaves(values, is_sorted=False), _leaves(values, is_sorted=True)]
    end = -1
    for words in (*writings, iter([arguments.strip()])):
        at = start
        for each in words:
            if (at := search.end_of(each, start=at, stop=end if end >= 0 else None, kind="arguments")) < 0:
                break
        else:
            end = at
    return end


def _leaves(value: Any, *, is_sorted: bool) -> Iterator[str]:
    """Names, texts and numbers in a value of JSON, from the first to the last. `is_sorted`: by names."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as entries:
                pairs = sorted(entries.items(), key=itemgetter(0)) if is_sorted else list(entries.items())
                waiting += [each for pair in reversed(pairs) for each in reversed(pair)]
            case list() as entries:
                waiting += reversed(entries)
            case str() as words:
                yield words.strip()
            case bool() | None:  # true, True or yes
                pass
            case number:
                yield json.dumps(number)


def _in_json(words: str, *, ensure_ascii: bool) -> str:
    return json.dumps(words, ensure_ascii=ensure_ascii)[1:-1]


def _printed(words: str) -> str:
    return repr(words)[1:-1]


class _Search:
    """Finds words in a text: as they are, as JSON writes them, or as Python does.

    Of each kind the form found last is tried first: a form that is nowhere is looked for up to the text's end.
    """

    _FORMS = (str, partial(_in_json, ensure_ascii=False), partial(_in_json, ensure_ascii=True), _printed)

    def __init__(self, text: str) -> None:
        self._text = text
        self._found_as: dict[str, int] = {}

    def end_of(self, words: str, *, start: int, kind: str, stop: int | None = None) -> int:
        """Where the first of these words between `start` and `stop` end, or -1."""
        if words.isalnum() and words.isascii():  # no form is another
            at = self._text.find(words, start, stop)
            return -1 if at < 0 else at + len(words)
        end = -1
        found_as = self._found_as.get(kind, 0)
        for form in (found_as, *(each for each in range(len(self._FORMS)) if each != found_as)):
            written = self._FORMS[form](words)
            if (at := self._text.find(written, start, stop)) >= 0:
                end = at + len(written)
                stop, self._found_as[kind] = at + len(written) - 1, form
        return end


class _refusing:
    """Whatever a template raises is the conversation's refusal."""

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
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what a model said, for training: here its body is all there is to it."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict` without what its type gives away."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Without names that reach Python's own attributes."""

    def __init__(*args: Any, **entries: Any) -> None:  # `namespace(self=...)` is a name too
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
