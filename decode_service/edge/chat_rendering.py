"""Conversations to texts by the model's chat template, in processes that can be stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from common import chat_template_process as protocol
from common.answering import DONE
from common.asked_process import AskedProcess, ChildEnded, ChildFailed
from common.chat_template import ChatRefused, TextTooLong

RENDER_TIMEOUT_S = 2.0  # a long conversation takes some 10 ms
_START_TIMEOUT_S = 20.0
_MAX_PROCESSES = 8
_MEMORY_BYTES = 256 << 20  # of a process's addresses: Python and Jinja take some 50 MiB
_MEMORY_PER_CHAR = 16
_MAX_ROOMY_CHARS = 64 << 20

_log = structlog.get_logger(__name__)


class ChatRendering:
    """Event loop only. A process renders one conversation at a time, and is killed when it takes too long over it.

    `chat_template` returns source and special tokens, or raises ChatRefused. What the template makes of a probe decides
    at the start how contents are given to it; a template that fails there refuses every conversation, by that reason.
    """

    def __init__(
        self,
        chat_template: Callable[[], tuple[str, dict[str, Any]]],
        *,
        max_chars: int,
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        self._chat_template = chat_template
        self._max_chars = max_chars
        self._timeout_s = timeout_s
        self._parts_roles: list[str] | None = None
        self._refusal = "its processes have not started"
        self._places = asyncio.Semaphore(_MAX_PROCESSES)
        self._idle: list[AskedProcess] = []
        self._renderings: set[asyncio.Task[str | ValueError]] = set()

    @property
    def refusal(self) -> str | None:
        """Why no conversation is rendered, or None."""
        return self._refusal if self._parts_roles is None else None

    async def open(self) -> None:
        try:
            self._idle.append(await self._start())
        except (ChatRefused, ChildFailed) as error:
            self._refusal = str(error if isinstance(error, ChatRefused) else _not_rendered(error))
            _log.warning("chat_refused", reason=self._refusal)

    async def close(self) -> None:
        """Ends every process. Nobody waits for a rendering any more."""
        renderings = tuple(self._renderings)
        for rendering in renderings:
            rendering.cancel()
        await asyncio.gather(*renderings, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._idle))

    async def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Raises ChatRefused, or TextTooLong. A caller that is cancelled leaves the process to its work."""
        if self.refusal is not None:
            raise ChatRefused(self.refusal)
        rendering = asyncio.create_task(self._render(json.dumps(messages).encode()), name="render_chat")
        self._renderings.add(rendering)
        rendering.add_done_callback(self._renderings.discard)
        result = await asyncio.shield(rendering)
        if isinstance(result, ValueError):
            raise result
        return result

    async def _render(self, command: bytes) -> str | ValueError:
        """The error is a result, since there may be nobody to raise it to."""
        async with self._places:
            try:
                try:
                    return await self._render_by_one(command)
                except ChildEnded:  # perhaps before it was asked
                    return await self._render_by_one(command)
            except (ChatRefused, TextTooLong) as error:
                return error
            except ChildFailed as error:
                return _not_rendered(error)

    async def _render_by_one(self, command: bytes) -> str:
        """Raises ChatRefused, TextTooLong, or ChildFailed."""
        self._idle = [process for process in self._idle if process.is_usable]
        process = self._idle.pop() if self._idle else await self._start()
        try:
            return await _answer(process, command, timeout_s=self._timeout_s)
        finally:
            self._idle.append(process)

    async def _start(self) -> AskedProcess:
        """Raises ChatRefused, or ChildFailed."""
        source, special_tokens = self._chat_template()
        asked = {
            "source": source,
            "special_tokens": special_tokens,
            "parts_roles": self._parts_roles,
            "max_chars": self._max_chars,
        }
        memory_bytes = _MEMORY_BYTES + _MEMORY_PER_CHAR * min(self._max_chars, _MAX_ROOMY_CHARS)
        process = await AskedProcess.spawn(
            protocol.__name__, str(2 * _START_TIMEOUT_S), str(memory_bytes), timeout_s=_START_TIMEOUT_S
        )
        try:
            answer = await _answer(process, json.dumps(asked).encode(), timeout_s=_START_TIMEOUT_S)
        except ChatRefused:
            await process.close()
            raise
        self._parts_roles = json.loads(answer)
        return process


async def _answer(process: AskedProcess, command: bytes, *, timeout_s: float) -> str:
    """Raises ChatRefused, TextTooLong, or ChildFailed when the process has ended or was killed."""
    status, content = await process.ask(command, timeout_s=timeout_s)
    text = content.decode(errors="replace")
    match status:
        case _ if status == DONE:
            return text
        case protocol.TOO_LONG:
            raise TextTooLong(text)
        case _:
            raise ChatRefused(text)


def _not_rendered(error: ChildFailed) -> ChatRefused:
    return ChatRefused(f"the model's chat template is not rendered: {error}")
