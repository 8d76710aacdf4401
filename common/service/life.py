"""One life of a service: it starts, serves, drains, and ends with a reason or without one.

    serve ─builds─▶ EngineInbox ◀─ edge ◀─ engine ◀─ EngineThread ─┐
                                    └──────── ServiceServer ───────┼─▶ ServiceLife.run
                                                       Watchdog ───┘

`ServiceLife.run` is the one place that says in which order the parts start and stop, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import structlog

from common.config.settings import ServiceSettings
from common.errors import BatonError, EngineLost, EngineStalled
from common.service.engine_thread import EngineThread
from common.service.program import termination_signals
from common.service.runtime import Runtime
from common.service.server import ServiceServer
from common.service.watchdog import Watchdog
from common.service.work_beside import Work
from common.telemetry.engine_metrics import EngineMetrics

ENGINE_STOP_TIMEOUT_S = 10.0
CLOSE_GRACE_S = 1.0
"""How long what ends by itself may take once nothing is waited for any more."""

_log = structlog.get_logger(__name__)


class ServiceEdge(Protocol):
    """What a service has open: requests of its clients, or calls of its peers. Event loop only."""

    async def open(self) -> None:
        """Begin what posts to the engine or is of use to clients only later. Waits for nobody."""

    @property
    def is_ready(self) -> bool:
        """Whether what is sent now would be served by an engine that is well."""

    @property
    def num_open(self) -> Mapping[str, int]:
        """How much is open, by the name that it has in the log."""

    def drain(self) -> None:
        """Take nothing new from now on. Further calls do nothing."""

    async def wait_idle(self) -> None:
        """Return when nothing is open, or nothing that is can end any more."""

    def fail_all(self, error: BatonError) -> None:
        """End all that is open with `error`: the engine will end nothing."""

    def end_rest(self) -> None:
        """The grace period is over: end what is open with a reason, or leave it to the server's end."""

    async def close(self) -> None:
        """End what `open` began. Bounded in time."""


class ServiceLife:
    """The parts of a service, each complete, and their one life. `populate` is the engine's pool's, beside serving."""

    def __init__(
        self,
        *,
        settings: ServiceSettings,
        runtime: Runtime,
        metrics: EngineMetrics,
        thread: EngineThread[Any],
        edge: ServiceEdge,
        server: ServiceServer,
        populate: Work,
    ) -> None:
        self.thread = thread
        self._settings = settings
        self._runtime = runtime
        self._metrics = metrics
        self._edge = edge
        self._server = server
        self._populate = populate
        self._watchdog = Watchdog(
            engine=thread,
            device=runtime.device,
            num_layers_begun=lambda: runtime.model.num_layers_begun,
            stall_timeout_s=settings.engine_stall_timeout_s,
        )

    async def run_until_signalled(self) -> None:
        """`run`, ended by the first SIGTERM or SIGINT."""
        with termination_signals() as terminated:
            await self.run(terminated)

    async def run(self, terminated: asyncio.Event) -> None:
        """Serve until `terminated` is set, then let what is open end, within the grace period. Sets it itself when the
        engine is lost: all that was open has then been failed.

        Raises EngineLost when the engine died or hangs, ConfigError when the address cannot be had.
        """
        # Nobody asks before the parts are complete, and metrics are scraped at any time.
        self._watch_metrics()
        # The engine runs before whoever posts to it: a request that is taken before is refused as if it had died.
        self.thread.start()
        # Peers are looked for before clients come, so that readiness waits no longer than it has to.
        await self._edge.open()
        # From here on clients are answered, with "not ready" first.
        port = await self._server.start(self._settings.listen)
        _log.info("serving", port=port)
        # There is a server to tell it now; the work beside serving begins when it is ready.
        readiness = asyncio.create_task(self._follow_readiness(), name="readiness")
        # Until the engine is about to stop: what hangs while it drains is noticed too.
        watching = asyncio.create_task(self._watchdog.follow(self._on_lost(terminated)), name="watchdog")

        await terminated.wait()

        _log.info("draining", **self._edge.num_open)
        # First of all, so that what is open only becomes less.
        self._edge.drain()
        # At once: balancers and decode services must not wait for the next look.
        await self._server.set_ready(False)
        # What is open ends by itself while there is an engine.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._edge.wait_idle(), self._grace_s)
        # While the server is there to write why.
        self._edge.end_rest()
        # Before the server, which it would tell.
        readiness.cancel()
        # The last words are written; what is open still is cut off.
        await self._server.stop(CLOSE_GRACE_S)
        # After the clients, whose requests come from the peers.
        await self._edge.close()
        # An engine that is told to stop does not move, and that is no stall.
        watching.cancel()
        # The thread of an engine that is lost may hang for ever: the process ends without it.
        if self._watchdog.lost is not None:
            raise self._watchdog.lost
        # Last, as all above post to it. One that stands still is not waited for.
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
