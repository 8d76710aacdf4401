"""Looks up the addresses behind a name, a host's or a file's, without blocking the event loop or the process's exit."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from common.addresses import AddressFile, Name, address_of, host_and_port

MAX_FILE_BYTES = 64 << 10

LookUp = Callable[[str, int], Sequence[str]]
"""A function that returns the addresses of (host, port), as "HOST:PORT" with numeric hosts.

It blocks. It raises OSError if there is no address.
"""


def look_up(host: str, port: int) -> tuple[str, ...]:
    """Returns the addresses of a host from the system's resolver, each with the port: "10.0.0.1:50052". It blocks.

    Returns only IPv4 addresses if there are any, because a server with addresses of both kinds is one server. Raises
    OSError if there is no address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of the name is empty or too long
        raise OSError(f"is no name: {error}") from error
    for family in (socket.AF_INET, socket.AF_INET6):
        numbers = sorted({str(place[0]) for kind, *_, place in found if kind is family})
        if numbers:
            return tuple(address_of(number, port) for number in numbers)
    raise OSError("has no address")


def read_addresses(path: Path) -> tuple[str, ...]:
    """Returns the addresses in a file that lists one HOST:PORT a line, with numeric hosts. It blocks.

    Blank lines are skipped. Raises OSError if the file cannot be read, lists no address or something that is no
    address, is larger than 64 KiB, or does not end with a line end, as a half-written file.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(f"has more than {MAX_FILE_BYTES} bytes")
    if content and not content.endswith(b"\n"):
        raise OSError("its last line has no end")
    addresses = []
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        if address := line.strip():
            try:
                host, port = host_and_port(address)
                addresses.append(address_of(str(ip_address(host)), port))
            except ValueError:
                raise OSError(f"line {number}: {address[:80]!r} is not HOST:PORT with a numeric host") from None
    if not addresses:
        raise OSError("lists no address")
    return tuple(dict.fromkeys(addresses))


class LookUps:
    """The look-ups of one name: one at a time, each on a thread of its own, because it may block for long.

    `found` has the addresses of the last successful look-up, also while later ones fail. `error` says why the last
    look-up failed, and is "" if it did not. Each look-up's thread passes `hand_over` a function that updates this
    object, to be called where that is safe.
    """

    def __init__(
        self,
        *,
        name: Name,
        look_up: LookUp,
        hand_over: Callable[[Callable[[], None]], None],
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.found: tuple[str, ...] = ()
        self.error = ""
        self.looking_since_s: float | None = None
        """When the look-up that is under way began, or None without one."""
        self._look_up = look_up
        self._hand_over = hand_over
        self._interval_s = interval_s
        self._clock = clock
        self._look_next_s = clock()

    def look_if_due(self) -> None:
        """Begins a look-up, unless one is under way or the last one began less than `interval_s` ago."""
        now_s = self._clock()
        if self.looking_since_s is not None or now_s < self._look_next_s:
            return
        self.looking_since_s, self._look_next_s = now_s, now_s + self._interval_s
        # A daemon thread outside of any pool: if the look-up hangs, the process can exit and no pool loses a thread.
        try:
            threading.Thread(target=self._look, name=f"look-up-{self.name}", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads: a later call tries again
            self._take(error)

    def _look(self) -> None:
        answer: Sequence[str] | Exception
        try:
            if isinstance(self.name, AddressFile):
                answer = read_addresses(Path(self.name.path))
            else:
                answer = self._look_up(self.name.host, self.name.port)
        except Exception as error:  # any error is a result: later look-ups must go on
            answer = error
        self._hand_over(partial(self._take, answer))

    def _take(self, answer: Sequence[str] | Exception) -> None:
        self.looking_since_s = None
        if isinstance(answer, Exception):
            self.error = f"not found: {answer}"
        else:
            self.found, self.error = tuple(answer), ""


class LookedUpName(LookUps):
    """A name and its addresses, which `refresh` looks up. Use it on the event loop only."""

    def __init__(self, *, name: Name, look_up: LookUp, timeout_s: float) -> None:
        self._has_answered = asyncio.Event()
        super().__init__(name=name, look_up=look_up, hand_over=self._on_loop)
        self.error = "not looked up yet"
        self._timeout_s = timeout_s

    async def refresh(self) -> None:
        """Looks up the name and updates `found` and `error`. Takes at most `timeout_s`. Raises only CancelledError.

        If the last look-up has not ended, waits for that one, so that there are never two.
        """
        self._loop = asyncio.get_running_loop()
        if not self._has_answered.is_set():
            self.look_if_due()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._has_answered.wait()
            self._has_answered.clear()
        except TimeoutError:
            self.error = f"not found: no answer within {self._timeout_s:g} s"

    def _on_loop(self, take: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(take)

    def _take(self, answer: Sequence[str] | Exception) -> None:
        super()._take(answer)
        self._has_answered.set()
