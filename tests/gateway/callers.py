"""Wraps the two clients of the `openai` package, blocking and asynchronous, so that tests call both in the same way."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import openai

from tests.gateway.gateway_here import GatewayHere

MODEL = "tiny"


class Caller(Protocol):
    async def chat(self, **options: Any) -> Any: ...

    async def chat_chunks(self, **options: Any) -> list[Any]: ...

    async def complete(self, **options: Any) -> Any: ...

    async def completion_chunks(self, **options: Any) -> list[Any]: ...


class BlockingCaller:
    def __init__(self, gateway: GatewayHere) -> None:
        self._client = gateway.openai()

    async def chat(self, **options: Any) -> Any:
        return await asyncio.to_thread(self._client.chat.completions.create, **{"model": MODEL, **options})

    async def chat_chunks(self, **options: Any) -> list[Any]:
        return await asyncio.to_thread(lambda: list(self._stream(self._client.chat.completions, options)))

    async def complete(self, **options: Any) -> Any:
        return await asyncio.to_thread(self._client.completions.create, **{"model": MODEL, **options})

    async def completion_chunks(self, **options: Any) -> list[Any]:
        return await asyncio.to_thread(lambda: list(self._stream(self._client.completions, options)))

    def _stream(self, api: Any, options: dict[str, Any]) -> Any:
        return api.create(**{"model": MODEL, "stream": True, **options})


class AsyncCaller:
    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def chat(self, **options: Any) -> Any:
        return await self._client.chat.completions.create(**{"model": MODEL, **options})

    async def chat_chunks(self, **options: Any) -> list[Any]:
        return [chunk async for chunk in await self._stream(self._client.chat.completions, options)]

    async def complete(self, **options: Any) -> Any:
        return await self._client.completions.create(**{"model": MODEL, **options})

    async def completion_chunks(self, **options: Any) -> list[Any]:
        return [chunk async for chunk in await self._stream(self._client.completions, options)]

    async def _stream(self, api: Any, options: dict[str, Any]) -> Any:
        return await api.create(**{"model": MODEL, "stream": True, **options})
