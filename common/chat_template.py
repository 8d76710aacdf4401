"""A model's chat template: a conversation to the text of its prompt, and nothing that somebody said left out.

The environment is the one that `apply_chat_template` of transformers renders in: templates are written for it. This
module needs none of its libraries, so that a process of its own can render.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_CACHED_SHAPES = 256
_MAX_CHARS = 1 << 24


def _marker(index: int) -> str:
    return f"qz{index}zq"


_PROBE = _marker(0) + " and so on" * 500 + _marker(1)
"""Long, since a template may cut a content."""
_PRINTED_PART = re.compile(rf"""text['"]:\s*['"]{_marker(0)}""")
"""A list of parts as Python or JSON writes it."""


class ChatRefused(ValueError):
    """The template cannot render this conversation, or would drop some of it."""


class TextTooLong(ValueError):
    """A text is longer than it may be."""


class ChatTemplate:
    """`parts_roles`: the roles whose content the template reads as a list of parts. None: find it out.

    Whether it keeps what is said is asked of it by markers in place of the contents, once for each order of roles.
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

    def render(self, messages: Sequence[tuple[str, str]], *, max_chars: int = _MAX_CHARS) -> str:
        """Ends where the assistant's turn begins. Raises ChatRefused, or TextTooLong."""
        text = self._render(messages, max_chars=max_chars)
        shape = bytes(2 * ROLES.index(role) + bool(content.strip()) for role, content in messages)
        if (dropped := self._dropped(shape)) is not None:
            role = messages[dropped][0]
            raise ChatRefused(f"messages[{dropped}]: the model's chat template leaves out what the {role} says here")
        return text

    def _render(self, messages: Sequence[tuple[str, str]], *, max_chars: int = _MAX_CHARS) -> str:
        conversation = [{"role": role, "content": self._content(role, content)} for role, content in messages]
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

    def _content(self, role: str, content: str) -> Any:
        return [{"type": "text", "text": content}] if role in self.parts_roles else content

    def _choose_form(self, role: str) -> None:
        """A string, unless only parts are kept. Raises ChatRefused when a user's words are kept in neither form."""
        as_strings, reason = self.parts_roles, ""
        for parts_roles in (as_strings, as_strings | {role}):
            self.parts_roles = parts_roles
            for before, after in _AROUND[role]:
                try:
                    text = self._render([*before, (role, _PROBE), *after]).casefold()
                except (ChatRefused, TextTooLong) as error:
                    reason = str(error)
                    continue
                if _marker(0) in text and _marker(1) in text and not _PRINTED_PART.search(text):
                    return
        self.parts_roles = as_strings  # what it keeps of this role, if anything, each conversation shows
        if role == "user":
            raise ChatRefused(
                reason or "the model's chat template leaves out what a user says, as a string and as a list of parts"
            )

    def _find_dropped(self, shape: bytes) -> int | None:
        """The index of the first message that is not in the text, of a conversation of this shape: roles, and whether
        they say anything. A template that refuses the markers, but not the contents, has read these.
        """
        probes = [(ROLES[code // 2], _marker(index) if code % 2 else "") for index, code in enumerate(shape)]
        try:
            text = self._render(probes).casefold()
        except (ChatRefused, TextTooLong):
            return None
        return next((index for index, (_, marker) in enumerate(probes) if marker not in text), None)


_AROUND: Mapping[str, Sequence[tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str]]]]] = {
    "user": (((), ()), ((("system", "s"),), ())),
    "system": (((), (("user", "u"),)),),
    "developer": (((), (("user", "u"),)),),
    "assistant": (((("user", "u"),), (("user", "v"),)),),
    "tool": (((("user", "u"), ("assistant", "a")), ()),),
}
"""What is said before and after a message of that role, to try its form."""


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
