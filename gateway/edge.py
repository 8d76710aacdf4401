"""The outer layers of every HTTP request: they give it an id, check its key, open its span, and log and count it when
it ends.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import structlog
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, use_span
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.addresses import host_of_authority, names_this_machine
from common.rpc.bearer_tokens import is_known, token_in
from common.telemetry.tracing import context_of
from gateway.errors import ApiError
from gateway.request_record import NO_ROUTE, TOKENIZER_INFO_PATH, TOKENIZING_PATHS, GatewayMetrics, HttpRecord
from gateway.sending import send_error

_MAX_LOGGED_CHARS = 256
_STATUS_PATHS = ("/", "/metrics", "/status.json")
_SCHEME = b"bearer "
_BARE_HEADER = b"x-api-key"
_PASSWORD = 'Basic realm="Baton"'
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})
_MAX_PATH_CHARS = 256

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
    origin. The request's Host header shows this. A request without that header comes from no browser.
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

    The CORS layer lies around it, because browsers send preflights without a key.
    """

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys, covers_status: bool) -> None:
        self._app = app
        self._api_keys = api_keys
        self._covered = _STATUS_PATHS if covers_status else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: HttpRecord = scope["state"]["record"]
        try:
            record.take_id(scope["headers"])
            if is_api(scope):
                record.client = (
                    self._api_keys.check(scope["headers"], takes_bare=record.is_messages_api) or record.client
                )
            elif scope["path"] in self._covered:
                self._api_keys.check_viewer(scope["headers"])
        except ApiError as error:
            await send_error(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)


def is_api(scope: Scope) -> bool:
    return bool(scope["path"].startswith("/v1/")) or scope["path"] in (*TOKENIZING_PATHS, TOKENIZER_INFO_PATH)


def _why(error: ApiError | None) -> dict[str, Any]:
    """Returns the log fields that say why the answer is an error.

    Errors name fields, and never contain a prompt or a key. They quote only short texts, such as names.
    """
    if error is None:
        return {}
    return {"error": str(error)[:_MAX_LOGGED_CHARS], "error_param": error.param, "error_code": error.code}


class ApiKeys:
    """Checks the API keys of requests. Without any configured key, every caller is accepted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, headers: Sequence[tuple[bytes, bytes]], *, takes_bare: bool = False) -> str:
        """Checks the key in a request's headers. Raises ApiError 401 unless it is a configured one.
        Without configured keys every request passes. The key comes in `authorization`; with `takes_bare` it may also
        come in `x-api-key`, or in both if it is the same key.

        Returns a name for the key, such as "key 1", if several are configured, and else "". The check takes the same
        time however much of a wrong key is right.
        """
        if not self._keys:
            return ""
        names = (b"authorization", _BARE_HEADER) if takes_bare else (b"authorization",)
        shown = [(name, value if name == _BARE_HEADER else _bearer(value)) for name, value in headers if name in names]
        if not shown:
            how = "'Authorization: Bearer KEY'" + (" or 'x-api-key: KEY'" if takes_bare else "")
            raise _unknown(f"authorization: no API key was shown; send {how}")
        _, key = shown[0]
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        is_clear = len(dict(shown)) == len(shown) and all(other == key for _, other in shown)
        if not is_clear:
            raise _unknown("authorization: more than one API key was shown", code="invalid_api_key")
        if not any(matches):
            raise _unknown("authorization: the API key is not known here", code="invalid_api_key")
        return f"key {matches.index(True)}" if len(self._keys) > 1 else ""

    def check_viewer(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Checks the key of a request for the status page or metrics. Raises ApiError 401 unless it is configured.

        Here the key may also be sent as the password of basic authentication, as browsers do.
        """
        shown = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        keys = [key.decode() for key in self._keys]
        if len(shown) != 1 or not is_known(token_in(shown[0]), keys):
            raise ApiError(
                401, "authorization: show an API key, or give it as password", headers={"www-authenticate": _PASSWORD}
            )


def _bearer(header: bytes) -> bytes:
    """Returns the key in the value of an `authorization` header, or b"" if there is none."""
    return header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else b""


def _unknown(message: str, *, code: str | None = None) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


class TracedApp:
    """An ASGI layer that opens a span for each request, as the parent of the gRPC calls' spans.

    The span continues the trace of the request's `traceparent` header. It ends with the answer's last byte and carries
    the status that is logged. It is marked as an error for a status from 500 on, and for an answer that broke off. Its
    name has only the method and the route. The layer lies inside the key check, so a request without a key gets no
    span.
    """

    def __init__(self, app: ASGIApp, *, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        record: HttpRecord = scope["state"]["record"]
        is_known = scope["method"] in _METHODS
        method = scope["method"] if is_known else "HTTP"
        span = self._tracer.start_span(
            method if record.route == NO_ROUTE else f"{method} {record.route}",
            context_of(_decoded(scope["headers"])),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method if is_known else "_OTHER",
                "url.path": scope["path"][:_MAX_PATH_CHARS],
            },
        )
        is_whole = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_whole
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        with use_span(span, end_on_exit=True):
            try:
                await self._app(scope, receive, send_and_note)
            finally:
                span.set_attribute("http.response.status_code", record.status)
                if not is_whole:
                    span.set_status(Status(StatusCode.ERROR, "the answer broke off"))
                elif record.status >= 500:
                    span.set_status(Status(StatusCode.ERROR))


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    """Decodes the headers' names and values, which are Latin-1 in HTTP."""
    for name, value in headers:
        yield name.decode("latin-1"), value.decode("latin-1")
