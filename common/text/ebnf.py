"""Turns grammars in llama.cpp's form of EBNF (GBNF) into llguidance's form of Lark.

    text ──_Parser──▶ rules ──_Writer──▶ Lark

GBNF knows characters only, but llguidance reads words before it parses them, and reads each as far as it goes. So parts
without recursion that stand side by side become one word: in `[a-z]+ "s"` the "s" is found although [a-z] could be it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

_MAX_DEPTH = 100
_MAX_TIMES = 2_000
"""The most times that a repetition asks for or bounds: llama.cpp's bound too."""
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEAD = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
_TIMES = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_SIGNS: Mapping[tuple[int, int | None], str] = {(0, 1): "?", (0, None): "*", (1, None): "+"}


class EbnfRefused(ValueError):
    """The text is no grammar in this form, or uses what is not supported. The text of the error says what and where."""


@dataclass(frozen=True, slots=True)
class _Literal:
    text: str


@dataclass(frozen=True, slots=True)
class _OneOf:
    """One character, as a regular expression."""

    regex: str


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: Sequence[_Node]


@dataclass(frozen=True, slots=True)
class _Alternatives:
    parts: Sequence[_Node]


@dataclass(frozen=True, slots=True)
class _Repeated:
    part: _Node
    least: int
    most: int | None


_Node = _Literal | _OneOf | _Reference | _Sequence | _Alternatives | _Repeated


def ebnf_to_lark(text: str) -> str:
    """Returns the same grammar as Lark. Its length, and the time, grow as the text's. Raises EbnfRefused."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise EbnfRefused("there is no rule root")
    for name, node in rules.items():
        for reference in _references(node):
            if reference not in rules:
                raise EbnfRefused(f"rule {name[:64]} needs {reference[:64]}, which is not there")
    if (endless := _endless(rules)) is not None:
        raise EbnfRefused(f"rule {endless[:64]} has no sentence that ends")
    return _Writer(rules).lark()


class _Parser:
    """Reads rules. A rule ends where the next begins, so that its alternatives may stand on lines of their own."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        self._skip_space()
        while self._place < len(self._text):
            if (head := _HEAD.match(self._text, self._place)) is None:
                raise self._refusal("a rule, NAME ::= ..., is expected")
            if head[1] in rules:
                raise self._refusal(f"rule {head[1][:64]} is there twice")
            self._place = head.end()
            self._skip_space()
            rules[head[1]] = self._alternatives()
        return rules

    def _alternatives(self) -> _Node:
        alternatives = [self._sequence()]
        while self._takes("|"):
            alternatives.append(self._sequence())
        return alternatives[0] if len(alternatives) == 1 else _Alternatives(alternatives)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (part := self._part()) is not None:
            parts.append(self._with_times(part))
        return parts[0] if len(parts) == 1 else _Sequence(parts)

    def _part(self) -> _Node | None:
        """Reads what a repetition may follow. Returns None at the end of a sequence."""
        if self._takes('"', skips_space=False):
            text = "".join(character for character, _ in self._until('"'))
            self._skip_space()
            return _Literal(text)
        if self._takes("[", skips_space=False):
            return self._class()
        if self._takes("."):
            return _OneOf(r"[\x{0}-\x{10FFFF}]")
        if self._takes("("):
            return self._group()
        name = _NAME.match(self._text, self._place)
        if name is None or _HEAD.match(self._text, self._place):
            return None
        self._place = name.end()
        self._skip_space()
        return _Reference(name[0])

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._refusal(f"more than {_MAX_DEPTH} parentheses are open")
        node = self._alternatives()
        self._depth -= 1
        if not self._takes(")"):
            raise self._refusal(") is expected")
        return node

    def _class(self) -> _Node:
        is_negated = self._takes("^", skips_space=False)
        characters, ranges, place = list(self._until("]")), [], 0
        while place < len(characters):
            low = high = characters[place][0]
            if characters[place + 1 : place + 2] == [("-", False)] and place + 2 < len(characters):
                place += 2
                high = characters[place][0]
            if low > high:
                raise self._refusal(f"the range {low!r} to {high!r} has its ends the wrong way round")
            ranges.append(_in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}")
            place += 1
        if not ranges:
            raise self._refusal("a class has no characters")
        self._skip_space()
        return _OneOf(f"[{'^' if is_negated else ''}{''.join(ranges)}]")

    def _with_times(self, part: _Node) -> _Node:
        for (least, most), sign in _SIGNS.items():
            if self._takes(sign):
                return _Repeated(part, least, most)
        if (times := _TIMES.match(self._text, self._place)) is None:
            return part
        least = int(times[1])
        most = least if times[2] is None else None if times[3] is None else int(times[3])
        if max(least, most or 0) > _MAX_TIMES or (most is not None and most < least):
            raise self._refusal(f"a repetition is from 0 to {_MAX_TIMES} times")
        self._place = times.end()
        self._skip_space()
        return _Sequence(()) if most == 0 else _Repeated(part, least, most)

    def _until(self, end: str) -> Iterator[tuple[str, bool]]:
        """Yields the characters before `end`, each with whether it is escaped, and goes past `end`."""
        while self._place < len(self._text):
            character = self._text[self._place]
            self._place += 1
            if character == end:
                return
            is_escaped = character == "\\"
            yield (self._escaped() if is_escaped else character), is_escaped
        raise self._refusal(f"{end} is expected")

    def _escaped(self) -> str:
        kind = self._text[self._place : self._place + 1]
        self._place += 1
        if (num_digits := _NUM_DIGITS.get(kind)) is not None:
            digits = self._text[self._place : self._place + num_digits]
            self._place += num_digits
            if not re.fullmatch(rf"[0-9A-Fa-f]{{{num_digits}}}", digits):
                raise self._refusal(f"\\{kind} needs {num_digits} hexadecimal digits")
            number = int(digits, 16)
            if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
                raise self._refusal(f"\\{kind}{digits} is no character")
            return chr(number)
        if kind in _ESCAPED:
            return _ESCAPED[kind]
        if not kind or kind.isalnum() or kind.isspace():
            raise self._refusal(f"\\{kind} is not known")
        return kind

    def _takes(self, token: str, *, skips_space: bool = True) -> bool:
        if not self._text.startswith(token, self._place):
            return False
        self._place += len(token)
        if skips_space:
            self._skip_space()
        return True

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._place)
        assert space is not None
        self._place = space.end()

    def _refusal(self, message: str) -> EbnfRefused:
        line = self._text.count("\n", 0, self._place) + 1
        return EbnfRefused(f"{message}, in line {line}")


