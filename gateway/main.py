"""The gateway's process: starts and drains the HTTP server, and opens the client of the decode services."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import structlog
import uvicorn
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from baton import AsyncClient, Tls
from baton.errors import InvalidArgument, Unavailable
from common.addresses import host_and_port, is_loopback, why_not_listen
from common.config.settings import GatewaySettings
from common.errors import ConfigError, StartupError
from common.host.descriptors import MAX_CONNECTIONS, max_connections
from common.rpc.aio import run
from common.rpc.bearer_tokens import read_tokens
from common.rpc.tls import server_tls
from common.service.program import run_program, termination_signals
from common.telemetry.tracing import NO_TRACER, process_tracer
from gateway.app import build_app
from gateway.connection import bounded_connections
from gateway.edge import ApiKeys
from gateway.errors import unavailable
from gateway.limits import HttpLimits
from gateway.listener import BoundedListener, OpenConnections
from gateway.open_requests import OpenRequests
from gateway.served_model import ServedModel
from gateway.status.collector import StatusCollector
from gateway.status.watched import open_clients

PROGRAM = "gateway"
_BACKLOG = 2048
_CLOSE_GRACE_S = 1
_MAX_LARGE_BODIES = 64
_START_LOOK_S = 0.01
RPC_TIMEOUT_S = 5.0
_TLS_FILES = ("ca_file", "cert_file", "key_file")

_log = structlog.get_logger(__name__)


def run_gateway(argv: Sequence[str]) -> int:
    """Runs the gateway until SIGTERM or SIGINT. Returns the process's exit status."""
    return run_program(PROGRAM, GatewaySettings, argv, _serve_traced)


def _serve_traced(settings: GatewaySettings, instance_id: str) -> None:
    with process_tracer(settings, service=PROGRAM, instance_id=instance_id) as tracer:
        run(serve(settings, tracer))


async def serve(settings: GatewaySettings, tracer: Tracer) -> None:
    """Serves until SIGTERM or SIGINT, then finishes open requests within the grace period."""
    server = GatewayServer(settings, tracer=tracer)
    terminated = asyncio.Event()
    with termination_signals(terminated.set):
        port = await server.start()
        _log.info("serving", port=port)
        await terminated.wait()
        await server.drain()
        await server.stop()


