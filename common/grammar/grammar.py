"""The constraints that a request sets on its output: a grammar, as text, and rules about its tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from common.errors import InvalidRequest


class GrammarKind(Enum):
    """The language of a grammar's text. Each value is the name of the field of SamplingParams for it."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"
    """The text is a JSON list of the texts to choose from."""
    EBNF = "ebnf"


_PLACE = re.compile(r"at ([0-9]+)\([0-9]+\): (?:failed to compile JSON schema: )?")
"""Matches the place in a text, line and column, at the beginning of an error."""
MAX_CHARS: Mapping[GrammarKind, int] = {
    GrammarKind.JSON_SCHEMA: 1 << 16,
    GrammarKind.REGEX: 1 << 14,
    GrammarKind.LARK: 1 << 14,
    GrammarKind.CHOICE: 1 << 16,
    GrammarKind.EBNF: 1 << 14,
}
"""The most characters of a grammar's text. JSON schemas inside a Lark grammar are not part of its count."""


SCHEMA_OPTIONS = "x-guidance"
"""The keyword at the root of a JSON schema for options of its grammar (llguidance's name)."""
_BLANKS = re.compile(r"(?: |\n|\r|\t|\\[nrst]|\(\?:|[\[\]()|*+?]|\{[0-9]*,?[0-9]*\})*")
"""Matches a regular expression of JSON's blanks."""


def whitespace_fault(pattern: str) -> str:
    """Returns what is wrong with a regular expression for the blanks of JSON, or "" if it has only parts of one."""
    return "" if _BLANKS.fullmatch(pattern) else "may match spaces, tabs and line ends only"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The text of a grammar, which a request's output must fit.

    With `opens_objects`, objects that declare properties in a JSON schema may have others, unless it says otherwise.

    `made_of` names the request's field that the grammar was derived from, if it is not the field that `kind` names.
    Lines of a derived text may come from other fields; `fields_of_lines` maps their numbers, from 1, to these.
    """

    kind: GrammarKind
    text: str
    opens_objects: bool = False
    made_of: str = field(default="", compare=False)
    fields_of_lines: Mapping[int, str] = field(default_factory=dict, compare=False)

    @property
    def request_field(self) -> str:
        """The request's field that errors name."""
        return self.made_of or f"sampling.{self.kind.value}"

    @classmethod
    def of_choices(cls, texts: Iterable[str]) -> Grammar:
        return cls(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))

    @property
    def choices(self) -> list[str]:
        """The texts to choose from. The grammar must be of kind CHOICE."""
        texts: list[str] = json.loads(self.text)
        return texts

    def refused(self, why: str) -> InvalidRequest:
        """Returns the error of a request whose grammar is not served. A derived text and places in it are not shown."""
        place = _PLACE.match(why)
        if not self.made_of or place is None:
            return InvalidRequest(self.request_field, why)
        return InvalidRequest(self.fields_of_lines.get(int(place[1]), self.made_of), why[place.end() :])

    def failed(self, why: str) -> InvalidRequest:
        """Returns the error of a request whose output cannot go on, for example at a limit of the grammar library."""
        return InvalidRequest(self.request_field, f"does not let this output go on: {why}")


@dataclass(frozen=True, slots=True)
class TokenRules:
    """A request's rules about the tokens of its output.

    Every token must be one of `allowed_ids` (ascending); if there are none, all tokens are allowed. The output must not
    contain any of the `forbidden` sequences, each of at least one token.
    """

    allowed_ids: tuple[int, ...] = ()
    forbidden: tuple[tuple[int, ...], ...] = ()

    @property
    def request_field(self) -> str:
        """The request's field that errors name."""
        return "sampling.allowed_token_ids" if self.allowed_ids else "sampling.bad_words"

    def failed(self, why: str) -> InvalidRequest:
        """Returns the error of a request whose output cannot go on under the rules."""
        return InvalidRequest(self.request_field, why)
