"""Threads for slow work with texts: tokenising prompts, and replaying the output of resumed requests."""

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
"""The lanes: the largest number of bytes of a text (None: no limit), and the name of the lane's thread."""
MAX_WAITING_BYTES = 64 << 20
_RETRY_AFTER_S = 1
_BYTES_PER_REPLAYED_TOKEN = 16
"""The number of bytes of text that take about as long to tokenise as one token takes to replay."""


class WaitingBytes:
    """Counts the bytes of texts that wait or are processed, and admits at most `max_bytes`, or one longer text."""

    def __init__(self, max_bytes: int, *, purpose: str) -> None:
        self._max_bytes = max_bytes
        self._purpose = purpose
        self._num_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Adds a text of `num_bytes`. Raises Overloaded if the sum would exceed the limit. If nothing else waits, a
        text of any size is admitted.
        """
        with self._lock:
            if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
                message = f"{self._num_bytes} bytes of prompts wait to be {self._purpose}"
                raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
            self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes


class TextThreads:
    """Three threads, called lanes: for short, long and the longest texts. A text waits only for texts of its own lane.

    In each lane at most `max_bytes` of text, or one longer text, wait or are processed.
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
        """Runs `work` in the lane for texts of `num_bytes`. Returns its result, or raises its error.

        Raises Overloaded if too much text waits in the lane. `name` is the name of the work's span on the timeline. If
        the caller is cancelled, work that has not begun is dropped. Work that has begun goes on, and its bytes count
        until it ends.
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

    async def replay(self, work: Callable[[], T], *, num_tokens: int) -> T:
        """Runs `work`, which goes through `num_tokens` tokens of output, and returns its result.

        Raises Overloaded if too much text waits.
        """
        return await self.run("replay", work, num_bytes=num_tokens * _BYTES_PER_REPLAYED_TOKEN)

    def shut_down(self) -> None:
        """Drops work that has not begun, and waits until the work that has begun is done."""
        for _, executor, *_ in self._lanes:
            executor.shutdown(cancel_futures=True)