class GatewayServer:
    """Runs the gateway on the current event loop.

    Construction raises ConfigError or StartupError for settings that cannot be applied.
    """

    def __init__(
        self, settings: GatewaySettings, *, tracer: Tracer = NO_TRACER, limits: HttpLimits | None = None
    ) -> None:
        self._settings = settings
        limits = limits or HttpLimits.of(settings)
        api_keys = () if settings.api_key_file is None else read_tokens("api_key_file", settings.api_key_file)
        if api_keys and settings.tls_cert is None and not is_loopback(settings.listen):
            _log.warning("tokens_in_plain_text", listen=settings.listen)
        if not is_loopback(settings.listen) and not (api_keys and settings.status_needs_key):
            _log.warning("open_to_all", listen=settings.listen, what="status and metrics" if api_keys else "everything")
        tls = server_tls(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
        self._client = open_decode_client(settings)
        self.open_requests = OpenRequests(
            max_open=settings.max_open_requests,
            max_reading_bytes=_MAX_LARGE_BODIES * settings.max_request_bytes,
        )
        self._status = _status_collector(settings)
        self._served_model = ServedModel(
            self._client, timeout_s=settings.admission_timeout_s, names=settings.served_model_name
        )
        app = build_app(
            client=self._client,
            served_model=self._served_model,
            open_requests=self.open_requests,
            api_keys=ApiKeys(api_keys),
            registry=CollectorRegistry(),
            limits=limits,
            status=self._status,
            tracer=tracer,
            cors_origins=settings.cors_origins,
            allowed_hosts=settings.allowed_hosts or (() if is_loopback(settings.listen) and not api_keys else ("*",)),
            status_needs_key=settings.status_needs_key,
        )
        wanted = max(MAX_CONNECTIONS, 2 * settings.max_open_requests)
        self._connections = OpenConnections(max_connections=max_connections(wanted))
        config = uvicorn.Config(
            app,
            http=bounded_connections(limits, self._connections),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # uvicorn would warn about single requests, which the connection logs itself
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=limits.keep_alive_s,
            timeout_graceful_shutdown=_CLOSE_GRACE_S,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._limits = limits
        self._http = _HttpServer(config, handshake_timeout_s=limits.head_timeout_s)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Starts to listen. Returns the port. Raises ConfigError if the address is not available."""
        listener = BoundedListener(
            _listen(self._settings.listen),
            connections=self._connections,
            is_tls=self._settings.tls_cert is not None,
            linger_s=self._limits.head_timeout_s,
        )
        self._serving = asyncio.create_task(self._http.serve(sockets=[listener]), name="http")
        while not self._http.started and not self._serving.done():  # noqa: ASYNC110 - uvicorn tells it in no other way
            await asyncio.sleep(_START_LOOK_S)
        if self._serving.done():
            self._serving.result()
        return int(listener.getsockname()[1])

    async def drain(self) -> None:
        """Admits no more requests. Open ones may finish within the grace period; then they end with an error."""
        _log.info("draining", num_requests=len(self.open_requests))
        self.open_requests.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.grace_period_s):
                await self.open_requests.wait_idle()
        self.open_requests.fail_all(unavailable("the gateway stopped before the request's end", code="stopping"))

    async def stop(self) -> None:
        """Stops the server. Answers that are being written get one more second."""
        self._http.should_exit = True
        if self._serving is not None:
            await self._serving
        for connection in tuple(self._http.server_state.connections):
            connection.transport.abort()  # its client does not read the answer
        if self._status is not None:
            await self._status.close()
        await self._served_model.close()
        await self._client.close()


class _HttpServer(uvicorn.Server):
    """uvicorn's server with a time limit on TLS handshakes and without its own signal handlers."""

    def __init__(self, config: uvicorn.Config, *, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Sets up everything but the listening, because uvicorn's Config has no handshake timeout.
        await super().startup(sockets=[])
        config, loop = self.config, asyncio.get_running_loop()

        def protocol() -> Any:
            shared = {"server_state": self.server_state, "app_state": self.lifespan.state}
            return config.http_protocol_class(config=config, **shared)  # type: ignore[call-arg]

        self.servers = [
            await loop.create_server(
                protocol,
                sock=listener,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=None if config.ssl is None else self._handshake_timeout_s,
            )
            for listener in sockets or ()
        ]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _status_collector(settings: GatewaySettings) -> StatusCollector | None:
    if not settings.status_page:
        return None
    token_file = settings.metrics_token_file
    return StatusCollector(
        metrics_targets=settings.metrics_targets,
        metrics_token="" if token_file is None else read_tokens("metrics_token_file", token_file)[0],
        decode_targets=settings.decode,
        open_client=open_clients(tls=decode_tls(settings), token=_decode_token(settings)),
    )


def _listen(address: str) -> socket.socket:
    host, port = host_and_port(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both and family is socket.AF_INET6
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"listen: cannot listen on {address}: {why_not_listen(address) or error}") from error
    listener.setblocking(False)
    return listener


def open_decode_client(settings: GatewaySettings) -> AsyncClient:
    """Opens the client of the decode services, in a running event loop.

    Raises ConfigError, which names the setting, or StartupError if `decode` is a list of which no host
    name resolves.
    """
    token = _decode_token(settings)
    if token is not None and not settings.decode_tls and not all(map(is_loopback, settings.decode)):
        _log.warning("tokens_in_plain_text", decode=settings.decode)
    try:
        return AsyncClient(
            ",".join(settings.decode),
            tls=decode_tls(settings),
            token=token,
            rpc_timeout_s=max(RPC_TIMEOUT_S, settings.admission_timeout_s),
            resume=True,
            resume_timeout_s=settings.resume_timeout_s,
            admission_timeout_s=settings.admission_timeout_s,
        )
    except InvalidArgument as error:
        setting = "decode_tls" if error.field in _TLS_FILES else "decode"
        raise ConfigError(f"{setting}: {error}") from error
    except Unavailable as error:
        raise StartupError(f"decode: {error}") from error


def _decode_token(settings: GatewaySettings) -> str | None:
    """Reads the token that authenticates the gateway to the decode services.

    Returns None if no token file is configured. Raises ConfigError for an empty file.
    """
    if settings.decode_token_file is None:
        return None
    return read_tokens("decode_token_file", settings.decode_token_file)[0]


def decode_tls(settings: GatewaySettings) -> Tls | None:
    if not settings.decode_tls:
        return None
    return Tls(
        ca_file=settings.decode_tls_ca,
        cert_file=settings.tls_cert,
        key_file=settings.tls_key,
        server_name=settings.decode_tls_server_name,
    )
