"""Threads for slow work with texts: prompts to token ids, and output that a request brings to text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from common.errors import Overloaded
from common.telemetry.timeline import TOKENIZE, Timeline

T = TypeVar("T")

LANES = ((4 << 10, TOKENIZE), (64 << 10, f"{TOKENIZE}-long"), (None, f"{TOKENIZE}-longest"))
"""The bytes that each takes at most, and its name."""
MAX_WAITING_BYTES = 64 << 20
_RETRY_AFTER_S = 1


class WaitingBytes:
    """Texts that wait or are in work in one lane: at most `max_bytes`, or a single longer text."""

    def __init__(self, max_bytes: int, *, purpose: str) -> None:
        self._max_bytes = max_bytes
        self._purpose = purpose
        self._num_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        with self._lock:
            if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
                message = f"{self._num_bytes} bytes of prompts wait to be {self._purpose}"
                raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
            self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes


class TextThreads:
    """One thread for short texts, one for long ones, one for the longest: no text waits for another lane's.

    At most `max_bytes` of text wait or are in work in each lane, or a single longer text.
    """

    def __init__(self, *, timeline: Timeline | None, max_bytes: int) -> None:
        timeline = timeline or Timeline()
        self._lanes = [
            (
                largest,
                ThreadPoolExecutor(1, thread_name_prefix=name),
                timeline.track(name),
                WaitingBytes(max_bytes, purpose="tokenised"),
            )
            for largest, name in LANES
        ]

    async def run(self, name: str, work: Callable[[], T], *, num_bytes: int) -> T:
        """Returns or raises what `work` does. Raises Overloaded.

        A cancelled caller takes its work back unless that has begun; then it goes on, and its bytes still count.
        """
        executor, track, waiting = next(
            (executor, track, waiting)
            for largest, executor, track, waiting in self._lanes
            if largest is None or num_bytes <= largest
        )

        def recorded() -> T:
            with track.span(name):
                return work()

        waiting.take(num_bytes)
        future: Future[T] = executor.submit(recorded)
        future.add_done_callback(lambda _: waiting.give_back(num_bytes))
        return await asyncio.wrap_future(future)

    def shut_down(self) -> None:
        """Waits for work that has begun."""
        for _, executor, *_ in self._lanes:
            executor.shutdown(cancel_futures=True)
