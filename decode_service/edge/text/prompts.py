"""Turns prompts into token ids, off the event loop. A prompt much longer than the context is rejected before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from common.errors import ContextExceeded, InvalidRequest
from common.rpc.fair_shares import Caller
from common.sampling.params import SPELLINGS_PER_BAD_WORD
from common.telemetry.timeline import Timeline
from common.text.chat_template import ChatRefused, TextTooLong
from common.text.tokenizer import TextTokenizer
from decode_service.edge.request_checks import (
    MAX_CONTEXTS,
    ChatPrompt,
    ModelLimits,
    Prompt,
    TextPrompt,
    TokenIdsPrompt,
)
from decode_service.edge.text.chat_rendering import RENDER_CPU_S, ChatRendering
from decode_service.edge.text.text_threads import MAX_WAITING_BYTES, TextThreads

T = TypeVar("T")


class Prompts:
    """Turns prompts into token ids. For the event loop only, inside an `async with`. Errors name the request's field.

    A text is rejected without tokenising it if it has more bytes than the allowed number of tokens could have. Callers
    of different clients, and of one client's tenants, take turns.
    """

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer,
        limits: ModelLimits,
        timeline: Timeline | None = None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        render_cpu_s: float = RENDER_CPU_S,
    ) -> None:
        self.tokenizer = tokenizer
        self._limits = limits
        self._max_tokens = MAX_CONTEXTS * limits.max_context_tokens
        self._max_bytes = self._max_tokens * tokenizer.longest_token_bytes
        self._chats = ChatRendering(
            tokenizer.chat_template, max_chars=self._max_bytes, max_waiting_bytes=max_waiting_bytes, cpu_s=render_cpu_s
        )
        self._threads = TextThreads(timeline=timeline, max_bytes=max_waiting_bytes)

    async def __aenter__(self) -> Self:
        await self._chats.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._chats.close()
        self._threads.shut_down()

    async def replay(self, work: Callable[[], T], *, num_tokens: int, caller: Caller) -> T:
        """Runs `work`, which goes through `num_tokens` tokens, on one of the TextThreads and returns its result.

        Raises Overloaded if too much text waits there.
        """
        return await self._threads.replay(work, num_tokens=num_tokens, caller=caller)

    async def encode(self, prompt: Prompt, *, adds_special_tokens: bool | None = None, caller: Caller) -> Sequence[int]:
        """Returns the prompt's token ids. Raises InvalidRequest, ContextExceeded or Overloaded.

        A text may exceed the model's context, so that errors can tell its length; with more than MAX_CONTEXTS times the
        context it is refused. Where the prompt must fit, call `check_lengths` afterwards. `adds_special_tokens` says
        whether the tokenizer adds its special tokens; None means that it does for a text, and not for a chat.
        """
        match prompt:
            case TokenIdsPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                adds = True if adds_special_tokens is None else adds_special_tokens
                return await self._tokenize("encode", text, adds_special_tokens=adds, caller=caller)
            case ChatPrompt():
                text = await self._render(prompt, caller)
                adds = bool(adds_special_tokens)
                return await self._tokenize("encode_chat", text, adds_special_tokens=adds, caller=caller)

    async def spell(self, texts: Sequence[str], *, caller: Caller) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences that spell any of `texts`. Raises Overloaded."""
        num_bytes = SPELLINGS_PER_BAD_WORD * sum(len(text.encode(errors="replace")) for text in texts)
        return await self._threads.run("spell", partial(self._spell, texts), num_bytes=num_bytes, caller=caller)

    def _spell(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(sequence for text in texts for sequence in self.tokenizer.spellings(text)))

    async def _render(self, chat: ChatPrompt, caller: Caller) -> str:
        num_bytes = self._num_bytes(*(text for message in chat.messages for text in message.texts), *chat.options.texts)
        try:
            return await self._chats.render(chat.messages, chat.options, num_bytes=num_bytes, caller=caller)
        except ChatRefused as error:
            raise InvalidRequest(error.field, error.reason) from error
        except TextTooLong as error:
            raise self._too_long() from error

    async def _tokenize(self, name: str, text: str, *, adds_special_tokens: bool, caller: Caller) -> Sequence[int]:
        num_bytes = self._num_bytes(text)
        work = partial(
            self.tokenizer.encode, text, max_tokens=self._max_tokens, adds_special_tokens=adds_special_tokens
        )
        try:
            token_ids = await self._threads.run(name, work, num_bytes=num_bytes, caller=caller)
        except TextTooLong as error:
            raise self._too_long() from error
        if len(token_ids) > self._max_tokens:
            raise self._too_long()
        return token_ids

    def _num_bytes(self, *texts: str) -> int:
        """Returns the total bytes of `texts`. Raises ContextExceeded if MAX_CONTEXTS contexts cannot hold so many."""
        num_bytes = sum(len(text.encode(errors="replace")) for text in texts)
        if num_bytes > self._max_bytes:
            raise self._too_long()
        return num_bytes

    def _too_long(self) -> ContextExceeded:
        most = self._limits.max_context_tokens
        return ContextExceeded(
            "prompt",
            f"more than {self._max_tokens} tokens do not fit a context of {most}",
            max_context_tokens=most,
        )
