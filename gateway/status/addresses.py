"""Resolves the name of a target to addresses, once for each round of samples."""

from __future__ import annotations

from dataclasses import dataclass

from common.addresses import DnsName, host_and_port, is_name, parse_name
from common.rpc.name_lookup import LookedUpName, LookUp


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a target: the `target` as configured, the host that its certificate is for, and the
    numeric HOST:PORT."""

    target: str
    host: str
    numeric: str


class TargetAddresses:
    """The addresses of one target, as of the last successful look-up.

    `target` is "HOST:PORT", "dns:///HOST:PORT" or "file:///PATH".
    """

    def __init__(self, target: str, *, look_up: LookUp, timeout_s: float) -> None:
        self.target = target
        name = parse_name(target) if is_name(target) else DnsName(*host_and_port(target))
        self._name = LookedUpName(name=name, look_up=look_up, timeout_s=timeout_s)
        self.found: tuple[Address, ...] = ()

    @property
    def reason(self) -> str:
        """Why the last look-up failed, or "" if it did not. A failure leaves `found` as it was."""
        return self._name.error

    async def refresh(self) -> None:
        """Looks the name up again, for at most `timeout_s`. Never raises."""
        await self._name.refresh()
        self.found = tuple(
            Address(self.target, self._name.name.certified_host or host_and_port(number)[0], number)
            for number in self._name.found
        )
