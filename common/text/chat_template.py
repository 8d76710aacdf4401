"""Renders a conversation to a prompt with the model's chat template, and refuses to leave out anything that was said.

The rule: each content, call and tool is in the text, as it was said or as JSON or Python quote it. Only blanks around
it and its line ends may differ. It begins after the end of the previous one of its kind: a system's words, a
developer's, the assistant's, calls, answers, tools. A user's words stand between what was said before and after them,
wherever a system's or a developer's are. Answers come after the calls before them. The names, texts and numbers of one
call or tool may come in any order. An assistant's thoughts, switches such as /no_think, and true, false and null may be
absent. Short words might be in the text by chance. So each new sequence of roles is also rendered once as a *twin*,
with markers for words, which must pass the same check. Words beside calls, and a system's words where the last message
is an answer, may be absent from the text if they are absent from the twin. With twins of a few conversations, this
check also finds at the start in which forms the template writes contents, calls and tools, and which of them it does
not write at all.

The Jinja environment is that of `apply_chat_template` in transformers, for which templates are written. This module
does not import transformers, so that a separate small process can render.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from common.text.chat_messages import (
    NO_OPTIONS,
    ChatMessage,
    TemplateOptions,
    Tool,
    ToolCall,
    finite,
    json_object,
    listed,
)
from common.text.generic_tools import (
    in_ordinary_messages,
    with_neighbours_joined,
    with_one_call_each,
    with_system_first,
)

_MAX_KNOWN_TWINS = 256
_MAX_CHARS = 1 << 24
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
_CUT = "qzcutzq"
"""Ends the message that the output continues."""


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


class TemplateTexts(NamedTuple):
    """The chat template of a model, and its special tokens by name. If `tool_use` is not None, it is the template of
    chats with tools.
    """

    source: str
    special_tokens: Mapping[str, str]
    tool_use: str | None = None


class _Form(NamedTuple):
    """The form in which a template gets messages: contents of `parts_roles` as lists of parts and others as strings;
    arguments of calls as objects or as JSON text, empty contents beside calls as null or as "", and calls with or
    without the assistant's words beside them.
    """

    parts_roles: frozenset[str] = frozenset()
    has_objects: bool = True
    has_null: bool = False
    has_words: bool = True


class _SaidPart(NamedTuple):
    """A part of a conversation: its `words` must be in the text. It is in the message with index `message`, or, if that
    is None, in the tools. Errors show `within`, its place there, and `what` it is.
    """

    kind: str
    message: int | None
    within: str
    what: str
    words: Sequence[str | float]


class _LeftOut(NamedTuple):
    """The parts of a conversation that a template leaves out: `first` is the first part that it has to keep, or None.
    `unsaid` are the indices of messages whose contents it may leave out.
    """

    first: _SaidPart | None = None
    unsaid: frozenset[int] = frozenset()


_USER, _SYSTEM, _ASSISTANT = ChatMessage("user", "u"), ChatMessage("system", "s"), ChatMessage("assistant", "a")
_BLANK_SYSTEM = ChatMessage("system")
_CALL = ToolCall("f", "{}", "id")
_CALLING = ChatMessage("assistant", tool_calls=(_CALL,))
_CALLING_TWICE = ChatMessage("assistant", tool_calls=(_CALL, _CALL))
_ANSWER = ChatMessage("tool", "t", tool_call_id="id", name="f")
_MARKED_PARAMETERS = {
    "type": "object",
    "properties": {"qzpzq": {"type": "string", "description": "w"}},  # some templates read it of every parameter
    "required": ["qzpzq"],
}
_MARKED_TOOL = Tool("qzfzq", "qzdzq", json.dumps(_MARKED_PARAMETERS))
_WITH_TOOL = TemplateOptions((_MARKED_TOOL,))
_TRIALS: Mapping[str, Sequence[ChatMessage]] = {
    "user": [_USER],
    "system": [_SYSTEM, _USER],
    "developer": [ChatMessage("developer", "d"), _USER],
    "assistant": [_USER, _ASSISTANT, _USER],
    "tool": [_USER, _ASSISTANT, _ANSWER],
}
"""For each role, a conversation that shows in which form the template writes its contents."""
_PROBE_ID = "000000000"  # some templates accept ids of this length only
_PRINTED = re.compile(r"""text['"]:\s*['"]qz\d|'qz\d+zq':""")
"""Matches a list of parts that a template printed instead of reading it, and arguments as Python prints them."""


