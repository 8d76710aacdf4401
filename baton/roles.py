"""The role of a service's process, prefill or decode: reads the role and the load, and changes the role."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from baton.client import Tls
from baton.client.channel import authorized, channel_options, single_server
from baton.codec import inference_load_from_wire, prefill_load_from_wire
from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    Unauthenticated,
    Unavailable,
    error_from_rpc,
)
from baton.server_info import InferenceLoad, PrefillLoad
from baton.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc, roles_pb2, roles_pb2_grpc
from common.peer_text import peer_text
from common.role import Role

CALL_TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0
"""How long a service may take, after its grace period, to begin in the other role and to be ready."""
LOOK_INTERVAL_S = 0.1


_WIRE = {Role.PREFILL: roles_pb2.ROLE_PREFILL, Role.DECODE: roles_pb2.ROLE_DECODE}


@dataclass(frozen=True, slots=True)
class RoleState:
    """The role of a process, and its current or last change of role.

    `changing_to` is None if no change is in progress. `roles` are those that the process can have. `num_orders` counts
    the changes that were begun. `last_failure` says why the last of them failed, if it did: the process then has its
    old role. `grace_period_s` is how long open requests may take to finish when the role changes.
    """

    role: Role
    changing_to: Role | None
    instance_id: str
    is_ready: bool
    roles: tuple[Role, ...]
    num_orders: int
    last_failure: str
    grace_period_s: float


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A change that is over: the role before, the state after, and how long both took together.

    `seconds` is 0 if the process had the role already.
    """

    before: Role
    after: RoleState
    seconds: float


class RoleClient:
    """Asks the service at `address` for its role and its load, and changes its role. Blocking; use it as a context
    manager.

    Each RPC may take `timeout_s`; `change` makes several. `other_token` is shown where `token` is refused, for a
    process that takes other tokens in its other role.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        other_token: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        target, options = single_server(address), channel_options(tls, None)
        self._channel = (
            grpc.insecure_channel(target, options)
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options)
        )
        tokens = [token] if other_token is None else [token, other_token]
        channels = [authorized(self._channel, each) for each in tokens]
        self._roles: list[Any] = [roles_pb2_grpc.RolesStub(each) for each in channels]
        self._prefill: list[Any] = [prefill_pb2_grpc.PrefillStub(each) for each in channels]
        self._decode: list[Any] = [inference_pb2_grpc.InferenceStub(each) for each in channels]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def state(self) -> RoleState:
        """Returns the state now. Raises Unavailable if nothing answers, as for a moment during a change."""
        return _state_of(self._called(self._roles, "GetRole", roles_pb2.GetRoleRequest()).state)

    def load(self, role: Role) -> PrefillLoad | InferenceLoad:
        """Returns the load that the service reports in `role`. Raises an error if that is not its role now."""
        if role is Role.PREFILL:
            return prefill_load_from_wire(self._called(self._prefill, "GetLoad", prefill_pb2.GetPrefillLoadRequest()))
        return inference_load_from_wire(self._called(self._decode, "GetLoad", inference_pb2.GetInferenceLoadRequest()))

    def order(self, role: Role) -> RoleState:
        """Orders a change, which then begins, and returns the state at its beginning. Does nothing if the process has
        the role.

        Raises FailedPrecondition if the process cannot have the role, or is changing to another one.
        """
        return _state_of(self._called(self._roles, "SetRole", roles_pb2.SetRoleRequest(role=_WIRE[role])).state)

    def change(self, role: Role, *, start_timeout_s: float = START_TIMEOUT_S) -> RoleChange:
        """Orders a change, and waits until the service is ready in its new role, unless it has that role already.

        It waits for the service's grace period and `start_timeout_s`. Raises what `order` raises, FailedPrecondition
        if the process has gone back to its old role, or DeadlineExceeded if it is not ready in time.
        """
        begin_s = self._clock()
        before = self.order(role)
        if before.changing_to is None:
            return RoleChange(before.role, before, 0.0)
        timeout_s = before.grace_period_s + start_timeout_s
        seen, why = before, "does not answer"
        while self._clock() - begin_s < timeout_s:
            try:
                seen = self.state()
            except (Unavailable, Cancelled, DeadlineExceeded) as error:  # its server ends, and another begins
                why = str(error)
            else:
                if seen.changing_to is None and seen.last_failure:
                    raise FailedPrecondition(
                        f"{self.address}: is a {seen.role} service again: {seen.last_failure}", reason="ROLE_REFUSED"
                    )
                if seen.changing_to is None and seen.role is role and seen.is_ready:
                    return RoleChange(before.role, seen, self._clock() - begin_s)
                why = f"is a {seen.role} service, and not ready" if seen.changing_to is None else "is still changing"
            self._sleep(LOOK_INTERVAL_S)
        raise DeadlineExceeded(f"{self.address}: {why}, {timeout_s:g} s after the order to be a {role} service")

    def _called(self, stubs: Sequence[Any], method: str, request: object) -> Any:
        """Calls `method` with the first token that is not refused. Raises the error of the last one.

        Each call tries the first token first, because a token may be accepted for roles and refused for the load.
        """
        for stub in stubs[:-1]:
            with suppress(Unauthenticated):
                return self._called_with(stub, method, request)
        return self._called_with(stubs[-1], method, request)

    def _called_with(self, stub: Any, method: str, request: object) -> Any:
        try:
            return getattr(stub, method)(request, timeout=self._timeout_s)
        except grpc.RpcError as failure:
            error = error_from_rpc(failure)
            raise type(error)(
                f"{self.address}: {error}", reason=error.reason, metadata=error.metadata, code=error.code
            ) from None


def _state_of(state: roles_pb2.RoleState) -> RoleState:
    return RoleState(
        role=_role_of(state.role),
        changing_to=_role_of(state.changing_to) if state.changing_to else None,
        instance_id=peer_text(state.instance_id),
        is_ready=state.is_ready,
        roles=tuple(map(_role_of, state.roles)),
        num_orders=state.num_orders,
        last_failure=peer_text(state.last_failure, 1024),
        grace_period_s=state.grace_period_s,
    )


def _role_of(number: int) -> Role:
    for role, known in _WIRE.items():
        if number == known:
            return role
    raise Internal(f"the service has a role that this client does not know: {number}", reason="PROTOCOL")
