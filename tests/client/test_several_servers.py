"""Tests that with an address which names several servers, either client uses those that are ready, in turn if nothing
else decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from baton import AsyncClient, Client, errors
from baton.client import Tls
from baton.client.target import parse_target
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started
from tests.support.running_pair import wait_until

READY, NOT_READY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE = 14


@pytest.fixture
def servers() -> Iterator[dict[str, ScriptedServer]]:
    """Two ready servers. Each answers with its own name as the request id."""
    servers = {name: ScriptedServer() for name in ("a", "b")}
    for name, server in servers.items():
        server.inference.script = [started(name), finished()]
        set_ready(server, True)
    yield servers
    for server in servers.values():
        server.stop()


def set_ready(server: ScriptedServer, is_ready: bool) -> None:
    server.health.set("baton.v1.Inference", READY if is_ready else NOT_READY)


def address(servers: dict[str, ScriptedServer]) -> str:
    return ", ".join(server.address for server in servers.values())


def asked(client: Client, num: int = 6) -> list[str]:
    return [client.complete("Hi", timeout_s=BOUND_S).request_id for _ in range(num)]


def test_ready_servers_take_turns_and_one_that_is_not_gets_nothing(servers: dict[str, ScriptedServer]) -> None:
    with Client(address(servers)) as client:
        wait_until(lambda: set(asked(client)) == {"a", "b"})
        assert asked(client) in (["a", "b"] * 3, ["b", "a"] * 3)

        set_ready(servers["a"], False)
        wait_until(lambda: set(asked(client)) == {"b"})
        servers["b"].stop()
        with pytest.raises(errors.Unavailable):
            asked(client)

        set_ready(servers["a"], True)
        wait_until(lambda: set(asked(client)) == {"a"})


async def test_the_async_client_does_so_too_and_resumes_at_the_other(servers: dict[str, ScriptedServer]) -> None:
    lost = failure(UNAVAILABLE, "Socket closed")
    set_ready(servers["b"], False)
    servers["a"].inference.scripts.append([started("a", seed=7), delta([5], "x"), lost])
    servers["a"].inference.script = [lost]  # answers callers that have not yet heard that it is not ready
    servers["b"].inference.script = [started("b", seed=7), delta([6], "y"), finished(num_completion_tokens=2)]
    async with AsyncClient(address(servers), resume=True) as client:
        events: list[Any] = []
        async for event in client.generate("Hi", timeout_s=BOUND_S):
            if len(events) == 1:
                set_ready(servers["b"], True)
                set_ready(servers["a"], False)
            events.append(event)
    assert [event.token_ids for event in events[1:-1]] == [(5,), (6,)]


def test_nothing_of_a_closed_client_comes_to_a_later_event_loop(servers: dict[str, ScriptedServer]) -> None:
    """gRPC delivers the events of all event loops together, so an event for a closed loop would show as an error in
    another loop.
    """
    told: list[dict[str, Any]] = []

    async def use() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
        async with AsyncClient(address(servers)) as client:
            await client.complete("Hi", timeout_s=BOUND_S)
            await asyncio.sleep(0.05)

    for _ in range(4):
        asyncio.run(use())
    assert told == []


def test_a_single_server_answers_for_itself_though_it_is_not_ready(servers: dict[str, ScriptedServer]) -> None:
    set_ready(servers["a"], False)
    servers["a"].inference.script = [failure(UNAVAILABLE, "stopping", reason="DRAINING")]
    with Client(servers["a"].address) as client, pytest.raises(errors.Unavailable) as refusal:
        client.complete("Hi")
    assert refusal.value.reason == "DRAINING"


def test_the_hosts_of_a_list_are_looked_up() -> None:
    assert parse_target("localhost:1,127.0.0.1:2", None).addresses == ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2")
    assert parse_target("[::1]:1,[::1]:2", None).addresses == ("ipv6:[::1]:1", "ipv6:[::1]:2")
    assert parse_target("127.0.0.1:1,gone.invalid:2,a..b:3", None).addresses == ("ipv4:127.0.0.1:1",)
    assert parse_target("localhost:1,127.0.0.1:1", None).addresses == ("ipv4:127.0.0.1:1",)


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize(
    "wrong", ["127.0.0.1:1,nonsense", "127.0.0.1:1,:2", "127.0.0.1:1,127.0.0.1:65536", ",", "dns:///a", "dns://b/a:1"]
)
async def test_a_list_that_is_none_is_refused(make: Callable[[str], Any], wrong: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refusal:
        make(wrong)
    assert refusal.value.field == "address"


def test_hosts_that_nobody_knows_are_named_when_there_is_no_other() -> None:
    """If a replica's container is gone, its host name no longer resolves, and the other replicas serve. If no host is
    left, the error lists them all.
    """
    with pytest.raises(errors.Unavailable, match=r"one\.invalid:1,two\.invalid:2"):
        Client("one.invalid:1,two.invalid:2")


def test_a_list_with_tls_needs_the_name_that_the_certificates_have() -> None:
    tls = Tls(ca_file=Path(__file__).parent / "certificates" / "ca.pem")
    with pytest.raises(errors.InvalidArgument, match="server_name"):
        Client("127.0.0.1:1,127.0.0.1:2", tls=tls)