def _in_class(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"


class _Writer:
    """Writes rules as Lark. Those without recursion become words that refer to each other, and are not copied."""

    def __init__(self, rules: Mapping[str, _Node]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._can_be_empty: dict[str, bool] = {}
        """For the rules without recursion only."""
        self._words: dict[str, str] = {}
        """The names of words by their definition."""

    def lark(self) -> str:
        lines = []
        for name in _without_recursion(self._rules):
            self._can_be_empty[name] = self._is_empty_at_times(self._rules[name])
            lines.append(f"T{self._numbers[name]}: {self._in_word(self._rules[name])}")
        for name, node in self._rules.items():
            if name not in self._can_be_empty:
                lines.append(f"r{self._numbers[name]}: {self._in_rule(node)}")
        lines.append(f"start: {self._in_rule(_Reference('root'))}")
        lines += [f"{name}: {definition}" for definition, name in self._words.items()]
        return "\n".join(lines) + "\n"

    def _in_word(self, node: _Node) -> str:
        match node:
            case _Literal(text):
                return json.dumps(text)
            case _OneOf(regex):
                return f"/{regex}/"
            case _Reference(name):
                return f"T{self._numbers[name]}"
            case _Sequence(parts):
                return " ".join(map(self._in_word, parts)) or '""'
            case _Alternatives(parts):
                return f"({' | '.join(map(self._in_word, parts))})"
            case _Repeated(part, least, most):
                return _repeated(self._in_word(part), least, most)

    def _in_rule(self, node: _Node) -> str:
        if self._is_word(node):
            return self._word(node)
        match node:
            case _Reference(name):
                return f"r{self._numbers[name]}"
            case _Sequence(parts):
                return " ".join(
                    self._word(_Sequence(tuple(group))) if are_words else " ".join(map(self._in_rule, group))
                    for are_words, group in groupby(parts, self._is_word)
                )
            case _Alternatives(parts):
                return f"({' | '.join(map(self._in_rule, parts))})"
            case _Repeated(part, least, most):
                return _repeated(self._in_rule(part), least, most)
        raise AssertionError("literals and classes are words")

    def _word(self, node: _Node) -> str:
        """Returns the name of a new word. One that can be empty is left out instead: llguidance reads no empty ones."""
        definition = self._in_word(node)
        can_be_empty = self._is_empty_at_times(node)
        if can_be_empty:
            definition = rf"({definition}) & /[\x{{0}}-\x{{10FFFF}}]+/"
        name = self._words.setdefault(definition, f"W{len(self._words)}")
        return f"{name}?" if can_be_empty else name

    def _is_word(self, node: _Node) -> bool:
        return all(name in self._can_be_empty for name in _references(node))

    def _is_empty_at_times(self, node: _Node) -> bool:
        match node:
            case _Literal(text):
                return not text
            case _OneOf():
                return False
            case _Reference(name):
                return self._can_be_empty[name]
            case _Sequence(parts):
                return all(map(self._is_empty_at_times, parts))
            case _Alternatives(parts):
                return any(map(self._is_empty_at_times, parts))
            case _Repeated(part, least, _):
                return not least or self._is_empty_at_times(part)


def _repeated(part: str, least: int, most: int | None) -> str:
    times = f"{{{least},{most or ''}}}"
    return f"({part}){_SIGNS.get((least, most), times)}"


def _references(node: _Node) -> Iterator[str]:
    match node:
        case _Reference(name):
            yield name
        case _Sequence(parts) | _Alternatives(parts):
            for part in parts:
                yield from _references(part)
        case _Repeated(part, _, _):
            yield from _references(part)


def _endless(rules: Mapping[str, _Node]) -> str | None:
    """Returns the first rule that never comes to an end, or None."""
    waiting, ended = dict(rules), set[str]()
    while found := [name for name, node in waiting.items() if _ends(node, ended)]:
        ended.update(found)
        for name in found:
            del waiting[name]
    return next(iter(waiting), None)


def _ends(node: _Node, ended: Set[str]) -> bool:
    match node:
        case _Reference(name):
            return name in ended
        case _Sequence(parts):
            return all(_ends(part, ended) for part in parts)
        case _Alternatives(parts):
            return any(_ends(part, ended) for part in parts)
        case _Repeated(part, least, _):
            return not least or _ends(part, ended)
    return True


def _without_recursion(rules: Mapping[str, _Node]) -> Iterator[str]:
    """Yields the rules that lead to no recursion, each after those that it refers to."""
    needed = {name: set(_references(node)) for name, node in rules.items()}
    num_needed = {name: len(references) for name, references in needed.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for name, references in needed.items():
        for reference in references:
            users[reference].append(name)
    ready = [name for name, num in num_needed.items() if not num]
    while ready:
        yield (name := ready.pop())
        for user in users[name]:
            num_needed[user] -= 1
            if not num_needed[user]:
                ready.append(user)
