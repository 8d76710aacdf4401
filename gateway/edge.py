"""What every HTTP request meets first: its id, the check of its key, the count and the log line of its end."""

from __future__ import annotations

import logging

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api_keys import ApiKeys
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.request_record import RequestRecord
from gateway.responses import error_response

_log = structlog.get_logger(__name__)


class Edge:
    """An ASGI application around another, which finds the RequestRecord in `scope["state"]["record"]`.

    What is under /v1 needs a key.
    """

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._app = app
        self._api_keys = api_keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord.of(scope)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        is_api = scope["path"].startswith("/v1/")
        try:
            if is_api:
                self._api_keys.check(scope["headers"])
            record.take_id(scope["headers"])
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_id)
        else:
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                record.status = 500  # whatever the answer began with
                raise
        finally:
            seconds = record.elapsed_s
            self._metrics.on_end(route=record.route, status=record.status, seconds=seconds)
            _log.log(
                logging.INFO if is_api else logging.DEBUG,
                "request_finished",
                request_id=record.request_id,
                route=record.route,
                status=record.status,
                seconds=round(seconds, 6),
                num_choices=record.num_choices,
                num_prompt_tokens=record.num_prompt_tokens,
                num_completion_tokens=record.num_completion_tokens,
                ttft_s=None if record.ttft_s is None else round(record.ttft_s, 6),
            )
