"""Tests of which of several servers a client chooses for a call: the one that has the request's beginning cached,
unless it is too busy compared with the others.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import re
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2

from baton import AsyncClient, Client, errors
from baton.client import asynchronous, blocking, generation
from baton.client.asynchronous import AsyncEventStream
from baton.client.blocking import EventStream
from baton.client.generation import Generation
from baton.client.servers import (
    ASK_STATE_S,
    FAILED_FOR_S,
    MARGIN_SHARE,
    MIN_MARGIN_CALLS,
    READY_TIMEOUT_S,
    AsyncServers,
    BlockingServers,
    CommonServer,
    Opening,
    Server,
    Wait,
)
from baton.events import Started
from baton.v1 import inference_pb2
from common.text.chat_messages import ChatMessage
from tests.client.either_client import EitherClient, EitherStream
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started
from tests.client.test_affinity import QUESTION, SYSTEM, chat
from tests.security.raw_http2 import GOAWAY, HEADERS, PREFACE, SETTINGS, RawHttp2, frame
from tests.support.black_hole import BlackHoleProxy
from tests.support.running_pair import wait_until
from tests.support.services_here import until
from tests.support.stream_server import StreamServer

READY, NOT_READY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NUM_SERVERS = 3
LOST = failure(code_pb2.UNAVAILABLE, "Socket closed")


def full(retry_after_s: str) -> Any:
    return failure(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after_s=retry_after_s)


FULL = full("0")


@pytest.fixture
def scripted() -> Iterator[list[ScriptedServer]]:
    """Ready servers. Each answers with its own address as the request id."""
    servers = [ScriptedServer() for _ in range(NUM_SERVERS)]
    for server in servers:
        server.inference.script = [started(server.address), delta([5], "a"), finished(num_completion_tokens=1)]
        set_ready(server, True)
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def servers(scripted: list[ScriptedServer]) -> Iterator[BlockingServers]:
    with connected(scripted) as servers:
        yield servers


@contextmanager
def connected(scripted: list[ScriptedServer]) -> Iterator[BlockingServers]:
    """Yields a client's choice among the servers `scripted`, once all of them are known to be ready."""
    servers = BlockingServers(addresses(scripted))
    try:
        wait_until(lambda: len({give_back(servers, take(servers)) for _ in scripted}) == len(scripted))
        yield servers
    finally:
        servers.close()


def addresses(scripted: list[ScriptedServer]) -> str:
    return ",".join(server.address for server in scripted)


def set_ready(server: ScriptedServer, is_ready: bool) -> None:
    server.health.set("baton.v1.Inference", READY if is_ready else NOT_READY)


def take(
    servers: BlockingServers,
    *turns: tuple[str, str],
    avoided: Collection[Server] = (),
    common: CommonServer | None = None,
    **fields: Any,
) -> Server:
    """Takes the server for a chat of these turns, or for a request without a beginning if there are none, and notes
    that the server accepted it.
    """
    beginnings = servers.beginnings_of(chat(*turns, **fields))
    server = servers.take_when_ready(beginnings, avoided=avoided, common=common, timeout_s=BOUND_S)
    servers.note_accepted(server, Opening(beginnings))
    return server


def give_back(servers: BlockingServers, *taken: Server) -> Server:
    for server in taken:
        servers.give_back(server)
    return taken[0]


def asked(servers: BlockingServers, *turns: tuple[str, str], **fields: Any) -> Server:
    return give_back(servers, take(servers, *turns, **fields))


def conversation(number: int) -> tuple[tuple[str, str], ...]:
    return (SYSTEM, ("user", f"This is conversation {number}, and it is not like the others."))


def test_the_fewest_open_calls_decide_between_servers_without_it(servers: BlockingServers) -> None:
    busy = [take(servers) for _ in range(NUM_SERVERS)]
    idle = give_back(servers, busy[1])
    assert [take(servers) is idle for _ in range(2)] == [True, False]


@pytest.mark.parametrize("num_at_each", [0, 40])
def test_the_server_that_has_it_is_not_filled_while_others_are_idle(servers: BlockingServers, num_at_each: int) -> None:
    home = asked(servers, *conversation(0))
    for _ in range(num_at_each * NUM_SERVERS):
        take(servers)
    taken: list[Server] = []
    while not taken or taken[-1] is home:
        taken.append(take(servers, *conversation(0)))
    num_there = len(taken) - 1
    mean = num_at_each + num_there / NUM_SERVERS
    assert num_there - 1 <= max(MIN_MARGIN_CALLS, MARGIN_SHARE * mean) <= num_there + 1
    give_back(servers, *taken[:-1])
    assert take(servers, *conversation(0)) is taken[-1], "it moved: the last server that had it counts"


