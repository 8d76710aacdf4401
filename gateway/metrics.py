"""The gateway's Prometheus metrics."""

from __future__ import annotations

import collections
from collections.abc import Callable
from http import HTTPStatus
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.telemetry.metrics import PHASE_S
from gateway.errors import CLIENT_LEFT_STATUS
from gateway.request_record import HEALTH_PATHS, MESSAGES_PATHS, TOKENIZING_PATHS

_REQUEST_S = (*PHASE_S, 120.0, 300.0, 600.0)
_API_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    *MESSAGES_PATHS,
    "/v1/models",
    "/v1/models/{model}",
    "/v1/responses",
    *TOKENIZING_PATHS,
)
_STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 429, CLIENT_LEFT_STATUS, 500, 502, 503, 504)


class GatewayMetrics:
    """The gateway's Prometheus metrics.

    Every status of the API is exposed from the start with 0. Otherwise Prometheus would see no increase in a series
    that begins with its first event, and ratios would be wrong.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "baton_gateway_requests_total",
            "HTTP requests by how they ended; 499: the client left",
            ["route", "status"],
            registry=registry,
        )
        for route, status in product(_API_ROUTES, _STATUSES):
            self._requests.labels(route, str(status))
        self.errors: collections.Counter[int] = collections.Counter()
        """The requests that ended with an error, by status. Health checks do not count: 503 is one of their answers."""
        self._request_s = Histogram(
            "baton_gateway_request_seconds",
            "From a request's head to the end of its answer",
            ["route"],
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._ttft_s = Histogram(
            "baton_gateway_ttft_seconds",
            "From a request's head to its first token",
            ["route"],
            buckets=PHASE_S,
            registry=registry,
        )
        self._open = Gauge("baton_gateway_open_requests", "Generations' requests being answered", registry=registry)
        self._reading = Gauge(
            "baton_gateway_reading_requests", "Generations' requests whose body is on its way", registry=registry
        )
        self._prompt_tokens = Counter(
            "baton_gateway_prompt_tokens_total",
            "Tokens of prompts that were admitted, once a prompt",
            registry=registry,
        )
        self._completion_tokens = Counter(
            "baton_gateway_completion_tokens_total", "Tokens that came of them, over all choices", registry=registry
        )
        self._disconnects = Counter(
            "baton_gateway_client_disconnects_total", "Clients that left before their answer's end", registry=registry
        )

    def watch_requests(self, *, num_open: Callable[[], int], num_reading: Callable[[], int]) -> None:
        self._open.set_function(num_open)
        self._reading.set_function(num_reading)

    def on_end(self, *, route: str, status: int, seconds: float) -> None:
        if status >= HTTPStatus.BAD_REQUEST and route not in HEALTH_PATHS:
            self.errors[status] += 1
        self._requests.labels(route, str(status)).inc()
        self._request_s.labels(route).observe(seconds)

    def on_disconnect(self) -> None:
        self._disconnects.inc()

    def on_first_token(self, *, route: str, seconds: float) -> None:
        self._ttft_s.labels(route).observe(seconds)

    def on_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def on_tokens(self, num_tokens: int) -> None:
        self._completion_tokens.inc(num_tokens)
