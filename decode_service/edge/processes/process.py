"""The process of an edge: serves clients, for an engine in another process.

    python -m decode_service.edge.processes.process FILE

FILE is the number of an inherited socket to the engine's process. The process ends when nothing has come through it for
too long.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, assert_never, cast

import structlog
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from common.errors import BatonError
from common.grammar.matcher import Matcher
from common.host.descriptors import raise_descriptor_limit
from common.host.link import Link
from common.role import Role
from common.rpc.aio import run
from common.sampling.params import ResolvedSampling
from common.service.engine_thread import EnginePort
from common.service.roles import Roles, RoleState
from common.service.watchdog import UNREADY_AFTER_S
from common.telemetry.logs import configure_logs, only_log_lines
from common.telemetry.stats import EngineLoad
from common.telemetry.timeline import RecordedTrack, Timeline
from common.telemetry.timeline_rpc import OtherTimeline
from common.telemetry.tracing import process_tracer
from common.text.tokenizer import TextTokenizer
from decode_service.edge.assembly import EdgePlan, OpenedEdge, opened_edge
from decode_service.edge.matchers import Matchers
from decode_service.edge.processes.messages import (
    AnswerTo,
    Ask,
    Begin,
    CannotStart,
    ChangeRole,
    EdgeSaid,
    EdgeState,
    EndRecording,
    Events,
    FailAll,
    Listen,
    Listening,
    MakeMatcher,
    NoLonger,
    NothingLive,
    Question,
    Record,
    Stop,
    StopAdmitting,
    ToEdge,
    unpacked,
)
from decode_service.edge.processes.silence import SAYS_EVERY_S, Silence, longest_silence_s
from decode_service.edge.replicas import ReplicaState, ReplicaStates
from decode_service.messages import Command

PROGRAM = "decode_service"

_log = structlog.get_logger(__name__)


class EngineElsewhere(EnginePort[Command], ReplicaStates, Roles, Matchers, OtherTimeline):
    """Stands for the engine's process: knows its last state, and asks it questions."""

    def __init__(self, link: Link, told: EdgeState) -> None:
        self._link = link
        self.told = told
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}

    def post(self, command: Command) -> None:
        self._link.send(command)

    @property
    def load(self) -> EngineLoad:
        return self.told.load

    @property
    def is_alive(self) -> bool:
        return self.told.is_alive

    def states(self) -> Sequence[ReplicaState]:
        return self.told.replicas

    @property
    def state(self) -> RoleState:
        return self.told.role

    async def ask(self, role: Role) -> None:
        state = await self._answer_to(ChangeRole(role))
        self.told = dataclasses.replace(self.told, role=state)

    async def of(self, sampling: ResolvedSampling, output_ids: Sequence[int], *, client: str, tenant: str) -> Matcher:
        return cast(Matcher, await self._answer_to(MakeMatcher(sampling, tuple(output_ids), client, tenant)))

    async def start(self, *, max_events: int) -> None:
        await self._answer_to(Record(max_events))

    async def stop(self) -> Sequence[RecordedTrack]:
        return await asyncio.to_thread(unpacked, await self._answer_to(EndRecording()))

    def answered(self, answer: AnswerTo) -> None:
        asked = self._asked.get(answer.number)
        if asked is None or asked.done():  # nobody waits any more
            return
        if answer.error is None:
            asked.set_result(answer.value)
        else:
            asked.set_exception(answer.error)

    async def _answer_to(self, question: Question) -> Any:
        number = next(self._numbers)
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        self._link.send(Ask(number, question))
        try:
            return await answer
        except asyncio.CancelledError:
            self._link.send(NoLonger(number))
            raise
        finally:
            del self._asked[number]