def test_the_server_of_the_last_call_is_avoided_if_another_is_ready(
    scripted: list[ScriptedServer], servers: BlockingServers
) -> None:
    home = asked(servers, *conversation(0))
    assert give_back(servers, take(servers, *conversation(0), avoided={home})) is not home
    for server in scripted:
        set_ready(server, server.address in home.target)
    wait_until(lambda: {asked(servers) for _ in range(NUM_SERVERS)} == {home})
    assert take(servers, *conversation(0), avoided={home}) is home


def test_a_request_is_tried_once_at_each_server_before_it_comes_to_one_again(servers: BlockingServers) -> None:
    full = errors.ResourceExhausted("full", reason="QUEUE_FULL")
    for server in [asked(servers) for _ in range(NUM_SERVERS)]:
        servers.note_failed(server, full)
    take(servers)  # has more open calls than the others, which all have failed too
    tried: list[tuple[Server, bool]] = []
    avoided: set[Server] = set()
    for _ in range(NUM_SERVERS):
        server = give_back(servers, take(servers, avoided=avoided))
        servers.note_failed(server, full)
        tried.append((server, servers.avoid(server, avoided)))
    assert len({server for server, _ in tried}) == NUM_SERVERS
    assert [is_another_ready for _, is_another_ready in tried] == [True] * (NUM_SERVERS - 1) + [False]
    assert not avoided


def test_one_that_hangs_is_not_waiting_to_be_tried(servers: BlockingServers) -> None:
    first, second, *others = [asked(servers) for _ in range(NUM_SERVERS)]
    for server in others:
        servers.note_hung(server, 1.0)
    avoided: set[Server] = set()
    assert [servers.avoid(first, avoided), servers.avoid(second, avoided)] == [True, False]


def test_an_answer_that_is_too_large_says_nothing_about_its_server(servers: BlockingServers) -> None:
    server = asked(servers)
    servers.note_failed(server, errors.ResourceExhausted("Received message larger than max"))
    assert server in {asked(servers) for _ in range(NUM_SERVERS)}


OpenClient = Callable[..., EitherClient]


async def served_by(client: EitherClient, *turns: tuple[str, str], **options: Any) -> str:
    """Sends a chat of these turns, and returns the address of the server that answers."""
    messages = [ChatMessage(role, content) for role, content in turns]
    return str((await client.complete(chat=messages, timeout_s=BOUND_S, **options)).request_id)


async def started_at(stream: EitherStream) -> str:
    """Returns the address of the server that has accepted the stream's request."""
    event = await anext(stream)
    assert isinstance(event, Started)
    return event.request_id


async def until_all_are_used(client: EitherClient, num: int = NUM_SERVERS) -> None:
    used: set[str] = set()
    async with asyncio.timeout(BOUND_S):
        while len(used) < num:
            used = {await served_by(client, QUESTION, cache_prompt=False) for _ in range(NUM_SERVERS)}


async def test_either_client_keeps_conversations_where_they_are(
    scripted: list[ScriptedServer], open_client: OpenClient
) -> None:
    client = open_client(addresses(scripted))
    await until_all_are_used(client)
    num = 2 * NUM_SERVERS + 1  # so that taking turns would move each
    turns = {number: list(conversation(number)) for number in range(num)}
    homes: dict[int, set[str]] = {number: set() for number in turns}
    for _ in range(3):
        for number, messages in turns.items():
            homes[number].add(await served_by(client, *messages))
            messages += [("assistant", "a"), ("user", "And then?")]
    assert [len(servers) for servers in homes.values()] == [1] * len(turns)
    assert len(set().union(*homes.values())) == NUM_SERVERS


async def test_a_conversation_goes_on_elsewhere_while_its_server_stops_and_the_server_is_used_again(
    scripted: list[ScriptedServer], open_client: OpenClient
) -> None:
    client = open_client(addresses(scripted))
    await until_all_are_used(client)
    home = await served_by(client, *conversation(0))
    server = next(each for each in scripted if each.address == home)
    set_ready(server, False)
    server.inference.script = [LOST]  # answers a client that has not yet heard that it is not ready
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(errors.Unavailable):
                if (moved_to := await served_by(client, *conversation(0))) != home:
                    break
    for _ in range(NUM_SERVERS):
        assert await served_by(client, *conversation(0)) == moved_to
    server.inference.script = [started(home), finished()]
    set_ready(server, True)
    await until_all_are_used(client)
    assert await served_by(client, *conversation(0)) == moved_to


