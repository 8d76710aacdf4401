"""The outer layers of every HTTP request: they give it an id, check its key, and log and count it when it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.addresses import host_of_authority, names_this_machine
from gateway.api_keys import ApiKeys
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.request_record import TOKENIZER_INFO_PATH, TOKENIZING_PATHS, HttpRecord
from gateway.sending import send_error

_MAX_LOGGED_CHARS = 256
_STATUS_PATHS = ("/", "/metrics", "/status.json")

_log = structlog.get_logger(__name__)


class HttpEdge:
    """The outermost ASGI layer: it logs and counts each request when it ends.

    It puts an HttpRecord into `scope["state"]["record"]`, which the inner layers fill.
    """

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("/") and scope["path"] != "/":  # some clients add a slash
            scope = {**scope, "path": scope["path"].removesuffix("/")}
        record = HttpRecord.of(scope)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if record.is_messages_api:
                    headers["request-id"] = record.request_id
                if record.ignored:
                    headers["x-ignored-fields"] = ", ".join(record.ignored)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            record.status = 500  # replaces the status that the answer may have begun with
            raise
        finally:
            seconds = record.elapsed_s
            self._metrics.on_end(route=record.route, status=record.status, seconds=seconds)
            _log.log(
                logging.INFO if is_api(scope) or record.error is not None else logging.DEBUG,
                "request_finished",
                request_id=record.request_id,
                route=record.route,
                status=record.status,
                seconds=round(seconds, 6),
                num_choices=record.num_choices,
                num_prompt_tokens=record.num_prompt_tokens,
                num_completion_tokens=record.num_completion_tokens,
                ttft_s=None if record.ttft_s is None else round(record.ttft_s, 6),
                **_why(record.error),
            )


class HostCheck:
    """An ASGI layer that refuses requests for other hosts than `allowed` and this machine's own names.

    A web page can point its own domain at a loopback address, and a browser then takes the gateway for that page's
    origin. The host that the request names gives it away. A request that names none comes from no browser.
    """

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = {host_of_authority(host) for host in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = host_of_authority(dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1"))
        if host in self._allowed or names_this_machine(host):
            await self._app(scope, receive, send)
            return
        message = f"host: the gateway does not serve {host[:128]!r}; allowed_hosts can name it"
        await send_error(ApiError(403, message, code="host_not_allowed"), scope, receive, send)


class KeyCheck:
    """An ASGI layer that requires a key under /v1 and for tokenising, and with `covers_status` also for the status page
    and metrics.

    HttpEdge and the CORS layer wrap it, because a browser sends preflights without a key.
    """

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys, covers_status: bool) -> None:
        self._app = app
        self._api_keys = api_keys
        self._covered = _STATUS_PATHS if covers_status else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: HttpRecord = scope["state"]["record"]
        try:
            if is_api(scope):
                record.client = (
                    self._api_keys.check(scope["headers"], takes_bare=record.is_messages_api) or record.client
                )
            elif scope["path"] in self._covered:
                self._api_keys.check_viewer(scope["headers"])
            record.take_id(scope["headers"])
        except ApiError as error:
            await send_error(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)


def is_api(scope: Scope) -> bool:
    return bool(scope["path"].startswith("/v1/")) or scope["path"] in (*TOKENIZING_PATHS, TOKENIZER_INFO_PATH)


def _why(error: ApiError | None) -> dict[str, Any]:
    """Returns the log fields that say why the answer is an error. Errors name fields, and never contain a prompt or a
    key.
    """
    if error is None:
        return {}
    return {"error": str(error)[:_MAX_LOGGED_CHARS], "error_param": error.param, "error_code": error.code}
