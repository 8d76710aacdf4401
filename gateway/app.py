"""Builds the ASGI application: the routes, health checks included, and the layers around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version as package_version

from opentelemetry.trace import Tracer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton import AsyncClient
from baton.errors import BatonError
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from gateway.apis.chat import CHAT
from gateway.apis.completions import COMPLETIONS
from gateway.apis.messages import MESSAGES, ConversationFields
from gateway.apis.responses import RESPONSES
from gateway.edge import ApiKeys, HostCheck, HttpEdge, KeyCheck, TracedApp
from gateway.errors import ApiError, answer_of, api_error_of, internal
from gateway.fields import RequestFields
from gateway.generation import GenerationEndpoint
from gateway.limits import HttpLimits
from gateway.open_requests import OpenRequests
from gateway.openapi import openapi_document
from gateway.post_endpoint import PostParts
from gateway.request_record import COUNT_TOKENS_PATH, TOKENIZER_INFO_PATH, GatewayMetrics, HttpRecord
from gateway.sending import JsonResponse, error_response, send_error
from gateway.served_model import ServedModel
from gateway.status.collector import StatusCollector, status_routes
from gateway.status.snapshot import Gateway
from gateway.tokenizing import DetokenizeFields, TokenizeFields, Tokenizing, TokenizingEndpoint

_METHODS = ("GET", "POST")
_APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
_BODIES: Mapping[str, type[RequestFields]] = {
    **{api.path: api.fields for api in _APIS},
    COUNT_TOKENS_PATH: ConversationFields,
    "/tokenize": TokenizeFields,
    "/detokenize": DetokenizeFields,
}
HEALTH_TIMEOUT_S = 4.0  # more than ANSWER_TIMEOUT_S, so that another service is asked; less than probes wait


def build_app(
    *,
    client: AsyncClient,
    served_model: ServedModel,
    open_requests: OpenRequests,
    api_keys: ApiKeys,
    registry: CollectorRegistry,
    limits: HttpLimits,
    status: StatusCollector | None,
    tracer: Tracer,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = ("*",),
    status_needs_key: bool = False,
) -> ASGIApp:
    """Builds the whole gateway as an ASGI application. Call it in a running event loop.

    `allowed_hosts` are the hosts that requests may name, beside those of this machine; "*" allows any.
    """
    metrics = GatewayMetrics(registry)
    metrics.watch_requests(num_open=lambda: len(open_requests), num_reading=lambda: open_requests.num_reading)
    health = _GatewayHealth(client, open_requests=open_requests)

    parts = PostParts(served_model=served_model, open_requests=open_requests, metrics=metrics, limits=limits)
    tokenizing = Tokenizing(client)

    async def list_models(_request: Request) -> Response:
        card = await served_model.card()
        return JsonResponse({"object": "list", "data": [card.as_json(name) for name in card.names]})

    async def retrieve_model(request: Request) -> Response:
        card = await served_model.card()
        card.check(request.path_params["model"])
        return JsonResponse(card.as_json(request.path_params["model"]))

    async def tokenizer_info(_request: Request) -> Response:
        card = await served_model.card()
        return JsonResponse({**card.tokenizer, "model_max_length": card.max_context_tokens})

    async def version(_request: Request) -> Response:
        return JsonResponse({"version": package_version("baton-serve")})

    def state() -> Gateway:
        card = served_model.known()
        return Gateway(
            version=package_version("baton-serve"),
            model_names=() if card is None else card.names,
            errors={str(status): count for status, count in sorted(metrics.errors.items())},
        )

    async def openapi(_request: Request) -> Response:
        return JsonResponse(document)

    async def exposition(_request: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    routes = [
        *(Route(api.path, GenerationEndpoint(api, client=client, **parts), methods=["POST"]) for api in _APIS),
        Route(COUNT_TOKENS_PATH, TokenizingEndpoint(tokenizing.count_tokens, **parts), methods=["POST"]),
        Route("/tokenize", TokenizingEndpoint(tokenizing.tokenize, **parts), methods=["POST"]),
        Route("/detokenize", TokenizingEndpoint(tokenizing.detokenize, **parts), methods=["POST"]),
        Route(TOKENIZER_INFO_PATH, tokenizer_info),
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", retrieve_model),
        Route("/health", health.ready),
        Route("/health/live", health.live),
        Route("/health/ready", health.ready),
        Route("/ping", health.ready, methods=["GET", "POST"]),
        Route("/version", version),
        Route("/openapi.json", openapi),
        Route("/metrics", exposition),
        *(() if status is None else status_routes(status, state)),
    ]
    document = openapi_document(routes, bodies=_BODIES, version=package_version("baton-serve"))
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _on_api_error,
            BatonError: _on_baton_error,
            HTTPException: _on_http_exception,
            Exception: _on_mistake,
        },
    )
    app.router.redirect_slashes = False
    checked: ASGIApp = KeyCheck(TracedApp(app, tracer=tracer), api_keys=api_keys, covers_status=status_needs_key)
    checked = _for_origins(checked, cors_origins) if cors_origins else checked
    checked = checked if "*" in allowed_hosts else HostCheck(checked, allowed=allowed_hosts)
    return HttpEdge(checked, metrics=metrics)


def _for_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns `app` in a layer that lets web pages of the given origins call it from a browser.

    Browsers send CORS preflight requests without a key, so they are answered before the key is checked.
    """
    return _Origins(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["request-id", "retry-after", "x-ignored-fields", "x-request-id"],
    )


