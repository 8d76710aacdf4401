"""A record of one HTTP request while it is answered, for its log line and for the gateway's Prometheus metrics."""

from __future__ import annotations

import collections
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Scope

from common.addresses import network_of
from common.telemetry.metrics import PHASE_S
from gateway.errors import CLIENT_LEFT_STATUS, ApiError, invalid, messages_error, openai_error

MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
MESSAGES_PATHS = (MESSAGES_PATH, COUNT_TOKENS_PATH)
TOKENIZING_PATHS = ("/tokenize", "/detokenize")
TOKENIZER_INFO_PATH = "/tokenizer_info"
_HEALTH_PATHS = ("/health", "/health/live", "/health/ready", "/ping")
_API_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    *MESSAGES_PATHS,
    "/v1/models",
    "/v1/models/{model}",
    "/v1/responses",
    *TOKENIZING_PATHS,
)
_ROUTES = frozenset(
    {
        *_API_ROUTES,
        *_HEALTH_PATHS,
        TOKENIZER_INFO_PATH,
        "/",
        "/metrics",
        "/openapi.json",
        "/status.json",
        "/version",
    }
)
NO_ROUTE = "other"
_SHOWN_ID = re.compile(r"[!-~]{1,96}")
_REQUEST_S = (*PHASE_S, 120.0, 300.0, 600.0)
_STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 429, CLIENT_LEFT_STATUS, 500, 502, 503, 504)


@dataclass(slots=True, kw_only=True)
class HttpRecord:
    """The data of one HTTP request for its log line and for metrics.

    `status` is the answer's status, or that of an error that broke the answer off. `error` says why the answer is an
    error. `client` names whoever sent the request: the number of the API key if several keys are configured, else the
    client's network. Places and memory are shared fairly among clients.
    """

    route: str
    is_messages_api: bool
    """Whether the path is one of Anthropic's Messages API."""
    client: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began_s: float = field(default_factory=time.monotonic)
    status: int = 500
    num_choices: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    ttft_s: float | None = None
    error: ApiError | None = None
    ignored: list[str] = field(default_factory=list)
    """Fields of the request that mean nothing to the model."""

    @classmethod
    def of(cls, scope: Scope) -> HttpRecord:
        host, _ = scope.get("client") or ("", 0)
        path = scope["path"]
        is_messages_api = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
        return cls(route=route_of(path), is_messages_api=is_messages_api, client=network_of(host))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def error_body(self, error: ApiError) -> Mapping[str, Any]:
        """Returns an error as the API of the request's route writes it."""
        return messages_error(error, self.request_id) if self.is_messages_api else openai_error(error)

    def take_id(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Takes over the caller's x-request-id, if there is one. Raises ApiError if it is too long, or has characters
        that are not allowed.
        """
        for name, value in headers:
            if name == b"x-request-id":
                if not _SHOWN_ID.fullmatch(shown := value.decode("latin-1")):
                    raise invalid("x-request-id", "must be 1 to 96 printable ASCII characters without spaces")
                self.request_id = shown


def route_of(path: str) -> str:
    """Returns the route of a path, out of a small fixed set, because routes label metrics and name spans."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    return path if path in _ROUTES else NO_ROUTE


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
        if status >= HTTPStatus.BAD_REQUEST and route not in _HEALTH_PATHS:
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