class ChatTemplate:
    """A model's chat template. It renders conversations, and checks that the text has everything that was said."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles and tries the template. Raises ChatRefused if it is invalid, or does not render a user's words."""
        self._special_tokens = special_tokens
        environment = _environment()
        with _refusing("is none"):
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        self._known_twins: dict[bytes, _LeftOut] = {}
        contents_form = self._find_form_of_contents()
        calls_form = self._find_form_of_calls(contents_form)
        self._writes_calls = calls_form is not None
        form = self._form = calls_form or contents_form
        self._writes_several_calls = self._writes(form, _USER, _CALLING_TWICE, _ANSWER, _ANSWER)
        self.writes_tools = self._writes(form, _USER, some_options=[_WITH_TOOL])
        """Whether the template has a form for tools, and writes them in full."""
        self._writes_answers = self._writes(form, *_TRIALS["tool"])
        self._writes_system = self._writes(form, *_TRIALS["system"])
        self._takes_turns = frozenset(
            role
            for role, trial in (
                ("system", [_SYSTEM, _SYSTEM, _USER]),
                ("user", [_USER, _USER]),
                ("assistant", [_USER, _ASSISTANT, _ASSISTANT, _USER]),
            )
            if not self._writes(form, *trial)
        )
        """The roles of which the template takes no two messages in a row."""
        self._writes_later_system = self._writes(form, _SYSTEM, _USER, _ASSISTANT, _SYSTEM, _USER)

    def render(
        self, messages: Sequence[ChatMessage], options: TemplateOptions = NO_OPTIONS, *, max_chars: int = _MAX_CHARS
    ) -> str:
        """Renders the messages, by default up to where an assistant's answer begins. Raises ChatRefused or TextTooLong.

        The model is told of tools, calls and answers in ordinary messages where the template has no form for them, and
        of one call in each message where it has none for several. If it takes a system message at the beginning only,
        that has the words of all. If roles have to take turns, neighbours become one message.
        """
        places = [f"messages[{index}]" for index in range(len(messages))]
        leaves_out_tools = bool(options.tools) and not self.writes_tools
        if leaves_out_tools or (any(message.tool_calls for message in messages) and not self._writes_calls):
            messages, places = in_ordinary_messages(
                messages,
                options.tools if leaves_out_tools else (),
                has_answers=not leaves_out_tools and self.writes_tools and self._writes_answers,
                has_system=self._writes_system,
            )
            options = replace(options, tools=()) if leaves_out_tools else options
        has_later_system = any(message.role == "system" for message in messages[1:])
        if has_later_system and self._writes_system and not self._writes_later_system:
            messages, places = with_system_first(messages, places)
        if self._takes_turns:
            messages, places = with_neighbours_joined(messages, places, self._takes_turns)
        if any(len(message.tool_calls) > 1 for message in messages) and not self._writes_several_calls:
            messages, places = with_one_call_each(messages, places)
        self._check_kwargs(options)
        text = self._render(messages, options, self._form, max_chars)
        first, unsaid = self._left_out_of_twin(messages, options)
        first = first or _find_missing(_parts(messages, options.tools, self._form, unsaid), text)
        if first is not None:
            place = "tools" if first.message is None else places[first.message]
            reason = f"the model's chat template leaves out or changes some of {first.what} here"
            raise ChatRefused(reason, f"chat.{place}{first.within}")
        return text

    @property
    def variables(self) -> Sequence[str]:
        """The names of the variables that a request may set."""
        return sorted(self._variables - self._special_tokens.keys() - _OWN_VARIABLES)

    def _check_kwargs(self, options: TemplateOptions) -> None:
        """Raises ChatRefused for a variable that the template does not read, or that a request may not set."""
        for name in json_object(options.chat_template_kwargs) or ():
            if name not in self._variables:
                known = listed(self.variables) or "no variable of a request"
                reason = f"the model's chat template does not read {name[:64]!r}, it reads {known}"
            elif name in self._special_tokens or name in _OWN_VARIABLES:
                reason = f"{name!r} is not the request's to set"
            else:
                continue
            raise ChatRefused(reason, "chat.chat_template_kwargs")

    def _render(
        self, messages: Sequence[ChatMessage], options: TemplateOptions, form: _Form, max_chars: int = _MAX_CHARS
    ) -> str:
        if options.continue_final_message:
            messages = [*messages[:-1], replace(messages[-1], content=messages[-1].content + _CUT)]
        variables = {
            **self._special_tokens,
            "documents": None,
            **(json_object(options.chat_template_kwargs) or {}),
            "messages": [_as_read(message, form) for message in messages],
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

    def _left_out_of_twin(self, messages: Sequence[ChatMessage], options: TemplateOptions) -> _LeftOut:
        """Returns what the template leaves out of the conversation's twin. If it refuses the twin, the result is empty,
        because it then reads the markers' texts.
        """
        twin = _twin(messages)
        if options.tools:  # a template leaves out parts if there are tools, whichever they are
            options = replace(options, tools=_WITH_TOOL.tools)
        key = hashlib.sha256(repr((twin, options)).encode()).digest()
        left_out = self._known_twins.pop(key, None)
        if left_out is None:
            left_out = _LeftOut()
            with suppress(ChatRefused, TextTooLong):
                text = self._render(twin, options, self._form)
                # Mistral's templates write a system's words only before a user's that are the last
                lacks_system = self._writes_system and twin[-1].role == "tool"
                left_out = _find_left_out(twin, options.tools, text, self._form, may_lack_system=lacks_system)
            if len(self._known_twins) == _MAX_KNOWN_TWINS:
                del self._known_twins[next(iter(self._known_twins))]
        self._known_twins[key] = left_out  # as the one that was used last
        return left_out

    def _find_form_of_contents(self) -> _Form:
        """Returns the form in which the template writes contents. Raises ChatRefused if it writes a user's words in
        none. Another role that it writes in none gets strings.
        """
        form = _Form()
        for role, trial in _TRIALS.items():
            forms = form, form._replace(parts_roles=form.parts_roles | {role})
            found = next((each for each in forms if self._writes(each, *trial)), None)
            if found is None and role == "user":
                self._render([_USER], NO_OPTIONS, form)  # raises the template's own reason, if it has one
                reason = "leaves out what a user says, as a string and as a list of parts"
                raise ChatRefused(f"the model's chat template {reason}")
            form = found or form
        return form

    def _find_form_of_calls(self, form: _Form) -> _Form | None:
        """Returns the first form in which the template writes a call with its answer, or None."""
        for has_null, has_objects in itertools.product((False, True), (True, False)):
            form = form._replace(has_null=has_null, has_objects=has_objects)
            if self._writes(form, _USER, _CALLING, _ANSWER):
                return form._replace(has_words=self._writes(form, _USER, replace(_CALLING, content="w"), _ANSWER))
        return None

    def _writes(
        self, form: _Form, *messages: ChatMessage, some_options: Sequence[TemplateOptions] = (NO_OPTIONS, _WITH_TOOL)
    ) -> bool:
        """Whether the template writes all that the twin of these messages says, with or without a system message before
        it, with one of `some_options`.
        """
        for before, options in itertools.product(((), (_BLANK_SYSTEM,)), some_options):
            with suppress(ChatRefused, TextTooLong):
                twin = _twin([*before, *messages])
                text = self._render(twin, options, form)
                if _find_left_out(twin, options.tools, text, form).first is None and not _PRINTED.search(text):
                    return True
        return False


class ChatTemplates:
    """A model's chat templates. `tool_use`, if there is one, renders chats with tools, and the other one the rest.

    A `tool_use` that is invalid, or that has no form for tools, counts as absent.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None) -> None:
        """Compiles and tries the templates. Raises ChatRefused as ChatTemplate does, for `source` only."""
        self._default = self._with_tools = ChatTemplate(source, special_tokens)
        if tool_use is not None:
            with suppress(ChatRefused, TextTooLong):
                template = ChatTemplate(tool_use, special_tokens)
                self._with_tools = template if template.writes_tools else self._default

    def render(
        self, messages: Sequence[ChatMessage], options: TemplateOptions = NO_OPTIONS, *, max_chars: int = _MAX_CHARS
    ) -> str:
        """Renders the messages as `ChatTemplate.render` does, by the template for them."""
        template = self._with_tools if options.tools else self._default
        return template.render(messages, options, max_chars=max_chars)

    @property
    def uses_tool_use(self) -> bool:
        return self._with_tools is not self._default

    @property
    def variables(self) -> Sequence[str]:
        """The names of the variables that a request may set, of any of the templates."""
        return sorted({*self._default.variables, *self._with_tools.variables})


def _twin(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Returns the conversation with a marker of its own for each content, and for names and values of calls."""
    markers = (f"qz{index}zq" for index in itertools.count())
    return tuple(
        ChatMessage(
            message.role,
            next(markers) if any(_pieces(message)) else "",
            tuple(
                ToolCall(
                    next(markers),
                    next(markers) if _object_of(call.arguments) is None else json.dumps({next(markers): next(markers)}),
                    _PROBE_ID if call.id else "",
                )
                for call in message.tool_calls
            ),
            _PROBE_ID if message.tool_call_id else "",
            "f" if message.name else "",
        )
        for message in messages
    )


def _find_left_out(
    twin: Sequence[ChatMessage], tools: Sequence[Tool], text: str, form: _Form, *, may_lack_system: bool = False
) -> _LeftOut:
    """Returns what is missing from the twin's text."""
    unsaid = frozenset(
        index
        for index, message in enumerate(twin)
        if message.content not in text and (message.tool_calls or (may_lack_system and message.role == "system"))
    )
    return _LeftOut(_find_missing(_parts(twin, tools, form, unsaid), text), unsaid)


def _as_read(message: ChatMessage, form: _Form) -> dict[str, Any]:
    """Returns the message in the form that templates for transformers expect. Absent fields have no key."""
    says_nothing = bool(message.tool_calls) and not (form.has_words and message.content.strip())
    content: Any = "" if says_nothing else message.content
    if message.role in form.parts_roles:
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


def _call_as_read(call: ToolCall, form: _Form) -> dict[str, Any]:
    arguments = _object_of(call.arguments) if form.has_objects else None
    function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    read: dict[str, Any] = {"type": "function", "function": function}
    return {"id": call.id, **read} if call.id else read


def _object_of(arguments: str) -> dict[str, Any] | None:
    """Parses the arguments of a call. Returns None if they are no JSON object, or if the parsed object would lose
    something, or be no text: if a name comes twice, a number is not finite, or a surrogate has no pair.
    """
    if not arguments.strip():
        return {}  # some models write nothing if there are no arguments
    try:
        value = json.loads(arguments, object_pairs_hook=_without_repetition, parse_float=finite, parse_constant=finite)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name comes twice")
    return value


_END_OF_THOUGHTS = re.compile(
    r"</(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning)>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<channel\|>"
)
_ANSWER_IN_TAGS = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
"""Matches a content whose answer is in <answer> tags, which some models write after their thoughts."""
_SWITCH = re.compile(r"/(?:(?:no_?)?think|system_override)\b")
"""Matches switches in a content, which turn thinking, or the template's own words, on or off."""
_AFTER = {
    "tools": ("tools",),
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "assistant", "call", "tool"),
    "assistant": ("user", "assistant"),
    "call": ("user", "call"),
    "tool": ("user", "call", "tool"),
}
"""For each kind of part, the kinds whose last part so far it must follow."""
_MAX_SEARCHED_CHARS = 1 << 28  # takes about 0.3 s


