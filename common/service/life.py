"""The life of a service: it starts, serves, drains and ends.

    serve ─builds─▶ EngineInbox ◀─ edge ◀─ engine ◀─ EngineThread ─┐
                                    └─────────── FrontServer ──────┼─▶ ServiceLife.run
                                                       Watchdog ───┘

`ServiceLife.run` is the one place that defines in which order the parts start and stop, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol

import structlog

from common.config.settings import ServiceSettings
from common.errors import BatonError, EngineLost, EngineStalled
from common.service.engine_thread import EngineThread
from common.service.runtime import Runtime
from common.service.server import FrontServer
from common.service.watchdog import Watchdog
from common.service.work_beside import Work
from common.telemetry.metrics import EngineMetrics

ENGINE_STOP_TIMEOUT_S = 10.0
CLOSE_GRACE_S = 1.0
"""Seconds that the remaining calls get to end before the stopping server cuts them off."""
_A_TURN_S = 0.001
"""A wait within which the event loop handles all that has happened before it. A wait of 0 s would be too short."""

_log = structlog.get_logger(__name__)


class ServiceEdge(Protocol):
    """The network side of a service: its clients' requests, or its peers' calls. Use it from the event loop only."""

    async def open(self) -> None:
        """Begins to look for peers, or to serve their reads of the KV pool. It does not wait for any peer."""

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be served, provided that the engine works."""

    @property
    def num_open(self) -> Mapping[str, int]:
        """How many requests or calls are open. The key is the name under which the log shows the number."""

    def drain(self) -> None:
        """Refuses new requests from now on. A second call does nothing."""

    async def wait_idle(self) -> None:
        """Waits until no request or call is open any more, or until the open ones can no longer end."""

    def fail_all(self, error: BatonError) -> None:
        """Ends all open requests or calls with `error`, because the engine will not end them."""

    def end_rest(self) -> None:
        """Called after the grace period: ends open requests with a reason, or leaves them to the server, which cuts
        them off.
        """

    async def close(self) -> None:
        """Ends the background work that `open` began, within a bounded time."""


class ServiceLife:
    """Starts and stops the parts of a service. The parts that it is given are completely built, and not started.

    `populate` allocates the memory of the engine's KV pool in the background while the service serves.
    """

    def __init__(
        self,
        *,
        settings: ServiceSettings,
        runtime: Runtime,
        metrics: EngineMetrics,
        thread: EngineThread[Any],
        edge: ServiceEdge,
        server: FrontServer,
        populate: Work,
    ) -> None:
        self.thread = thread
        self._settings = settings
        self._runtime = runtime
        self._metrics = metrics
        self._edge = edge
        self._server = server
        self._populate = populate
        self._port = 0
        self._watchdog = Watchdog(
            engine=thread,
            device=runtime.device,
            num_layers_begun=lambda: runtime.model.num_layers_begun,
            ranks=runtime.ranks,
            stall_timeout_s=settings.engine_stall_timeout_s,
        )

    async def run(self, terminated: asyncio.Event, on_serving: Callable[[], None] = lambda: None) -> None:
        """Serves until `terminated` is set, then lets open requests end within the grace period.

        `terminated` is set by SIGTERM or SIGINT, or when the process changes its role. Calls `on_serving` once the
        server listens, unless `terminated` is set by then. If `terminated` is set before the server starts, it does not
        listen at all. If the engine is lost, `run` fails everything that is open and sets `terminated` itself. Raises
        EngineLost if the engine died or hangs, ConfigError if the server cannot listen on its address. Whatever it
        raises, nothing that it started is left, except a lost engine.
        """
        # First, so that metrics say "not ready" while the rest starts.
        self._watch_metrics()
        # Before any command is posted: requests are refused while the engine is not alive.
        self.thread.start()
        try:
            # Before clients connect, so that readiness waits for the peers as briefly as possible.
            await self._edge.open()
            # Signals that arrived while the parts were built are handled now: the loop had no turn until here.
            await asyncio.sleep(_A_TURN_S)
            if terminated.is_set():
                await self._stop_all()
                return
            # From here on clients are answered; health says "not ready".
            self._port = await self._server.start(self._settings.listen)
            _log.info("serving", port=self._port)
            if not terminated.is_set():
                on_serving()
        except BaseException:
            await self._stop_all()
            raise
        # After the server, whose health it sets. The background work begins once the service is ready.
        readiness = asyncio.create_task(self._follow_readiness(), name="readiness")
        # Runs until just before the engine stops, so that an engine that hangs while draining is noticed too.
        watching = asyncio.create_task(self._watchdog.follow(self._on_lost(terminated)), name="watchdog")

        await terminated.wait()

        _log.info("draining", **self._edge.num_open)
        # First of all, so that the number of open requests only falls.
        self._edge.drain()
        # At once: balancers and decode services must not wait for the next readiness poll.
        await self._server.set_ready(False)
        # Open requests end by themselves, as long as the grace period and the engine last.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._edge.wait_idle(), self._grace_s)
        # Before the server stops, so that clients are told why.
        self._edge.end_rest()
        # Before the server stops: it has no health to set any more.
        readiness.cancel()
        # The calls that were ended have a moment to send their answer; then they are cut off.
        await self._server.stop(CLOSE_GRACE_S)
        # After the server: while its calls are open, they may still need the peers.
        await self._edge.close()
        # Before the engine stops, which would look like its death.
        watching.cancel()
        # Without stopping the thread: a lost engine's may hang for ever, and the process ends anyway.
        if self._watchdog.lost is not None:
            raise self._watchdog.lost
        # Last, since all parts above post to the engine.
        await self._stop_engine()

    async def _stop_all(self) -> None:
        """Stops a service that has not begun to serve, in the order of a serving one. Some of its parts may not have
        started. Each part is stopped, even if one before it raises.
        """
        async with AsyncExitStack() as parts:
            parts.push_async_callback(self._stop_engine)
            parts.push_async_callback(self._edge.close)
            parts.push_async_callback(self._server.stop, CLOSE_GRACE_S)

    async def _stop_engine(self) -> None:
        """Stops the engine. One that makes no progress is not waited for. Raises EngineStalled if it did not stop."""
        stop_timeout_s = ENGINE_STOP_TIMEOUT_S if self._watchdog.is_well else 0.0
        if not await asyncio.to_thread(self.thread.stop, stop_timeout_s):
            raise EngineStalled("the engine did not stop")

    @property
    def _grace_s(self) -> float:
        return self._settings.grace_period_s if self._watchdog.lost is None else CLOSE_GRACE_S

    def _watch_metrics(self) -> None:
        self._metrics.watch(
            lambda: self.thread.inbox.load,
            is_ready=lambda: self._server.is_ready,
            grpc_port=lambda: self._port,
            is_fused=lambda: self._runtime.model.runs_program,
            forward_counts=self._runtime.forward_counts,
        )

    async def _follow_readiness(self) -> None:
        await self._server.follow(
            lambda: self._watchdog.is_well and self._edge.is_ready,
            on_ready=lambda: self._runtime.start_beside(self._populate),
        )

    def _on_lost(self, terminated: asyncio.Event) -> Callable[[EngineLost], None]:
        def on_lost(error: EngineLost) -> None:
            self._edge.drain()
            self._edge.fail_all(error)
            terminated.set()

        return on_lost
