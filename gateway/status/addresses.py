"""Resolves the host name of a target to addresses, once for each round of samples."""

from __future__ import annotations

from dataclasses import dataclass

from common.addresses import DnsName, host_and_port, is_dns_name
from common.rpc.name_lookup import LookedUpName, LookUp


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a target: the `target` as configured, its host name, and one numeric HOST:PORT of that host."""

    target: str
    host: str
    numeric: str


class TargetAddresses:
    """The addresses of one target, "HOST:PORT" or "dns:///HOST:PORT", as of the last successful DNS look-up."""

    def __init__(self, target: str, *, look_up: LookUp, timeout_s: float) -> None:
        self.target = target
        name = DnsName.parse(target) if is_dns_name(target) else DnsName(*host_and_port(target))
        self._name = LookedUpName(host=name.host, port=name.port, look_up=look_up, timeout_s=timeout_s)
        self.found: tuple[Address, ...] = ()

    @property
    def reason(self) -> str:
        """Why the last look-up failed, or "" if it did not. A failure leaves `found` as it was."""
        return self._name.error

    async def refresh(self) -> None:
        """Looks the name up again, for at most `timeout_s`. Never raises."""
        await self._name.refresh()
        self.found = tuple(Address(self.target, self._name.host, number) for number in self._name.found)
