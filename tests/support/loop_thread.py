"""An event loop in a thread of its own, which other threads drive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time can be moved forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


class LoopThread:
    """An event loop in a daemon thread. It runs from construction until it is closed.

    `on_fault` is called with the context of an error that no code awaits; without it, asyncio logs the error.
    """

    def __init__(self, *, bound_s: float = 60.0, on_fault: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._bound_s = bound_s
        self._loop = _Loop()
        if on_fault is not None:
            self._loop.set_exception_handler(lambda _, context: on_fault(context))
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Runs the coroutine on the loop and returns its result. Raises TimeoutError after `bound_s`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self._bound_s)

    def skip(self, seconds: float) -> None:
        """Moves the loop's time forward, and returns once the timers that are due by then have run."""

        async def skip() -> None:
            self._loop.skipped_s += seconds
            for _ in range(3):  # timers run in the turn after the one in which they are due
                await asyncio.sleep(0)

        self.run(skip())

    def call_soon(self, act: Callable[[], object]) -> None:
        """Makes the loop call `act` soon, and does not wait for that."""
        self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        """Stops the loop, waits at most `bound_s` for its thread, and closes it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._bound_s)
        self._loop.close()
