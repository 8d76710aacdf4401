"""Looks up the addresses behind a name, a host's or a file's, without blocking the event loop or the process's exit."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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

    Blank lines are skipped. Raises OSError if the file cannot be read, lists no address or something that is none, is
    larger than 64 KiB, or does not end with the end of a line, as a file that is only half written.
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


def addresses_behind(name: Name, look_up: LookUp) -> Sequence[str]:
    """Returns the addresses that the name stands for now. It blocks. Raises OSError if there is none."""
    if isinstance(name, AddressFile):
        return read_addresses(Path(name.path))
    return look_up(name.host, name.port)


class LookedUpName:
    """A name and its addresses, which `refresh` looks up. Use it on the event loop only.

    `found` has the addresses of the last successful look-up, also while later ones fail. `error` says why the last
    look-up failed, or that there was none yet; it is "" if the last one succeeded. A look-up runs on a thread of its
    own, because it may block for long. If one takes too long, the next `refresh` waits for the same one, so that there
    are never two.
    """

    def __init__(self, *, name: Name, look_up: LookUp, timeout_s: float) -> None:
        self.name = name
        self.found: tuple[str, ...] = ()
        self.error = "not looked up yet"
        self._look_up = look_up
        self._timeout_s = timeout_s
        self._under_way: asyncio.Future[Sequence[str] | Exception] | None = None

    async def refresh(self) -> None:
        """Looks up the name and updates `found` and `error`. Takes at most `timeout_s`. Raises only CancelledError."""
        answer = await self._answer()
        if isinstance(answer, Exception):
            self.error = f"not found: {answer}"
        else:
            self.found, self.error = tuple(answer), ""

    async def _answer(self) -> Sequence[str] | Exception:
        """Returns the addresses, or the error of the look-up: TimeoutError if it has not ended after `timeout_s`."""
        if self._under_way is None:
            self._under_way = self._begin()
        done, _ = await asyncio.wait({self._under_way}, timeout=self._timeout_s)
        if not done:
            return TimeoutError(f"no answer within {self._timeout_s:g} s")
        answer, self._under_way = self._under_way.result(), None
        return answer

    def _begin(self) -> asyncio.Future[Sequence[str] | Exception]:
        """Starts a look-up on a new thread. The future gets its addresses or its error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[str] | Exception] = loop.create_future()

        def tell(answer: Sequence[str] | Exception) -> None:
            if not future.done():
                future.set_result(answer)

        def look() -> None:
            answer: Sequence[str] | Exception
            try:
                answer = addresses_behind(self.name, self._look_up)
            except Exception as error:  # any error is a result: later look-ups must go on
                answer = error
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(tell, answer)

        # A daemon thread outside of any pool: if the look-up hangs, the process can exit and no pool loses a thread.
        threading.Thread(target=look, name=f"look-up-{self.name}", daemon=True).start()
        return future
