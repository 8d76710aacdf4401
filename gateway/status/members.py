"""Keeps one member per address of some targets, while DNS names gain and lose addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from common.rpc.name_lookup import LookUp
from gateway.status.addresses import Address, TargetAddresses

MAX_MEMBERS = 64
"""The most addresses that are sampled. It limits the connections of a round and the samples that are kept."""


class Member(Protocol):
    async def sample(self, now_s: float) -> None:
        """Asks the service for its state once, within a time limit. `now_s` is the time of this round.

        An error of the service is recorded, not raised.
        """

    async def close(self) -> None: ...


MemberT = TypeVar("MemberT", bound=Member)


class Members(Generic[MemberT]):
    """Keeps one member, such as a sampled service, for each address of `targets`; at most `max_members` in all.

    `join` makes the member of an address when the address is found. The member is closed when its address is gone.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        join: Callable[[Address], MemberT],
        look_up: LookUp,
        timeout_s: float,
        max_members: int = MAX_MEMBERS,
    ) -> None:
        self._targets = [TargetAddresses(target, look_up=look_up, timeout_s=timeout_s) for target in targets]
        self._join = join
        self._max_members = max_members
        self._by_address: dict[Address, MemberT] = {}
        self._awaited = dict.fromkeys(targets)

    @property
    def all(self) -> tuple[MemberT, ...]:
        """The members, in the order of targets, then of addresses. A member of two targets appears once."""
        return tuple(
            self._by_address[address]
            for target in self._targets
            for address in target.found
            if address in self._by_address
        )

    @property
    def unknown(self) -> tuple[tuple[str, str], ...]:
        """The targets that have no address, each with the reason."""
        return tuple((target.target, target.reason) for target in self._targets if not target.found)

    @property
    def awaited(self) -> tuple[str, ...]:
        """The targets that have not been sampled yet."""
        return tuple(self._awaited)

    @property
    def outdated(self) -> tuple[tuple[str, str], ...]:
        """The targets whose last look-up failed, each with the reason. Their known members are still sampled."""
        return tuple((target.target, target.reason) for target in self._targets if target.found and target.reason)

    @property
    def num_left_out(self) -> int:
        return len({each.numeric for target in self._targets for each in target.found}) - len(self._by_address)

    async def sample(self, now_s: float) -> None:
        """Looks up every target and then samples its members. All targets are handled at the same time."""
        await asyncio.gather(*(self._sample_target(target, now_s) for target in self._targets))

    async def _sample_target(self, target: TargetAddresses, now_s: float) -> None:
        before = target.found
        await target.refresh()
        gone = [self._by_address.pop(each) for each in before if each not in target.found and each in self._by_address]
        for address in target.found:
            taken = {each.numeric for each in self._by_address}
            if address.numeric not in taken and len(taken) < self._max_members:
                self._by_address[address] = self._join(address)
        here = [self._by_address[address] for address in target.found if address in self._by_address]
        await asyncio.gather(*(member.close() for member in gone), *(member.sample(now_s) for member in here))
        self._awaited.pop(target.target, None)

    async def close(self) -> None:
        members, self._by_address = list(self._by_address.values()), {}
        await asyncio.gather(*(member.close() for member in members))
