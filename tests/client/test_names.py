"""Tests of a name that resolves to several decode services, which come and go while a client is connected."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton import Client, Finished, Tls, errors
from baton.client.servers import LOOK_UP_INTERVAL_S, READY_TIMEOUT_S, AsyncServers, BlockingServers, Server
from baton.v1 import inference_pb2
from tests.client.either_client import EitherClient
from tests.client.scripted_inference import ScriptedServer, finished, started
from tests.support.names import Names
from tests.support.services_here import until

LOOK_UP_OFTEN = {"grpc.dns_min_time_between_resolutions_ms": 50}
BOUND_S = 60.0
NUM_TRIES = 20
EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The HTTP/2 frame with which a server opens a connection."""
CERTIFICATES = Path(__file__).with_name("certificates")


def ready_at(host: str, port: int = 0) -> ScriptedServer:
    """Runs a server whose answers name its host. Raises RuntimeError if the port is taken there."""
    server = ScriptedServer(host=host, port=port)
    server.inference.model = host
    server.inference.script = [started(host), finished()]
    server.become_ready()
    return server


@contextmanager
def ready_at_both(host: str, other: str) -> Iterator[tuple[ScriptedServer, int]]:
    """Runs a server at each host, with one port for both. Yields the first and the port, which another process may have
    at the other host: then the next free one is tried.
    """
    with ExitStack() as stack:
        for _ in range(NUM_TRIES):
            first = ready_at(host)
            stack.callback(first.stop)
            port = int(first.address.rpartition(":")[2])
            with suppress(RuntimeError):
                stack.callback(ready_at(other, port).stop)
                break
        else:
            raise AssertionError(f"no port is free at both {host} and {other}")
        yield first, port


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    names.install(monkeypatch)
    return names


OpenClient = Callable[..., EitherClient]


@pytest.fixture
async def connect(open_client: OpenClient) -> OpenClient:
    """A function that opens a client of either kind, which looks names up often."""
    return lambda address, **options: open_client(address, channel_overrides=LOOK_UP_OFTEN, **options)


async def host_asked(client: EitherClient) -> str:
    """Makes a call, and returns the host that answers it."""
    return str((await client.call("model_info")).model)


async def test_services_that_a_name_gains_or_loses_are_used_or_not_and_streams_stay_where_they_are(
    names: Names, connect: OpenClient
) -> None:
    names.hosts["decode.test"] = ["127.0.0.1"]
    may_end = threading.Event()

    def script() -> Iterator[Any]:
        yield started("127.0.0.1")
        may_end.wait(BOUND_S)
        yield finished()

    with ready_at_both("127.0.0.1", "127.0.0.2") as (first, port):
        async with asyncio.timeout(BOUND_S):
            first.inference.scripts.append(script())  # type: ignore[arg-type]  # read once
            client = connect(f"dns:///decode.test:{port}")
            stream = client.generate("Hi")
            assert (await anext(stream)).request_id == "127.0.0.1"
            assert {await host_asked(client) for _ in range(10)} == {"127.0.0.1"}

            names.hosts["decode.test"] = ["127.0.0.1", "127.0.0.2"]
            while await host_asked(client) != "127.0.0.2":
                pass

            names.hosts["decode.test"] = ["127.0.0.2"]
            while {await host_asked(client) for _ in range(10)} != {"127.0.0.2"}:
                pass
            del names.hosts["decode.test"]
            assert {await host_asked(client) for _ in range(10)} == {"127.0.0.2"}, "a failed look-up changes nothing"
            may_end.set()
            assert [type(event) async for event in stream] == [Finished]


async def test_a_name_that_nobody_knows_is_told_and_looked_up_again(names: Names, connect: OpenClient) -> None:
    server = ready_at("127.0.0.1")
    address = f"dns:///decode.test:{server.address.rpartition(':')[2]}"
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(errors.Unavailable, match=rf"{re.escape(address)}: not found: .*no such name"):
            await host_asked(connect(address))
        first = asyncio.ensure_future(anext(connect(address, resume=True).generate("Hi")))
        assert not (await asyncio.wait({first}, timeout=0.3))[0]
        names.hosts["decode.test"] = ["127.0.0.1"]
        assert (await first).request_id == "127.0.0.1"
    server.stop()


