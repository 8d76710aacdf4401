"""The engine's side of edges in processes of their own: starts, feeds, watches and stops them.

    clients ──▶ edge 1 ──commands──▶ EdgeProcesses ──▶ EngineInbox ──▶ engine
    clients ──▶ edge 2 ◀──events──── EdgeProcesses ◀── EventRouter ◀── engine

All edges listen on one port, and the kernel gives each connection to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import structlog
from prometheus_client import CollectorRegistry

from common.addresses import address_of, host_and_port, why_not_listen
from common.errors import BatonError, ConfigError, EngineFault, StartupError
from common.grammar.matcher import Matcher
from common.host.child_process import Child
from common.host.link import Link, start_linked
from common.sampling.params import TokenLogprobs
from common.service.engine_thread import EnginePort
from common.service.roles import Roles
from common.service.server import FrontServer
from common.telemetry.timeline import Recording, Timeline
from decode_service.edge.assembly import EdgePlan
from decode_service.edge.decode_edge import UnreadEvents
from decode_service.edge.live_requests import AllLiveRequests
from decode_service.edge.matchers import Matchers
from decode_service.edge.processes.edge_metrics import EdgeMetrics
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
    FromEdge,
    HeldMatcher,
    Listen,
    Listening,
    MakeMatcher,
    NoLonger,
    NothingLive,
    Record,
    Stop,
    StopAdmitting,
    packed,
)
from decode_service.edge.processes.silence import SAYS_EVERY_S, Silence, longest_silence_s
from decode_service.edge.replicas import ReplicaStates
from decode_service.messages import (
    Abort,
    Command,
    Event,
    Failed,
    FinishAtStop,
    Finished,
    PhaseBegan,
    PromptScored,
    RequestEvent,
    RowTaken,
    Submit,
    Tokens,
)

START_TIMEOUT_S = 60.0
HELD_S = 60.0
LONGEST_SILENCE_S = 10.0
"""For how long an edge may say nothing. It waits for no device, and meanwhile the kernel gives it connections."""
_TELL_INTERVAL_S = 0.1
_RESTART_S = 1.0
_END_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _EdgeProcess:
    """One process of an edge. Events wait in `unread` until the process takes them, and matchers wait in `held` for
    their requests.

    `live` has the engine's ids of the edge's requests. `listening` gets the port, or the error that prevents listening.
    `told` is the last state sent, at `told_s`.
    """

    number: int
    process: Child
    link: Link
    listening: asyncio.Future[int]
    silence: Silence = field(default_factory=lambda: Silence(patience_s=START_TIMEOUT_S))
    told: EdgeState | None = None
    told_s: float = 0.0
    unread: UnreadEvents = field(default_factory=UnreadEvents)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    live: set[str] = field(default_factory=set)
    held: dict[int, Matcher] = field(default_factory=dict)
    answering: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    recorded_for: int | None = None  # the number of the Ask for which the timeline is recorded


class EdgeProcesses(AllLiveRequests, FrontServer):
    """The edges of an engine in `num` processes. Use it on the event loop only, inside an `async with`.

    An edge that ends, or says nothing for `longest_silence_s`, but at most LONGEST_SILENCE_S, is replaced, and its
    requests are aborted. Entering the context starts the processes.
    """

    def __init__(
        self,
        plan: EdgePlan,
        *,
        num: int,
        engine: EnginePort[Command],
        matchers: Matchers,
        replicas: ReplicaStates,
        roles: Roles,
        timeline: Timeline,
        registry: CollectorRegistry,
        stall_timeout_s: float,
    ) -> None:
        self._plan = plan
        self._num = num
        self._engine = engine
        self._matchers = matchers
        self._replicas = replicas
        self._roles = roles
        self._timeline = timeline
        self._longest_silence_s = min(longest_silence_s(stall_timeout_s), LONGEST_SILENCE_S)
        self._metrics = EdgeMetrics()
        registry.register(self._metrics)
        self._edges: dict[int, _EdgeProcess] = {}
        self._owners: dict[str, _EdgeProcess] = {}
        self._address: str | None = None
        self._is_ready = False
        self._is_draining = False
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        try:
            for number in range(1, self._num + 1):
                edge = await self._begin(number)
                self._tasks.append(asyncio.create_task(self._keep(edge), name=f"edge-{number}"))
        except BaseException:
            await self.__aexit__()
            raise
        self._tasks.append(asyncio.create_task(self._tell_from_time_to_time(), name="tell-edges"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for edge in self._edges.values():
            edge.process.kill()
            edge.process.wait()
            self._abandon(edge)

    # ---- as the requests that are open ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def dispatch(self, event: RequestEvent) -> None:
        match event:
            case Tokens():
                for edge, tokens in self._by_edge(event):
                    self._give(edge, tokens)
            case PhaseBegan() | RowTaken() | PromptScored():
                if (owner := self._owners.get(event.request_id)) is not None:
                    self._give(owner, event)
            case Finished() | Failed():
                if (owner := self._owners.get(event.request_id)) is not None:
                    self._forget(event.request_id)
                    self._give(owner, event)

    def fail_all(self, error: BatonError) -> None:
        for edge in self._edges.values():
            edge.link.send(FailAll(error))

    def drain(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            for edge in self._edges.values():
                edge.link.send(StopAdmitting())

    async def wait_idle(self) -> None:
        for number in range(1, self._num + 1):
            await self._edges[number].is_idle.wait()

    # ---- as the server ----------------------------------------------------------------------------------------------

    async def start(self, address: str) -> int:
        if reason := why_not_listen(address):  # edges would share the port with another service's
            raise ConfigError(f"listen: cannot listen on {address}: {reason}")
        host, _ = host_and_port(address)
        first, *others = self._edges.values()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                first.link.send(Listen(address))
                port = await asyncio.shield(first.listening)
                self._address = address_of(host, port)  # from now on an edge that is replaced listens by itself
                for edge in others:
                    edge.link.send(Listen(self._address))
                for edge in others:
                    await asyncio.shield(edge.listening)
        except TimeoutError:
            raise StartupError(f"edge_processes: not all edges listen within {START_TIMEOUT_S:g} s") from None
        return port

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    async def set_ready(self, is_ready: bool) -> None:
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            self._tell()

    async def stop(self, grace_s: float) -> None:
        self._is_stopping = True
        for edge in self._edges.values():
            edge.link.send(Stop(grace_s))
        ends = [asyncio.to_thread(edge.process.wait, grace_s + _END_TIMEOUT_S) for edge in self._edges.values()]
        await asyncio.gather(*ends, return_exceptions=True)  # those that do not end are killed on leaving the context

    # ---- the processes ----------------------------------------------------------------------------------------------

    async def _begin(self, number: int) -> _EdgeProcess:
        """Starts the process of an edge. Raises StartupError if it cannot be started."""
        try:
            process, link = await start_linked("decode_service.edge.processes.process")
        except OSError as error:
            raise StartupError(f"edge_processes: an edge cannot be started: {error}") from error
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        edge = _EdgeProcess(number, process, link, listening)
        self._edges[number] = edge
        link.send(Begin(self._plan, number))
        self._tell_one(edge)
        if self._address is not None:
            link.send(Listen(self._address))
        if self._is_draining:
            link.send(StopAdmitting())
        return edge

    async def _keep(self, edge: _EdgeProcess) -> None:
        """Serves an edge until it ends, and then starts another one in its place."""
        while True:
            try:
                how = await self._attend(edge)
            except Exception:  # a defect must cost an edge only
                _log.exception("edge_failed", edge=edge.number)
                edge.process.kill()
                how = "failed"
            num_aborted = self._abandon(edge)
            if self._is_stopping:
                return
            _log.error("edge_lost", edge=edge.number, pid=edge.process.pid, how=how, num_requests=num_aborted)
            if (next_edge := await self._replaced(edge)) is None:
                return
            edge = next_edge

    async def _replaced(self, edge: _EdgeProcess) -> _EdgeProcess | None:
        """Returns another edge in place of one that was lost, or None if the service stops. Tries until it can."""
        while True:
            await asyncio.sleep(_RESTART_S)
            if self._is_stopping:
                return None
            try:
                return await self._begin(edge.number)
            except (StartupError, OSError) as error:
                _log.error("edge_not_started", edge=edge.number, error=str(error))

    async def _attend(self, edge: _EdgeProcess) -> str:
        """Reads what the edge sends until it ends. Returns how it ended."""
        feeding = asyncio.create_task(self._feed(edge), name="feed-edge")
        feeding.add_done_callback(partial(_end_starved, edge))
        why = ""
        try:
            while True:
                message: FromEdge = await edge.link.receive()
                if isinstance(message, CannotStart):
                    why = f": {message.error}"
                    if not edge.listening.done():
                        edge.listening.set_exception(message.error)
                        edge.listening.exception()  # also if nobody waits for it
                self._take(edge, message)
        except EOFError:
            code = await asyncio.to_thread(edge.process.wait)
        finally:
            feeding.cancel()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        if not edge.listening.done():
            edge.listening.set_exception(StartupError(f"edge_processes: edge {edge.number} {how}"))
            edge.listening.exception()
        return how + why

    async def _feed(self, edge: _EdgeProcess) -> None:
        """Sends events as fast as the edge takes them. What it does not take is merged."""
        with contextlib.suppress(EOFError):  # `_attend` sees that too
            while True:
                await edge.has_news.wait()
                await edge.link.can_send()
                edge.has_news.clear()
                edge.link.send(Events(_of_requests(edge.unread.take())))

    def _abandon(self, edge: _EdgeProcess) -> int:
        """Aborts the requests of an edge that has ended, and frees what was kept for it. Returns their number."""
        edge.link.close()
        for task in edge.answering.values():
            task.cancel()
        edge.held.clear()
        self._end_recording(edge)
        aborted = tuple(edge.live)
        for engine_id in aborted:
            self._forget(engine_id)
            self._engine.post(Abort(engine_id))
        self._metrics.ended(edge.number)
        edge.is_idle.set()
        return len(aborted)

    # ---- what edges say ---------------------------------------------------------------------------------------------

    def _take(self, edge: _EdgeProcess, message: FromEdge) -> None:
        match message:
            case Submit():
                self._submit(edge, message)
            case Abort():
                self._forget(message.request_id)
                self._engine.post(message)
            case FinishAtStop():
                self._engine.post(message)
            case Ask(number):
                task = asyncio.create_task(self._answer(edge, message), name="answer-edge")
                edge.answering[number] = task
                task.add_done_callback(lambda _: edge.answering.pop(number, None))
            case NoLonger(number):
                edge.held.pop(number, None)
                if (answering := edge.answering.get(number)) is not None:
                    answering.cancel()
                if edge.recorded_for == number:
                    self._end_recording(edge)
            case EdgeSaid():
                edge.silence.heard()
                self._metrics.said(edge.number, message.metrics)
            case Listening(port):
                edge.listening.set_result(port)
            case NothingLive():
                edge.is_idle.set()

    def _submit(self, edge: _EdgeProcess, submit: Submit) -> None:
        sent: object = submit.matcher
        if isinstance(sent, HeldMatcher):
            matcher = edge.held.pop(sent.number, None)
            if matcher is None:
                error = EngineFault(f"the matcher was not used within {HELD_S:g} s")
                self._give(edge, Failed(submit.request_id, error))
                return
            submit = dataclasses.replace(submit, matcher=matcher)
        self._owners[submit.request_id] = edge
        edge.live.add(submit.request_id)
        self._engine.post(submit)

    async def _answer(self, edge: _EdgeProcess, ask: Ask) -> None:
        try:
            answer = AnswerTo(ask.number, await self._value_of(edge, ask))
        except BatonError as error:
            answer = AnswerTo(ask.number, error=error)
        except Exception as error:  # the asker must not wait for ever
            _log.exception("edge_answer_failed", edge=edge.number, question=type(ask.question).__name__)
            answer = AnswerTo(ask.number, error=EngineFault(f"{type(error).__name__}: {error}"))
        edge.link.send(answer)

    async def _value_of(self, edge: _EdgeProcess, ask: Ask) -> object:
        match ask.question:
            case MakeMatcher(sampling, output_ids, client, tenant):
                made = await self._matchers.of(sampling, output_ids, client=client, tenant=tenant)
                edge.held[ask.number] = made
                asyncio.get_running_loop().call_later(HELD_S, edge.held.pop, ask.number, None)
                return HeldMatcher(ask.number)
            case ChangeRole(role):
                await self._roles.ask(role)
                return self._roles.state
            case Record(max_events):
                self._timeline.start(max_events=max_events)
                edge.recorded_for = ask.number
                return None
            case EndRecording():
                recording = self._end_recording(edge)
                return [] if recording is None else await asyncio.to_thread(lambda: packed(recording.take_tracks()))

    def _end_recording(self, edge: _EdgeProcess) -> Recording | None:
        if edge.recorded_for is None:
            return None
        edge.recorded_for = None
        return self._timeline.stop()

    # ---- what edges are told ----------------------------------------------------------------------------------------

    def _by_edge(self, event: Tokens) -> list[tuple[_EdgeProcess, Tokens]]:
        """Splits an event with tokens of several requests by the edges that have them."""
        owners = [self._owners.get(request_id) for request_id in event.request_ids]
        present = {owner for owner in owners if owner is not None}
        if len(present) == 1 and None not in owners:
            return [(present.pop(), event)]
        split: dict[_EdgeProcess, tuple[list[str], list[int], list[int], list[TokenLogprobs | None]]] = {
            owner: ([], [], [], []) for owner in present
        }
        stop = 0
        for owner, request_id, num_tokens in zip(owners, event.request_ids, event.num_tokens, strict=True):
            start, stop = stop, stop + num_tokens
            if owner is not None:
                request_ids, nums, token_ids, logprobs = split[owner]
                request_ids.append(request_id)
                nums.append(num_tokens)
                token_ids += event.token_ids[start:stop]
                logprobs += event.logprobs[start:stop]
        return [
            (owner, Tokens(tuple(request_ids), tuple(nums), tuple(token_ids), tuple(logprobs)))
            for owner, (request_ids, nums, token_ids, logprobs) in split.items()
        ]

    def _give(self, edge: _EdgeProcess, event: RequestEvent) -> None:
        edge.unread.add((event,))
        edge.has_news.set()

    def _forget(self, engine_id: str) -> None:
        if (owner := self._owners.pop(engine_id, None)) is not None:
            owner.live.discard(engine_id)

    def _tell(self) -> None:
        for edge in self._edges.values():
            self._tell_one(edge)

    def _tell_one(self, edge: _EdgeProcess) -> None:
        engine = self._engine
        told = EdgeState(
            self._is_ready, engine.is_alive, self._roles.state, engine.load, tuple(self._replicas.states())
        )
        if told != edge.told or time.monotonic() - edge.told_s >= SAYS_EVERY_S:
            edge.told, edge.told_s = told, time.monotonic()
            edge.link.send(told)

    async def _tell_from_time_to_time(self) -> None:
        while True:
            await asyncio.sleep(_TELL_INTERVAL_S)
            self._tell()
            for edge in self._edges.values():
                if edge.silence.look() > self._longest_silence_s:
                    edge.process.kill()


def _end_starved(edge: _EdgeProcess, feeding: asyncio.Task[None]) -> None:
    """Ends an edge to which events cannot be sent."""
    if not feeding.cancelled() and (error := feeding.exception()) is not None:
        _log.error("edge_failed", edge=edge.number, exc_info=error)
        edge.process.kill()


def _of_requests(events: Collection[Event]) -> list[RequestEvent]:
    return [event for event in events if isinstance(event, RequestEvent)]
