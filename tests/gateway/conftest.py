from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton import Client
from common.config.fast_paths import FastPath
from tests.client.scripted_inference import ScriptedServer
from tests.gateway.callers import Caller
from tests.gateway.gateway_here import GatewayHere, gateway_here
from tests.support.loop_thread import LoopThread
from tests.support.services_here import pair_here

START_BOUND_S = 100.0


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    """The event loop of the gateways and of the services of `pair`."""
    thread = LoopThread(bound_s=START_BOUND_S)
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def pair(loop: LoopThread, tiny_model_dir: Callable[[str], Path]) -> Iterator[Client]:
    """A client of the decode service of a real pair, whose model writes reasoning and calls in the Hermes format."""
    stack = AsyncExitStack()

    async def start() -> str:
        # Answers are compared more closely than operators and fused kernels agree.
        settings = {"max_kv_tokens": 8192, "disabled_fast_paths": (FastPath.FUSED_FORWARDS,)}
        services = pair_here(tiny_model_dir("llama"), decode={"output_format": "hermes"}, **settings)
        pair = await stack.enter_async_context(services)
        return pair.decode.address

    try:
        with Client(loop.run(start())) as client:
            yield client
    finally:
        loop.run(stack.aclose())


@pytest.fixture(scope="session")
def gateway(loop: LoopThread, pair: Client) -> Iterator[GatewayHere]:
    """A gateway in front of the real pair, which serves its model as "tiny"."""
    with gateway_here(loop, pair.address, served_model_name="tiny") as here:
        yield here


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def edge(loop: LoopThread, scripted: ScriptedServer) -> Iterator[GatewayHere]:
    """A gateway in front of a decode service whose answers the test writes. Its model is "demo"."""
    with gateway_here(loop, scripted.address) as here:
        yield here


@pytest.fixture
def caller(gateway: GatewayHere) -> Caller:
    return Caller(gateway.openai())
