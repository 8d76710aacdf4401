"""A model's tokenizer: it converts prompts to token ids, and token ids to text.

Any member may be used from any thread, because nothing changes after construction except caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from common.errors import UnsupportedModel
from common.model.model_files import model_faults, read_tokenizer
from common.text.chat_messages import NO_OPTIONS, ChatMessage, TemplateOptions
from common.text.chat_template import ChatRefused, ChatTemplates, TemplateTexts, TextTooLong
from common.text.output_formats import shows_calls
from common.text.token_bytes import TokenBytes

_MAX_CACHED_TOKENS = 1 << 18
_CHARS_PER_TOKEN = 8  # more than most texts have


class TokenDecoder(Protocol):
    """The part of a tokenizer that turns output into text."""

    def is_skipped(self, token_id: int) -> bool:
        """Returns whether this is a special token or an id past the vocabulary.

        Such a token has no text. The tokens before and after it are decoded as if they were adjacent.
        """

    @property
    def byte_of(self) -> Mapping[int, int]:
        """The byte of each byte-fallback token, by token id. Only a run of such tokens forms text. Empty for byte-level
        tokenizers.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of these tokens without special tokens. Bytes that form no character become U+FFFD."""

    def bytes_of(self, token_id: int, *, begins_text: bool = False) -> bytes:
        """Returns the bytes of one token, which need not be valid UTF-8. The joined bytes of an output's tokens are its
        text, if special tokens are left out.

        `begins_text` says that only skipped tokens precede it in the output. The bytes of a special token are those of
        its name.
        """


class PromptEncoder(Protocol):
    """The part of a tokenizer that turns a prompt into token ids. It may block, so do not use it on an event loop."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of `text`, with the special tokens that the model's tokenizer adds by itself."""

    def encode_chat(self, messages: Sequence[ChatMessage], options: TemplateOptions = NO_OPTIONS) -> tuple[int, ...]:
        """Renders the messages with the model's chat template, by default up to where an answer begins, and encodes the
        text.

        The template runs in this process; a service renders in a separate one, which can be stopped. Raises
        ChatRefused.
        """


