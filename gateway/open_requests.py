"""The requests that are being answered: limits on their number, and their end when the process stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from common.rpc.fair_shares import FairBytes, FairPlaces, Full, NoRoom
from gateway.errors import ApiError, overloaded, unavailable

Fail = Callable[[ApiError], None]
Hold = Callable[[int], None]
FREE_BODY_BYTES = 64 << 10
MAX_KEPT_BYTES = 512 << 20
"""The most bytes that all answers keep until their end."""


class OpenRequest:
    """An open request, which `fail` can end from outside.

    `fails_by` sets the function that `fail` calls with the error. If `fail` was called before, `fails_by` calls the
    function at once. Only the first error counts.
    """

    def __init__(self) -> None:
        self._error: ApiError | None = None
        self._fail: Fail | None = None

    def fails_by(self, fail: Fail) -> None:
        self._fail = fail
        if self._error is not None:
            fail(self._error)

    @asynccontextmanager
    async def ends_when_failed(self) -> AsyncIterator[None]:
        """Lets `fail` interrupt the block: the wait inside it is cancelled, and the block raises the ApiError."""
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
    """All open requests of the gateway. Use it on the event loop only. After `drain` no request is admitted.

    A request counts as open once its head has come. All bodies that are still arriving may hold `max_reading_bytes`
    together. A request whose body has come takes one of `max_open` places. Places and bytes are shared fairly among
    clients.
    """

    def __init__(self, *, max_open: int, max_reading_bytes: int) -> None:
        self._places = FairPlaces(max_open)
        self._reading_bytes = FairBytes(max_reading_bytes)
        self._kept_bytes = FairBytes(MAX_KEPT_BYTES)
        self._requests: dict[OpenRequest, None] = {}
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        """Returns the number of requests that hold a place."""
        return len(self._places)

    @property
    def num_reading(self) -> int:
        """The number of requests whose body is still arriving."""
        return len(self._requests) - len(self._places)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @contextmanager
    def enter(self) -> Iterator[OpenRequest]:
        """Registers a request while the block runs. Raises ApiError 503 while draining."""
        self._refuse_if_draining()
        request = OpenRequest()
        self._requests[request] = None
        self._is_idle.clear()
        try:
            yield request
        finally:
            del self._requests[request]
            if not self._requests:
                self._is_idle.set()

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Holds a place for a request while the block runs.

        Raises ApiError: 503 while draining, 429 when there is no place for this client.
        """
        self._refuse_if_draining()
        try:
            place = self._places.take((client, ""))
        except Full as full:
            message = f"{len(self._places)} requests are open"
            raise overloaded(message, retry_after_s=full.retry_after_s) from None
        try:
            yield
        finally:
            self._places.give_back(place)

    @contextmanager
    def reading(self, client: str) -> Iterator[Hold]:
        """Limits the memory for bodies that are arriving. Yields a function to call with the number of bytes received
        so far.

        The function raises ApiError 429 when bodies take too much memory. One client's bodies may take half of that
        memory. The first FREE_BODY_BYTES of each do not count, because a connection holds them anyway.
        """
        with _holding(self._reading_bytes, client, "too many large bodies are on their way") as hold_more:
            num_counted = FREE_BODY_BYTES

            def hold(num_bytes: int) -> None:
                nonlocal num_counted
                if num_bytes > num_counted:
                    hold_more(num_bytes - num_counted)
                    num_counted = num_bytes

            yield hold

    @contextmanager
    def keeping(self, client: str) -> Iterator[Hold]:
        """Limits the memory for what answers keep until their end. Yields a function to call with the number of further
        bytes that an answer keeps.

        The function raises ApiError 429 when answers keep too much. The answers of one client may keep half of it.
        """
        with _holding(self._kept_bytes, client, "other answers leave no room for what this one keeps") as hold:
            yield hold

    def drain(self) -> None:
        self._is_draining = True

    async def wait_idle(self) -> None:
        await self._is_idle.wait()

    def fail_all(self, error: ApiError) -> None:
        for request in tuple(self._requests):
            request.fail(error)

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise unavailable("the gateway is stopping", code="stopping")


@contextmanager
def _holding(lent: FairBytes, client: str, why_not: str) -> Iterator[Hold]:
    """Yields a function that takes further bytes for `client` until the block ends. It raises ApiError 429, which says
    `why_not`, if there is no room.
    """
    num_held = 0

    def hold(num_bytes: int) -> None:
        nonlocal num_held
        try:
            num_held += lent.take((client, ""), num_bytes)
        except NoRoom:
            raise overloaded(why_not) from None

    try:
        yield hold
    finally:
        lent.give_back((client, ""), num_held)
