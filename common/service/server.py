"""The gRPC server of both services: bounds on clients, reflection, and health checks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_reflection.v1alpha import reflection

from baton.v1 import roles_pb2_grpc, timeline_pb2_grpc
from common.addresses import is_loopback, why_not_listen
from common.config.settings import ServiceSettings
from common.errors import ConfigError, NotServed, Overloaded, RequestCancelled
from common.host.descriptors import MAX_CONNECTIONS
from common.peer_text import peer_text
from common.rpc.bearer_tokens import TokenCheck, read_tokens
from common.rpc.errors import abort_with
from common.rpc.grpc_options import HANDSHAKE_TIMEOUT_S, IDLE_TIMEOUT_S, MAX_MESSAGE_BYTES, server_options
from common.rpc.server_bounds import (
    BY_ADDRESS,
    BoundedAnswers,
    BoundedRequests,
    Context,
    StreamLimit,
    begin_answer,
    clients_told_apart,
)
from common.rpc.tls import server_credentials
from common.service.roles import Roles
from common.service.roles_rpc import ROLES_SERVICE, RolesServicer
from common.telemetry.timeline import Timeline
from common.telemetry.timeline_rpc import TIMELINE_SERVICE, OtherTimeline, TimelineServicer

READINESS_INTERVAL_S = 0.1
_ALIVE = ""
_Response = health_pb2.HealthCheckResponse
_WRITE_TIMEOUT_S = 10.0
_ANSWERING = {"baton.v1.Inference": "decode service", "baton.v1.Prefill": "prefill service"}

NewRoles = Callable[[Callable[[], bool]], RolesServicer]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The bounds on what clients may use.

    All clients together may open `max_streams` streams of each method, and a client `max_watches_per_client` watches of
    health. A call's only request must arrive within `request_timeout_s`, and a handshake must end within
    `handshake_timeout_s`. A connection without a call is closed after `idle_timeout_s`. After `connection_age_s` (None:
    never) a client is asked to connect again.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_streams: int = 1024
    max_watches_per_client: int = 1024
    max_connections: int = MAX_CONNECTIONS
    request_timeout_s: float = 10.0
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    connection_age_s: float | None = None


class FrontServer(ABC):
    """An object that answers a service's clients: a gRPC server in this process, or those of several processes."""

    @abstractmethod
    async def start(self, address: str) -> int:
        """Listens on `address` ("host:port"; port 0 takes a free one) and returns the port. Health checks report the
        service as not ready until `set_ready`.

        Raises ConfigError if it cannot listen on the address.
        """

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether health checks report the service as ready."""

    @abstractmethod
    async def set_ready(self, is_ready: bool) -> None: ...

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Refuses further calls; open ones have `grace_s` to end."""

    async def follow(
        self,
        is_ready: Callable[[], bool],
        *,
        on_ready: Callable[[], None] = lambda: None,
        interval_s: float = READINESS_INTERVAL_S,
    ) -> None:
        """Polls `is_ready` and sets the server's readiness accordingly, until cancelled. Calls `on_ready` once, when
        first ready.
        """
        while not is_ready():
            await self.set_ready(False)
            await asyncio.sleep(interval_s)
        await self.set_ready(True)
        on_ready()
        while True:
            await asyncio.sleep(interval_s)
            await self.set_ready(is_ready())


