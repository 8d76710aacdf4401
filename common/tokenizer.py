"""A model's tokenizer: prompts to token ids, token ids to text.

Any member may be used from any thread: nothing here changes after construction, but for what is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import AutoTokenizer

from common.token_bytes import TokenBytes

_MAX_CACHED_TOKENS = 1 << 18


class TokenDecoder(Protocol):
    """What turning output into text needs."""

    def is_skipped(self, token_id: int) -> bool:
        """Special tokens, and ids past the vocabulary: they have no text and do not separate what is around them."""

    @property
    def byte_of(self) -> Mapping[int, int]:
        """Byte-fallback tokens' bytes: a run of them is text only as a whole. Empty for byte-level tokenizers."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens skipped; bytes that are no character become U+FFFD."""

    def bytes_of(self, token_id: int, *, begins_text: bool = False) -> bytes:
        """The token's own, which need not be UTF-8; joined over an output without special tokens they are its text.

        `begins_text`: nothing but skipped tokens is before it in the output. A special token's are what it is called.
        """


class PromptEncoder(Protocol):
    """What turning a prompt into token ids needs."""

    def encode(self, text: str) -> tuple[int, ...]:
        """With the special tokens the model's tokenizer adds by itself."""

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """(role, content) pairs through the model's chat template, ending where the assistant's turn begins.

        Raises ValueError when there is no template or it refuses these messages.
        """


class TextTokenizer(TokenDecoder, PromptEncoder):
    """A transformers tokenizer with a `tokenizers` backend."""

    def __init__(self, pretrained: Any) -> None:
        backend = getattr(pretrained, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(pretrained).__name__} has no `tokenizers` backend")
        self._pretrained = pretrained
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        token_bytes = TokenBytes(backend, self._special_ids)
        self._byte_of = token_bytes.byte_of
        self._bytes_of = lru_cache(_MAX_CACHED_TOKENS)(token_bytes.of)
        pretrained("")  # resets truncation and padding now: later calls then only read the backend

    @classmethod
    def from_directory(cls, directory: Path) -> TextTokenizer:
        return cls(AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False))

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def is_skipped(self, token_id: int) -> bool:
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    @property
    def byte_of(self) -> Mapping[int, int]:
        return self._byte_of

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def bytes_of(self, token_id: int, *, begins_text: bool = False) -> bytes:
        return self._bytes_of(token_id, begins_text=begins_text)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._pretrained(text)["input_ids"])

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        if not self._pretrained.chat_template:
            raise ValueError("the model has no chat template")
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            token_ids = self._pretrained.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses it: {error}") from error
        return tuple(token_ids)
