"""One life of a service: it starts, serves, drains and ends.

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
"""How long calls may take to end once nothing is waited for any more."""

_log = structlog.get_logger(__name__)


class ServiceEdge(Protocol):
    """What a service has open: requests of its clients, or calls of its peers. Event loop only."""

    async def open(self) -> None:
        """Begin to look for peers, or to serve their reads. Waits for none of them."""

    @property
    def is_ready(self) -> bool:
        """Whether what is sent now would be served by an engine that is well."""

    @property
    def num_open(self) -> Mapping[str, int]:
        """How much is open, by the name that it has in the log."""

    def drain(self) -> None:
        """Take nothing new from now on. Further calls do nothing."""

    async def wait_idle(self) -> None:
        """Return when nothing is open, or when what is open cannot end any more."""

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
        """Serve until `terminated` is set, then let what is open end, within the grace period. `run` sets it when the
        engine is lost: all that was open has then been failed.

        Raises EngineLost when the engine died or hangs, ConfigError when the address cannot be had.
        """
        # First, so that metrics say "not ready" while the rest starts.
        self._watch_metrics()
        # Before anybody posts to it: requests are refused while the engine is not alive.
        self.thread.start()
        # Before clients come, so that readiness waits for the peers no longer than it has to.
        await self._edge.open()
        # From here on clients are answered; health says "not ready".
        port = await self._server.start(self._settings.listen)
        _log.info("serving", port=port)
        # After the server, whose health it sets. The work beside serving begins when it is ready the first time.
        readiness = asyncio.create_task(self._follow_readiness(), name="readiness")
        # It goes on until just before the engine stops: an engine that hangs while it drains is noticed too.
        watching = asyncio.create_task(self._watchdog.follow(self._on_lost(terminated)), name="watchdog")

        await terminated.wait()

        _log.info("draining", **self._edge.num_open)
        # First of all, so that what is open only becomes less.
        self._edge.drain()
        # At once: balancers and decode services must not wait for the next look.
        await self._server.set_ready(False)
        # What is open ends by itself, for as long as the grace period or the engine lasts.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._edge.wait_idle(), self._grace_s)
        # Before the server stops, so that clients are told why.
        self._edge.end_rest()
        # Before the server stops: it has no health to set any more.
        readiness.cancel()
        # Those calls have a moment to be written; then they are cut off.
        await self._server.stop(CLOSE_GRACE_S)
        # After the server: while its calls are open the peers may still be asked something.
        await self._edge.close()
        # Before the engine stops, which would look like its death.
        watching.cancel()
        # Without stopping the thread: that of a lost engine may hang for ever, and the process ends all the same.
        if self._watchdog.lost is not None:
            raise self._watchdog.lost
        # Last, since all parts above post to it. One that stands still is not waited for.
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
