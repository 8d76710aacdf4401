"""Turns grammars in llama.cpp's form of EBNF (GBNF) into llguidance's form of Lark.

    text ──_Parser──▶ rules ──_Writer──▶ Lark

GBNF has characters only. llguidance first splits text into words (Lark's terminals), each as long as possible, and then
parses these. So neighbouring parts without recursion become one word: in `[a-z]+ "s"` the "s" is found although [a-z]
matches it too. Where the text after a word could also continue it, the word's end is parsed character by character.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import or_

_MAX_DEPTH = 100
_MAX_TIMES = 2_000
"""The largest number in a repetition. llama.cpp has the same limit."""
_MAX_WORD = 1 << 16
"""The most characters of a word (a terminal of Lark) with all its repetitions written out. llguidance takes seconds for
more.
"""
_MAX_STEPS = 500_000
"""The most visits to parts of rules. So many take about a second."""
_LAST = 0x10FFFF
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEAD = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
_TIMES = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_SIGNS: Mapping[tuple[int, int | None], str] = {(0, 1): "?", (0, None): "*", (1, None): "+"}


class EbnfRefused(ValueError):
    """The text is not a grammar in this form, or uses something unsupported. The message says what and where."""


@dataclass(frozen=True, slots=True)
class _Literal:
    text: str


@dataclass(frozen=True, slots=True)
class _OneOf:
    """One character in any of these ranges, ends included, or with `is_negated` one that is in none of them."""

    ranges: Sequence[tuple[int, int]]
    is_negated: bool = False

    @property
    def regex(self) -> str:
        ranges = [_in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}" for low, high in self.ranges]
        return f"[{'^' if self.is_negated else ''}{''.join(ranges)}]"


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

    @property
    def is_open(self) -> bool:
        """Whether the part may occur more often than `least` times."""
        return self.most != self.least

    def around(self, part: str) -> str:
        """Returns this repetition in Lark, where `part` is the repeated part in Lark."""
        times = f"{{{self.least},{self.most or ''}}}"
        return f"({part}){_SIGNS.get((self.least, self.most), times)}"


_Node = _Literal | _OneOf | _Reference | _Sequence | _Alternatives | _Repeated


def ebnf_to_lark(text: str) -> str:
    """Returns the same grammar in Lark. Raises EbnfRefused if the text is no such grammar, or takes too many steps."""
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
    """Parses a grammar into rules. A rule ends where the next begins, so alternatives may be on lines of their own."""

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
        """Reads one part of a sequence, without the repetition after it. Returns None at the end of the sequence."""
        if self._takes('"', skips_space=False):
            text = "".join(character for character, _ in self._until('"'))
            self._skip_space()
            return _Literal(text)
        if self._takes("[", skips_space=False):
            return self._class()
        if self._takes("."):
            return _OneOf([(0, _LAST)])
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
            ranges.append((ord(low), ord(high)))
            place += 1
        if not ranges:
            raise self._refusal("a class has no characters")
        self._skip_space()
        return _OneOf(ranges, is_negated)

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
        """Yields the characters before `end`, each with whether it was escaped, and moves past `end`."""
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


def _in_class(character: int) -> str:
    text = chr(character)
    return text if text.isascii() and text.isalnum() else f"\\x{{{character:X}}}"


Characters = int
"""A set of characters, with one bit for each range of characters. No class or text of the grammar divides a range."""


class _Alphabet:
    def __init__(self, nodes: Iterable[_Node]) -> None:
        bounds: set[int] = set()
        for node in nodes:
            for low, high in _ranges(node):
                bounds |= {low, high + 1}
        self._bounds = sorted(bounds)

    def of(self, node: _Literal | _OneOf) -> Characters:
        """Returns the characters with which a text that matches the node can begin."""
        found = 0
        for low, high in [(ord(node.text[0]),) * 2] if isinstance(node, _Literal) else node.ranges:
            found |= (2 << bisect_right(self._bounds, high)) - (1 << bisect_right(self._bounds, low))
        is_negated = isinstance(node, _OneOf) and node.is_negated
        return ((2 << len(self._bounds)) - 1) ^ found if is_negated else found


def _ranges(node: _Node) -> Iterator[tuple[int, int]]:
    match node:
        case _Literal(text):
            yield from ((ord(character),) * 2 for character in text)
        case _OneOf(ranges):
            yield from ranges
        case _Sequence(parts) | _Alternatives(parts):
            for part in parts:
                yield from _ranges(part)
        case _Repeated(part):
            yield from _ranges(part)


@dataclass(frozen=True, slots=True)
class _Edges:
    """How the texts that match a node can begin (`first`), and the characters with which such a text can go on after a
    shorter one that it begins with (`more`).
    """

    can_be_empty: bool
    first: Characters
    more: Characters


_NOTHING = _Edges(can_be_empty=False, first=0, more=0)
_EMPTY = _Edges(can_be_empty=True, first=0, more=0)


class _Writer:
    """Writes rules in Lark. Each rule without recursion becomes a word (a terminal), and words refer to each other.

    llguidance reads each word as far as it goes. So where the text after a part could also continue the part, the end
    of the part is written as rules for single characters. Then everything that begins with one of these characters is
    written in that way too, because a longer word would be read instead.
    """

    def __init__(self, rules: Mapping[str, _Node]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._alphabet = _Alphabet(rules.values())
        self._num_steps = 0
        self._edges_of: dict[str, _Edges] = {}
        self._plain = list(_without_recursion(rules))
        self._sizes: dict[str, int] = {}
        for name in self._plain:
            self._edges_of[name] = self._edges(rules[name])
            self._sizes[name] = self._size(rules[name])
            if self._sizes[name] > _MAX_WORD:
                raise EbnfRefused(f"rule {name[:64]} is too long with the rules that it refers to")
        self._are_words = frozenset(self._plain)
        self._recursive = [name for name in rules if name not in self._are_words]
        self._find_edges()
        self._after = self._find_after()
        self._contested: Characters = 0
        """The characters that are read one by one, and with which no word begins."""
        self._words: dict[str, str] = {}
        """The name of each word, by its definition."""
        self._split: dict[tuple[str, Characters | None], str] = {}
        """The names of rules that replace a word. The key is the name of the word's rule, and the characters that may
        follow it (None: any may follow).
        """
        self._to_split: list[tuple[str, Characters | None]] = []

    def lark(self) -> str:
        contested = -1
        while self._contested != contested:
            contested = self._contested
            self._words.clear()
            self._split.clear()
            lines = self._lines()
        return "\n".join(lines) + "\n"

    def _lines(self) -> list[str]:
        lines = [f"T{self._numbers[name]}: {self._in_word(self._rules[name])}" for name in self._plain]
        for name in self._recursive:
            lines.append(f"r{self._numbers[name]}: {self._in_rule(self._rules[name], self._after[name])}")
        lines.append(f"start: {self._in_rule(_Reference('root'), 0)}")
        while self._to_split:
            name, after = self._to_split.pop()
            node = self._rules[name]
            split = self._by_character(node) if after is None else self._in_words(node, after)
            lines.append(f"{self._split[name, after]}: {split}")
        return lines + [f"{name}: {definition}" for definition, name in self._words.items()]

    # ---- what begins, goes on and follows -----------------------------------------------------------------------

    def _edges(self, node: _Node) -> _Edges:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise EbnfRefused("its rules are too many, or refer to each other in too many ways")
        match node:
            case _Literal(""):
                return _EMPTY
            case _Literal() | _OneOf():
                return _Edges(can_be_empty=False, first=self._alphabet.of(node), more=0)
            case _Reference(name):
                return self._edges_of.get(name, _NOTHING)
            case _Sequence(parts):
                edges = _EMPTY
                for part in parts:
                    edges = _joined(edges, self._edges(part))
                return edges
            case _Alternatives(parts):
                each = [self._edges(part) for part in parts]
                first = reduce(or_, [edges.first for edges in each], 0)
                more = reduce(or_, [edges.more for edges in each], self._after_prefixes(parts))
                can_be_empty = any(edges.can_be_empty for edges in each)
                return _Edges(can_be_empty, first, more | first if can_be_empty else more)
            case _Repeated(part, least, _):
                edges = self._edges(part)
                can_be_empty = not least or edges.can_be_empty
                goes_on = can_be_empty or node.is_open
                return _Edges(can_be_empty, edges.first, edges.more | edges.first if goes_on else edges.more)

    def _size(self, node: _Node) -> int:
        """Returns how many characters a word has at most. A repetition without a bound counts with its least number."""
        match node:
            case _Literal(text):
                return len(text)
            case _OneOf():
                return 1
            case _Reference(name):
                return self._sizes[name]
            case _Sequence(parts) | _Alternatives(parts):
                return sum(map(self._size, parts))
            case _Repeated(part, least, most):
                return self._size(part) * (most or max(1, least))

    def _after_prefixes(self, parts: Sequence[_Node]) -> Characters:
        """Returns the characters with which literals among `parts` go on after a shorter one that they begin with."""
        found, prefixes = 0, list[str]()
        for text in sorted({part.text for part in parts if isinstance(part, _Literal)}):
            while prefixes and not text.startswith(prefixes[-1]):
                prefixes.pop()
            for prefix in prefixes:
                found |= self._alphabet.of(_Literal(text[len(prefix) :]))
            prefixes.append(text)
        return found

    def _find_edges(self) -> None:
        """Computes the edges of the rules with recursion. Their `more` is 0."""
        has_changed = True
        while has_changed:
            has_changed = False
            for name in reversed(self._recursive):
                edges = replace(self._edges(self._rules[name]), more=0)
                if edges != self._edges_of.get(name):
                    self._edges_of[name] = edges
                    has_changed = True

    def _find_after(self) -> dict[str, Characters]:
        """Returns, for each rule with recursion, the characters that may follow it."""
        after = dict.fromkeys(self._recursive, 0)
        has_changed = True
        while has_changed:
            has_changed = False
            for name in self._recursive:
                for other, found in self._references_with_after(self._rules[name], after[name]):
                    if found & ~after[other]:
                        after[other] |= found
                        has_changed = True
        return after

    def _references_with_after(self, node: _Node, after: Characters) -> Iterator[tuple[str, Characters]]:
        match node:
            case _Reference(name) if name not in self._are_words:
                yield name, after
            case _Sequence(parts):
                for part, after_part in self._with_after(parts, after):
                    yield from self._references_with_after(part, after_part)
            case _Alternatives(parts):
                for part in parts:
                    yield from self._references_with_after(part, after)
            case _Repeated(part):
                yield from self._references_with_after(part, self._after_time(node, after))

    def _with_after(self, parts: Sequence[_Node], after: Characters) -> list[tuple[_Node, Characters]]:
        """Returns each part of a sequence with the characters that may follow it."""
        found = []
        for part in reversed(parts):
            found.append((part, after))
            edges = self._edges(part)
            after = edges.first | after if edges.can_be_empty else edges.first
        return found[::-1]

    def _after_time(self, node: _Repeated, after: Characters) -> Characters:
        """Returns the characters that may follow one occurrence of the repeated part."""
        return after if node.most == 1 else after | self._edges(node.part).first

    # ---- writing ------------------------------------------------------------------------------------------------

    def _in_word(self, node: _Node) -> str:
        match node:
            case _Literal(text):
                return json.dumps(text)
            case _OneOf():
                return f"/{node.regex}/"
            case _Reference(name):
                return f"T{self._numbers[name]}"
            case _Sequence(parts):
                return " ".join(map(self._in_word, parts)) or '""'
            case _Alternatives(parts):
                return f"({' | '.join(map(self._in_word, parts))})"
            case _Repeated(part):
                return node.around(self._in_word(part))

    def _in_rule(self, node: _Node, after: Characters) -> str:
        if self._is_word(node):
            return self._in_words(node, after)
        match node:
            case _Reference(name):
                return f"r{self._numbers[name]}"
            case _Sequence(parts):
                written = []
                for are_words, group in groupby(self._with_after(parts, after), lambda each: self._is_word(each[0])):
                    each = list(group)
                    if are_words:
                        written.append(self._in_words(_Sequence([part for part, _ in each]), each[-1][1]))
                    else:
                        written += [self._in_rule(part, after_part) for part, after_part in each]
                return " ".join(written)
            case _Alternatives(parts):
                return f"({' | '.join(self._in_rule(part, after) for part in parts)})"
            case _Repeated(part):
                return node.around(self._in_rule(part, self._after_time(node, after)))
        raise AssertionError("literals and classes are words")

    def _in_words(self, node: _Node, after: Characters) -> str:
        """Writes a part without recursion as one word, or as several if a character in `after` could continue it."""
        edges = self._edges(node)
        if edges.first & self._contested:
            return self._by_character(node)
        if not edges.more & after:
            return self._word(node)
        self._contested |= edges.more & after
        match node:
            case _Reference(name):
                return self._split_rule(name, after)
            case _Sequence(parts):
                written, rest = [], self._with_after(parts, after)
                while rest:
                    num_parts = self._num_in_word(rest)
                    if num_parts > 1:
                        part = _Sequence([part for part, _ in rest[:num_parts]])
                        written.append(self._in_words(part, rest[num_parts - 1][1]))
                    else:
                        written.append(self._in_words(*rest[0]))
                    del rest[: num_parts or 1]
                return " ".join(written)
            case _Alternatives(parts) if self._after_prefixes(parts) & after:
                return self._by_character(node)
            case _Alternatives(parts):
                return f"({' | '.join(self._in_words(part, after) for part in parts)})"
            case _Repeated(part):
                self._contested |= edges.first
                return node.around(self._in_words(part, self._after_time(node, after)))
        raise AssertionError("nothing continues a literal or a class")

    def _num_in_word(self, parts: Sequence[tuple[_Node, Characters]]) -> int:
        """Returns how many of the first `parts`, at most, form a word that the text after them cannot continue."""
        edges, found = _EMPTY, 0
        for number, (part, after) in enumerate(parts, start=1):
            edges = _joined(edges, self._edges(part))
            if not edges.more & after:
                found = number
        return found

    def _by_character(self, node: _Node) -> str:
        self._contested |= self._edges(node).first
        match node:
            case _Literal(text):
                return " ".join(self._word(_Literal(character)) for character in text) or self._word(node)
            case _OneOf():
                return self._word(node)
            case _Reference(name):
                return self._split_rule(name, None)
            case _Sequence(parts):
                return " ".join(map(self._by_character, parts)) or self._word(node)
            case _Alternatives(parts):
                return f"({' | '.join(map(self._by_character, parts))})"
            case _Repeated(part):
                return node.around(self._by_character(part))

    def _split_rule(self, name: str, after: Characters | None) -> str:
        if (name, after) not in self._split:
            self._split[name, after] = f"s{len(self._split)}"
            self._to_split.append((name, after))
        return self._split[name, after]

    def _word(self, node: _Node) -> str:
        """Returns the name of a word for `node`. llguidance allows no empty words, so a node that can be empty becomes
        an optional word that is not empty.
        """
        definition = self._in_word(node)
        can_be_empty = self._edges(node).can_be_empty
        if can_be_empty:
            definition = rf"({definition}) & /[\x{{0}}-\x{{10FFFF}}]+/"
        name = self._words.setdefault(definition, f"W{len(self._words)}")
        return f"{name}?" if can_be_empty else name

    def _is_word(self, node: _Node) -> bool:
        return all(name in self._are_words for name in _references(node))


def _joined(edges: _Edges, then: _Edges) -> _Edges:
    """Returns the edges of a sequence of two nodes."""
    return _Edges(
        edges.can_be_empty and then.can_be_empty,
        edges.first | then.first if edges.can_be_empty else edges.first,
        edges.more | then.first | then.more if then.can_be_empty else then.more,
    )


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
    """Returns the first rule that no finite text can match, or None."""
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
    """Yields the rules from which no recursive rule is reached, each after the rules that it refers to."""
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