@pytest.mark.parametrize("broken_by", [LOST, FULL, full("20"), full("70")], ids=["lost", "full", "full-20", "full-70"])
async def test_a_generation_goes_at_once_from_the_server_that_broke_or_refused_its_call_to_another(
    scripted: list[ScriptedServer], open_client: OpenClient, broken_by: Any
) -> None:
    """The server is still ready, and has the conversation's beginning."""
    client = open_client(addresses(scripted[:2]), resume=True, admission_timeout_s=50.0)
    await until_all_are_used(client, 2)
    for _ in range(3):
        home = await served_by(client, *conversation(0))
        server = next(each for each in scripted if each.address == home)
        server.inference.scripts.append([broken_by])
        began_s = time.monotonic()
        assert await served_by(client, *conversation(0)) != home
        assert time.monotonic() - began_s < 20.0
        assert not server.inference.scripts


@pytest.mark.parametrize("told", [("70", "90"), ("90", "70")])
async def test_where_all_servers_are_full_the_request_ends_with_the_earliest_time_that_one_named(
    scripted: list[ScriptedServer], open_client: OpenClient, told: tuple[str, str]
) -> None:
    client = open_client(addresses(scripted[:2]), resume=True, admission_timeout_s=30.0)
    await until_all_are_used(client, 2)
    seconds, calls = itertools.cycle(told), []
    for server in scripted[:2]:

        def refuse(_: Any, address: str = server.address) -> list[Any]:
            calls.append(address)
            return [full(next(seconds))]

        server.inference.script = refuse
    with pytest.raises(errors.ResourceExhausted) as refusal:
        await served_by(client, QUESTION)
    assert refusal.value.metadata["retry_after_s"] == "70"
    assert (len(calls), len({*calls})) == (2, 2)


@pytest.mark.parametrize("broken_by", [LOST, FULL], ids=["lost", "full"])
async def test_a_server_that_fails_at_once_attracts_nothing(
    scripted: list[ScriptedServer], open_client: OpenClient, broken_by: Any
) -> None:
    """The server has the fewest open calls, and the requests that it did not accept begin like the later ones. Neither
    counts in its favour.
    """
    client = open_client(addresses(scripted))
    await until_all_are_used(client)
    scripted[0].inference.script = [broken_by]
    num_failed, began_s = 0, time.monotonic()
    for number in range(4 * NUM_SERVERS):
        for _ in range(4):
            try:
                await served_by(client, *conversation(number))
            except (errors.Unavailable, errors.ResourceExhausted):
                num_failed += 1
    assert 1 <= num_failed <= 1 + (time.monotonic() - began_s) / FAILED_FOR_S
    for server in scripted:
        server.inference.script = [broken_by]
    for _ in range(2 * NUM_SERVERS):
        with pytest.raises((errors.Unavailable, errors.ResourceExhausted)):
            await served_by(client, *conversation(0))


def test_a_request_that_no_server_accepted_has_no_home(servers: BlockingServers) -> None:
    beginnings = servers.beginnings_of(chat(*conversation(0)))
    chosen: set[Server] = set()
    for _ in range(NUM_SERVERS):
        chosen.add(server := servers.take_when_ready(beginnings, timeout_s=BOUND_S))
        servers.give_back(server, Opening(beginnings))
    assert len(chosen) == NUM_SERVERS


def test_requests_that_begin_alike_stay_together_before_any_is_accepted(servers: BlockingServers) -> None:
    beginnings = servers.beginnings_of(chat(*conversation(0)))
    taken = [servers.take_when_ready(beginnings, timeout_s=BOUND_S) for _ in range(MIN_MARGIN_CALLS + 2)]
    assert len({*taken[:-1]}) == 1 and taken[-1] is not taken[0], "the bound on imbalance holds"
    for server in taken[1:-1]:
        servers.give_back(server, Opening(beginnings))
    servers.give_back(taken[-1], Opening(beginnings))
    assert servers.take_when_ready(beginnings, timeout_s=BOUND_S) is taken[0], "one of them still asks there"


