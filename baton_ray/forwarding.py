"""Forwards HTTP requests that reach a Serve replica to the gateway process on the same node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx2
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

_CONNECT_TIMEOUT_S = 5.0
# These headers describe one connection, not the message. (RFC 9110, section 7.6.1)
_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)


class Forwarder:
    """Forwards requests to the server at `address`, and its answers back as they come, without a bound on their time.

    Call it on one event loop.
    """

    def __init__(self, address: str) -> None:
        self._origin = f"http://{address}"
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
            follow_redirects=False,
        )
        self._client.headers.clear()  # only the caller's are sent

    async def forward(self, request: Request) -> Response:
        """Returns the server's answer; 502 if it gave none. The answer's body is read while it is sent on.

        An answer that breaks off raises an error while it is sent, so that it breaks off for the caller too.
        """
        query = request.scope["query_string"]
        url = httpx2.URL(self._origin).copy_with(raw_path=_path(request) + (b"?" + query if query else b""))
        has_body = not {"content-length", "transfer-encoding"}.isdisjoint(request.headers)
        asked = self._client.build_request(
            request.method,
            url,
            headers=_end_to_end(request.headers.raw),
            content=request.stream() if has_body else None,
        )
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx2.HTTPError as error:
            why = f"the gateway did not answer: {str(error) or type(error).__name__}"
            return JSONResponse(
                {"error": {"message": why, "type": "server_error", "param": None, "code": "bad_gateway"}}, 502
            )
        response = StreamingResponse(
            _body(answer), status_code=answer.status_code, background=BackgroundTask(answer.aclose)
        )
        # Serve's proxy adds the request's id itself. The gateway takes the same id from the request.
        response.raw_headers = [each for each in _end_to_end(answer.headers.raw) if each[0].lower() != b"x-request-id"]
        return response

    async def close(self) -> None:
        await self._client.aclose()


async def _body(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yields the body as it comes. Closes the connection when the caller stops to read, so that the server notices."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


def _path(request: Request) -> bytes:
    """Returns the path as it was sent, without the application's `route_prefix`, which the gateway knows nothing of."""
    path: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
    prefix = quote(request.scope.get("root_path", "")).encode()
    return path.partition(b"?")[0].removeprefix(prefix) or b"/"


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]
