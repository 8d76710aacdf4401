"""A request's rules about tokens: which ones its output may have, and which sequences of them it may not contain."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules. Every token of the output is one of `allowed_ids`, which ascend; if there are none, any token may be.
    None of `forbidden`, sequences of at least one token, is in the output.
    """

    allowed_ids: tuple[int, ...] = ()
    forbidden: tuple[tuple[int, ...], ...] = ()

    @property
    def request_field(self) -> str:
        """The request's field, for errors."""
        return "sampling.allowed_token_ids" if self.allowed_ids else "sampling.bad_words"

    def failed(self, why: str) -> InvalidRequest:
        """Returns the error of a request whose output cannot go on."""
        return InvalidRequest(self.request_field, why)
