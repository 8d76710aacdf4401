"""Tests of addresses that name one server, several, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2

from baton import AsyncClient, Client, errors
from baton.client import Tls
from baton.client.channel import parse_target
from tests.client.scripted_inference import BOUND_S, ScriptedServer, failure, finished, started


def test_nothing_of_a_closed_client_comes_to_a_later_event_loop(server: ScriptedServer) -> None:
    """gRPC delivers the events of all event loops together, so an event for a closed loop would show as an error in
    another loop.
    """
    server.become_ready()
    server.inference.script = [started(), finished()]
    told: list[dict[str, Any]] = []

    async def use() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
        async with AsyncClient(f"{server.address},127.0.0.1:1") as client:
            await client.complete("Hi", timeout_s=BOUND_S)
            await asyncio.sleep(0.05)

    for _ in range(4):
        asyncio.run(use())
    assert told == []


def test_a_single_server_answers_for_itself_though_it_is_not_ready(server: ScriptedServer) -> None:
    server.inference.script = [failure(code_pb2.UNAVAILABLE, "stopping", reason="DRAINING")]
    with Client(server.address) as client, pytest.raises(errors.Unavailable) as refusal:
        client.complete("Hi")
    assert refusal.value.reason == "DRAINING"


def test_the_hosts_of_a_list_are_looked_up() -> None:
    assert parse_target("localhost:1,127.0.0.1:2", None).addresses == ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2")
    assert parse_target("[::1]:1,[::1]:2", None).addresses == ("ipv6:[::1]:1", "ipv6:[::1]:2")
    assert parse_target("[::1]:1,127.0.0.1:2", None).addresses == ("ipv6:[::1]:1", "ipv4:127.0.0.1:2")
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