class TextTokenizer(TokenDecoder, PromptEncoder):
    """The TokenDecoder and PromptEncoder of a transformers tokenizer, which must have a `tokenizers` backend."""

    def __init__(self, pretrained: Any) -> None:
        backend = getattr(pretrained, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(pretrained).__name__} has no `tokenizers` backend")
        self._pretrained = pretrained
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        """The ids of the special tokens, by their names."""
        self._special_ids = frozenset(self.special_tokens.values())
        token_bytes = TokenBytes(backend, self._special_ids)
        self._byte_of = token_bytes.byte_of
        self.longest_token_bytes = token_bytes.longest
        """The most bytes of text that one token stands for, unless the tokenizer drops some of the text."""
        self._bytes_of = lru_cache(_MAX_CACHED_TOKENS)(token_bytes.of)
        pretrained("")  # resets truncation and padding now: later calls then only read the backend

    @classmethod
    def from_directory(cls, directory: Path) -> TextTokenizer:
        """Loads the tokenizer in `directory`. Raises UnsupportedModel if there is no usable one."""
        pretrained = read_tokenizer(directory)
        if pretrained is None:
            raise UnsupportedModel(f"{directory.name}: no tokenizer, as tokenizer.json is one")
        with model_faults(f"{directory.name}: its tokenizer"):
            return cls(pretrained)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def showing(self, texts: Collection[str] | None) -> TokenDecoder:
        """Returns a decoder that decodes the special tokens whose names occur in `texts` to their names, and everything
        else as this one does. None means all special tokens.
        """
        shown = self._special_ids
        if texts is not None:
            joined = "\0".join(texts)
            shown = frozenset(token_id for name, token_id in self.special_tokens.items() if name in joined)
        return _ShowingSpecialTokens(self, self._backend, shown) if shown else self

    def is_skipped(self, token_id: int) -> bool:
        return token_id in self._special_ids or self._backend.id_to_token(token_id) is None

    @property
    def byte_of(self) -> Mapping[int, int]:
        return self._byte_of

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def pieces_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the tokens as the vocabulary spells them; "" for ids past it."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def bytes_of(self, token_id: int, *, begins_text: bool = False) -> bytes:
        return self._bytes_of(token_id, begins_text=begins_text)

    def encode(self, text: str, *, max_tokens: int | None = None, adds_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns the token ids of `text`. `adds_special_tokens` adds those that the model's tokenizer adds by itself.

        Raises TextTooLong as soon as it is clear that there are more than `max_tokens`, so of a much longer text only
        the beginning is encoded. The check is rough: the result may still have more than `max_tokens`.
        """
        if max_tokens is not None:
            num_chars = _CHARS_PER_TOKEN * max_tokens
            while num_chars < len(text):
                self._check_beginning(text[:num_chars], max_tokens)
                num_chars *= 4
        return self._encode(text, adds_special_tokens)

    def spellings(self, text: str) -> Iterator[tuple[int, ...]]:
        """Yields the token sequences that `text` is encoded to at the beginning of a text, after a space (which is then
        part of it), and after a line break, where some tokenizers spell a word without a space.
        """
        line_break = self._encode("\n", adds_special_tokens=False)
        after_line_break = self._encode("\n" + text, adds_special_tokens=False)
        yield from filter(
            None,
            (
                self._encode(text, adds_special_tokens=False),
                self._encode(" " + text, adds_special_tokens=False),
                after_line_break[len(line_break) :] if after_line_break[: len(line_break)] == line_break else (),
            ),
        )

    def chat_template(self) -> TemplateTexts:
        """Returns the chat template, and the special tokens by name. If there are several, it is the one named default,
        and the one named tool_use for chats with tools, if that shows a form of calls that is read. Raises ChatRefused
        if there is no template.
        """
        source: Any = self._pretrained.chat_template
        tool_use: Any = None
        if isinstance(source, Mapping):
            source, tool_use = source.get("default"), source.get("tool_use") or None
            if not source:
                raise ChatRefused("the model has several chat templates, and none of them is named default")
        if not source:
            raise ChatRefused("the model has no chat template")
        if not isinstance(source, str) or not isinstance(tool_use, str | None):
            raise ChatRefused("the model's chat_template is no text")
        if tool_use is not None and not shows_calls(tool_use):
            tool_use = None
        return TemplateTexts(source, dict(self._pretrained.special_tokens_map), tool_use)

    def template_sources(self) -> Sequence[str]:
        """Returns the source of the template for chats with tools and, if another one is for other chats, that one's.
        Raises ChatRefused without a template.
        """
        source, _, tool_use = self.chat_template()
        if tool_use is not None:
            with suppress(ChatRefused, TextTooLong):  # of the other one, which refuses all chats
                if self._chat_templates.uses_tool_use:
                    return tool_use, source
        return (source,)

    def chat_template_variables(self) -> Sequence[str]:
        """Returns the templates' variables that a request may set. Raises ChatRefused without a template."""
        return self._chat_templates.variables

    def encode_chat(self, messages: Sequence[ChatMessage], options: TemplateOptions = NO_OPTIONS) -> tuple[int, ...]:
        return self._encode(self._chat_templates.render(messages, options), adds_special_tokens=False)

    @cached_property
    def _chat_templates(self) -> ChatTemplates:
        return ChatTemplates(*self.chat_template())

    def _encode(self, text: str, adds_special_tokens: bool) -> tuple[int, ...]:
        """Encodes one text without holding the GIL, which the backend's `encode` would hold."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
        return tuple(encoding.ids)

    def _check_beginning(self, beginning: str, max_tokens: int) -> None:
        """Raises TextTooLong if `beginning` alone has clearly more than `max_tokens` tokens.

        At the cut some tokens differ from those of the whole text, so a margin is allowed.
        """
        if len(self._encode(beginning, adds_special_tokens=False)) > max_tokens + max_tokens // 4 + 64:
            raise TextTooLong(f"more than {max_tokens} tokens")


class _ShowingSpecialTokens(TokenDecoder):
    """Decodes as `tokenizer` does, and the special tokens in `shown` to their names."""

    def __init__(self, tokenizer: TokenDecoder, backend: Any, shown: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._shown = shown

    def is_skipped(self, token_id: int) -> bool:
        return token_id not in self._shown and self._tokenizer.is_skipped(token_id)

    @property
    def byte_of(self) -> Mapping[int, int]:
        return self._tokenizer.byte_of

    def decode(self, token_ids: Sequence[int]) -> str:
        kept = [token_id for token_id in token_ids if not self.is_skipped(token_id)]
        return str(self._backend.decode(kept, skip_special_tokens=False))

    def bytes_of(self, token_id: int, *, begins_text: bool = False) -> bytes:
        return self._tokenizer.bytes_of(token_id, begins_text=begins_text)
