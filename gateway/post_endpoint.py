"""What the endpoints that read a JSON body have in common: places, the body, and how their requests end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypedDict, Unpack

from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from gateway.errors import CLIENT_LEFT_STATUS, ApiError, ClientLeft, api_error_of
from gateway.limits import HttpLimits
from gateway.metrics import GatewayMetrics
from gateway.open_requests import OpenRequest, OpenRequests
from gateway.receiving import read_json_body, unless_left
from gateway.request_record import HttpRecord
from gateway.sending import send_error
from gateway.served_model import ModelCard, ServedModel


class PostParts(TypedDict):
    """The keyword arguments of every PostEndpoint."""

    served_model: ServedModel
    open_requests: OpenRequests
    metrics: GatewayMetrics
    limits: HttpLimits


class PostEndpoint(ABC):
    """The ASGI application of one endpoint whose requests have a JSON body."""

    def __init__(self, **parts: Unpack[PostParts]) -> None:
        self._served_model = parts["served_model"]
        self._open_requests = parts["open_requests"]
        self._metrics = parts["metrics"]
        self._limits = parts["limits"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: HttpRecord = scope["state"]["record"]
        try:
            with self._open_requests.enter() as open_request:
                async with open_request.ends_when_failed():
                    body = await self._read(scope, receive, record.client)
                with self._open_requests.place(record.client):
                    await self._answer(body, open_request, record, receive, send)
        except ApiError as error:
            await send_error(error, scope, receive, send)
        except ClientLeft:
            record.status = CLIENT_LEFT_STATUS
            self._metrics.on_disconnect()

    @abstractmethod
    async def _answer(
        self, body: bytes, open_request: OpenRequest, record: HttpRecord, receive: Receive, send: Send
    ) -> None:
        """Answers the request with this body, and ends when `open_request` fails. Raises ApiError, unless an answer has
        begun, or ClientLeft.
        """

    async def _read(self, scope: Scope, receive: Receive, client: str) -> bytes:
        with self._open_requests.reading(client) as hold:
            return await read_json_body(receive, scope["headers"], limits=self._limits, hold=hold)

    async def _card(self, receive: Receive) -> ModelCard:
        try:
            return await unless_left(receive, self._served_model.card())
        except BatonError as error:
            raise api_error_of(error, {}) from None
