"""The HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from common.errors import ConfigError


class MetricsServer:
    """Serves `registry` at `http://{listen}/metrics` from entering to leaving; with an empty `listen`, nothing."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        self._listen = listen
        self._registry = registry
        self._running: tuple[WSGIServer, threading.Thread] | None = None

    @property
    def port(self) -> int | None:
        return None if self._running is None else self._running[0].server_port

    def __enter__(self) -> Self:
        if self._listen:
            host, _, port = self._listen.rpartition(":")
            try:
                self._running = start_http_server(int(port), addr=host.strip("[]"), registry=self._registry)
            except OSError as error:
                raise ConfigError(f"metrics_listen: cannot listen on {self._listen}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            server, thread = self._running
            server.shutdown()
            server.server_close()
            thread.join()
