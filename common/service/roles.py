"""The role that a process has, prefill or decode, the order to change it, and the Roles service that takes orders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import structlog

from baton.v1 import roles_pb2, roles_pb2_grpc
from common.config.settings import Role
from common.errors import BatonError, Draining, InvalidRequest, RoleRefused
from common.rpc.errors import abort_with

ROLES_SERVICE: str = roles_pb2.DESCRIPTOR.services_by_name["Roles"].full_name
_WIRE = {Role.PREFILL: roles_pb2.ROLE_PREFILL, Role.DECODE: roles_pb2.ROLE_DECODE}

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

    def __init__(self, roles: Sequence[Role], clock: Callable[[], float] = time.monotonic) -> None:
        self.roles = tuple(roles)
        self.role = self.roles[0]
        self.changing_to: Role | None = None
        self.num_orders = 0
        self.last_failure = ""
        self.leaves = asyncio.Event()
        """Set when the service has to end: its role changes, or the process ends."""
        self.is_ending = False
        self._clock = clock
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
        self._ordered_s = self._clock()
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
        return self._clock() - self._ordered_s


Context = grpc.aio.ServicerContext[Any, Any]


class RolesServicer(roles_pb2_grpc.RolesServicer):
    """Tells the state of `roles`, and passes orders on. Use it from the event loop only.

    `is_ready` says whether the service is ready. `grace_period_s` is how long its open requests may take to finish when
    the role changes.
    """

    def __init__(self, roles: Roles, is_ready: Callable[[], bool], *, instance_id: str, grace_period_s: float) -> None:
        self._roles = roles
        self._instance_id = instance_id
        self._is_ready = is_ready
        self._grace_period_s = grace_period_s

    async def GetRole(self, request: roles_pb2.GetRoleRequest, context: Context) -> roles_pb2.GetRoleResponse:
        return roles_pb2.GetRoleResponse(state=self._state())

    async def SetRole(self, request: roles_pb2.SetRoleRequest, context: Context) -> roles_pb2.SetRoleResponse:
        try:
            await self._roles.ask(_role_of(request))
        except BatonError as error:
            await abort_with(context, error)
        return roles_pb2.SetRoleResponse(state=self._state())

    def _state(self) -> roles_pb2.RoleState:
        state = self._roles.state
        return roles_pb2.RoleState(
            role=_WIRE[state.role],
            changing_to=roles_pb2.ROLE_UNSPECIFIED if state.changing_to is None else _WIRE[state.changing_to],
            instance_id=self._instance_id,
            is_ready=self._is_ready(),
            roles=[_WIRE[role] for role in state.roles],
            num_orders=state.num_orders,
            last_failure=state.last_failure,
            grace_period_s=self._grace_period_s,
        )


def _role_of(request: roles_pb2.SetRoleRequest) -> Role:
    for role, number in _WIRE.items():
        if number == request.role:
            return role
    raise InvalidRequest("role", f"{request.role} is neither ROLE_PREFILL nor ROLE_DECODE")
