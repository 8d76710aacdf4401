"""Finds the bytes that one token stands for in a text. They need not be valid UTF-8 by themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token of a `tokenizers` backend.

    The tokens in `special_ids` are left out of decoded text; their bytes are those of their names.
    """

    def __init__(self, backend: Any, special_ids: frozenset[int]) -> None:
        stages = _decoder_stages(backend)
        self._backend = backend
        self._special_ids = special_ids
        self._byte_of_char = {char: byte for byte, char in bytes_to_unicode().items()} if "ByteLevel" in stages else {}
        self._byte_of = _byte_fallback(backend) if "ByteFallback" in stages else {}
        pieces = backend.get_vocab(with_added_tokens=True)
        self.longest = max(map(self._num_bytes_at_most, pieces), default=0)
        """An upper bound of the number of bytes of any token."""
        self._context = [] if self._byte_of_char else self._some_word()

    @property
    def byte_of(self) -> Mapping[int, int]:
        """The byte of each byte-fallback token, by token id. Empty for byte-level tokenizers."""
        return self._byte_of

    def of(self, token_id: int, *, begins_text: bool) -> bytes:
        """Returns the token's bytes, or b"" for an id past the vocabulary.

        `begins_text` says that no token with text precedes it, in which case a decoder may strip a space.
        """
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special_ids:
            return str(piece).encode()
        if self._byte_of_char:
            # If a token has any other character, the decoder takes the whole token literally.
            if all(char in self._byte_of_char for char in piece):
                return bytes(self._byte_of_char[char] for char in piece)
            return str(piece).encode()
        if begins_text and token_id not in self._byte_of:
            return self._decode([token_id]).encode()
        if (byte := self._byte_of.get(token_id)) is not None:
            return b"" if begins_text and not self._decode([token_id]) else bytes([byte])
        return self._decode([*self._context, token_id])[len(self._decode(self._context)) :].encode()

    def _num_bytes_at_most(self, piece: str) -> int:
        is_bytes = self._byte_of_char and all(char in self._byte_of_char for char in piece)
        return len(piece) if is_bytes else len(piece.encode(errors="replace"))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def _some_word(self) -> list[int]:
        """Returns [id] of a token that is a plain word, or [] if there is none.

        `of` decodes other tokens after it, so that the decoder does not take them for the beginning of a text.
        """
        for piece, token_id in sorted(
            self._backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]
        ):
            if piece.isascii() and piece.isalnum() and self._decode([token_id]) == piece:
                return [token_id]
        return []


def _decoder_stages(backend: Any) -> frozenset[str]:
    """Returns the types of all stages of the decoder, including those in nested sequences."""

    def kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
        yield str(decoder.get("type"))
        for stage in decoder.get("decoders", ()):
            yield from kinds(stage)

    if backend.decoder is None:
        return frozenset()
    return frozenset(kinds(json.loads(backend.decoder.__getstate__())))  # `to_str` would serialise the vocabulary too


def _byte_fallback(backend: Any) -> dict[int, int]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    matches = ((_BYTE_TOKEN.fullmatch(token), token_id) for token, token_id in vocabulary.items())
    return {token_id: int(match[1], 16) for match, token_id in matches if match is not None}
