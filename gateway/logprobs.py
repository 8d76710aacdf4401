r"""Writes log-probabilities in the formats of the two endpoints.

A token may be only a part of a character, so that its bytes are no valid text. It is written as escaped bytes:
`\xe2\x80` in chats, `bytes:\xe2\x80` in completions. A completion lists the most likely tokens as an object whose keys
are the tokens' texts. If several tokens have the same text, that key belongs to the chosen token, or else to the most
likely one; each of the others gets the key `token_id:` with its id.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from baton.events import PositionLogprobs, TokenLogprob

_LEAST = -9999.0
"""The value for minus infinity and NaN, which JSON does not have."""


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
    """Returns the `logprobs` object of a chat choice, or None if no log-probabilities were asked for."""
    if not positions:
        return None
    content = [
        {**_chat_token(each.chosen), "top_logprobs": [_chat_token(entry) for entry in each.top]} for each in positions
    ]
    return {"content": content, "refusal": None}


def _chat_token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(entry.token, ""), "bytes": list(entry.token), "logprob": _finite(entry.logprob)}


class CompletionLogprobs:
    """Writes the log-probabilities of one completion choice, and counts the text offset of each token in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        """Returns the `logprobs` object for the choice's next tokens, or None if no log-probabilities
        were asked for.
        """
        if not positions:
            return None
        return {
            "tokens": [_text(each.chosen.token, "bytes:") for each in positions],
            "token_logprobs": [_finite(each.chosen.logprob) for each in positions],
            "top_logprobs": [_top(each) for each in positions],
            "text_offset": [self._advance(each.chosen.token) for each in positions],
        }

    def _advance(self, token: bytes) -> int:
        begin = self._offset
        # Also counts replacement characters for earlier bytes that turned out to be no text.
        self._offset += len(self._decoder.decode(token))
        own_text = _decoded(token)
        return begin if own_text is None else self._offset - len(own_text)


def _top(position: PositionLogprobs) -> dict[str, float]:
    """Returns the log-probabilities at one position, by token text: the most likely tokens, best first, then the chosen
    one if it is not among them.

    The chosen token's key equals its entry in the `tokens` list of the answer.
    """
    entries = {entry.token_id: entry for entry in (*position.top, position.chosen)}
    chosen = _text(position.chosen.token, "bytes:")
    named: dict[str, float] = {}
    for token_id, entry in entries.items():
        name = _text(entry.token, "bytes:")
        if name in named or (name == chosen and token_id != position.chosen.token_id):
            name = f"token_id:{token_id}"
        named[name] = _finite(entry.logprob)
    return named


def _text(token: bytes, prefix: str) -> str:
    text = _decoded(token)
    return prefix + "".join(f"\\x{byte:02x}" for byte in token) if text is None else text


def _decoded(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST) if math.isfinite(logprob) else _LEAST