def _parts(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], form: _Form, unsaid: frozenset[int]
) -> Iterator[_SaidPart]:
    """Yields what must be in the text. `unsaid` are the messages whose contents may be absent.

    Of a tool's parameters only the names must be there: some templates write schemas as types of a programming
    language.
    """
    for number, tool in enumerate(tools):
        properties = tool.schema.get("properties")
        names = properties if isinstance(properties, dict) else ()
        yield _SaidPart("tools", None, f"[{number}]", "the tool", [tool.name, tool.description, *names])
    for index, message in enumerate(messages):
        for piece in () if index in unsaid else _pieces(message):
            yield _SaidPart(message.role, index, "", f"what the {message.role} says", [piece])
        for number, call in enumerate(message.tool_calls):
            arguments = _object_of(call.arguments) if form.has_objects else None
            words = [call.arguments] if arguments is None else _leaves(arguments)
            yield _SaidPart("call", index, f".tool_calls[{number}]", "the call", [call.name, *words])


def _find_missing(parts: Iterable[_SaidPart], text: str) -> _SaidPart | None:
    """Returns the first part that is not in its place in the text, or None.

    Finding words in any order takes time quadratic in their number. So once very many characters have been searched,
    further words must come in order.
    """
    search = _Search(text)
    ends = dict.fromkeys(_AFTER, 0)
    for part in parts:
        start = end = max(ends[kind] for kind in _AFTER[part.kind])
        ends_of_words: dict[str, int] = {}  # equal words must be at different places
        for word in part.words:
            written = word if isinstance(word, str) else json.dumps(word)
            found = search.end_of(word, ends_of_words.get(written, start) if search.chars_left > 0 else end)
            if found < 0:
                return part
            ends_of_words[written] = found
            end = max(end, found)
        ends[part.kind] = end
    return None


