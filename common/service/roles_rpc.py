"""The Roles service: callers ask which role a process has, or order it to change.

It is not in roles.py, because a process imports that file before it reads its settings, and gRPC only afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from baton.v1 import roles_pb2, roles_pb2_grpc
from common.errors import BatonError, InvalidRequest
from common.role import Role
from common.rpc.errors import abort_with
from common.service.roles import Roles

ROLES_SERVICE: str = roles_pb2.DESCRIPTOR.services_by_name["Roles"].full_name
_WIRE = {Role.PREFILL: roles_pb2.ROLE_PREFILL, Role.DECODE: roles_pb2.ROLE_DECODE}

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