def test_the_end_of_an_accepted_call_forgets_no_other_that_asks(servers: BlockingServers) -> None:
    beginnings = servers.beginnings_of(chat(*conversation(0)))
    accepted, asking = (servers.take_when_ready(beginnings, timeout_s=BOUND_S) for _ in range(2))
    assert accepted is asking
    opening = Opening(beginnings)
    servers.note_accepted(accepted, opening)
    take(servers, *conversation(0), avoided={asking})
    servers.give_back(accepted, opening)
    assert servers.take_when_ready(beginnings, timeout_s=BOUND_S) is asking


def test_the_choices_of_a_prompt_have_one_server_and_count_there_for_others(servers: BlockingServers) -> None:
    num_choices = 4 * MIN_MARGIN_CALLS
    beginnings = servers.beginnings_of(chat(*conversation(0)))
    common = CommonServer()
    taken = [
        servers.take_when_ready(beginnings, common=common, timeout_s=BOUND_S)
        for _ in range(num_choices)  # none is accepted yet
    ]
    assert len({*taken}) == 1
    others = [take(servers) for _ in range((NUM_SERVERS - 1) * num_choices)]
    assert taken[0] not in others
    assert {others.count(server) for server in others} == {num_choices}


def test_choices_of_a_prompt_go_elsewhere_together_where_the_bound_says_so(servers: BlockingServers) -> None:
    home = asked(servers, *conversation(0))
    busy: list[Server] = []
    while not busy or busy[-1] is home:
        busy.append(take(servers, *conversation(0)))
    common = CommonServer()
    assert {take(servers, *conversation(0), common=common) for _ in range(4)} == {busy[-1]}


@pytest.mark.parametrize("is_known", [True, False], ids=["ready", "connecting"])
async def test_further_outputs_of_a_prompt_go_where_the_first_is(
    scripted: list[ScriptedServer], open_client: OpenClient, is_known: bool
) -> None:
    client = open_client(addresses(scripted))
    if is_known:
        await until_all_are_used(client)
    for server in scripted:
        server.inference.script = [started(server.address), server.inference.HOLD]
    first = client.generate("Hi", timeout_s=BOUND_S)
    more = [client.generate("Hi", choice_index=index, same_server_as=first) for index in range(1, 5)]
    assert len({await started_at(stream) for stream in (*more, first)}) == 1


@pytest.mark.parametrize("broken_by", [LOST, FULL], ids=["lost", "full"])
async def test_an_output_that_is_lost_or_refused_there_goes_elsewhere_and_later_ones_with_it(
    scripted: list[ScriptedServer], open_client: OpenClient, broken_by: Any
) -> None:
    client = open_client(addresses(scripted), resume=True, admission_timeout_s=BOUND_S)
    await until_all_are_used(client)
    for server in scripted:
        server.inference.script = [started(server.address), server.inference.HOLD]
    first = client.generate("Hi", timeout_s=BOUND_S)
    home = await started_at(first)
    next(server for server in scripted if server.address == home).inference.scripts.append([broken_by])
    second = client.generate("Hi", choice_index=1, same_server_as=first, timeout_s=BOUND_S)
    moved_to = await started_at(second)
    assert moved_to != home
    more = [client.generate("Hi", choice_index=index, same_server_as=first) for index in range(2, 6)]
    assert {await started_at(stream) for stream in more} == {moved_to}


async def test_a_call_that_cannot_begin_does_not_count_as_open(scripted: list[ScriptedServer]) -> None:
    class Broken(Exception): ...

    class NoCall(Generation):
        def next_call(self) -> Any:
            raise Broken

    both: list[BlockingServers | AsyncServers] = [
        BlockingServers(addresses(scripted)),
        AsyncServers(addresses(scripted)),
    ]
    streams: list[Any] = [EventStream, AsyncEventStream]
    for servers, stream in zip(both, streams, strict=True):
        taken = servers.take_when_ready(timeout_s=BOUND_S)
        server = taken if isinstance(taken, Server) else await taken
        servers.give_back(server)
        with pytest.raises(Broken):
            stream(NoCall(chat(QUESTION), timeout_s=None, resume_timeout_s=None), servers)
        assert server.num_open == 0
        closing = servers.close()
        if closing is not None:
            await closing


