"""Threads for what takes time with texts: prompts to token ids, and output that a request brings along to text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from common.errors import Overloaded
from common.telemetry.timeline import TOKENIZE, Timeline

T = TypeVar("T")

LANES = ((4 << 10, TOKENIZE), (64 << 10, f"{TOKENIZE}-long"), (None, f"{TOKENIZE}-longest"))
"""The bytes that each takes at most, and its name."""
MAX_WAITING_BYTES = 64 << 20


class TextThreads:
    """One thread for short texts, one for long ones, one for the longest: none waits for a text of another lane.

    At most `max_bytes` of text wait or are worked on, or one text that is longer by itself.
    """

    def __init__(self, *, timeline: Timeline | None, max_bytes: int) -> None:
        timeline = timeline or Timeline()
        self._lanes = [
            (largest, ThreadPoolExecutor(1, thread_name_prefix=name), timeline.track(name)) for largest, name in LANES
        ]
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()

    async def run(self, name: str, work: Callable[[], T], *, num_bytes: int) -> T:
        """What `work` returns or raises. Raises Overloaded.

        A caller that is cancelled takes its work back, unless that has begun: it goes on, and its bytes still count.
        """
        executor, track = next((e, t) for largest, e, t in self._lanes if largest is None or num_bytes <= largest)

        def recorded() -> T:
            with track.span(name):
                return work()

        self._take(num_bytes)
        future: Future[T] = executor.submit(recorded)
        future.add_done_callback(lambda _: self._give_back(num_bytes))
        return await asyncio.wrap_future(future)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """While text is worked on elsewhere. Raises Overloaded."""
        self._take(num_bytes)
        try:
            yield
        finally:
            self._give_back(num_bytes)

    def shut_down(self) -> None:
        """What has begun is waited for."""
        for _, executor, _ in self._lanes:
            executor.shutdown(cancel_futures=True)

    def _take(self, num_bytes: int) -> None:
        with self._lock:
            if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
                raise Overloaded(f"{self._num_bytes} bytes of prompts wait to be tokenised")
            self._num_bytes += num_bytes

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
