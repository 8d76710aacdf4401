"""Tests of edges in processes of their own, in front of a fake engine.

The processes take seconds to start, so one test does everything that leaves them in order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from baton.v1 import inference_pb2, inference_pb2_grpc, roles_pb2, roles_pb2_grpc, timeline_pb2, timeline_pb2_grpc
from common.config.settings import DecodeSettings
from common.errors import BatonError, ConfigError, Draining, EngineLost, InvalidRequest, Overloaded, StartupError
from common.grammar.grammar import Grammar
from common.grammar.matcher import Matcher, TokenRulesMatcher
from common.grammar.reasoning import Reasoning
from common.host.link import Link
from common.role import Role
from common.rpc.errors import error_info
from common.rpc.grpc_options import channel_options
from common.service.roles import RoleSwitch
from common.telemetry.stats import Timings
from common.telemetry.timeline import Timeline
from decode_service.edge.assembly import EdgePlan
from decode_service.edge.decode_edge import EventRouter
from decode_service.edge.inference import INFERENCE_SERVICE
from decode_service.edge.live_requests import MAX_PROMPT_LOGPROB_BYTES
from decode_service.edge.matchers import MatchersHere
from decode_service.edge.processes import edges as edges_module
from decode_service.edge.processes.edge_metrics import EdgeMetrics
from decode_service.edge.processes.edges import EdgeProcesses
from decode_service.edge.processes.messages import AnswerTo, EdgeState, Events
from decode_service.edge.processes.process import EngineElsewhere
from decode_service.edge.processes.silence import Silence
from decode_service.edge.replicas import ReplicaBoard
from decode_service.edge.request_checks import ModelLimits
from decode_service.messages import Abort, Finished, FinishReason, Replica, ReplicasChanged, RowTaken, Submit, Tokens
from tests.decode_edge.children import children_running
from tests.decode_edge.edge_under_test import error_of, events_of, ids_in
from tests.decode_edge.fake_engine import FakeEngine
from tests.support.models import save_tiny_model
from tests.support.services_here import until

BOUND_S = 60.0
NUM_EDGES = 2
STALL_S = 5.0
MAX_LIVE = 4
NUM_CHANNELS = 16  # so many connections go to one of two edges once in 32,768 times


class _GrammarMatcher:
    """Stands in for the matcher of a grammar."""

    failure = ""


@dataclass
class Running:
    engine: FakeEngine
    address: str
    edges: EdgeProcesses
    router: EventRouter
    registry: CollectorRegistry
    roles: RoleSwitch
    timeline: Timeline
    channels: list[grpc.aio.Channel]
    matchers: list[Any]

    def generate(self, channel: int = 0, **fields: Any) -> Any:
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[68, 69, 70]), **fields)
        return inference_pb2_grpc.InferenceStub(self.channels[channel]).Generate(request, timeout=BOUND_S)

    async def submitted(self, request_id: str) -> Submit:
        def found() -> Submit | None:
            return next(
                (each for each in self.engine.of_type(Submit) if each.request_id.startswith(f"{request_id}#")), None
            )

        await wait_for(lambda: found() is not None)
        submit = found()
        assert submit is not None
        return submit

    async def all_ready(self) -> None:
        """Waits until each connection hears that requests are served. Those to an edge that has ended connect again."""
        asked = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
        async with asyncio.timeout(BOUND_S):
            for channel in self.channels:
                status = None
                while status != health_pb2.HealthCheckResponse.SERVING:
                    try:
                        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, wait_for_ready=True)
                        status = answer.status
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is grpc.StatusCode.UNAVAILABLE
                    await asyncio.sleep(0.02)

    def health_while_silent(self) -> int | None:
        """Returns the health that an edge tells while this process does nothing else, or None if none answers."""
        time.sleep(0.02)
        with grpc.insecure_channel(self.address, channel_options()) as channel:
            asked = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
            try:
                return int(health_pb2_grpc.HealthStub(channel).Check(asked, timeout=BOUND_S).status)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return None

    def reason_while_silent(self) -> str:
        """Returns why an edge refuses a request while this process does nothing else."""
        with grpc.insecure_channel(self.address, channel_options()) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(text="hi"), timeout=STALL_S
            )
            with pytest.raises(grpc.RpcError) as refusal:
                list(call)
        info = error_info(refusal.value)
        return "" if info is None else str(info.reason)

    async def refuses(self, channel: int, error: type[BatonError]) -> None:
        """Waits until requests are refused with `error`. One that is admitted before is cancelled."""
        for attempt in itertools.count():
            request_id = f"refused{channel}.{attempt}"
            call = self.generate(channel, request_id=request_id)
            refused = asyncio.create_task(error_of(call))
            submitted = asyncio.create_task(self.submitted(request_id))
            await asyncio.wait((refused, submitted), return_when=asyncio.FIRST_COMPLETED)
            submitted.cancel()
            if refused.done():
                assert refused.result()[1] == error.reason
                return
            call.cancel()
            await asyncio.gather(refused, return_exceptions=True)

    def end(self, submit: Submit, num_tokens: int) -> None:
        self.router.deliver([Finished(submit.request_id, FinishReason.LENGTH, 3, num_tokens, Timings())])

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


async def wait_for(condition: Callable[[], object]) -> None:
    await until(lambda: bool(condition()), bound_s=BOUND_S)


def edge_pids() -> set[int]:
    return set(children_running("edge.processes.process"))


def lost_edges(log: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Returns the id of each process that was lost, and how it ended."""
    return [(line["pid"], line["how"]) for line in log if line["event"] == "edge_lost"]