@asynccontextmanager
async def all_known(
    kind: type[BlockingServers] | type[AsyncServers], scripted: list[ScriptedServer]
) -> AsyncIterator[tuple[BlockingServers | AsyncServers, set[Server]]]:
    """Yields a client's servers, and all of them once each is known to be ready."""
    servers = kind(addresses(scripted))
    known: set[Server] = set()
    try:
        async with asyncio.timeout(BOUND_S):
            while len(known) < len(scripted):
                if (server := servers.take()) is not None:
                    known.add(server)
                    servers.give_back(server)
                await asyncio.sleep(0)
        yield servers, known
    finally:
        closing = servers.close()
        if closing is not None:
            await closing


@pytest.mark.parametrize("kind", [BlockingServers, AsyncServers])
async def test_a_call_that_ends_before_it_is_accepted_draws_no_other(
    scripted: list[ScriptedServer], kind: type[BlockingServers] | type[AsyncServers]
) -> None:
    for each in scripted:
        each.inference.script = [each.inference.HOLD]
    asked_servers: set[Server] = set()
    async with all_known(kind, scripted) as (servers, known):
        for _ in scripted:
            generation = Generation(chat(*conversation(0)), timeout_s=BOUND_S, resume_timeout_s=None)
            stream = EitherStream((EventStream if kind is BlockingServers else AsyncEventStream)(generation, servers))  # type: ignore[arg-type]
            (server,) = (each for each in known if each.num_open)
            asked_servers.add(server)
            await stream.close()
            async with asyncio.timeout(BOUND_S):
                await until(lambda: all(each.num_open == 0 for each in known))
    assert len(asked_servers) == NUM_SERVERS


async def test_a_first_call_waits_for_a_server_that_is_ready(
    scripted: list[ScriptedServer], open_client: OpenClient
) -> None:
    for server in scripted[1:]:
        set_ready(server, False)
    address = f"127.0.0.1:1,{addresses(scripted[::-1])}"
    assert await served_by(open_client(address), QUESTION) == scripted[0].address
    assert (await open_client(address).call("model_info")).model == "demo"


@pytest.fixture
def silent() -> Iterator[str]:
    """Two addresses that accept connections and send nothing, so that a client goes on connecting for long."""
    with BlackHoleProxy() as first, BlackHoleProxy() as second:
        first.cut()
        second.cut()
        yield f"{first.address},{second.address}"


async def test_the_wait_for_a_server_ends_with_the_deadline(silent: str, open_client: OpenClient) -> None:
    client = open_client(silent, rpc_timeout_s=0.2)
    with pytest.raises(errors.DeadlineExceeded):
        await client.complete("Hi", timeout_s=0.2)
    with pytest.raises(errors.DeadlineExceeded):
        await client.call("load")