def _pieces(message: ChatMessage) -> Iterator[str]:
    """Returns the pieces of a message's content that every template must keep, without blanks around them."""
    content, end = message.content, 0
    if message.role == "assistant":
        for thoughts in _END_OF_THOUGHTS.finditer(message.content):
            end = thoughts.end()
        content = content[end:]
        if answer := _ANSWER_IN_TAGS.fullmatch(content.strip()):
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


def _with_single_line_ends(text: str) -> str:
    """Returns the text with one line end for each run of line ends, and one for each run of escaped ones."""
    return _QUOTED_LINE_ENDS.sub(lambda match: "\\n" if match[1] else match[0], _LINE_ENDS.sub("\n", text))


def _writings(words: str) -> Sequence[str]:
    """Returns the words as they are, and as JSON, ASCII-only JSON and Python escape them."""
    words = _LINE_ENDS.sub("\n", words.strip())
    if _NOT_QUOTED.fullmatch(words):
        return [words]
    quoted = [encode_basestring(words)[1:-1], encode_basestring_ascii(words)[1:-1], repr('"' + words)[2:-1]]
    if '"' not in words:  # Python chooses the outer quotes by those in the whole text
        quoted.append(repr(words)[1:-1])
    return [_with_single_line_ends(words), *dict.fromkeys(quoted)]