@pytest.fixture(autouse=True)
def edges_may_start_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges_module, "START_TIMEOUT_S", 10 * BOUND_S)


@asynccontextmanager
async def running(
    directory: Path, log: list[Any], *, num: int = NUM_EDGES, stall_timeout_s: float = BOUND_S, **settings: Any
) -> AsyncIterator[Running]:
    engine, registry, replicas = FakeEngine(), CollectorRegistry(), ReplicaBoard()
    replicas.on_report(ReplicasChanged((Replica("127.0.0.1:1", is_ready=True),)))
    roles, timeline = RoleSwitch((Role.DECODE, Role.PREFILL)), Timeline()
    made: list[Any] = []

    async def new_matcher(
        grammar: Grammar | None, output_ids: Any, reasoning: Reasoning | None, *, client: str = "", tenant: str = ""
    ) -> Matcher:
        assert grammar is not None
        if grammar.text == "broken":
            raise RuntimeError("broken")
        if grammar.text == "refused":
            raise InvalidRequest("sampling.regex", "is refused")
        if grammar.text == "slow":
            made.append("began")
            try:
                await asyncio.sleep(BOUND_S)
            except asyncio.CancelledError:
                made.append("cancelled")
                raise
        made.append(matcher := _GrammarMatcher())
        return matcher  # type: ignore[return-value]

    async def replay(work: Any, *, num_tokens: int, caller: Any) -> Any:
        return work()

    plan = EdgePlan(
        settings=DecodeSettings(
            model=str(directory),
            listen="127.0.0.1:0",
            prefill=("127.0.0.1:1",),
            engine_stall_timeout_s=stall_timeout_s,
            **settings,
        ),
        instance_id="this service",
        directory=directory,
        limits=ModelLimits(vocab_size=268, max_context_tokens=1000, eos_token_ids=(0,)),
        model_info=inference_pb2.GetModelInfoResponse(model="tiny"),
        max_live=MAX_LIVE,
        max_prompt_logprob_bytes=MAX_PROMPT_LOGPROB_BYTES,
        shares_port=True,
    )
    edges = EdgeProcesses(
        plan,
        num=num,
        engine=engine,
        matchers=MatchersHere(new_matcher=new_matcher, replay=replay, vocab_size=268),
        replicas=replicas,
        roles=roles,
        timeline=timeline,
        registry=registry,
        stall_timeout_s=stall_timeout_s,
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(edges)
        router = EventRouter(
            loop=asyncio.get_running_loop(),
            live_requests=edges,
            transport=None,
            replicas=replicas,  # type: ignore[arg-type]
        )
        port = await edges.start("127.0.0.1:0")
        await edges.set_ready(True)
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", channel_options()))
            for _ in range(NUM_CHANNELS)
        ]
        yield Running(engine, f"127.0.0.1:{port}", edges, router, registry, roles, timeline, channels, made)
    assert not edge_pids(), "an edge is left"