async def test_a_server_that_hangs_is_passed_over(
    scripted: list[ScriptedServer], open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, other = scripted[:2]
    hung.inference.hangs = True
    set_ready(other, False)
    client = open_client(addresses([hung, other]), resume=True, rpc_timeout_s=BOUND_S)
    with monkeypatch.context() as patch:
        for module in (asynchronous, blocking, generation):
            patch.setattr(module, "ANSWER_TIMEOUT_S", 1.0)
        asked = asyncio.gather(client.complete("Hi"), client.call("load"), client.call("tokenize", "Hi"))
        methods = {await asyncio.to_thread(hung.inference.unanswered.get, timeout=BOUND_S) for _ in range(3)}
    assert methods == {"Generate", "GetLoad", "Tokenize"}
    set_ready(other, True)
    completion, load, tokenized = await asked
    assert completion.request_id == other.address and load.instance_id == "first" and tokenized.token_ids == (1,)

    hung.inference.unanswered = queue.Queue()
    for _ in range(3):
        assert (await client.complete("Hi")).request_id == other.address
    assert hung.inference.unanswered.empty()


@pytest.mark.parametrize("refusal", [LOST, FULL], ids=["lost", "full"])
async def test_a_small_call_that_a_server_refuses_goes_to_another(
    scripted: list[ScriptedServer], open_client: OpenClient, refusal: Any
) -> None:
    client = open_client(addresses(scripted))
    await until_all_are_used(client)
    for server in scripted[:2]:
        server.inference.refusals = itertools.repeat(refusal)
    for _ in range(2 * NUM_SERVERS):
        assert (await client.call("tokenize", "Hi")).token_ids == (1,)
    scripted[2].inference.refusals = itertools.repeat(refusal)
    with pytest.raises((errors.Unavailable, errors.ResourceExhausted)):
        await client.call("tokenize", "Hi")


async def test_a_small_call_whose_connection_is_lost_is_made_once_more_at_the_only_server(
    server: ScriptedServer, open_client: OpenClient
) -> None:
    """The connection may have been closing as the call began. What the server itself says is no such loss."""
    client = open_client(server.address)
    draining = failure(code_pb2.UNAVAILABLE, "stopped", reason="DRAINING")
    for failures, is_served in [([LOST], True), ([LOST, LOST], False), ([draining], False)]:
        server.inference.refusals = iter(failures)
        with nullcontext() if is_served else pytest.raises(errors.Unavailable):
            assert (await client.call("tokenize", "Hi")).token_ids == (1,)
        assert next(server.inference.refusals, None) is None


async def test_a_blocking_client_s_calls_are_made_once_more_by_itself_and_never_by_grpc() -> None:
    """With gRPC's own retries a call that begins as its connection closes may never end, whatever its time-out."""
    num_calls = 0

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads one call, and says that it has seen none."""
        nonlocal num_calls
        await reader.readexactly(len(PREFACE))
        peer = RawHttp2(reader, writer)
        peer.send(frame(SETTINGS, 0, 0))
        await until(lambda: any(kind == HEADERS for kind, *_ in peer.frames))
        num_calls += 1
        peer.send(frame(GOAWAY, 0, 0, bytes(8)))
        await peer.close()

    server = StreamServer(leave)
    client = Client(server.address, rpc_timeout_s=BOUND_S)
    with pytest.raises(errors.Unavailable):
        await asyncio.to_thread(client.health)
    await asyncio.to_thread(client.close)
    await server.close()
    assert num_calls == 2


async def test_a_small_call_that_all_servers_refuse_ends_with_the_earliest_time_that_one_named(
    scripted: list[ScriptedServer], open_client: OpenClient
) -> None:
    client = open_client(addresses(scripted))
    await until_all_are_used(client)
    refusals = map(full, "957")
    for server in scripted:
        server.inference.refusals = refusals
    with pytest.raises(errors.ResourceExhausted) as refusal:
        await client.call("tokenize", "Hi")
    assert refusal.value.retry_after_s == 5


async def test_a_server_that_works_for_long_is_not_one_that_hangs(
    server: ScriptedServer, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (asynchronous, blocking):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.2)
    server.inference.tokenizing_s = 0.5
    client = open_client(server.address)
    assert (await client.call("tokenize", "Hi")).token_ids == (1,)


async def test_a_small_call_that_is_cancelled_ends_at_the_server_too(server: ScriptedServer) -> None:
    server.inference.tokenizing_s = BOUND_S
    async with AsyncClient(server.address) as client:
        asked = asyncio.create_task(client.tokenize("Hi"))
        await asyncio.to_thread(server.inference.is_tokenizing.wait, BOUND_S)
        asked.cancel()
        await asyncio.to_thread(server.inference.ended_calls.get, timeout=BOUND_S / 2)
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_closing_a_client_is_an_error_for_its_small_calls(
    server: ScriptedServer, open_client: OpenClient
) -> None:
    server.inference.tokenizing_s = BOUND_S
    client = open_client(server.address)
    asked = asyncio.create_task(client.call("tokenize", "Hi"))
    await asyncio.to_thread(server.inference.is_tokenizing.wait, BOUND_S)
    await client.close()
    with pytest.raises(errors.Cancelled):
        await asked


@pytest.mark.parametrize("call", ["complete", "load"])
async def test_the_only_server_hangs(
    server: ScriptedServer, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    server.inference.hangs = True
    for rpc_timeout_s in (1.0, 30.0):  # on a busy machine, the first may pass before the call has waited
        client = open_client(
            server.address, resume=True, admission_timeout_s=0.3, rpc_timeout_s=rpc_timeout_s, token="secret"
        )
        with monkeypatch.context() as patch:
            for module in (asynchronous, blocking, generation):
                patch.setattr(module, "ANSWER_TIMEOUT_S", 0.2)
            with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)) as failure:
                await client.call(call, *(["Hi"] if call == "complete" else []))
        if isinstance(failure.value, errors.Unavailable):
            break
    assert f"{server.address} has not answered within" in str(failure.value)
    server.inference.hangs = False
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(errors.Unavailable, errors.DeadlineExceeded):  # on a busy machine
                assert (await client.call("load")).instance_id == "first"
                break


async def test_servers_that_are_not_ready_are_told_as_such(
    scripted: list[ScriptedServer], open_client: OpenClient
) -> None:
    for server in scripted:
        set_ready(server, False)
    for admission_timeout_s in (0.3, 3.0, 30.0):  # on a busy machine, the first may pass before all have said it
        client = open_client(addresses(scripted), resume=True, admission_timeout_s=admission_timeout_s)
        with pytest.raises(errors.Unavailable) as refusal:
            await client.call("complete", "Hi")
        if re.match(r"127\.0\.0\.1:\d+ says that it is not ready$", str(refusal.value)):
            break
    else:
        raise refusal.value


@pytest.mark.parametrize("bound", ["resume_timeout_s", "admission_timeout_s"])
async def test_the_wait_for_a_server_ends_when_a_generation_gives_up(
    silent: str, open_client: OpenClient, bound: str
) -> None:
    client = open_client(silent, resume=True, **{bound: 0.3})
    began_s = time.monotonic()
    with pytest.raises(errors.Unavailable, match="none of 2 services has become ready"):
        await client.complete("Hi")
    assert 0.3 <= time.monotonic() - began_s < READY_TIMEOUT_S


def test_an_end_that_passes_while_a_call_begins_to_wait_is_not_missed(silent: str) -> None:
    class Slow(BlockingServers):
        def take(self, *args: Any, **options: Any) -> Server | None:
            server = super().take(*args, **options)
            threading.Event().wait(0.2)
            return server

    servers = Slow(silent, ready_timeout_s=0.1, look_up_timeout_s=0.1)
    with pytest.raises(errors.Unavailable, match="none of 2 services has become ready"):
        servers.take_when_ready(timeout_s=None)
    servers.close()


@pytest.fixture(params=[BlockingServers, AsyncServers])
async def ready_within(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that opens a client's servers at an address, waits at most `timeout_s` for one to be ready, takes it,
    and closes them.
    """

    async def ready_within(address: str, timeout_s: float = 0.2) -> Server:
        servers = request.param(address, ready_timeout_s=timeout_s)
        try:
            async with asyncio.timeout(BOUND_S):
                if isinstance(servers, AsyncServers):
                    return await servers.take_when_ready(timeout_s=None)
                return await asyncio.to_thread(servers.take_when_ready, timeout_s=None)
        finally:
            if isinstance(servers, AsyncServers):
                await servers.close()
            else:
                servers.close()

    return ready_within


async def test_without_any_deadline_the_wait_for_a_server_ends_too(silent: str, ready_within: Any) -> None:
    with pytest.raises(errors.Unavailable, match="none of 2 services has become ready"):
        await ready_within(silent)
    for timeout_s in (0.2, 2.0, 20.0):  # on a busy machine, the first may pass before the connection is refused
        with suppress(errors.Unavailable):
            taken = await ready_within(f"{silent},127.0.0.1:1", timeout_s)
            break
    assert taken.target == "ipv4:127.0.0.1:1", "gRPC says why that one fails"


def test_a_channel_that_became_idle_connects_again(scripted: list[ScriptedServer]) -> None:
    servers = BlockingServers(
        f"127.0.0.1:1,{scripted[0].address}", channel_overrides={"grpc.client_idle_timeout_ms": 1000}
    )
    try:
        taken = take(servers)
        taken.inference.GetModelInfo(inference_pb2.GetModelInfoRequest())  # gRPC counts the time after a call
        give_back(servers, taken)
        wait_until(lambda: taken.state is grpc.ChannelConnectivity.IDLE, bound_s=BOUND_S)
        assert give_back(servers, take(servers)).state is grpc.ChannelConnectivity.READY
    finally:
        servers.close()


@pytest.mark.parametrize("closes", ["stream", "client"])
async def test_closing_ends_the_wait_for_a_server(
    silent: str, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch, closes: str
) -> None:
    monkeypatch.setattr(Wait, "pause_s", lambda _wait, _asked_s: 2 * BOUND_S)  # so that only a call to `wake` ends it
    client = open_client(silent)
    stream = client.generate("Hi")
    reading = asyncio.ensure_future(anext(stream))
    assert not (await asyncio.wait({reading}, timeout=0.1))[0]
    await (stream if closes == "stream" else client).close()
    with pytest.raises(errors.Cancelled):
        async with asyncio.timeout(BOUND_S):
            await reading


async def test_calls_that_wait_do_not_fill_the_event_loop(silent: str) -> None:
    num_calls, num_looks = 200, 0

    class Counted(AsyncServers):
        def take(self, *args: Any, **options: Any) -> Server | None:
            nonlocal num_looks
            num_looks += 1
            return super().take(*args, **options)

    servers = Counted(silent)
    waiting = [asyncio.ensure_future(servers.take_when_ready(timeout_s=None)) for _ in range(num_calls)]
    await asyncio.wait(waiting, timeout=20 * ASK_STATE_S)
    num_while_waiting = num_looks
    await servers.close()
    assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {errors.Cancelled}
    assert num_calls <= num_while_waiting <= 6 * num_calls, "each looks at first, and after a change"


def test_threads_may_share_a_client_while_servers_come_and_go(scripted: list[ScriptedServer]) -> None:
    num_threads, num_calls = 8, 25
    with Client(addresses(scripted), resume=True) as client:
        failures: list[BaseException] = []

        def talk(number: int) -> None:
            turns = [ChatMessage(role, content) for role, content in conversation(number)]
            try:
                for _ in range(num_calls):
                    client.complete(chat=turns, timeout_s=BOUND_S)
                    turns += [ChatMessage("assistant", "a"), ChatMessage("user", "And?")]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for server in scripted:
                set_ready(server, False)
                threads[0].join(0.02)
                set_ready(server, True)
        assert not failures
        assert sum(server.inference.requests.qsize() for server in scripted) >= num_threads * num_calls


@pytest.mark.parametrize("kind", [BlockingServers, AsyncServers])
async def test_a_call_counts_as_open_until_it_ends_or_its_stream_is_left(
    scripted: list[ScriptedServer], kind: type[BlockingServers] | type[AsyncServers]
) -> None:
    async with all_known(kind, scripted) as (servers, known):

        def open_stream() -> EitherStream:
            request = inference_pb2.GenerateRequest(text="Hi")
            generation = Generation(request, timeout_s=BOUND_S, resume_timeout_s=None)
            return EitherStream((EventStream if kind is BlockingServers else AsyncEventStream)(generation, servers))  # type: ignore[arg-type]

        async def until_open(num: int) -> None:
            async with asyncio.timeout(BOUND_S):
                await until(lambda: sum(server.num_open for server in known) == num)

        for each in scripted:
            each.inference.script = [started(each.address), each.inference.HOLD]
        held = [open_stream() for _ in scripted]
        assert len({await started_at(stream) for stream in held}) == NUM_SERVERS
        await until_open(NUM_SERVERS)
        await held[0].close()
        await until_open(NUM_SERVERS - 1)
        if kind is AsyncServers:
            reading = asyncio.ensure_future(anext(held[1]))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
            await until_open(NUM_SERVERS - 2)
        held.clear()
        gc.collect()
        await until_open(0)
        for each in scripted:
            each.inference.script = [started(each.address), finished()]
        assert len([event async for event in open_stream()]) == 2
        await until_open(0)


def test_closing_waits_for_the_threads_of_grpc_that_tell_states(
    scripted: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine such a thread comes late to ask the channel, which must not be closed by then."""
    poll: Any = grpc._channel._poll_connectivity
    raised, over = list[ValueError](), threading.Event()

    class LatelyAsked:
        def __init__(self, channel: Any) -> None:
            self._channel = channel
            self.check_connectivity_state = channel.check_connectivity_state

        def watch_connectivity_state(self, *arguments: Any) -> Any:
            threading.Event().wait(0.5)
            return self._channel.watch_connectivity_state(*arguments)

    def poll_late(state: Any, channel: Any, connects: bool) -> None:
        try:
            poll(state, LatelyAsked(channel), connects)
        except ValueError as error:
            raised.append(error)
        over.set()

    monkeypatch.setattr("grpc._channel._poll_connectivity", poll_late)
    BlockingServers(addresses(scripted)).close()
    assert over.wait(BOUND_S) and raised == []


def test_a_client_that_nobody_closed_is_freed(scripted: list[ScriptedServer]) -> None:
    servers = BlockingServers(addresses(scripted))
    give_back(servers, take(servers))
    left = weakref.ref(servers)
    del servers
    gc.collect()
    wait_until(lambda: left() is None)  # gRPC's threads may be telling it a state just now
