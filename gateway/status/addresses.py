"""The addresses behind a target's name, looked up again and again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to numeric HOST:PORTs. Raises OSError for a host that is not known."""


@dataclass(frozen=True, slots=True)
class Address:
    """`target` as it was configured, `host` its name, `numeric` one HOST:PORT behind it."""

    target: str
    host: str
    numeric: str


async def resolve_all(host: str, port: int) -> tuple[str, ...]:
    """Every IPv4 address of `host`; where there is none, every IPv6 address. The event loop is not held up."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {
        family: [str(address[0]) for each, _, _, _, address in found if each is family]
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    numbers = by_family[socket.AF_INET] or [f"[{number}]" for number in by_family[socket.AF_INET6]]
    return tuple(dict.fromkeys(f"{number}:{port}" for number in numbers))


class TargetAddresses:
    """Who is behind one target, "HOST:PORT" or "dns:///HOST:PORT", as of the last look-up.

    A look-up that takes longer than `timeout_s` goes on, and no other begins meanwhile: threads that hang in the
    system's resolver are no more than targets. Until it ends, what the one before it said stays.
    """

    def __init__(self, target: str, *, resolve: Resolve, timeout_s: float) -> None:
        self.target = target
        host, _, port = target.removeprefix("dns:///").rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._look_up: asyncio.Task[Sequence[str]] | None = None
        self.found: tuple[Address, ...] = ()
        self.reason = "the name is being looked up"
        """Why none is found."""

    async def refresh(self) -> None:
        """Ask again, for at most `timeout_s`. Never raises."""
        if self._look_up is None:
            self._look_up = asyncio.create_task(self._ask())
        done, _ = await asyncio.wait({self._look_up}, timeout=self._timeout_s)
        if not done:
            return
        look_up, self._look_up = self._look_up, None
        try:
            numbers = look_up.result()
        except (OSError, UnicodeError) as error:  # the latter of a label that is empty or too long
            self.found, self.reason = (), f"the name is not known: {error}"
        else:
            self.found = tuple(Address(self.target, self._host, number) for number in sorted(numbers))
            self.reason = "" if numbers else "no address is behind the name"

    async def _ask(self) -> Sequence[str]:
        return await self._resolve(self._host, self._port)

    def close(self) -> None:
        if self._look_up is not None:
            self._look_up.cancel()
            self._look_up = None
