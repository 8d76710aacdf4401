"""Both services in this process, on the test's event loop, with target models whose forwards can be made to hang."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from baton import errors
from baton.client import AsyncClient
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from common.attention.backend import ForwardInput
from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings
from common.errors import EngineLost
from common.service.life import ServiceLife
from common.service.process import Process
from common.service.roles import RoleSwitch
from common.service.runtime import open_runtime
from common.telemetry.tracing import NO_TRACER
from decode_service import main as decode_main
from prefill_service import main as prefill_main
from tests.support.faulty_target import FaultyTarget
from tests.support.free_ports import free_address

BOUND_S = 60.0
LOOK_INTERVAL_S = 0.01


class Hang:
    """Makes forwards hang. After `arm` every forward blocks until `release`, like a kernel that never ends."""

    def __init__(self) -> None:
        self._is_armed = threading.Event()
        self._has_begun = threading.Event()
        self._is_released = threading.Event()

    def arm(self) -> None:
        self._is_armed.set()

    def release(self) -> None:
        self._is_released.set()

    async def begun(self) -> None:
        await until(self._has_begun.is_set)

    def __call__(self, _batch: ForwardInput) -> bool:
        if self._is_armed.is_set():
            self._has_begun.set()
            assert self._is_released.wait(2 * BOUND_S)
        return False


@dataclass
class ServiceHere:
    """A service that runs in this process. `terminated.set()` acts as SIGTERM, `serving` is the task that runs `serve`,
    and `model` can be made to fail.
    """

    address: str
    client: AsyncClient
    ready_service: str
    serving: asyncio.Task[None]
    hang: Hang
    model: FaultyTarget
    terminated: asyncio.Event
    lives: list[ServiceLife]
    registry: CollectorRegistry

    async def health(self, service: str | None = None) -> HealthStatus | None:
        """Returns the health of the named service, by default of `ready_service`, or None while nothing answers."""
        try:
            return await self.client.health(self.ready_service if service is None else service)
        except errors.Unavailable:
            return None

    async def turns(self, status: HealthStatus) -> None:
        async with asyncio.timeout(BOUND_S):
            while await self.health() is not status:  # noqa: ASYNC110 - it can only be looked at
                await asyncio.sleep(LOOK_INTERVAL_S)

    async def lost(self) -> EngineLost:
        """Waits for `serve` to end because its engine was lost, and returns that error."""
        with pytest.raises(EngineLost) as raised:
            async with asyncio.timeout(BOUND_S):
                await self.serving
        return raised.value


@asynccontextmanager
async def serving_here(
    main: ModuleType,
    settings: ServiceSettings,
    ready_service: str,
    *,
    tracer: Tracer = NO_TRACER,
) -> AsyncIterator[ServiceHere]:
    """Runs the service that `main` assembles. If it still runs at the end of the block, it is ended as by SIGTERM."""
    terminated, hang = asyncio.Event(), Hang()
    lives: list[ServiceLife] = []
    runtime = open_runtime(settings)
    model = FaultyTarget(runtime.model)
    model.fails = hang
    process = Process(
        instance_id=ready_service,
        runtime=dataclasses.replace(runtime, model=model),
        registry=CollectorRegistry(),
        switch=RoleSwitch([settings.role]),
        tracer=tracer,
    )

    async def serve() -> None:
        async with main.assembled(settings, process) as life:
            lives.append(life)
            await life.run(terminated)

    serving = asyncio.create_task(serve())
    try:
        async with AsyncClient(settings.listen) as client:
            yield ServiceHere(
                settings.listen, client, ready_service, serving, hang, model, terminated, lives, process.registry
            )
    finally:
        hang.release()
        terminated.set()
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(serving, return_exceptions=True)
        await asyncio.to_thread(runtime.close)
        for life in lives:  # a real process would end with its lost engine
            assert await asyncio.to_thread(life.thread.stop, BOUND_S)


@dataclass(frozen=True)
class PairHere:
    prefill: ServiceHere
    decode: ServiceHere


TracerOf = Callable[[ServiceSettings, str], Tracer]
"""A function that returns the tracer for a service's settings and its program's name."""


@asynccontextmanager
async def pair_here(
    model: Path,
    *,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    tracer_of: TracerOf = lambda settings, program: NO_TRACER,
    **shared: Any,
) -> AsyncIterator[PairHere]:
    """Runs both services on free ports, and yields them once they are ready. `prefill`, `decode` and `shared` are
    settings added to those of a small service.
    """
    common = {
        "model": str(model),
        "dtype": "float32",
        "num_threads": 1,
        "max_kv_tokens": 4096,
        "debug_checks": True,
        **shared,
    }
    prefill_settings = PrefillSettings(listen=free_address(), **{**common, **(prefill or {})})
    decode_settings = DecodeSettings(
        listen=free_address(),
        prefill=(prefill_settings.listen,),
        **{"local_prefill_tokens": 0, **common, **(decode or {})},
    )
    async with (
        serving_here(
            prefill_main,
            prefill_settings,
            READY_SERVICE["prefill"],
            tracer=tracer_of(prefill_settings, "prefill_service"),
        ) as first,
        serving_here(
            decode_main,
            decode_settings,
            READY_SERVICE["decode"],
            tracer=tracer_of(decode_settings, "decode_service"),
        ) as second,
    ):
        await second.turns(HealthStatus.SERVING)
        yield PairHere(first, second)


async def until(condition: Callable[[], bool], *, bound_s: float = BOUND_S) -> None:
    async with asyncio.timeout(bound_s):
        while not condition():  # noqa: ASYNC110 - threads set it
            await asyncio.sleep(LOOK_INTERVAL_S)
