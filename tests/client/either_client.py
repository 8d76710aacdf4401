"""Either client, blocking or asynchronous, called in the same way."""

from __future__ import annotations

import asyncio
from typing import Any

from baton import AsyncClient, Client, Event


class EitherClient:
    """A client whose calls are awaited. Those of the blocking one run in a thread, since the test's event loop may have
    to answer them.
    """

    def __init__(self, client: Client | AsyncClient) -> None:
        self._client = client

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        method = getattr(self._client, name)
        if isinstance(self._client, Client):
            return await asyncio.to_thread(method, *arguments, **options)
        return await method(*arguments, **options)

    async def complete(self, prompt: str | None = None, **options: Any) -> Any:
        return await self.call("complete", prompt, **options)

    def generate(
        self, prompt: str | None = None, *, same_server_as: EitherStream | None = None, **options: Any
    ) -> EitherStream:
        if same_server_as is not None:
            options["same_server_as"] = same_server_as.stream
        return EitherStream(self._client.generate(prompt, **options))

    async def events(self, prompt: str | None = None, **options: Any) -> list[Event]:
        return [event async for event in self.generate(prompt, **options)]

    async def close(self) -> None:
        await self.call("close")


class EitherStream:
    """The events of a generation, read asynchronously from either client's stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def progress(self) -> Any:
        return self.stream.progress

    def __aiter__(self) -> EitherStream:
        return self

    async def __anext__(self) -> Event:
        if hasattr(self.stream, "__anext__"):
            return await anext(self.stream)
        event = await asyncio.to_thread(next, self.stream, None)
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        if hasattr(self.stream, "aclose"):
            await self.stream.aclose()
        else:
            self.stream.close()
