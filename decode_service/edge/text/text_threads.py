"""Threads for slow work with texts: tokenising prompts, and replaying the output of resumed requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from common.errors import Overloaded
from common.rpc.fair_shares import Caller, FairBytes, NoRoom
from common.telemetry.timeline import TOKENIZE, Timeline
from common.text.turns import Turns

T = TypeVar("T")

LANES = ((4 << 10, TOKENIZE), (64 << 10, f"{TOKENIZE}-long"), (None, f"{TOKENIZE}-longest"))
"""The lanes: the largest number of bytes of a text (None: no limit), and the name of the lane's thread."""
MAX_WAITING_BYTES = 64 << 20
_PLACES = (8, 2, 2)
"""How many texts of each lane its thread may have at a time: more than one, so that it does not wait for the event
loop, and few, because others wait for them.
"""
_RETRY_AFTER_S = 1
_BYTES_PER_REPLAYED_TOKEN = 16
"""The number of bytes of text that take about as long to tokenise as one token takes to replay."""


class TextLane:
    """The texts of one lane. Clients take turns: `num_places` texts are processed at a time, the others wait. At most
    `max_bytes` wait or are processed, shared as `FairBytes` has it. Use it on one event loop.
    """

    def __init__(
        self, num_places: int, max_bytes: int, *, purpose: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._turns = Turns(num_places, clock=clock)
        self._bytes = FairBytes(max_bytes)
        self._purpose = purpose

    async def begin(self, caller: Caller, num_bytes: int) -> Callable[[float | None], None]:
        """Waits for the turn of a text of `num_bytes`. Returns a function to be called when the text is processed, with
        the time when that began, or None if it began with the turn.

        Raises Overloaded if there is no room for so many bytes.
        """
        try:
            num_taken = self._bytes.take(caller, num_bytes)
        except NoRoom:
            message = f"prompts wait to be {self._purpose}: there is no room for {num_bytes} bytes more"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from None
        try:
            turn_began_s = await self._turns.take(caller)
        except BaseException:
            self._bytes.give_back(caller, num_taken)
            raise

        def over(began_s: float | None) -> None:
            self._turns.give_back(caller, turn_began_s if began_s is None else began_s)
            self._bytes.give_back(caller, num_taken)

        return over


class TextThreads:
    """Three threads, called lanes: for short, long and the longest texts. A text waits only for texts of its own lane,
    and there clients take turns. In each lane at most `max_bytes` of text wait or are processed.
    """

    def __init__(
        self, *, timeline: Timeline | None, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        timeline = timeline or Timeline()
        self._clock = clock
        self._is_shut_down = False
        self._lanes = [
            (
                largest,
                ThreadPoolExecutor(1, thread_name_prefix=name),
                timeline.track(name),
                TextLane(num_places, max_bytes, purpose="tokenised", clock=clock),
            )
            for (largest, name), num_places in zip(LANES, _PLACES, strict=True)
        ]

    async def run(self, name: str, work: Callable[[], T], *, num_bytes: int, caller: Caller) -> T:
        """Runs `work` in the lane for texts of `num_bytes`. Returns its result, or raises its error.

        Raises Overloaded if too much text waits in the lane. `name` is the name of the work's span on the timeline. If
        the caller is cancelled, work that has not begun is dropped. Work that has begun goes on, and its bytes count
        until it ends. Work that has not begun at `shut_down` ends with CancelledError.
        """
        executor, track, lane = next(
            (executor, track, lane)
            for largest, executor, track, lane in self._lanes
            if largest is None or num_bytes <= largest
        )

        began_s: float | None = None

        def recorded() -> T:
            nonlocal began_s
            began_s = self._clock()
            with track.span(name):
                return work()

        over = await lane.begin(caller, num_bytes)
        try:
            future: Future[T] = executor.submit(recorded)
        except RuntimeError:  # the service stops, or the system has no more threads
            over(None)
            if self._is_shut_down:
                raise asyncio.CancelledError from None
            raise
        result = asyncio.wrap_future(future)
        result.add_done_callback(lambda _: over(self._clock() if began_s is None else began_s))
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            future.cancel()  # unless it has begun
            raise

    async def replay(self, work: Callable[[], T], *, num_tokens: int, caller: Caller) -> T:
        """Runs `work`, which goes through `num_tokens` tokens of output, and returns its result.

        Raises Overloaded if too much text waits.
        """
        return await self.run("replay", work, num_bytes=num_tokens * _BYTES_PER_REPLAYED_TOKEN, caller=caller)

    def shut_down(self) -> None:
        """Drops work that has not begun, and waits until the work that has begun is done."""
        self._is_shut_down = True
        for _, executor, *_ in self._lanes:
            executor.shutdown(cancel_futures=True)
