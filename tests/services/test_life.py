"""Tests of the order in which a service's parts start and stop, whatever ends the service. Fakes of the parts record
the calls they get.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from prometheus_client import CollectorRegistry

from common.config.settings import DecodeSettings
from common.errors import BatonError, ConfigError, EngineLost, EngineStalled
from common.service.engine_thread import EngineInbox
from common.service.life import ServiceLife
from common.service.program import termination_signals
from common.telemetry.metrics import EngineMetrics
from tests.support.scripted_device import ScriptedDevice

BOUND_S = 60.0


class Thread:
    """A fake EngineThread."""

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps
        self.inbox: EngineInbox[str] = EngineInbox()
        self.is_alive = False
        self.death: BaseException | None = None
        self.is_stepping = False
        self.num_steps_begun = 0
        self.ends = True

    def start(self) -> None:
        self._steps.append("engine starts")
        self.is_alive = True

    def stop(self, _timeout_s: float) -> bool:
        self._steps.append("engine stops")
        return self.ends

    def die(self) -> None:
        self.death, self.is_alive = RuntimeError("cursed"), False


class Server:
    """A fake ServiceServer. It polls readiness until the service is ready."""

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps
        self.is_ready = False
        self.serves = asyncio.Event()
        self.while_starting: Callable[[], None] = lambda: None

    async def start(self, _address: str) -> int:
        self.while_starting()
        self._steps.append("server listens")
        return 1

    async def set_ready(self, is_ready: bool) -> None:
        self._steps.append("ready" if is_ready else "not ready")
        self.is_ready = is_ready

    async def follow(self, is_ready: Callable[[], bool], *, on_ready: Callable[[], None]) -> None:
        assert is_ready()
        await self.set_ready(True)
        on_ready()
        self.serves.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._steps.append("readiness ends")

    async def stop(self, _grace_s: float) -> None:
        await asyncio.sleep(0)  # lets the cancelled task end
        self._steps.append("server stops")


class Edge:
    """A fake ServiceEdge."""

    is_ready = True
    num_open: ClassVar = {"num_things": 1}

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self.failed_with: list[BatonError] = []
        self.while_opening: Callable[[], None] = lambda: None
        self.while_closing: Callable[[], None] = lambda: None

    async def open(self) -> None:
        self._steps.append("edge opens")
        self.while_opening()

    def drain(self) -> None:
        self._steps.append("drains")

    async def wait_idle(self) -> None:
        self._steps.append("waits")
        await self.is_idle.wait()

    def fail_all(self, error: BatonError) -> None:
        self._steps.append("fails all")
        self.failed_with.append(error)
        self.is_idle.set()

    def end_rest(self) -> None:
        self._steps.append("ends the rest")

    async def close(self) -> None:
        self._steps.append("edge closes")
        self.while_closing()


class Parts:
    """Fakes of all parts. `steps` lists the calls they got, in order."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.thread, self.server, self.edge = Thread(self.steps), Server(self.steps), Edge(self.steps)
        self.runtime = SimpleNamespace(
            device=ScriptedDevice(),
            model=SimpleNamespace(num_layers_begun=0, runs_program=False),
            ranks=None,
            forward_counts={},
            start_beside=lambda populate: populate(lambda: None),
        )
        self.registry = CollectorRegistry()


@pytest.fixture
def parts() -> Parts:
    return Parts()


def life_of(parts: Parts, *, grace_period_s: float = BOUND_S) -> ServiceLife:
    return ServiceLife(
        settings=DecodeSettings(grace_period_s=grace_period_s),
        runtime=cast(Any, parts.runtime),
        metrics=EngineMetrics(parts.registry),
        thread=cast(Any, parts.thread),
        edge=parts.edge,
        server=cast(Any, parts.server),
        populate=lambda _check: parts.steps.append("populates"),
    )


