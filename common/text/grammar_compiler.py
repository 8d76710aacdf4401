"""Compiles grammars on threads of their own, each one only after a trial in a child process.

    new grammar ──▶ its tenant's turn ──▶ trial in a child process ──▶ compiled here ──▶ matcher
    known grammar ─────────────────────────────────────────────────▶ copied here ──▶ matcher

Compiling cannot be stopped here. A grammar that stayed within the trial's limits takes as little time and memory here.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Self

from common.errors import InvalidRequest, Overloaded
from common.grammar.grammar import Grammar
from common.grammar.matcher import Matcher
from common.grammar.reasoning import Reasoning
from common.host.answering import DONE
from common.host.asked_process import AskedProcess, ChildEnded, ChildFailed
from common.rpc.fair_shares import Caller
from common.text import grammar_trial_process as protocol
from common.text.grammars import GrammarRefused, Grammars, OutputRefused, ReasoningRefused, Vocabulary
from common.text.turns import Turns

_RETRY_AFTER_S = 1
MAX_WAIT_S = 10.0
_STACK_BYTES = 512 << 20
"""The stack is large because the library recurses for each definition that another one refers to. Only the part of it
that is used takes memory.
"""
_CLOCK_S = 30.0  # passes only if the machine is overloaded or stops the process
LIMITS = protocol.Limits(
    cpu_s=0.5, timeout_s=_CLOCK_S, memory_bytes=(_STACK_BYTES >> 1) + (256 << 20), stack_bytes=_STACK_BYTES >> 1
)
"""The limits of a trial. Its stack is half as large as the service's, so what passes the trial fits here."""

TryOut = Callable[[Grammar], Awaitable[int]]
"""Tries a new grammar and returns its bytes, as `GrammarTrials.try_out` does."""


