"""A model's tokenizer: prompts to token ids, token ids to text.

Any member may be used from any thread: nothing here changes after construction, but for what is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from common.errors import UnsupportedModel
from common.model.model_files import model_faults, read_tokenizer
from common.text.chat_messages import ChatMessage
from common.text.chat_template import ChatRefused, ChatTemplate, TextTooLong
from common.text.token_bytes import TokenBytes

_MAX_CACHED_TOKENS = 1 << 18
_CHARS_PER_TOKEN = 8  # more than most texts have


class TokenDecoder(Protocol):
    """What is needed to turn output into text."""

    def is_skipped(self, token_id: int) -> bool:
        """True for special tokens and ids past the vocabulary, which have no text and do not separate others."""

    @property
    def byte_of(self) -> Mapping[int, int]:
        """The bytes of byte-fallback tokens; only a run of them is text. Empty for byte-level tokenizers."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Skips special tokens. Bytes that form no character become U+FFFD."""

    def bytes_of(self, token_id: int, *, begins_text: bool = False) -> bytes:
        """The token's own, which need not be UTF-8; joined over an output without special tokens they are its text.

        `begins_text`: nothing but skipped tokens is before it in the output. A special token's are what it is called.
        """


class PromptEncoder(Protocol):
    """What is needed to turn a prompt into token ids, where nobody else waits."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Adds the special tokens that the model's tokenizer adds by itself."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Through the model's chat template, ending where the assistant's turn begins. It is rendered here: a service
        renders where it can be stopped. Raises ChatRefused.
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
        self.longest_token_bytes = token_bytes.longest
        """No token stands for more of a text, unless the tokenizer throws some of it away."""
        self._bytes_of = lru_cache(_MAX_CACHED_TOKENS)(token_bytes.of)
        pretrained("")  # resets truncation and padding now: later calls then only read the backend

    @classmethod
    def from_directory(cls, directory: Path) -> TextTokenizer:
        """Raises UnsupportedModel if there is no usable tokenizer."""
        pretrained = read_tokenizer(directory)
        if pretrained is None:
            raise UnsupportedModel(f"{directory.name}: no tokenizer, as tokenizer.json is one")
        with model_faults(f"{directory.name}: its tokenizer"):
            return cls(pretrained)

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

    def encode(self, text: str, *, max_tokens: int | None = None, adds_special_tokens: bool = True) -> tuple[int, ...]:
        """`adds_special_tokens`: those that the model's tokenizer adds by itself.

        Raises TextTooLong as soon as it is clear that there are more than `max_tokens`: of a much longer text only the
        beginning is looked at. There may be more all the same.
        """
        if max_tokens is not None:
            num_chars = _CHARS_PER_TOKEN * max_tokens
            while num_chars < len(text):
                self._check_beginning(text[:num_chars], max_tokens)
                num_chars *= 4
        return self._encode(text, adds_special_tokens)

    def chat_template(self) -> tuple[str, dict[str, Any]]:
        """Returns the template's source, and the special tokens by their names. Raises ChatRefused."""
        source = self._pretrained.chat_template
        if isinstance(source, Mapping):
            source = source.get("default")
            if not source:
                raise ChatRefused("the model has several chat templates, and none of them is named default")
        if not source:
            raise ChatRefused("the model has no chat template")
        return source, dict(self._pretrained.special_tokens_map)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return self._encode(self._chat_template.render(messages), adds_special_tokens=False)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(*self.chat_template())

    def _encode(self, text: str, adds_special_tokens: bool) -> tuple[int, ...]:
        """Releases the interpreter's lock, which `encode` of one text would keep."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
        return tuple(encoding.ids)

    def _check_beginning(self, beginning: str, max_tokens: int) -> None:
        """Where it is cut, a few of its tokens are not those of the whole text: so many more are asked for."""
        if len(self._encode(beginning, adds_special_tokens=False)) > max_tokens + max_tokens // 4 + 64:
            raise TextTooLong(f"more than {max_tokens} tokens")