class _Origins(CORSMiddleware):
    """CORS middleware whose refusals have the JSON shape of all other errors, and a log line with the reason."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ApiError as error:
            await send_error(error, scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answers a CORS preflight request. Raises ApiError for an origin, method or header that is not allowed."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == HTTPStatus.OK:
            return answer
        why = bytes(answer.body).decode()  # for example "Disallowed CORS origin, method"
        message = f"{why}: pages of origins that cors_origins names may call, with {' or '.join(_METHODS)}"
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        raise ApiError(answer.status_code, message, code="origin_not_allowed", headers=kept)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refused(request, error)


async def _on_baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return _refused(request, api_error_of(error, {}))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers a request that the router refuses: its route is unknown, or its method is wrong."""
    assert isinstance(error, HTTPException)
    what, versioned = f"{request.method} {request.url.path}"[:128], f"/v1{request.url.path}"
    ending, code = ("is not served", "unknown_url") if error.status_code == 404 else ("is not allowed", "wrong_method")
    if any(isinstance(route, Route) and route.path == versioned for route in request.app.routes):
        ending = f"is not served, {versioned} is: the base URL ends with /v1"
    elif request.url.path.startswith("/v1/v1/"):
        ending = "is not served: the base URL has /v1 already, to which the client adds another one"
    response = _refused(request, ApiError(error.status_code, f"{what} {ending}", code=code))
    response.headers.update(error.headers or {})
    return response


async def _on_mistake(request: Request, _error: Exception) -> Response:
    return _refused(request, internal())


def _refused(request: Request, error: ApiError) -> Response:
    record: HttpRecord = request.scope["state"]["record"]
    record.error = error
    return error_response(error, record)


class _GatewayHealth:
    def __init__(self, client: AsyncClient, *, open_requests: OpenRequests) -> None:
        self._client = client
        self._open_requests = open_requests

    async def ready(self, _request: Request) -> Response:
        """Answers 200 if a decode service is ready. Answers 503 with the reason if none is, or if this process is
        stopping.
        """
        reason = await self._reason()
        if reason is None:
            return JsonResponse({"status": "ok"})
        return JsonResponse({"status": "unavailable", "reason": reason}, status_code=503)

    async def live(self, _request: Request) -> Response:
        """Answers 200 as long as this process runs."""
        return JsonResponse({"status": "ok"})

    async def _reason(self) -> str | None:
        if self._open_requests.is_draining:
            return "the gateway is stopping"
        try:
            status = await answer_of(self._client.health(READY_SERVICE["decode"], timeout_s=HEALTH_TIMEOUT_S))
        except BatonError as error:
            return f"the decode service cannot be reached: {error}"
        return None if status is HealthStatus.SERVING else "the decode service is not ready"