@pytest.mark.parametrize("name", ["baton-test-server", "other-server"])
async def test_with_tls_the_certificates_are_for_the_name(names: Names, connect: OpenClient, name: str) -> None:
    pair = ((CERTIFICATES / "server.key").read_bytes(), (CERTIFICATES / "server.pem").read_bytes())
    server = ScriptedServer(grpc.ssl_server_credentials([pair]))
    server.become_ready()
    names.hosts[name] = ["127.0.0.1"]
    try:
        port = server.address.rpartition(":")[2]
        client = connect(f"dns:///{name}:{port}", tls=Tls(ca_file=CERTIFICATES / "ca.pem"))
        if name == "baton-test-server":
            assert await host_asked(client) == "demo"
        else:
            with pytest.raises(errors.Unavailable, match="another hostname"):
                await host_asked(client)
    finally:
        server.stop()


def test_a_server_or_a_proxy_before_it_sees_the_name_that_was_looked_up(names: Names) -> None:
    names.hosts["decode.test"] = ["127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(BOUND_S)
        authority = f"decode.test:{listener.getsockname()[1]}"
        with Client(f"dns:///{authority}"):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(BOUND_S)
                connection.sendall(EMPTY_SETTINGS)
                received = b""
                while authority.encode() not in received:  # in the headers of the health check
                    received += (part := connection.recv(4096))
                    assert part, received


class LookUps:
    """A look-up function that counts its calls. It waits while the event `goes_on` is not set."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.began: list[None] = []
        self.num_ended = 0

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.began.append(None)
        self.goes_on.wait(BOUND_S)
        self.num_ended += 1
        return self.addresses


async def take(servers: BlockingServers | AsyncServers, timeout_s: float | None = BOUND_S) -> Server:
    if isinstance(servers, AsyncServers):
        await asyncio.sleep(0)  # what other threads found comes to the event loop
        return await servers.take_when_ready(timeout_s=timeout_s)
    return await asyncio.to_thread(servers.take_when_ready, timeout_s=timeout_s)


@pytest.fixture(params=[BlockingServers, AsyncServers])
async def watch(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., BlockingServers | AsyncServers]]:
    """A function that opens the servers behind a name. A LookUps resolves the name."""
    opened: list[BlockingServers | AsyncServers] = []

    def watch(look_ups: LookUps, **options: Any) -> BlockingServers | AsyncServers:
        opened.append(request.param("dns:///decode:1", look_up=look_ups, **options))
        return opened[-1]

    yield watch
    for servers in opened:
        if isinstance(servers, AsyncServers):
            await servers.close()
        else:
            servers.close()


@pytest.fixture
def ready_server() -> Any:
    server = ScriptedServer()
    server.become_ready()
    server.inference.script = [started(), finished()]
    yield server
    server.stop()


async def test_a_name_is_looked_up_at_calls_and_not_too_often(
    watch: Callable[..., Any], ready_server: ScriptedServer
) -> None:
    now_s = 0.0
    look_ups = LookUps(ready_server.address)
    servers = watch(look_ups, clock=lambda: now_s)
    for _ in range(10):
        servers.give_back(await take(servers))
    assert len(look_ups.began) == 1
    now_s = LOOK_UP_INTERVAL_S
    servers.give_back(await take(servers))
    await until(lambda: len(look_ups.began) == 2)


async def test_a_name_may_have_addresses_of_ipv6(watch: Callable[..., Any]) -> None:
    servers = watch(LookUps("[::1]:1"))
    server = await take(servers)
    servers.give_back(server)
    assert server.target == "ipv6:[::1]:1"


async def test_calls_wait_for_a_look_up_that_hangs_only_so_long_and_not_if_a_server_is_ready(
    watch: Callable[..., Any], ready_server: ScriptedServer
) -> None:
    look_ups = LookUps(ready_server.address)
    look_ups.goes_on.clear()
    servers = watch(look_ups, look_up_timeout_s=0.1, channel_overrides=LOOK_UP_OFTEN)
    with pytest.raises(errors.Unavailable, match=r"dns:///decode:1: not found: no answer within 0\.1 s"):
        await take(servers)
    look_ups.goes_on.set()
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(errors.Unavailable):  # until what was found has come
                servers.give_back(await take(servers))
                break

        look_ups.goes_on.clear()
        while look_ups.num_ended == len(look_ups.began):
            servers.give_back(await take(servers))
        for _ in range(10):
            servers.give_back(await take(servers))
            await asyncio.sleep(0.01)
    assert len(look_ups.began) == look_ups.num_ended + 1, "there is one look-up at a time"
    look_ups.goes_on.set()


async def test_calls_wait_for_look_ups_that_fail_late_only_so_long_in_all(watch: Callable[..., Any]) -> None:
    def fail_late(host: str, port: int) -> Sequence[str]:
        late.wait(0.15)
        raise OSError("no such name")

    late = threading.Event()
    for look_up_timeout_s in (0.4, 4.0, 12.0):  # on a busy machine, the first may pass before a look-up fails
        servers = watch(fail_late, look_up_timeout_s=look_up_timeout_s, channel_overrides=LOOK_UP_OFTEN)
        with pytest.raises(errors.Unavailable) as failure:
            async with asyncio.timeout(look_up_timeout_s + READY_TIMEOUT_S / 2):
                await take(servers, None)
        if "no such name" in str(failure.value):
            break
    else:
        raise failure.value


@pytest.mark.parametrize(
    ("options", "error"),
    [({"token": "two words"}, ValueError), ({"channel_overrides": {"grpc.max_metadata_size": 2**31}}, OverflowError)],
    ids=["token", "argument"],
)
async def test_what_cannot_be_sent_is_told_at_once(
    watch: Callable[..., Any], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        watch(LookUps("127.0.0.1:1"), **options)


async def test_a_look_up_that_found_no_thread_is_tried_again(
    watch: Callable[..., Any], ready_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_no_look_up(thread: threading.Thread) -> None:
        if thread.name.startswith("look-up"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_no_look_up)
        servers = watch(LookUps(ready_server.address), channel_overrides=LOOK_UP_OFTEN)
        with pytest.raises(errors.Unavailable, match="not found: can't start new thread"):
            servers.take()
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(errors.Unavailable):
                servers.give_back(await take(servers))
                break
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [BlockingServers, AsyncServers])
async def test_a_file_names_servers_as_a_dns_name_does(
    kind: type[BlockingServers | AsyncServers], ready_server: ScriptedServer, tmp_path: Path
) -> None:
    address = f"file://{tmp_path}/decode"
    servers: Any = kind(address, channel_overrides=LOOK_UP_OFTEN)
    with pytest.raises(errors.Unavailable, match=f"{address}: not found: .*No such file"):
        await take(servers)
    (tmp_path / "decode").write_text(f"{ready_server.address}\n")
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(errors.Unavailable):
                assert (await take(servers)).target == f"ipv4:{ready_server.address}"
                break
            await asyncio.sleep(0.01)
    closed = servers.close()
    if closed is not None:
        await closed


def test_servers_that_a_file_names_need_a_name_in_common_for_tls() -> None:
    with pytest.raises(errors.InvalidArgument, match="server_name"):
        Client("file:///decode", tls=Tls(ca_file=CERTIFICATES / "ca.pem"))


async def test_a_server_that_comes_back_still_has_its_open_calls(
    watch: Callable[..., Any], ready_server: ScriptedServer
) -> None:
    other = ScriptedServer()
    other.become_ready()
    try:
        look_ups = LookUps(ready_server.address)
        servers = watch(look_ups, channel_overrides=LOOK_UP_OFTEN)
        async with asyncio.timeout(BOUND_S):
            first = await take(servers)

            async def until_taken(is_right: Callable[[Server], bool]) -> Server:
                while not is_right(server := await take(servers)):
                    servers.give_back(server)
                return server

            look_ups.addresses = (other.address,)
            servers.give_back(await until_taken(lambda server: server is not first))
            look_ups.addresses = (ready_server.address,)
            again = await until_taken(lambda server: server.target == first.target)
            assert again is first and first.num_open == 2
    finally:
        other.stop()


async def test_the_channel_of_a_server_that_is_gone_is_closed_when_its_calls_have_ended(
    watch: Callable[..., Any], ready_server: ScriptedServer
) -> None:
    def is_closed(server: Server) -> bool:
        try:
            server.inference.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=BOUND_S)
        except (ValueError, grpc.aio.UsageError):
            return True
        except grpc.RpcError as error:  # it was closed during the call
            assert "Channel closed" in str(error)
            return True
        return False

    other = ScriptedServer()
    other.become_ready()
    try:
        look_ups = LookUps(ready_server.address)
        servers = watch(look_ups, channel_overrides=LOOK_UP_OFTEN)
        async with asyncio.timeout(BOUND_S):
            gone = await take(servers)
            look_ups.addresses = (other.address,)
            while (server := await take(servers)) is gone:
                servers.give_back(server)
            await asyncio.sleep(0.05)
            assert not is_closed(gone)
            servers.give_back(gone)
            await until(lambda: is_closed(gone))
            assert not is_closed(server)
    finally:
        other.stop()