class _Search:
    """Finds words and numbers in a text. `chars_left` falls by the number of characters searched for words."""

    def __init__(self, text: str) -> None:
        self._text = _with_single_line_ends(text)
        self.chars_left = _MAX_SEARCHED_CHARS

    def end_of(self, word: str | float, start: int) -> int:
        """Returns the end of the first place of a word or number at `start` or later, or -1.

        A number inside a longer number does not count.
        """
        if not isinstance(word, str):
            number = json.dumps(word)
            starts = self._starts_of_numbers.get(number, [])
            index = bisect_left(starts, start)
            return starts[index] + len(number) if index < len(starts) else -1
        writings = _writings(word)
        num_near = max(map(len, writings)) + _NEAR_CHARS if len(writings) > 1 else len(self._text)
        while True:  # to search all of the text for one writing would be slow if another is near
            places = [(self._text.find(each, start, start + num_near), len(each)) for each in writings]
            if ends := [at + length for at, length in places if at >= 0]:
                self.chars_left -= min(ends) - start
                return min(ends)
            if start + num_near >= len(self._text):
                return -1
            num_near *= 2

    @cached_property
    def _starts_of_numbers(self) -> Mapping[str, Sequence[int]]:
        starts: dict[str, list[int]] = {}
        for match in _NUMBER.finditer(self._text):
            starts.setdefault(match[0], []).append(match.start())
        return starts


@contextmanager
def _refusing(otherwise: str) -> Iterator[None]:
    """Turns any exception of a template into ChatRefused. It lets TextTooLong pass. In the error's message, `otherwise`
    describes a failure that is not the template's own refusal.
    """
    try:
        yield
    except (ChatRefused, TextTooLong):
        raise
    except MemoryError as error:
        raise ChatRefused("the model's chat template needs too much memory for it") from error
    except Exception as error:
        if isinstance(error, TemplateError) and not isinstance(error, TemplateSyntaxError):
            raise ChatRefused(f"the model's chat template refuses it: {error}") from error
        message = f"the model's chat template {otherwise}: {type(error).__name__}: {error}"
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
