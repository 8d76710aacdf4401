"""The requests that are being answered: how many there may be, and how they end when the process does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from gateway.errors import ApiError, overloaded, unavailable

Fail = Callable[[ApiError], None]


class OpenRequest:
    """One of them. `fails_by` is how it can be ended from outside, from now on. The first error holds."""

    def __init__(self) -> None:
        self._error: ApiError | None = None
        self._fail: Fail | None = None

    def fails_by(self, fail: Fail) -> None:
        self._fail = fail
        if self._error is not None:
            fail(self._error)

    @asynccontextmanager
    async def ends_when_failed(self) -> AsyncIterator[None]:
        """What waits in the block is cancelled by `fail`, and the block raises its ApiError."""
        try:
            async with asyncio.timeout(None) as time:
                self.fails_by(lambda _: time.reschedule(0))
                try:
                    yield
                finally:
                    self._fail = None
        except TimeoutError:
            if self._error is None:
                raise
            raise self._error from None

    def fail(self, error: ApiError) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._fail is not None:
            self._fail(error)


class OpenRequests:
    """Used by the event loop only. Between `drain` and the end nothing is admitted."""

    def __init__(self, *, max_open: int) -> None:
        self._max_open = max_open
        self._open: dict[OpenRequest, None] = {}
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @contextmanager
    def admit(self) -> Iterator[OpenRequest]:
        """Raises ApiError: 503 while draining, 429 when full."""
        if self._is_draining:
            raise unavailable("the gateway is stopping", code="stopping")
        if len(self._open) >= self._max_open:
            raise overloaded(f"{self._max_open} requests are open")
        request = OpenRequest()
        self._open[request] = None
        self._is_idle.clear()
        try:
            yield request
        finally:
            del self._open[request]
            if not self._open:
                self._is_idle.set()

    def drain(self) -> None:
        self._is_draining = True

    async def wait_idle(self) -> None:
        await self._is_idle.wait()

    def fail_all(self, error: ApiError) -> None:
        for request in tuple(self._open):
            request.fail(error)
