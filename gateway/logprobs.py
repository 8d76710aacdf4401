r"""Writes log-probabilities in the formats of the endpoints.

A token may be only a part of a character, so that its bytes are no valid text. It is written as escaped bytes:
`\xe2\x80` in chats and responses, `bytes:\xe2\x80` in completions. A completion lists the most likely tokens as an
object whose keys are the tokens' texts. If several tokens have the same text, that key belongs to the chosen token, or
else to the most likely one; each of the others gets the key `token_id:` with its id.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from baton.events import PositionLogprobs, PromptToken, TokenLogprob

_LEAST = -9999.0
"""The value for minus infinity and NaN, which JSON does not have."""


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
    """Returns the `logprobs` object of a chat choice, or None if no log-probabilities were asked for."""
    return {"content": token_logprobs(positions), "refusal": None} if positions else None


def token_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    """Returns an object for each token, with its log-probability and those of the likely ones."""
    return [
        {**_chat_token(each.chosen), "top_logprobs": [_chat_token(entry) for entry in each.top]} for each in positions
    ]


def _chat_token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(entry.token, ""), "bytes": list(entry.token), "logprob": _finite(entry.logprob)}


def prompt_logprobs(tokens: Sequence[PromptToken], *, num_top: int) -> list[dict[str, Any] | None]:
    """Returns a prompt's log-probabilities in vLLM's form: a list with an object for each token and None for the first
    one.

    The object has that token and the `num_top` most likely ones at its place, by token id.
    """
    return [None if each.logprob is None else _ranked(each, each.logprob, num_top) for each in tokens]


def _ranked(token: PromptToken, logprob: float, num_top: int) -> dict[str, Any]:
    own = TokenLogprob(token.token_id, logprob, token.token)
    top = [(rank, each) for rank, each in enumerate(token.top[:num_top], 1) if each.token_id != own.token_id]
    return {
        str(each.token_id): {"logprob": _finite(each.logprob), "rank": rank, "decoded_token": _text(each.token, "")}
        for rank, each in ((token.rank, own), *top)
    }


class CompletionLogprobs:
    """Writes the log-probabilities of one completion choice, and counts the text offset of each token in characters.

    If the prompt is echoed, its tokens come first. `echoed` is the prompt's text, or None if the prompt was given as
    token ids or is not echoed.
    """

    def __init__(self, echoed: str | None = None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        self._echoed = echoed

    def of_prompt(self, tokens: Sequence[PromptToken], *, num_top: int) -> dict[str, Any]:
        """Returns the `logprobs` object for the next tokens of the echoed prompt, with `num_top` likely tokens for
        each.
        """
        return {
            "tokens": [_text(each.token, "bytes:") for each in tokens],
            "token_logprobs": [None if each.logprob is None else _finite(each.logprob) for each in tokens],
            "top_logprobs": [
                None
                if each.logprob is None
                else _top(TokenLogprob(each.token_id, each.logprob, each.token), each.top[:num_top])
                for each in tokens
            ],
            "text_offset": [self._advance(each.token) for each in tokens],
        }

    def of(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        """Returns the `logprobs` object for the choice's next tokens, or None if no log-probabilities are wanted."""
        if not positions:
            return None
        if self._echoed is not None:
            self._offset, self._echoed = len(self._echoed), None
        return {
            "tokens": [_text(each.chosen.token, "bytes:") for each in positions],
            "token_logprobs": [_finite(each.chosen.logprob) for each in positions],
            "top_logprobs": [_top(each.chosen, each.top) for each in positions],
            "text_offset": [self._advance(each.chosen.token) for each in positions],
        }

    def _advance(self, token: bytes) -> int:
        begin = self._offset
        # Also has replacement characters for earlier bytes that turned out to be no text.
        text = self._decoder.decode(token)
        if self._echoed is not None and not self._echoed.startswith(text, begin):
            return begin  # the tokenizer added this token: it is not in the text
        self._offset += len(text)
        own_text = _decoded(token)
        return begin if own_text is None else self._offset - len(own_text)


def _top(own: TokenLogprob, top: Sequence[TokenLogprob]) -> dict[str, float]:
    """Returns the log-probabilities at one position, by token text: those of `top`, best first, then that of the
    position's `own` token if it is not among them.

    The own token's key equals its entry in the `tokens` list of the answer.
    """
    entries = {entry.token_id: entry for entry in (*top, own)}
    own_name = _text(own.token, "bytes:")
    named: dict[str, float] = {}
    for token_id, entry in entries.items():
        name = _text(entry.token, "bytes:")
        if name in named or (name == own_name and token_id != own.token_id):
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
