"""An event loop on a thread of its own, driven from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class LoopThread:
    """Runs from when it is built until it is closed, and keeps no process alive.

    `on_fault` takes the context of what goes wrong while nobody waits for it; without it, asyncio logs that.
    """

    def __init__(self, *, bound_s: float = 10.0, on_fault: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._bound_s = bound_s
        self._loop = asyncio.new_event_loop()
        if on_fault is not None:
            self._loop.set_exception_handler(lambda _, context: on_fault(context))
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Its result. Raises TimeoutError after `bound_s`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self._bound_s)

    def call_soon(self, act: Callable[[], object]) -> None:
        """Without waiting for it."""
        self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        """Waits for the loop at most `bound_s`."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._bound_s)
        self._loop.close()
