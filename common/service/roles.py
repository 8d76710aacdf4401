"""The role that a process has, prefill or decode, and the order to change it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from common.errors import Draining, RoleRefused
from common.role import Role

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RoleState:
    """The role that a process has, the one that it is changing to if any, and those that it can have.

    `num_orders` counts the changes that were ordered, and `last_failure` says why the last one failed, if it did.
    """

    role: Role
    changing_to: Role | None
    roles: tuple[Role, ...]
    num_orders: int
    last_failure: str


class Roles(Protocol):
    """The role of a service's process, as its servers see it."""

    @property
    def state(self) -> RoleState: ...

    async def ask(self, role: Role) -> None:
        """Orders a change to `role`, as `RoleSwitch.order` does."""


class RoleSwitch(Roles):
    """Says which role a process has, and takes the order to change it. For the event loop only.

    `order` only asks: `common.service.process.serve_roles` ends the one role and begins the other. `roles` are those
    that the process can have; it begins with the first.
    """

    def __init__(self, roles: Sequence[Role]) -> None:
        self.roles = tuple(roles)
        self.role = self.roles[0]
        self.changing_to: Role | None = None
        self.num_orders = 0
        self.last_failure = ""
        self.leaves = asyncio.Event()
        """Set when the service has to end: its role changes, or the process ends."""
        self.is_ending = False
        self._ordered_s = 0.0

    @property
    def state(self) -> RoleState:
        return RoleState(self.role, self.changing_to, self.roles, self.num_orders, self.last_failure)

    async def ask(self, role: Role) -> None:
        self.order(role)

    def order(self, role: Role) -> None:
        """Orders a change to `role`. Does nothing if the process has this role, or is changing to it.

        Raises RoleRefused if the process cannot have the role or is changing to another one, Draining if it ends.
        """
        if self.is_ending:
            raise Draining("the process ends, and changes its role no more")
        if role not in self.roles:
            raise RoleRefused(f"is not set, so this process stays a {self.role} service", setting="other_role")
        if self.changing_to not in (None, role):
            raise RoleRefused(f"the process is changing to {self.changing_to}; order again when that is over")
        if self.changing_to is not None or role is self.role:
            return
        self.changing_to, self.last_failure = role, ""
        self.num_orders += 1
        self._ordered_s = time.monotonic()
        _log.info("role_changing", role=self.role, to=role)
        self.leaves.set()

    def end(self) -> None:
        """Says that the process ends: its service has to leave, and no other role begins."""
        self.is_ending = True
        self.leaves.set()

    def begin(self, role: Role) -> None:
        """Says that the process is about to serve in `role`."""
        self.role = role
        self.leaves = asyncio.Event()
        if self.is_ending:
            self.leaves.set()

    def settle(self, failure: str = "") -> float:
        """Says that the process serves again, in the role that was ordered, or in the old one because of `failure`.

        Returns the seconds since the order.
        """
        self.changing_to, self.last_failure = None, failure
        return time.monotonic() - self._ordered_s
