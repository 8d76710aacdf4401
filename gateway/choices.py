"""Runs the choices of one HTTP request: each is one Generate call, and all are read at the same time.

Generate call 0 ─▶ reader ─┐
Generate call 1 ─▶ reader ─┼─▶ queue of one ─▶ (index, event), in the order of arrival
Generate call 2 ─▶ reader ─┘

A reader waits while the queue is full. If the client takes nothing, gRPC's flow control therefore stops the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

import structlog

from baton.client import AsyncEventStream
from baton.errors import BatonError
from baton.events import Event, Finished, Started
from gateway.errors import ApiError, internal

_log = structlog.get_logger(__name__)

IndexedEvent = tuple[int, Event]


class Choices(AsyncIterator[IndexedEvent]):
    """The events of all choices of one request, as (index of the choice, event).

    Use it with `async with`; leaving the block cancels open calls. The first choice that fails ends all of them.
    """

    def __init__(self, num_choices: int, open_stream: Callable[[int], AsyncEventStream]) -> None:
        """Prepares the choices. `open_stream(index)` starts the generation of one; its errors are raised on entering
        the block.
        """
        self._open_stream = open_stream
        self._streams: list[AsyncEventStream] = []
        self._place: asyncio.Queue[IndexedEvent | BatonError | ApiError] = asyncio.Queue(maxsize=1)
        self._failure: BatonError | ApiError | None = None
        self._all_started = asyncio.Event()
        self._num_open = self._num_choices = num_choices
        self._readers: list[asyncio.Task[None]] = []

    async def started(self) -> tuple[Started, ...]:
        """Returns each choice's Started event once all are admitted. It reads no further event.

        Raises the BatonError of a choice that was not admitted.
        """
        started: dict[int, Started] = {}
        while len(started) < self._num_choices:
            index, event = await self._next()
            assert isinstance(event, Started)
            started[index] = event
        self._all_started.set()
        return tuple(started[index] for index in range(self._num_choices))

    async def __anext__(self) -> IndexedEvent:
        """Returns the next event of any choice, with the choice's index. Call it after `started`. The iteration ends
        when every choice has finished.

        Raises the BatonError of the first choice that fails, or the error given to `fail`.
        """
        if self._num_open == 0:
            raise StopAsyncIteration
        index, event = await self._next()
        if isinstance(event, Finished):
            self._num_open -= 1
        return index, event

    def fail(self, error: ApiError) -> None:
        """Ends all choices. The next call that reads an event raises `error`."""
        self._end_with(error)

    async def _next(self) -> IndexedEvent:
        if self._failure is not None:
            raise self._failure
        item = await self._place.get()
        if isinstance(item, BatonError | ApiError):
            raise item
        return item

    async def _read(self, index: int, stream: AsyncEventStream) -> None:
        try:
            await self._place.put((index, await anext(stream)))
            await self._all_started.wait()
            async for event in stream:
                await self._place.put((index, event))
        except BatonError as error:
            self._end_with(error)
        except Exception:
            _log.exception("choice_crashed", index=index)
            self._end_with(internal())

    def _end_with(self, error: BatonError | ApiError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        while not self._place.empty():
            self._place.get_nowait()
        self._place.put_nowait(error)  # wakes a caller that is waiting for an event

    async def __aenter__(self) -> Self:
        try:
            for index in range(self._num_choices):
                self._streams.append(self._open_stream(index))
                await asyncio.sleep(0)  # lets other requests run between the calls, because each call copies its prompt
        except BaseException:
            await self._close()
            raise
        self._readers = [asyncio.create_task(self._read(index, each)) for index, each in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for stream in self._streams:
            await stream.aclose()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
