"""Fetches a service's metrics page, with limits on time and size."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import httpx2

from common.rpc.bearer_tokens import authorization
from gateway.status.exposition import Exposition, parse_exposition

MAX_BYTES = 256 << 10
"""The largest accepted answer in bytes; services send about 20 KiB."""
MAX_CONNECTIONS = 64


class ScrapeFailed(Exception):
    """A service's metrics could not be fetched. The message says why, in words for the status page."""


class Scraper:
    """Fetches /metrics from services. It ignores proxy settings of the environment and follows no redirect."""

    def __init__(self, *, timeout_s: float, max_bytes: int = MAX_BYTES, token: str = "") -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        shown = dict(authorization(token)) if token else {}
        self._client = httpx2.AsyncClient(
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS),
            trust_env=False,
            follow_redirects=False,
            # A compressed answer could be small and unpack to a huge one.
            headers={"accept": "text/plain", "accept-encoding": "identity", **shown},
        )

    async def scrape(self, address: str) -> Exposition:
        """Fetches and parses the metrics of the service at HOST:PORT, within `timeout_s`. Raises ScrapeFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await self._text(f"http://{address}/metrics")
                return parse_exposition(text)  # takes milliseconds
        except TimeoutError:
            raise ScrapeFailed(f"no whole answer within {self._timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ScrapeFailed(str(error) or type(error).__name__) from error
        except ValueError as error:
            raise ScrapeFailed(f"not Baton's metrics: {error}"[:200]) from error

    async def _text(self, url: str) -> str:
        body = bytearray()
        async with self._client.stream("GET", url) as response:
            if response.status_code != httpx2.codes.OK:
                raise ScrapeFailed(f"answered {response.status_code}")
            async for part in response.aiter_raw():
                body += part
                if len(body) > self._max_bytes:
                    raise ScrapeFailed(f"more than {self._max_bytes} bytes")
        return body.decode()

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
