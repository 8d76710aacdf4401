"""A record of one HTTP request while it is answered, for its log line and for metrics."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from common.addresses import network_of
from gateway.errors import ApiError, invalid, messages_error, openai_error

MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
MESSAGES_PATHS = (MESSAGES_PATH, COUNT_TOKENS_PATH)
TOKENIZING_PATHS = ("/tokenize", "/detokenize")
TOKENIZER_INFO_PATH = "/tokenizer_info"
HEALTH_PATHS = ("/health", "/health/live", "/health/ready", "/ping")
_ROUTES = frozenset(
    {
        *HEALTH_PATHS,
        *TOKENIZING_PATHS,
        TOKENIZER_INFO_PATH,
        *MESSAGES_PATHS,
        "/",
        "/metrics",
        "/openapi.json",
        "/status.json",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/responses",
        "/version",
    }
)
NO_ROUTE = "other"
_SHOWN_ID = re.compile(r"[!-~]{1,96}")


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
