"""What is behind a name, looked up again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.addresses import DnsName, address_of

LookUp = Callable[[str, int], Sequence[str]]
"""(host, port) to the addresses behind it, as "HOST:PORT" with numeric hosts. Blocks. Raises OSError without any."""

_log = logging.getLogger(__name__)


def look_up(host: str, port: int) -> tuple[str, ...]:
    """By the system's resolver. IPv4 addresses where there are any: a replica that has both kinds is one replica."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # of a label that is empty or too long
        raise OSError(f"is no name: {error}") from error
    for family in (socket.AF_INET, socket.AF_INET6):
        numbers = sorted({str(place[0]) for kind, *_, place in found if kind is family})
        if numbers:
            return tuple(address_of(number, port) for number in numbers)
    raise OSError("has no address")


class NameWatch:
    """`found` is what the last look-up found, kept while further ones fail; `error` says why nothing was found yet.

    Event loop only. A look-up runs on a thread of its own, for it blocks as long as it likes; one that takes too long
    is waited for again, so that there is never a second. `on_look_up` is called after each.
    """

    def __init__(
        self,
        *,
        name: DnsName,
        look_up: LookUp,
        interval_s: float,
        timeout_s: float,
        on_look_up: Callable[[], None],
    ) -> None:
        self.name = name
        self.found: tuple[str, ...] = ()
        self.error = "not looked up yet"
        self._look_up = look_up
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_look_up = on_look_up
        self._under_way: asyncio.Future[Sequence[str] | Exception] | None = None
        self._is_failing = False

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            answer = await self._answer()
            if isinstance(answer, Exception):
                self._failed(answer)
            else:
                self._succeeded(tuple(answer))
            await asyncio.sleep(self._interval_s)

    async def _answer(self) -> Sequence[str] | Exception:
        if self._under_way is None:
            self._under_way = self._begin()
        done, _ = await asyncio.wait({self._under_way}, timeout=self._timeout_s)
        if not done:
            return TimeoutError(f"no answer within {self._timeout_s} s")
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
                answer = self._look_up(self.name.host, self.name.port)
            except Exception as error:  # the looking must go on
                answer = error
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(tell, answer)

        # A daemon, of no pool: a look-up that hangs must not keep the process from its end.
        threading.Thread(target=look, name=f"look-up-{self.name.host}", daemon=True).start()
        return future

    def _failed(self, error: Exception) -> None:
        self.error = f"not found: {error}"
        if not self._is_failing:
            _log.warning("looking up %s failed, what was found stays: %s", self.name, error)
        self._is_failing = True
        self._on_look_up()

    def _succeeded(self, found: tuple[str, ...]) -> None:
        if self._is_failing:
            _log.info("looking up %s succeeds again", self.name)
        self._is_failing = False
        self.found = found
        self._on_look_up()
