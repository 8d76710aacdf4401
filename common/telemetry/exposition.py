"""The HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

import io
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

from common.addresses import (
    host_and_port,
    host_of_authority,
    is_loopback,
    names_this_machine,
    why_not_listen,
)
from common.errors import ConfigError
from common.rpc.bearer_tokens import is_known, token_in

HEAD_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 10.0
_MAX_HEAD_BYTES = 16 << 10
_MAX_CONNECTIONS = 32
_FAILED_ACCEPT_S = 0.1
_STOP_POLL_S = 0.05

_log = structlog.get_logger(__name__)


class MetricsServer:
    """Serves `registry` over HTTP at `http://{listen}/metrics` inside its context. With an empty `listen` it does
    nothing.

    If there are `tokens`, a client must send one of them in the header `authorization`. If there are none and `listen`
    is on loopback, a request must name this machine as its host: web pages of other domains that resolve to loopback
    are refused. A client has 5 s to send the head of its request, and 10 s to read the answer. If more than 32 clients
    connect, the oldest connection is dropped.
    """

    def __init__(self, listen: str, registry: CollectorRegistry, *, tokens: Sequence[str] = ()) -> None:
        self._listen = listen
        is_local = bool(listen) and is_loopback(listen) and not tokens
        fields = {"registry": registry, "tokens": tuple(tokens), "is_local": is_local}
        self._handler = type("Handler", (_Handler,), fields)
        self._has_tokens = bool(tokens)
        self._running: tuple[_ThreadingServer, threading.Thread] | None = None

    @property
    def port(self) -> int | None:
        return None if self._running is None else int(self._running[0].server_address[1])

    def __enter__(self) -> Self:
        if self._listen:
            try:
                server = _ThreadingServer(self._listen, self._handler)
            except (OSError, UnicodeError) as error:
                reason = why_not_listen(self._listen) or error
                raise ConfigError(f"metrics_listen: cannot listen on {self._listen}: {reason}") from error
            if not self._has_tokens and not is_loopback(self._listen):
                _log.warning("open_to_all", listen=self._listen, what="metrics")
            thread = threading.Thread(target=server.serve_forever, args=(_STOP_POLL_S,), name="metrics", daemon=True)
            thread.start()
            self._running = server, thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            server, thread = self._running
            server.shutdown()
            server.server_close()
            thread.join()


class _ThreadingServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, listen: str, handler: type[_Handler]) -> None:
        host, port = host_and_port(listen)
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = info[0]
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}  # open connections, the oldest first
        super().__init__(info[4][:2], handler)  # type: ignore[arg-type]

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_FAILED_ACCEPT_S)  # out of descriptors: accepting again at once would fail too
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _shut_down(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client left, or did not read the answer
            _log.exception("metrics_failed")


class _Handler(MetricsHandler):
    """Handles one request of one connection."""

    tokens: ClassVar[tuple[str, ...]] = ()
    is_local: ClassVar[bool] = False

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BytesIO(self._head())
        self.connection.settimeout(_ANSWER_TIMEOUT_S)

    def do_GET(self) -> None:
        if self.is_local and not names_this_machine(host_of_authority(self.headers.get("host", "localhost"))):
            self.send_error(403, "the host of this request is no name of this machine")
            return
        if self.tokens and not is_known(token_in(self.headers.get("authorization", "")), self.tokens):
            self.send_response(401)
            self.send_header("www-authenticate", 'Basic realm="Baton"')
            self.end_headers()
            return
        super().do_GET()

    def _head(self) -> bytes:
        """Reads the head of the request. Returns b"" if it does not arrive in time or is too long."""
        head, until_s = b"", time.monotonic() + HEAD_TIMEOUT_S
        while b"\r\n\r\n" not in head:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or len(head) > _MAX_HEAD_BYTES:
                return b""
            self.connection.settimeout(left_s)
            part = self.connection.recv(4096)
            if not part:
                return b""
            head += part
        return head


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads or writes the connection
    except OSError:
        return  # the connection ended by itself
