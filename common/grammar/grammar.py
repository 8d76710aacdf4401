"""The grammar of a request's output, as text: a JSON schema, a regular expression or a Lark grammar."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.errors import InvalidRequest


class GrammarKind(Enum):
    """The language of a grammar's text. The values are the names of SamplingParams' fields for it."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The text of a grammar. Output that ends by itself is a sentence of it."""

    kind: GrammarKind
    text: str

    def failed(self, why: str) -> InvalidRequest:
        """Returns the error of a request whose output has reached a limit of the grammar's library."""
        return InvalidRequest(f"sampling.{self.kind.value}", f"is too large or too ambiguous for this output: {why}")