class ServiceServer(FrontServer):
    """A gRPC server with health checks and reflection, and with the services Timeline and Roles if they are given.

    Add other servicers to `grpc_server` before `start`. Health has two names: "" says that the process is alive,
    `service_name` that requests are served (`set_ready`). If there are `tokens`, every call except health checks must
    carry one of them. If there are `role_tokens`, an order to change the role must carry one of those instead.
    `new_roles` makes the Roles service from a function that says whether requests are served.
    """

    def __init__(
        self,
        *,
        service_name: str,
        credentials: grpc.ServerCredentials | None = None,
        checks_certificates: bool = False,
        tokens: Sequence[str] = (),
        role_tokens: Sequence[str] = (),
        limits: ServerLimits | None = None,
        timeline: TimelineServicer | None = None,
        new_roles: NewRoles | None = None,
        shares_port: bool = False,
    ) -> None:
        """Builds the server. `checks_certificates` says whether `credentials` admit only clients with a certificate. If
        it `shares_port`, other processes listen on the same port, and the kernel chooses one for each connection.
        """
        limits = limits or ServerLimits()
        self._service_name = service_name
        self._credentials = credentials
        self._checks_certificates = checks_certificates
        self._has_tokens = bool(tokens)
        self._has_role_tokens = bool(role_tokens)
        self.client_of = clients_told_apart(tokens)
        self._health = HealthServicer(max_watches_per_client=limits.max_watches_per_client)
        self._is_ready: bool | None = None
        self.grpc_server = grpc.aio.server(
            interceptors=[
                *([TokenCheck(tokens, role_tokens)] if tokens or role_tokens else []),
                BoundedAnswers(timeout_s=_WRITE_TIMEOUT_S),
                StreamLimit(max_streams=limits.max_streams, client_of=self.client_of),
                BoundedRequests(timeout_s=limits.request_timeout_s),
            ],
            options=server_options(
                max_receive_bytes=limits.max_message_bytes,
                handshake_timeout_s=limits.handshake_timeout_s,
                idle_timeout_s=limits.idle_timeout_s,
                connection_age_s=limits.connection_age_s,
                max_connections=limits.max_connections,
                shares_port=shares_port,
            ),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        names = self._names = [service_name, HEALTH_SERVICE, reflection.SERVICE_NAME]
        if timeline is not None:
            timeline_pb2_grpc.add_TimelineServicer_to_server(timeline, self.grpc_server)
            names.append(TIMELINE_SERVICE)
        if new_roles is not None:
            roles_pb2_grpc.add_RolesServicer_to_server(new_roles(lambda: self.is_ready), self.grpc_server)
            names.append(ROLES_SERVICE)
        reflection.enable_server_reflection(names, self.grpc_server)

    async def start(self, address: str) -> int:
        if not is_loopback(address):
            if (self._has_tokens or self._has_role_tokens) and self._credentials is None:
                _log.warning("tokens_in_plain_text", listen=address)
            if not self._has_tokens and not self._checks_certificates:
                _log.warning("open_to_all", listen=address, what="everything")
        try:
            if self._credentials is None:
                port = self.grpc_server.add_insecure_port(address)
            else:
                port = self.grpc_server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            reason = why_not_listen(address) or str(error)
            raise ConfigError(f"listen: cannot listen on {address}: {reason}") from error
        self.grpc_server.add_generic_rpc_handlers((_OtherCalls(self._names),))  # the last handler that gRPC tries
        self._health.set(_ALIVE, is_serving=True)
        await self.set_ready(False)
        await self.grpc_server.start()
        return port

    @property
    def is_ready(self) -> bool:
        return self._is_ready is True

    async def set_ready(self, is_ready: bool) -> None:
        if is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        self._health.set(self._service_name, is_serving=is_ready)
        _log.info("readiness", service=self._service_name, is_ready=is_ready)

    async def stop(self, grace_s: float) -> None:
        await asyncio.shield(self.grpc_server.stop(grace_s))


class _OtherCalls(grpc.GenericRpcHandler):
    """Refuses calls to unknown methods. The error states which service this is, and which one serves the method."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        error = NotServed(self._words(str(handler_call_details.method)))

        async def refuse(_requests: object, context: Context) -> None:
            await abort_with(context, error)

        return grpc.stream_unary_rpc_method_handler(refuse)  # works for any kind of call

    def _words(self, method: str) -> str:
        service = method.removeprefix("/").rpartition("/")[0]
        own, other = self._names[0], _ANSWERING.get(service)
        here = f"this is the {_ANSWERING.get(own, own)}, and serves {', '.join(self._names)}"
        if other is None or service == own:
            return f"{peer_text(method, 128)!r} is not served here: {here}"
        return f"{service} is served by the {other}, at another address: {here}"


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The grpc.health.v1 service of a server whose service names are known beforehand. Use it from the event loop only.

    A watcher that does not read delays neither `set` nor other watchers, and is dropped after a timeout. The number of
    watches per client, as addresses tell them apart, is limited. If a client has all it may, a further one takes the
    place of the oldest on that of its connections with most, or fails if its own connection has as many; which of the
    two ends, ends with RESOURCE_EXHAUSTED. So no connection with many locks out other callers at its address.

    (The servicer in grpcio-health-checking holds a lock while it writes, and every later change of the status waits for
    it.)
    """

    def __init__(self, *, max_watches_per_client: int) -> None:
        self._max_watches_per_client = max_watches_per_client
        self._statuses: dict[str, Any] = {}
        # The watches of each client on each of its connections, the oldest first. Each has a time-out that ends it.
        self._watches: dict[str, dict[str, dict[asyncio.Timeout, None]]] = {}
        self._changed = asyncio.Event()

    def set(self, service: str, *, is_serving: bool) -> None:
        self._statuses[service] = _Response.SERVING if is_serving else _Response.NOT_SERVING
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            known = ", ".join(name for name in self._statuses if name)
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"{peer_text(request.service, 128)!r} is not here, {known} is"
            )
        return _Response(status=self._statuses[request.service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        await begin_answer(context)
        client, connection = BY_ADDRESS(context), str(context.peer())
        full = Overloaded(f"{self._max_watches_per_client} watches of this client are open")
        if not self._make_room(client, connection):
            await abort_with(context, full)
        try:
            async with asyncio.timeout(None) as watch:
                with self._counted(watch, client, connection):
                    await self._write_changes(request.service, context)
        except TimeoutError:
            await abort_with(context, full if watch.expired() else RequestCancelled("the watcher reads nothing"))

    def _make_room(self, client: str, connection: str) -> bool:
        """Ends a watch of the client if it has all it may: the oldest on that of its connections with most. Returns
        False, and ends none, if no other connection would keep as many watches as this one would have.
        """
        of_client = self._watches.get(client, {})
        if sum(map(len, of_client.values())) < self._max_watches_per_client:
            return True
        fullest = max(of_client, key=lambda each: len(of_client[each]))
        if len(of_client[fullest]) <= len(of_client.get(connection, ())) + 1:
            return False
        oldest = next(iter(of_client[fullest]))
        self._forget(client, fullest, oldest)
        oldest.reschedule(asyncio.get_running_loop().time())
        return True

    @contextmanager
    def _counted(self, watch: asyncio.Timeout, client: str, connection: str) -> Iterator[None]:
        """Counts `watch` among those of a client's connection while the block runs."""
        self._watches.setdefault(client, {}).setdefault(connection, {})[watch] = None
        try:
            yield
        finally:
            self._forget(client, connection, watch)

    def _forget(self, client: str, connection: str, watch: asyncio.Timeout) -> None:
        """Counts `watch` no longer, if it has not been forgotten already."""
        of_client = self._watches.get(client, {})
        of_connection = of_client.get(connection, {})
        of_connection.pop(watch, None)
        if not of_connection:
            of_client.pop(connection, None)
        if not of_client:
            self._watches.pop(client, None)

    async def _write_changes(self, service: str, context: Context) -> NoReturn:
        """Writes the status whenever it changes. Raises TimeoutError if the watcher does not read a change in time."""
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(service, _Response.SERVICE_UNKNOWN)
            if status != sent:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await context.write(_Response(status=status))
                sent = status
            await changed.wait()


def open_server(
    settings: ServiceSettings,
    *,
    service_name: str,
    instance_id: str,
    limits: ServerLimits,
    timeline: Timeline,
    roles: Roles,
    other_timeline: OtherTimeline | None = None,
    shares_port: bool = False,
) -> ServiceServer:
    """Builds a server with the TLS files and tokens that the settings name. Raises ConfigError if one of them is
    invalid.
    """
    return ServiceServer(
        service_name=service_name,
        credentials=server_credentials(settings.tls_cert, settings.tls_key, settings.tls_ca),
        checks_certificates=settings.tls_ca is not None,
        tokens=server_tokens(settings),
        role_tokens=_tokens_in("role_token_file", settings.role_token_file),
        limits=limits,
        timeline=TimelineServicer(
            timeline=timeline, service=service_name, instance_id=instance_id, other=other_timeline
        ),
        new_roles=partial(RolesServicer, roles, instance_id=instance_id, grace_period_s=settings.grace_period_s),
        shares_port=shares_port,
    )


def server_tokens(settings: ServiceSettings) -> tuple[str, ...]:
    """Returns the tokens that callers may use; each caller must show one of them.

    Returns none if the settings name no file: callers then need no token. Raises ConfigError if the file is invalid.
    """
    return _tokens_in("auth_token_file", settings.auth_token_file)


def _tokens_in(setting: str, file: Path | None) -> tuple[str, ...]:
    return () if file is None else read_tokens(setting, file)
