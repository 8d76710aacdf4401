"""A request's rules about tokens: which ones its output may have, and which sequences of them it may not contain."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest


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
