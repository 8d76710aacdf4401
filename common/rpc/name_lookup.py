"""What is behind a name, as the system's resolver says it, without holding up an event loop or its end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.addresses import address_of

LookUp = Callable[[str, int], Sequence[str]]
"""(host, port) to the addresses behind it, as "HOST:PORT" with numeric hosts. Blocks. Raises OSError without any."""


def look_up(host: str, port: int) -> tuple[str, ...]:
    """By the system's resolver. IPv4 addresses where there are any: a server that has both kinds is one server."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # of a label that is empty or too long
        raise OSError(f"is no name: {error}") from error
    for family in (socket.AF_INET, socket.AF_INET6):
        numbers = sorted({str(place[0]) for kind, *_, place in found if kind is family})
        if numbers:
            return tuple(address_of(number, port) for number in numbers)
    raise OSError("has no address")


class LookedUpName:
    """`found` is what the last look-up that succeeded found, kept while further ones fail.

    `error` says why the last one failed, "" when it did not. Event loop only. A look-up runs on a thread of its own,
    for it blocks as long as it likes; one that takes too long is waited for again, so that there is never a second.
    """

    def __init__(self, *, host: str, port: int, look_up: LookUp, timeout_s: float) -> None:
        self.host = host
        self.port = port
        self.found: tuple[str, ...] = ()
        self.error = "not looked up yet"
        self._look_up = look_up
        self._timeout_s = timeout_s
        self._under_way: asyncio.Future[Sequence[str] | Exception] | None = None

    async def refresh(self) -> None:
        """Ask again, for at most `timeout_s`. Raises nothing but a cancellation."""
        answer = await self._answer()
        if isinstance(answer, Exception):
            self.error = f"not found: {answer}"
        else:
            self.found, self.error = tuple(answer), ""

    async def _answer(self) -> Sequence[str] | Exception:
        if self._under_way is None:
            self._under_way = self._begin()
        done, _ = await asyncio.wait({self._under_way}, timeout=self._timeout_s)
        if not done:
            return TimeoutError(f"no answer within {self._timeout_s:g} s")
        answer, self._under_way = self._under_way.result(), None
        return answer

    def _begin(self) -> asyncio.Future[Sequence[str] | Exception]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[str] | Exception] = loop.create_future()

        def tell(answer: Sequence[str] | Exception) -> None:
            if not future.done():
                future.set_result(answer)

        def look() -> None:
            answer: Sequence[str] | Exception
            try:
                answer = self._look_up(self.host, self.port)
            except Exception as error:  # the looking must go on
                answer = error
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(tell, answer)

        # A daemon, of no pool: a look-up that hangs must not keep the process from its end, nor others from a thread.
        threading.Thread(target=look, name=f"look-up-{self.host}", daemon=True).start()
        return future