class GrammarCompiler:
    """Makes matchers on threads of its own. Use it on the event loop only, inside an `async with`.

    New grammars are tried and compiled one at a time. Beside that, one known grammar at a time is copied, and one
    matcher of a known grammar accepts the output that a request brings along. Clients take turns at each of these.
    """

    def __init__(self, grammars: Grammars, try_out: TryOut, *, max_wait_s: float = MAX_WAIT_S) -> None:
        """Starts the threads. A caller waits for its turn for `max_wait_s` at most."""
        self._grammars = grammars
        self._try_out = try_out
        self._max_wait_s = max_wait_s
        self._compiling, self._copying, self._replaying = _Lane("grammars"), _Lane("matchers"), _Lane("replays")
        self._work: set[asyncio.Task[Matcher | Exception]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for work in tuple(self._work):
            work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for lane in (self._compiling, self._copying, self._replaying):
            lane.thread.shutdown(cancel_futures=True)

    async def matcher(
        self,
        grammar: Grammar | None,
        output_ids: Sequence[int] = (),
        reasoning: Reasoning | None = None,
        *,
        client: str = "",
        tenant: str = "",
    ) -> Matcher:
        """Returns a matcher that has accepted `output_ids`. Either of `grammar` and `reasoning` may be None.

        Raises InvalidRequest, naming the field, for a grammar that is not served, for a marker of reasoning that the
        model cannot write, and for output that does not fit; Overloaded if it waits too long for its turn.
        """
        try:
            return await self._in_turn(grammar, output_ids, reasoning, (client, tenant))
        except GrammarRefused as error:
            if grammar is None:
                raise InvalidRequest("sampling.reasoning", str(error)) from error
            raise grammar.refused(str(error)) from error
        except ReasoningRefused as error:
            raise InvalidRequest("sampling.reasoning.end", str(error)) from error
        except OutputRefused as error:
            raise InvalidRequest("generated_token_ids", str(error)) from error
        except ChildFailed as error:
            message = f"no process tries the grammar now: {error}"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from error

    def _known_bytes(self, grammar: Grammar | None) -> int | None:
        """Returns the bytes for which the grammar counts in the cache: 0 without one, None if it is not cached."""
        return 0 if grammar is None else self._grammars.num_bytes_of(grammar)

    def _knows(self, reasoning: Reasoning | None) -> bool:
        return reasoning is None or self._grammars.knows(reasoning)

    async def _in_turn(
        self, grammar: Grammar | None, output_ids: Sequence[int], reasoning: Reasoning | None, caller: Caller
    ) -> Matcher:
        lane = self._compiling
        if self._known_bytes(grammar) is not None and self._knows(reasoning):
            lane = self._replaying if output_ids else self._copying
        try:
            async with asyncio.timeout(self._max_wait_s):
                began_s = await lane.turns.take(caller)
                num_bytes = self._known_bytes(grammar)
                if lane is not self._compiling and (num_bytes is None or not self._knows(reasoning)):
                    # The grammar left the cache during the wait. Only the compiling lane tries what it compiles.
                    lane.turns.give_back(caller, began_s)
                    lane = self._compiling
                    began_s = await lane.turns.take(caller)
                    num_bytes = self._known_bytes(grammar)
        except TimeoutError as error:
            message = f"grammars wait for more than {self._max_wait_s:g} s for their turn"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from error
        # The work goes on when the caller leaves: a trial that is cancelled ends its process.
        made = self._made(lane, grammar, num_bytes, output_ids, reasoning)
        work = asyncio.create_task(made, name="make_matcher")
        self._work.add(work)

        def over(task: asyncio.Task[Matcher | Exception]) -> None:
            self._work.discard(task)
            lane.turns.give_back(caller, began_s)

        work.add_done_callback(over)
        result = await asyncio.shield(work)
        if isinstance(result, Exception):
            raise result
        return result

    async def _made(
        self,
        lane: _Lane,
        grammar: Grammar | None,
        num_bytes: int | None,
        output_ids: Sequence[int],
        reasoning: Reasoning | None,
    ) -> Matcher | Exception:
        """Returns the matcher or the error. The error is not raised, because the caller may be gone, and asyncio logs
        exceptions that nobody receives.

        `num_bytes` is None for a grammar that is to be tried. Any other was tried before: if it leaves the cache now,
        the thread compiles it again.
        """
        try:
            if num_bytes is None:
                assert grammar is not None
                lane.thread.submit(self._grammars.load)  # the first time, while the process starts
                num_bytes = await self._try_out(grammar)
            make = partial(self._grammars.matcher, grammar, output_ids, reasoning, num_bytes=num_bytes)
            return await asyncio.wrap_future(lane.thread.submit(make))
        except (GrammarRefused, ReasoningRefused, OutputRefused, ChildFailed) as error:
            return error


class GrammarTrials:
    """Compiles grammars on trial in a child process, which is started for the first grammar. Use it on the event loop
    only, inside an `async with`.

    `vocabulary` is `Grammars.vocabulary`; it is called on another thread.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, limits: protocol.Limits = LIMITS) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._process: AskedProcess | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            await self._process.close()

    async def try_out(self, grammar: Grammar) -> int:
        """Compiles a grammar in the child process, and returns how many bytes it takes there. One call at a time.

        Raises GrammarRefused for a grammar that is not served or exceeds the limits, and ChildFailed if the child
        process does not work or gets too little time. If the caller is cancelled, the process is killed.
        """
        command = json.dumps(
            {"kind": grammar.kind.value, "text": grammar.text, "opens_objects": grammar.opens_objects}
        ).encode()
        try:
            status, content = await (await self._usable_process()).ask(command)
        except ChildEnded:  # the process may have ended before the request reached it
            status, content = await (await self._usable_process()).ask(command)
        if status == protocol.LATE:
            raise ChildFailed(content.decode())
        if status != DONE:
            raise GrammarRefused(content.decode())
        return int(content)

    async def _usable_process(self) -> AskedProcess:
        """Returns the child process, and starts one if there is none. Raises GrammarRefused or ChildFailed."""
        if self._process is None or not self._process.is_usable:
            asked = {"limits": asdict(self._limits), **await asyncio.to_thread(self._vocabulary)}
            self._process = await AskedProcess.spawn(protocol.__name__, str(2 * _CLOCK_S), timeout_s=2 * _CLOCK_S)
            await self._process.ask(json.dumps(asked).encode())
        return self._process


class _Lane:
    """A thread, and the turns of those who wait for it."""

    def __init__(self, name: str) -> None:
        self.turns = Turns(1)
        self.thread = _thread_with_stack(name, _STACK_BYTES)


def _thread_with_stack(name: str, num_bytes: int) -> ThreadPoolExecutor:
    """Returns an executor with one thread, which is started now and has a stack of `num_bytes`."""
    before = threading.stack_size(num_bytes)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor
