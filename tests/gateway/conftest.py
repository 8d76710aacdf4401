from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton import Client
from baton.client import asynchronous, generation
from baton.local_pair import LocalPair
from gateway import app
from gateway.status import collector
from tests.client.scripted_inference import ScriptedServer
from tests.gateway.callers import Caller
from tests.gateway.gateway_here import GatewayHere, gateway_here
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import running_pair

START_BOUND_S = 100.0


@pytest.fixture(autouse=True)
def services_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (asynchronous, generation):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", START_BOUND_S)
    monkeypatch.setattr(app, "HEALTH_TIMEOUT_S", START_BOUND_S)
    monkeypatch.setattr(collector, "TIMEOUT_S", START_BOUND_S)


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    """The event loop of the gateways."""
    thread = LoopThread(bound_s=START_BOUND_S)
    yield thread
    thread.close()


@pytest.fixture
def own_loop() -> Iterator[LoopThread]:
    """An event loop of one test's own, which may skip time."""
    thread = LoopThread(bound_s=START_BOUND_S)
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[Client]:
    """A client of the decode service of a real pair, whose model writes reasoning and calls in the Hermes format.

    The services are processes of their own: they live until the last test, and tests of other folders replace parts of
    engines in the test's process.
    """
    # Answers are compared more closely than operators and fused kernels agree.
    shared_args = ["--max-kv-tokens=8192", "--disabled-fast-paths=fused_forwards"]
    decode_args = ["--output-format=hermes"]
    with running_pair(
        tiny_model_dir("llama"), kind=forked, shared_args=shared_args, decode_args=decode_args
    ) as running:
        yield running.client


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