async def live(parts: Parts, end: Callable[[asyncio.Event], None], *, grace_period_s: float = BOUND_S) -> None:
    """Runs a service from start to end. `end` is called once it serves."""
    terminated = asyncio.Event()
    running = asyncio.create_task(life_of(parts, grace_period_s=grace_period_s).run(terminated))
    async with asyncio.timeout(BOUND_S):
        await parts.server.serves.wait()
        end(terminated)
        await running


STARTS = ["engine starts", "edge opens", "server listens", "ready", "populates"]
DRAINS = ["drains", "not ready", "waits", "ends the rest", "readiness ends", "server stops", "edge closes"]


async def test_parts_start_in_one_order_and_stop_in_another(parts: Parts) -> None:
    await live(parts, lambda terminated: terminated.set())
    assert parts.steps == [*STARTS, *DRAINS, "engine stops"]
    assert not parts.edge.failed_with


async def test_metrics_tell_the_port_once_the_server_listens(parts: Parts) -> None:
    ports = []
    parts.server.while_starting = lambda: ports.append(parts.registry.get_sample_value("baton_grpc_port"))

    def end(terminated: asyncio.Event) -> None:
        ports.append(parts.registry.get_sample_value("baton_grpc_port"))
        terminated.set()

    await live(parts, end)
    assert ports == [0, 1]


async def test_what_does_not_end_is_waited_for_as_long_as_the_grace_period(parts: Parts) -> None:
    parts.edge.is_idle.clear()
    await live(parts, lambda terminated: terminated.set(), grace_period_s=0.01)
    assert parts.steps == [*STARTS, *DRAINS, "engine stops"]


async def test_an_engine_that_is_lost_fails_all_and_its_thread_is_not_waited_for(parts: Parts) -> None:
    with pytest.raises(EngineLost, match=r"^the engine died: RuntimeError: cursed$") as lost:
        await live(parts, lambda _terminated: parts.thread.die())
    assert parts.steps == [*STARTS, "drains", "fails all", *DRAINS]
    assert parts.edge.failed_with == [lost.value]


async def test_an_engine_that_is_lost_while_it_drains_ends_the_wait(parts: Parts) -> None:
    parts.edge.is_idle.clear()

    def end(terminated: asyncio.Event) -> None:
        terminated.set()
        asyncio.get_running_loop().call_later(0.01, parts.thread.die)

    with pytest.raises(EngineLost):
        await live(parts, end)
    assert parts.steps == [*STARTS, *DRAINS[:3], "drains", "fails all", *DRAINS[3:]]


async def test_an_engine_that_does_not_stop_is_told(parts: Parts) -> None:
    parts.thread.ends = False
    with pytest.raises(EngineStalled, match="did not stop"):
        await live(parts, lambda terminated: terminated.set())
    assert parts.steps[-1] == "engine stops"


def fail() -> None:
    raise ConfigError("listen: it is taken")


async def test_a_part_that_cannot_start_stops_those_that_have(parts: Parts) -> None:
    parts.server.while_starting = fail
    parts.edge.while_closing = fail  # which keeps no other part from stopping
    with pytest.raises(ConfigError, match="it is taken"):
        await life_of(parts).run(asyncio.Event())
    assert parts.steps == [*STARTS[:2], "server stops", "edge closes", "engine stops"]


async def test_a_service_that_has_to_leave_before_it_listens_does_not_serve(parts: Parts) -> None:
    terminated = asyncio.Event()
    parts.edge.while_opening = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with termination_signals(terminated.set):
        await life_of(parts).run(terminated, on_serving=lambda: parts.steps.append("serves"))
    assert parts.steps == [*STARTS[:2], "server stops", "edge closes", "engine stops"]


async def test_a_service_that_has_to_leave_while_it_begins_to_listen_drains_at_once(parts: Parts) -> None:
    terminated = asyncio.Event()
    parts.server.while_starting = terminated.set
    await life_of(parts).run(terminated, on_serving=lambda: parts.steps.append("serves"))
    assert parts.steps[:4] == [*STARTS[:3], "drains"] and parts.steps[-1] == "engine stops"
    assert "serves" not in parts.steps
