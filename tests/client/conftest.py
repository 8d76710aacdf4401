from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from baton import AsyncClient, Client
from baton.client import asynchronous, blocking, generation
from tests.client.either_client import EitherClient
from tests.client.scripted_inference import ScriptedServer


@pytest.fixture(autouse=True)
def servers_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small call may take ten seconds in all, so nine still let it wait for the head of an answer first."""
    for module in (asynchronous, blocking, generation):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 9.0)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture
async def async_client(server: ScriptedServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as client:
        yield client


@pytest.fixture(params=[Client, AsyncClient])
async def open_client(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., EitherClient]]:
    """A function that opens a client of either kind."""
    opened: list[EitherClient] = []

    def open_client(address: str, **options: Any) -> EitherClient:
        opened.append(EitherClient(request.param(address, **options)))
        return opened[-1]

    yield open_client
    for client in opened:
        await client.close()


@pytest.fixture
async def either(open_client: Callable[..., EitherClient], server: ScriptedServer) -> EitherClient:
    return open_client(server.address)
