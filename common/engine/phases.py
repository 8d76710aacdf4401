"""The rules of phases: what a request or a prompt holds in each, and which may follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from common.kv.pool import KvPool, LeaseState, RowLease

PhaseT = TypeVar("PhaseT", bound=Enum)


@dataclass(frozen=True, slots=True)
class PhaseRule(Generic[PhaseT]):
    """The rule of one phase: the state of the lease of the pool row, None if no row is held, and the phases of which
    one comes next.
    """

    lease: LeaseState | None
    following: frozenset[PhaseT]

    def check_followed_by(self, phase: PhaseT, *, who: str) -> None:
        """Raises AssertionError if `phase` cannot follow."""
        assert phase in self.following, f"{who}: {phase} does not follow"

    def settle(self, lease: RowLease | None, pool: KvPool, *, who: str) -> None:
        """Sets the lease's state to that of this phase, or releases the lease if the phase holds no row."""
        if self.lease is not None:
            assert lease is not None, f"{who} holds no row"
            lease.state = self.lease
        elif lease is not None:
            pool.release(lease)
