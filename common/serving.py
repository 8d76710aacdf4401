"""What both services' servers share: bounds, TLS, reflection, truthful health, signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from common.errors import ConfigError
from common.wire.grpc_options import MAX_MESSAGE_BYTES, server_options

READINESS_INTERVAL_S = 0.1
_ALIVE = ""

_log = structlog.get_logger(__name__)


class ServiceServer:
    """A gRPC server with health and reflection; add servicers to `grpc_server` before `start`.

    Health tells "" (the process is alive) from `service_name` (requests are served: `set_ready`).
    """

    def __init__(
        self,
        *,
        service_name: str,
        credentials: grpc.ServerCredentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._service_name = service_name
        self._credentials = credentials
        self._health = health_aio.HealthServicer()
        self._is_ready: bool | None = None
        self.grpc_server = grpc.aio.server(options=server_options(max_receive_bytes=max_message_bytes))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        names = (service_name, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)

    async def start(self, address: str) -> int:
        """Listen on `address` ("host:port", port 0 for any); returns the port. Not ready until `set_ready`.

        Raises ConfigError when the address cannot be had.
        """
        try:
            if self._credentials is None:
                port = self.grpc_server.add_insecure_port(address)
            else:
                port = self.grpc_server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"listen: cannot listen on {address}: {error}") from error
        await self._health.set(_ALIVE, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        await self.grpc_server.start()
        return port

    async def set_ready(self, is_ready: bool) -> None:
        if is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        response = health_pb2.HealthCheckResponse
        await self._health.set(self._service_name, response.SERVING if is_ready else response.NOT_SERVING)
        _log.info("readiness", service=self._service_name, is_ready=is_ready)

    async def follow(self, is_ready: Callable[[], bool], *, interval_s: float = READINESS_INTERVAL_S) -> None:
        """Keep readiness what `is_ready` says, until cancelled."""
        while True:
            await self.set_ready(is_ready())
            await asyncio.sleep(interval_s)

    async def stop(self, grace_s: float) -> None:
        """Take no further call; those open have `grace_s` to end."""
        await asyncio.shield(self.grpc_server.stop(grace_s))


@contextmanager
def termination_signals() -> Iterator[asyncio.Event]:
    """The event is set by the first SIGTERM or SIGINT; a further one ends the process as the system has it."""
    loop = asyncio.get_running_loop()
    received = asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        received.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def server_credentials(
    certificate: Path | None, key: Path | None, client_ca: Path | None
) -> grpc.ServerCredentials | None:
    """None without a certificate. With `client_ca`, clients must present a certificate that it signed."""
    if certificate is None or key is None:
        return None
    return grpc.ssl_server_credentials(
        [(_read("tls_key", key), _read("tls_cert", certificate))],
        root_certificates=None if client_ca is None else _read("tls_ca", client_ca),
        require_client_auth=client_ca is not None,
    )


def channel_credentials(ca: Path | None, certificate: Path | None, key: Path | None) -> grpc.ChannelCredentials:
    """What a client needs: whom it trusts (None: the system's authorities), and its own certificate where asked for."""
    return grpc.ssl_channel_credentials(
        root_certificates=None if ca is None else _read("prefill_tls_ca", ca),
        private_key=None if key is None else _read("tls_key", key),
        certificate_chain=None if certificate is None else _read("tls_cert", certificate),
    )


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {error}") from error
