from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from baton import AsyncClient, Client
from tests.client.scripted_inference import ScriptedServer


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
