"""Patterns of JSON schemas: those of dates, and what makes a pattern match only strings that our grammars write.

Our grammars allow no `\\u` escapes in strings, so they write no control character without a short escape. Then
llguidance 1.9 gets patterns wrong that match such a character: it drops a literal one from the string, and a class that
holds all of them, such as `[^"]`, also matches the quote.
"""

from __future__ import annotations

import re

_UNWRITABLE = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_HAS_UNWRITABLE = re.compile(f"[{_UNWRITABLE}]")
_SURROGATES = re.compile(r"\\u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
"""Matches a character beyond 16 bits as ECMA-262 writes it."""
_ESCAPE = re.compile(
    rf"{_SURROGATES.pattern}|\\(?:[pP](?:\{{[^}}]*\}}|.)|[xuU]\{{[^}}]*\}}|x[0-9A-Fa-f]{{2}}|u[0-9A-Fa-f]{{4}}"
    r"|U[0-9A-Fa-f]{8}|0[0-9]+|c[A-Za-z]|.)",
    re.DOTALL,
)
_IS_SET = re.compile(r"\\[dDsSwWpP]")
"""Matches an escape that is no end of a range."""
_MARKS_IN_CLASS = frozenset("[]&~-^")
_MAY_MATCH_UNWRITABLE = frozenset("pPWDSsxuUav")
_IGNORES_SPACE = re.compile(r"(?<!\\)(?:\\\\)*\(\?[a-zA-Z]*x")

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-((0[13-9]|1[0-2])-[0-9]{{2}}|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
DATE_PATTERNS = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}.{_TIME}"}
"""By `format`, a pattern that its strings must match too. llguidance knows the days of each month, but it writes a 29
February in any year, and a second 60, which only leap seconds have.
"""


class PatternRefused(Exception):
    """The pattern is not supported. The message says why."""


def has_unwritable(text: str) -> bool:
    """Returns whether the text has a control character that our grammars do not write."""
    return _HAS_UNWRITABLE.search(text) is not None


def writable_pattern(pattern: str) -> str:
    """Returns a regular expression in Rust's syntax that matches the strings of `pattern` that our grammars can write.

    `pattern` has ECMA-262's syntax, as JSON Schema says. A malformed one may be returned unchanged. Raises
    PatternRefused if it is not supported.
    """
    if _IGNORES_SPACE.search(pattern):
        raise PatternRefused("the flag x is not supported")
    parts, place = [], 0
    while place < len(pattern):
        end = _end_of_part(pattern, place)
        part = pattern[place:end]
        part = _class(part) if part[0] == "[" else _escape(part)
        is_set = part[0] == "[" or (part[0] == "\\" and part[1:2] in _MAY_MATCH_UNWRITABLE) or has_unwritable(part)
        parts.append(f"[{part}&&[^{_UNWRITABLE}]]" if is_set else part)
        place = end
    return "".join(parts)


def _end_of_part(pattern: str, place: int) -> int:
    """Returns where the class, the escape or the character at `place` ends. Raises PatternRefused for a class that does
    not end, or that languages end in different places.
    """
    if pattern[place] == "\\":
        return _end_of_escape(pattern, place)
    if pattern[place] != "[":
        return place + 1
    place += 1 + pattern.startswith("^", place + 1)
    if pattern.startswith("]", place):
        raise PatternRefused("a class begins with ], which ends it in ECMA-262 and not in other languages: write \\]")
    while place < len(pattern):
        if pattern[place] == "]":
            return place + 1
        place = _end_of_escape(pattern, place) if pattern[place] == "\\" else place + 1
    raise PatternRefused("a class is not closed")


def _end_of_escape(pattern: str, place: int) -> int:
    escape = _ESCAPE.match(pattern, place)
    return len(pattern) if escape is None else escape.end()


def _class(written: str) -> str:
    """Returns a class in Rust's syntax, in which brackets, `&&`, `--` and `~~` inside a class would mean something."""
    begin = 2 if written[1] == "^" else 1
    parts: list[str] = []
    place, end = begin, len(written) - 1
    while place < end:
        after = _end_of_escape(written, place) if written[place] == "\\" else place + 1
        parts.append(written[place:after])
        place = after
    made: list[str] = []
    index = 0
    while index < len(parts):
        ends = parts[index : index + 3]
        if len(ends) == 3 and ends[1] == "-" and not _IS_SET.match(ends[0]) and not _IS_SET.match(ends[2]):
            made += (_in_class(ends[0]), "-", _in_class(ends[2]))
            index += 3
        else:
            made.append(_in_class(parts[index]))
            index += 1
    return f"{written[:begin]}{''.join(made)}]"


def _in_class(part: str) -> str:
    if part == "\\b":
        return r"\x08"
    return f"\\{part}" if part in _MARKS_IN_CLASS else _escape(part)


def _escape(part: str) -> str:
    """Returns an escape in Rust's syntax. What is no escape, or the same in both, is returned unchanged."""
    if part == r"\0":
        return r"\x00"
    if part[:2] == r"\c" and len(part) == 3:
        return f"\\x{ord(part[2]) % 32:02x}"
    if pair := _SURROGATES.fullmatch(part):
        character = 0x10000 + ((int(pair[1], 16) - 0xD800) << 10) + int(pair[2], 16) - 0xDC00
        return f"\\u{{{character:x}}}"
    return part
