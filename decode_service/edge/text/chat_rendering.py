"""Renders conversations with the model's chat template, in child processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Sequence

import structlog

from common.errors import Overloaded
from common.host.answering import DONE
from common.host.asked_process import AskedProcess, ChildEnded, ChildFailed
from common.rpc.fair_shares import Caller
from common.text import chat_template_process as protocol
from common.text.chat_messages import NO_OPTIONS, ChatMessage, TemplateOptions, chat_to_json
from common.text.chat_template import ChatRefused, TemplateTexts, TextTooLong
from decode_service.edge.text.text_threads import LANES, MAX_WAITING_BYTES, TextLane

RENDER_CPU_S = 2.0  # a long conversation takes some 10 ms
_TIMEOUT_S = 60.0  # clock time: passes only if the machine is overloaded or stops the process
_PLACES = (4, 2, 2)
"""How many processes may render conversations of each lane at the same time. A lane is a class of sizes, see `LANES`.
"""
_MEMORY_BYTES = 256 << 20  # beyond the memory that Python itself has mapped
_MEMORY_PER_CHAR = 16
_MAX_ROOMY_CHARS = 64 << 20
_BYTES_PER_MESSAGE = 64
"""The number of bytes that is added to a conversation's size for each message, tool or call, because rendering an empty
one takes about as long as rendering so much text.
"""
_MAX_SPARE = 2
SPARE_S = 60.0
_RETRY_AFTER_S = 1

_log = structlog.get_logger(__name__)


class ChatRendering:
    """Renders conversations in child processes, one at a time in each. For the event loop only.

    A process that takes too long is killed. `chat_template` returns the template, or raises ChatRefused. Each process
    probes the template at its start. If the first probe is refused, every conversation is refused for that reason. If
    no process could be started, the next conversation tries again.

    Conversations are divided by size into lanes (`LANES`), so that short ones do not wait for long ones. Each lane has
    its own limit of waiting bytes, and clients take turns there. Processes that had nothing to do for `spare_s` are
    ended, except two.
    """

    def __init__(
        self,
        chat_template: Callable[[], TemplateTexts],
        *,
        max_chars: int,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        cpu_s: float = RENDER_CPU_S,
        spare_s: float = SPARE_S,
    ) -> None:
        self._chat_template = chat_template
        self._max_chars = max_chars
        self._cpu_s = cpu_s
        self._spare_s = spare_s
        self._is_probed = False
        self._refusal: str | None = None
        self._lanes = [
            (largest, TextLane(num_places, max_waiting_bytes, purpose="rendered"))
            for (largest, _), num_places in zip(LANES, _PLACES, strict=True)
        ]
        self._idle: list[AskedProcess] = []
        self._least_idle = 0  # the fewest idle processes since spare ones were ended
        self._ending: asyncio.TimerHandle | None = None
        self._renderings: set[asyncio.Task[str | Exception]] = set()
        self._endings: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        try:
            self._idle.append(await self._start())
        except ChatRefused:
            pass  # recorded in `_refusal` and logged
        except ChildFailed as error:
            _log.warning("chat_not_probed", reason=str(error))

    async def close(self) -> None:
        """Ends every process. Call it only when no caller waits for a rendering any more."""
        if self._ending is not None:
            self._ending.cancel()
        renderings = tuple(self._renderings)
        for rendering in renderings:
            rendering.cancel()
        await asyncio.gather(*renderings, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._idle), *self._endings)

    async def render(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions = NO_OPTIONS,
        *,
        num_bytes: int,
        caller: Caller,
    ) -> str:
        """Renders a conversation. `num_bytes` is the size of its contents and options.

        Raises ChatRefused, TextTooLong or Overloaded. If the caller is cancelled while the conversation waits, the
        conversation is dropped. A rendering that has begun goes on, and counts towards its lane's limits until it ends.
        """
        if self._refusal is not None:
            raise ChatRefused(self._refusal)
        num_parts = len(options.tools) + sum(1 + len(message.tool_calls) for message in messages)
        num_bytes += _BYTES_PER_MESSAGE * num_parts
        lane = next(lane for largest, lane in self._lanes if largest is None or num_bytes <= largest)
        over = await lane.begin(caller, num_bytes)
        rendering = asyncio.create_task(self._render(messages, options), name="render_chat")
        self._renderings.add(rendering)
        rendering.add_done_callback(self._renderings.discard)
        rendering.add_done_callback(lambda _: over(None))
        result = await asyncio.shield(rendering)
        if isinstance(result, Exception):
            raise result
        return result

    async def _render(self, messages: Sequence[ChatMessage], options: TemplateOptions) -> str | Exception:
        """Renders a conversation and returns the text or the error.

        It returns the error instead of raising it, because the caller may be gone, and asyncio logs an exception that
        nobody receives.
        """
        command = chat_to_json(messages, options).encode()
        try:
            try:
                return await self._render_by_one(command)
            except ChildEnded:  # the process may have ended before the request reached it
                return await self._render_by_one(command)
        except (ChatRefused, TextTooLong) as error:
            return error
        except ChildFailed as error:
            message = f"no process renders the chat now: {error}"
            return Overloaded(message, retry_after_s=_RETRY_AFTER_S)

    async def _render_by_one(self, command: bytes) -> str:
        """Renders a conversation in an idle process or a new one. Raises ChatRefused, TextTooLong or ChildFailed."""
        self._idle = [process for process in self._idle if process.is_usable]
        process = self._idle.pop() if self._idle else None
        self._least_idle = min(self._least_idle, len(self._idle))
        process = process or await self._start()
        try:
            return await _answer(process, command, cpu_s=self._cpu_s)
        finally:
            self._idle.append(process)
            if self._ending is None:
                self._ending = asyncio.get_running_loop().call_later(self._spare_s, self._end_spare)

    def _end_spare(self) -> None:
        for process in self._idle[: max(self._least_idle - _MAX_SPARE, 0)]:  # the most recently used processes are kept
            process.kill()
            ending = asyncio.create_task(process.close(), name="end_spare")
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        self._idle = [process for process in self._idle if process.is_usable]
        self._least_idle = len(self._idle)
        again = len(self._idle) > _MAX_SPARE
        self._ending = asyncio.get_running_loop().call_later(self._spare_s, self._end_spare) if again else None

    async def _start(self) -> AskedProcess:
        """Starts a process and probes the template in it. Raises ChatRefused or ChildFailed."""
        try:
            texts = self._chat_template()
            process = await AskedProcess.spawn(protocol.__name__, str(2 * _TIMEOUT_S), timeout_s=_TIMEOUT_S)
            asked = {
                **texts._asdict(),
                "max_chars": self._max_chars,
                "memory_bytes": _MEMORY_BYTES + _MEMORY_PER_CHAR * min(self._max_chars, _MAX_ROOMY_CHARS),
                "cpu_s": self._cpu_s,
            }
            try:
                await _answer(process, json.dumps(asked).encode(), cpu_s=protocol.START_CPU_S)
            except ChatRefused:
                await process.close()
                raise
        except ChatRefused as error:
            if not self._is_probed and self._refusal is None:
                self._refusal = str(error)
                _log.warning("chat_refused", reason=self._refusal)
            raise
        self._is_probed = True
        return process


async def _answer(process: AskedProcess, command: bytes, *, cpu_s: float) -> str:
    """Sends a command to the process and returns its answer.

    Raises ChatRefused or TextTooLong. A process that used more than `cpu_s` of CPU time has ended: that raises
    ChatRefused too. Raises ChildFailed if the process failed in any other way.
    """
    try:
        status, content = await process.ask(command)
    except ChildEnded as error:
        if error.returncode == -signal.SIGPROF:
            took = f"takes more than {cpu_s:g} s of the processor for it"
            raise ChatRefused(f"the model's chat template {took}") from error
        raise
    text = content.decode(errors="replace")
    match status:
        case _ if status == DONE:
            return text
        case protocol.TOO_LONG:
            raise TextTooLong(text)
        case _:
            field, reason = json.loads(text)
            raise ChatRefused(reason, field)