class _RunningEdge:
    """An edge that obeys the engine's process. While that process is silent for long, the edge is not ready and refuses
    requests.
    """

    def __init__(
        self,
        link: Link,
        *,
        engine: EngineElsewhere,
        opened: OpenedEdge,
        registry: CollectorRegistry,
        stall_timeout_s: float,
    ) -> None:
        self._link = link
        self._engine = engine
        self._silence = Silence()
        self._longest_silence_s = longest_silence_s(stall_timeout_s)
        self._live_requests = opened.live_requests
        self._server = opened.server
        self._registry = registry
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Returns when it was stopped. Raises EOFError if the engine's process has ended."""
        self._tasks.append(asyncio.create_task(self._say_from_time_to_time(), name="say"))
        try:
            while True:
                message: ToEdge = await self._link.receive()
                self._silence.heard()
                if isinstance(message, Stop):
                    self._is_stopping = True
                    await self._server.stop(message.grace_s)
                    self._say()
                    await self._link.can_send()
                    return
                await self._follow(message)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _follow(self, message: ToEdge) -> None:
        match message:
            case Events():
                for event in message.events:
                    self._live_requests.dispatch(event)
                await asyncio.sleep(0)  # clients get what has come before more is taken
            case EdgeState():
                self._engine.told = message
                await self._server.set_ready(message.is_ready)
            case Listen():
                self._link.send(Listening(await self._server.start(message.address)))
            case AnswerTo():
                self._engine.answered(message)
            case StopAdmitting():
                self._live_requests.drain()
                self._tasks.append(asyncio.create_task(self._say_when_idle(), name="idle"))
            case FailAll():
                self._live_requests.fail_all(message.error)
            case Begin() | Stop():
                raise AssertionError(message)
            case _:
                assert_never(message)

    def _say(self) -> None:
        self._link.send(EdgeSaid(tuple(self._registry.collect())))

    async def _say_from_time_to_time(self) -> None:
        while True:
            self._say()
            await asyncio.sleep(SAYS_EVERY_S)
            if not self._is_stopping:
                await self._listen_for_silence()

    async def _listen_for_silence(self) -> None:
        silent_s = self._silence.look()
        if silent_s > self._longest_silence_s:
            _log.critical("engine_process_silent", silent_s=round(silent_s, 1))
            os._exit(1)
        if silent_s > UNREADY_AFTER_S:
            self._engine.told = dataclasses.replace(self._engine.told, is_alive=False)
            await self._server.set_ready(False)

    async def _say_when_idle(self) -> None:
        await self._live_requests.wait_idle()
        self._link.send(NothingLive())


async def _serve(end: socket.socket) -> None:
    link = await Link.on(end)
    begin = await link.receive()
    assert isinstance(begin, Begin)
    plan = begin.plan
    settings = plan.settings
    configure_logs(
        settings.log_level,
        settings.log_format,
        service=PROGRAM,
        instance_id=plan.instance_id,
        edge=str(begin.number),
    )
    try:
        with process_tracer(settings, service=PROGRAM, instance_id=plan.instance_id) as tracer:
            await _run(link, plan, tracer)
    except BatonError as error:
        link.send(CannotStart(error))
        await link.can_send()
    link.close()


async def _run(link: Link, plan: EdgePlan, tracer: Tracer) -> None:
    told = await link.receive()
    assert isinstance(told, EdgeState)
    engine, registry = EngineElsewhere(link, told), CollectorRegistry()
    async with opened_edge(
        plan,
        engine=engine,
        new_matchers=lambda _: engine,
        replicas=engine,
        roles=engine,
        tokenizer=TextTokenizer.from_directory(plan.directory),
        registry=registry,
        tracer=tracer,
        timeline=Timeline(),
        other_timeline=engine,
    ) as opened:
        edge = _RunningEdge(
            link,
            engine=engine,
            opened=opened,
            registry=registry,
            stall_timeout_s=plan.settings.engine_stall_timeout_s,
        )
        await edge.run()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine's process stops this one in order
    raise_descriptor_limit()
    with only_log_lines(), suppress(EOFError):  # the engine's process ends, and so does this one
        run(_serve(socket.socket(fileno=int(sys.argv[1]))))
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end would take a second


if __name__ == "__main__":
    main()
