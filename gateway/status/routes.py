"""Serves the status page and its JSON data over HTTP."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.status.collector import StatusCollector
from gateway.status.document import Document
from gateway.status.snapshot import Gateway

_INLINE = {kind: re.compile(f"<{kind}>(.*?)</{kind}>", re.DOTALL) for kind in ("script", "style")}


def status_routes(collector: StatusCollector, gateway: Callable[[], Gateway]) -> list[Route]:
    """Returns the routes of the status page: `/` is the page, `/status.json` a `Snapshot` beside the state that
    `gateway` returns. Neither may be cached.
    """
    page = importlib.resources.files("gateway.status").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "cache-control": "no-store",
        "content-security-policy": content_security_policy(page),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def show(_request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    async def figures(_request: Request) -> Response:
        document = Document.beside(gateway(), await collector.first_look())
        return Response(document, media_type="application/json", headers=headers)

    return [Route("/", show), Route("/status.json", figures)]


def content_security_policy(page: str) -> str:
    """Returns the page's Content-Security-Policy.

    It allows the page's own script and style, by their hashes, and requests to its own origin; nothing else.
    """
    allowed = "; ".join(f"{kind}-src {_hashes(kind, page)}" for kind in _INLINE)
    return (
        f"default-src 'none'; {allowed}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(kind: str, page: str) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in _INLINE[kind].findall(page))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
