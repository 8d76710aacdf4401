"""What both services' servers share: bounds, keepalive, TLS, reflection, truthful health, signals, draining."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import ConfigError

MAX_MESSAGE_BYTES = 16 << 20
HEALTH_INTERVAL_S = 0.2
_CLOSE_TIMEOUT_S = 1.0  # for streams whose last message is on its way

_log = structlog.get_logger(__name__)

# A generation may be silent for long: pings keep middleboxes quiet, notice a dead peer, and are never an offence.
_CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),  # a second process on the same address is a mistake, not load balancing
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca`, clients must present a certificate that it signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class ServiceServer:
    """A gRPC server with grpc.health.v1 and reflection.

    Health: "" serves while the process lives; `service_name` while `is_ready()` says so, which is asked periodically
    and by `refresh_health`. Add servicers to `grpc_server` before `start`.
    """

    def __init__(
        self,
        *,
        listen: str,
        service_name: str,
        is_ready: Callable[[], bool],
        tls: TlsFiles | None = None,
    ) -> None:
        self.grpc_server = grpc.aio.server(options=_CHANNEL_OPTIONS)
        self._listen = listen
        self._service_name = service_name
        self._is_ready = is_ready
        self._tls = tls
        self._health = health.aio.HealthServicer()
        self._last_status: int | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Returns the address it listens on: the port is a real one when `listen` asked for port 0."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        names = (self._service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)
        await self.refresh_health()
        port = self._bind()
        await self.grpc_server.start()
        self._watch = asyncio.create_task(self._watch_health(), name="health")
        return f"{self._listen.rpartition(':')[0]}:{port}"

    async def refresh_health(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if self._is_ready() else health_pb2.HealthCheckResponse.NOT_SERVING
        if status != self._last_status:
            self._last_status = status
            await self._health.set(self._service_name, status)
            _log.info("health", service=self._service_name, is_ready=status == serving)

    async def stop(self) -> None:
        """End what is still open and the server. Bounded in time."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self.grpc_server.stop(_CLOSE_TIMEOUT_S)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self.refresh_health()

    def _bind(self) -> int:
        try:
            if self._tls is None:
                return self.grpc_server.add_insecure_port(self._listen)
            return self.grpc_server.add_secure_port(self._listen, _server_credentials(self._tls))
        except RuntimeError as error:
            raise ConfigError(f"listen: cannot listen on {self._listen}: {error}") from error


@contextmanager
def termination_signals() -> Iterator[asyncio.Event]:
    """The event is set by the first SIGTERM or SIGINT; a further one has the system's effect."""
    loop = asyncio.get_running_loop()
    received = asyncio.Event()

    def on_signal() -> None:
        received.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def is_done_within(work: Awaitable[None], timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(work, timeout_s)
    except TimeoutError:
        return False
    return True


def _server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(_read("tls_key", tls.key), _read("tls_cert", tls.certificate))],
        root_certificates=None if tls.client_ca is None else _read("tls_ca", tls.client_ca),
        require_client_auth=tls.client_ca is not None,
    )


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {error}") from error