@pytest.mark.thorough
async def test_several_edges_are_one_service(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    """All that clients may ask is answered through any edge, and each gets the tokens of its own requests."""
    directory = save_tiny_model(tmp_path / "m", "llama")
    async with running(directory, log, max_queued_requests=0) as service:
        # Requests of many connections at once: the engine's events reach the right edge, in order.
        calls = {f"r{i}": service.generate(i, request_id=f"r{i}") for i in range(NUM_CHANNELS // 4)}
        submits = [await service.submitted(request_id) for request_id in calls]
        ids = tuple(submit.request_id for submit in submits)
        num = len(ids)
        service.router.deliver([Tokens(ids, (1,) * num, tuple(range(70, 70 + num)))])
        service.router.deliver(
            [Tokens(ids, (2,) * num, tuple(number for i in range(num) for number in (80 + i, 90 + i)))]
        )
        for submit in submits:
            service.end(submit, 3)
        outputs = [ids_in(await events_of(call)) for call in calls.values()]
        assert outputs == [[70 + i, 80 + i, 90 + i] for i in range(num)]
        await wait_for(lambda: service.count("baton_requests_total", outcome="length") == num)
        assert service.count("baton_output_tokens_total") == 3 * num
        assert len(service.edges) == 0

        # Every connection is answered, by both edges.
        loads = [
            await inference_pb2_grpc.InferenceStub(channel).GetLoad(inference_pb2.GetInferenceLoadRequest())
            for channel in service.channels
        ]
        assert {(load.num_steps, load.prefill_replicas[0].address) for load in loads} == {(9, "127.0.0.1:1")}

        # Grammars are compiled by the engine's process. What clients get for a bad one is as ever.
        call = service.generate(1, request_id="constrained", sampling={"regex": "ab", "bad_words": ["z"]})
        constrained = await service.submitted("constrained")
        assert isinstance(constrained.matcher, TokenRulesMatcher)
        call.cancel()
        await wait_for(lambda: any(each.request_id == constrained.request_id for each in service.engine.of_type(Abort)))
        code, reason, metadata = await error_of(service.generate(2, sampling={"regex": "refused"}))
        assert (code, reason, metadata) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_FIELD",
            {"field": "sampling.regex"},
        )
        assert (await error_of(service.generate(2, sampling={"regex": "broken"})))[0] is grpc.StatusCode.INTERNAL
        slow = service.generate(3, sampling={"regex": "slow"})
        await wait_for(lambda: "began" in service.matchers)
        slow.cancel()
        await wait_for(lambda: service.matchers[-1] == "cancelled")

        # The role, and the timeline of the engine's process, which an edge asks for.
        roles = roles_pb2_grpc.RolesStub(service.channels[4])
        state = (await roles.SetRole(roles_pb2.SetRoleRequest(role=roles_pb2.ROLE_PREFILL))).state
        assert state.changing_to == roles_pb2.ROLE_PREFILL and service.roles.changing_to is Role.PREFILL
        recording = timeline_pb2_grpc.TimelineStub(service.channels[5]).Record(
            timeline_pb2.RecordTimelineRequest(duration_s=0.5)
        )
        track = service.timeline.track("engine")
        await wait_for(lambda: track.ring is not None)
        with track.span("a step of the engine"):
            pass
        strings = [text async for message in recording for text in message.events.strings]
        assert "a step of the engine" in strings

        # An edge that is killed: its requests are aborted, those of the other go on, and another takes its place.
        held = [service.generate(i, request_id=f"held{i}") for i in range(4, 8)]
        held_submits = [await service.submitted(f"held{i}") for i in range(4, 8)]
        before = edge_pids()
        assert len(before) == NUM_EDGES
        num_aborts = len(service.engine.of_type(Abort))
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await wait_for(lambda: victim not in edge_pids() and len(edge_pids()) == NUM_EDGES)
        (lost,) = [line for line in log if line["event"] == "edge_lost"]
        assert lost["pid"] == victim and lost["how"] == "was killed by SIGKILL"
        aborted = {abort.request_id for abort in service.engine.of_type(Abort)[num_aborts:]}
        assert len(aborted) == lost["num_requests"]
        for submit, call in zip(held_submits, held, strict=True):
            if submit.request_id in aborted:
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await events_of(call)
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            else:
                service.router.deliver([Tokens((submit.request_id,), (1,), (75,))])
                service.end(submit, 1)
                assert ids_in(await events_of(call)) == [75]
        num += len(held) - len(aborted)  # counts of an edge that ended are kept
        await wait_for(lambda: service.count("baton_requests_total", outcome="length") == num)
        await service.all_ready()

        # While the service drains, requests that are live go on, and others are refused.
        call = service.generate(0, request_id="last")
        last = await service.submitted("last")
        service.edges.drain()
        idle = asyncio.create_task(service.edges.wait_idle())
        for channel in range(NUM_CHANNELS):
            await service.refuses(channel, Draining)
        assert not idle.done()
        service.end(last, 0)
        await events_of(call)
        await asyncio.wait_for(idle, BOUND_S)
        await service.edges.stop(0.1)
        assert not edge_pids()


async def test_an_edge_that_is_behind_or_whose_clients_leave(
    tmp_path: Path, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges_module, "LONGEST_SILENCE_S", BOUND_S)  # it is stopped for long on a busy machine
    async with running(save_tiny_model(tmp_path / "m", "llama"), log, num=1) as service:
        await what_it_does_not_take_is_merged(service, monkeypatch)
        await requests_that_have_had_rows_keep_their_places(service)
        await matchers_that_are_not_used_in_time_are_dropped(service, monkeypatch)
        await requests_fail_when_the_engine_dies(service)
        await recordings_end_with_the_caller(service)


async def what_it_does_not_take_is_merged(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an edge is stopped, thousands of steps cost little memory, and afterwards its client gets every token."""
    num_messages, num_sent, num_steps = 0, 0, 0
    send = Link.send

    def noting(link: Link, message: object) -> None:
        nonlocal num_messages, num_sent
        if isinstance(message, Events):
            num_messages += 1
            num_sent += sum(len(event.token_ids) for event in message.events if isinstance(event, Tokens))
        send(link, message)

    with monkeypatch.context() as patched:
        patched.setattr(Link, "send", noting)
        call = service.generate(request_id="r")
        submit = await service.submitted("r")
        (pid,) = edge_pids()
        os.kill(pid, signal.SIGSTOP)
        while num_steps < 1_000 or num_sent > num_steps // 3:  # no longer, because gRPC misses a process that is silent
            assert num_steps < 100_000, "nothing is merged"
            service.router.deliver([Tokens((submit.request_id,), (1,), (70 + num_steps % 10,))])
            num_steps += 1
            await asyncio.sleep(0)
        assert num_sent > 0
        os.kill(pid, signal.SIGCONT)
        service.end(submit, num_steps)
        assert ids_in(await events_of(call)) == [70 + step % 10 for step in range(num_steps)]
        assert num_messages < num_steps // 2


async def requests_that_have_had_rows_keep_their_places(service: Running) -> None:
    calls, submits = [], []
    for i in range(MAX_LIVE):
        calls.append(service.generate(request_id=f"place{i}", priority=3))
        submits.append(await service.submitted(f"place{i}"))
    service.router.deliver([RowTaken(submit.request_id) for submit in submits[1:]])
    service.router.deliver([Tokens((submits[1].request_id,), (1,), (70,))])
    while not (await calls[1].read()).delta.token_ids:  # the edge was told that before
        pass
    calls.append(service.generate(request_id="better", priority=0))
    await service.submitted("better")
    assert (await error_of(calls[0]))[1] == Overloaded.reason, "the only one that waits"
    for call in calls:
        call.cancel()
    await wait_for(lambda: len(service.edges) == 0)


async def matchers_that_are_not_used_in_time_are_dropped(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(edges_module, "HELD_S", 0.0)
        num_submits = len(service.engine.of_type(Submit))
        code, _, _ = await error_of(service.generate(sampling={"regex": "ab"}))
        assert code is grpc.StatusCode.INTERNAL
        assert len(service.engine.of_type(Submit)) == num_submits


async def requests_fail_when_the_engine_dies(service: Running) -> None:
    call = service.generate(request_id="unlucky")
    await service.submitted("unlucky")
    service.engine.die()
    service.router.on_death(RuntimeError("broken"))
    assert (await error_of(call))[1] == EngineLost.reason


async def recordings_end_with_the_caller(service: Running) -> None:
    """Also if the caller leaves before the engine's process has begun one, or the edge ends meanwhile."""
    track = service.timeline.track("engine")
    (pid,) = edge_pids()
    stub = timeline_pb2_grpc.TimelineStub(service.channels[0])
    for pause_s in (0.0, 0.002, 0.01, 0.5):
        call = stub.Record(timeline_pb2.RecordTimelineRequest(duration_s=30))
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(pause_s)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.sleep(0.2)  # a late one begins, which must end
        await wait_for(lambda: track.ring is None)

    def is_recorded() -> bool:
        """Asks again, because an edge that has not yet ended the last one refuses this one."""
        if not recordings or recordings[-1].done():
            recordings.append(stub.Record(timeline_pb2.RecordTimelineRequest(duration_s=30)))
        return track.ring is not None

    recordings: list[Any] = []
    await wait_for(is_recorded)
    os.kill(pid, signal.SIGKILL)
    await wait_for(lambda: track.ring is None)


@pytest.mark.thorough
async def test_processes_that_cannot_be_started_or_hang(
    tmp_path: Path, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start that is an error, and what was started ends. Later it is tried again. One that hangs is lost too."""
    directory, start = save_tiny_model(tmp_path / "m", "llama"), edges_module.start_linked
    num_started = 0

    async def failing(module: str) -> Any:
        nonlocal num_started
        num_started += 1
        if num_started == 2:
            raise OSError("no memory")
        return await start(module)

    monkeypatch.setattr(edges_module, "start_linked", failing)
    with pytest.raises(StartupError, match="no memory"):
        async with running(directory, log):
            pass
    assert not edge_pids()
    num_started = 0
    async with running(directory, log, num=1) as service:
        (killed,) = edge_pids()
        os.kill(killed, signal.SIGKILL)
        await wait_for(lambda: edge_pids() - {killed})
        await service.all_ready()
        assert [line["event"] for line in log if line["event"].startswith("edge_")] == ["edge_lost", "edge_not_started"]
        (hung,) = edge_pids()
        os.kill(hung, signal.SIGSTOP)
        await wait_for(lambda: len(lost_edges(log)) == 2)
        assert lost_edges(log) == [(killed, "was killed by SIGKILL"), (hung, "was killed by SIGKILL")]


@pytest.mark.thorough
async def test_an_edge_is_not_ready_while_the_engines_process_hangs_and_then_ends(
    tmp_path: Path, log: list[dict[str, Any]]
) -> None:
    directory = save_tiny_model(tmp_path / "m", "llama")
    async with running(directory, log, num=1, stall_timeout_s=3 * STALL_S) as service:
        await service.all_ready()
        while service.health_while_silent() == health_pb2.HealthCheckResponse.SERVING:
            pass
        assert service.health_while_silent() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert service.reason_while_silent() == EngineLost.reason
        await service.all_ready()
        call = service.generate(request_id="later")
        submit = await service.submitted("later")
        service.end(submit, 0)
        await events_of(call)

        (pid,) = edge_pids()
        while service.health_while_silent() is not None:
            pass
        await wait_for(lambda: lost_edges(log))
        assert lost_edges(log) == [(pid, "ended with status 1")]


@pytest.mark.thorough
async def test_edges_do_not_share_the_port_of_another_service(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    directory = save_tiny_model(tmp_path / "m", "llama")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="listen: cannot listen on"):
            async with running(directory, log, num=1) as service:
                await service.edges.start(f"127.0.0.1:{other.getsockname()[1]}")


async def test_an_answer_about_the_role_leaves_what_was_told_meanwhile() -> None:
    link, other = [await Link.on(end) for end in socket.socketpair()]
    engine, role = FakeEngine(), RoleSwitch((Role.DECODE, Role.PREFILL)).state
    told = EdgeState(is_ready=True, is_alive=True, role=role, load=engine.load, replicas=())
    elsewhere = EngineElsewhere(link, told)
    asking = asyncio.create_task(elsewhere.ask(Role.PREFILL))
    ask = await other.receive()
    elsewhere.told = dataclasses.replace(told, is_alive=False)
    changed = dataclasses.replace(role, changing_to=Role.PREFILL)
    elsewhere.answered(AnswerTo(ask.number, changed))
    await asking
    assert elsewhere.told == dataclasses.replace(told, is_alive=False, role=changed)
    link.close()
    other.close()


def test_counts_of_an_edge_that_ended_are_kept_beside_those_of_the_next() -> None:
    registry, metrics = CollectorRegistry(), EdgeMetrics()
    registry.register(metrics)
    for number, counts in ((1, (3, 5)), (2, (10,)), (1, (7,))):
        for count in counts:  # an edge says its counts again and again
            own = CollectorRegistry()
            Counter("tokens", "Tokens.", registry=own).inc(count)
            metrics.said(number, tuple(own.collect()))
        if count == 5:
            metrics.ended(number)
    assert registry.get_sample_value("tokens_total") == 5 + 10 + 7


def test_silence_does_not_count_the_time_for_which_the_machine_was_suspended() -> None:
    now_s = 100.0
    silence = Silence(patience_s=10.0, clock=lambda: now_s)
    for passed_s, expected_s in ((0.5, -9.5), (1000.0, -8.5), (0.25, -8.25)):
        now_s += passed_s
        assert silence.look() == expected_s
    silence.heard()
    now_s += 0.5
    assert silence.look() == 0.5
