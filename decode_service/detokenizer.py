"""Token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.tokenizer import TokenDecoder

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class DecodedText:
    """`text` is new and final. `tail` follows it if nothing more comes, but a further token may still change it."""

    text: str
    tail: str = ""


class IncrementalDetokenizer:
    """The texts of all `push` calls and of one `flush`, joined, are `decode` of all the ids.

    No text splits a character: bytes that may begin one are kept until it is complete, or until `flush`.

        ids    ... │ context: final │ pending │        decode(context + pending) minus decode(context) is what
                   └────── window ────────────┘        pending adds; earlier ids cannot change it
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._num_context = 0
        self._num_emitted_chars = 0  # of the window's text

    def push(self, token_id: int) -> DecodedText:
        if self._decoder.is_skipped(token_id):
            return DecodedText("")
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        if token_id in self._decoder.byte_ids:  # the next byte may turn this whole run into U+FFFD
            return DecodedText("", tail=text[self._num_emitted_chars :].rstrip(_REPLACEMENT))
        is_complete = not text.endswith(_REPLACEMENT)
        num_final = len(text) if is_complete else len(text) - 1
        new = text[self._num_emitted_chars : num_final]
        self._num_emitted_chars = max(self._num_emitted_chars, num_final)
        if is_complete:
            self._forget(self._window[self._num_context :])
        return DecodedText(new)

    def flush(self) -> str:
        """What was kept back. Nothing may be pushed after it."""
        return self._decoder.decode(self._window)[self._num_emitted_chars :]

    def _forget(self, recent: Sequence[int]) -> None:
        """Keep only `recent` as context, unless it is not enough: a decoder may strip the start of a text."""
        text = self._decoder.decode(recent)
        if text:
            self._window = list(recent)
            self._num_context = len(recent)
            self._num_emitted_chars = len(text)
