"""Patterns of JSON schemas: those of dates, and what makes a pattern match only strings that our grammars write.

Our grammars allow no `\\u` escapes in strings, so they write no control character without a short escape. Then
llguidance 1.9 gets patterns wrong that match such a character: it drops a literal one from the string, and a class that
holds all of them, such as `[^"]`, also matches the quote.
"""

from __future__ import annotations

import re

_UNWRITABLE = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_HAS_UNWRITABLE = re.compile(f"[{_UNWRITABLE}]")
_ESCAPE = re.compile(
    r"\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL
)
_MAY_MATCH_UNWRITABLE = frozenset("pPWDSsxuUav")
_IGNORES_SPACE = re.compile(r"\(\?[a-zA-Z]*x")

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

    A malformed pattern may be returned unchanged. Raises PatternRefused if the pattern is not supported.
    """
    if _IGNORES_SPACE.search(pattern):
        raise PatternRefused("the flag x is not supported")
    parts, place = [], 0
    while place < len(pattern):
        end = _end_of_part(pattern, place)
        part = pattern[place:end]
        is_set = part[0] == "[" or (part[0] == "\\" and part[1:2] in _MAY_MATCH_UNWRITABLE) or has_unwritable(part)
        parts.append(f"[{part}&&[^{_UNWRITABLE}]]" if is_set else part)
        place = end
    return "".join(parts)


def _end_of_part(pattern: str, place: int) -> int:
    """Returns where the class, the escape or the character at `place` ends."""
    if pattern[place] == "\\":
        escape = _ESCAPE.match(pattern, place)
        return len(pattern) if escape is None else escape.end()
    if pattern[place] != "[":
        return place + 1
    depth = 0
    while place < len(pattern):
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            depth += 1
            place += pattern.startswith("^", place + 1)
            place += pattern.startswith("]", place + 1)  # a first one stands for itself
        elif pattern[place] == "]":
            depth -= 1
            if not depth:
                return place + 1
        place += 1
    return len(pattern)
