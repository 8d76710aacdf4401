"""Tests of prefill replicas that are found through a name: they appear, disappear and return while the transport
runs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from grpc_health.v1 import health_pb2

from common.errors import PrefillUnavailable
from common.rpc.name_lookup import look_up
from common.rpc.tls import channel_credentials, server_credentials
from common.wire.codec_frames import FrameCodec
from common.wire.handoff import Accepted
from decode_service.handoff.grpc_replica import PrefillAccess
from decode_service.handoff.grpc_transport import GrpcTransport
from decode_service.messages import FrameArrived, Replica, ReplicasChanged, StartHandoff
from tests.handoff.homes import FAST
from tests.handoff.raw_replica import RawReplica
from tests.handoff.samples import FINGERPRINT, ROOMY_BUDGET_BYTES, prebuilt, row
from tests.handoff.scripted_names import ScriptedNames
from tests.handoff.scripted_prefill import RecordingDecode
from tests.security.certificates import Authority
from tests.support.free_ports import needs_ipv6
from tests.support.loop_thread import LoopThread
from tests.wire.strategies import VOCAB_SIZE

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
CODEC = FrameCodec(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE)
ACCEPTED, WHOLE = CODEC.encode(Accepted("raw")), (CODEC.encode(Accepted("raw")), CODEC.encode(prebuilt(0)))
TIMEOUTS = replace(FAST, look_up_interval_s=0.01)


def port_free_at(*hosts: str) -> tuple[int, ExitStack]:
    """Returns a port and what keeps others from it at all hosts until it is closed, as HeldPorts does for one host."""
    while True:
        port, held = 0, ExitStack()
        try:
            for host in hosts:
                holder = held.enter_context(socket.socket())
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((host, port))
                port = holder.getsockname()[1]
        except OSError:  # the first host's port is taken at another
            held.close()
        else:
            return port, held


class Rig:
    """Replicas at several hosts and one port, the names that resolve to them, and a transport that looks these up."""

    def __init__(self) -> None:
        self.port, self._held = port_free_at(FIRST, SECOND)
        self.loop = LoopThread()
        self.decode = RecordingDecode()
        self.names = ScriptedNames()
        self.transport: GrpcTransport | None = None
        self._running: list[RawReplica] = []

    def bring_up(self, host: str, *, frames: tuple[bytes, ...] = WHOLE) -> RawReplica:
        replica = RawReplica(instance_id=host, host=host, port=self.port)
        replica.frames = frames
        self.loop.run(replica.start())
        self._running.append(replica)
        return replica

    def stop(self, replica: RawReplica) -> None:
        self._running.remove(replica)
        self.loop.run(replica.stop())

    def connect(self, *addresses: str, **options: object) -> GrpcTransport:
        async def build() -> GrpcTransport:
            transport = GrpcTransport(
                post=self.decode.post,
                addresses=[address.replace("PORT", str(self.port)) for address in addresses],
                fingerprint=FINGERPRINT,
                vocab_size=VOCAB_SIZE,
                receive_budget_bytes=ROOMY_BUDGET_BYTES,
                **{"timeouts": TIMEOUTS, "look_up": self.names, **options},  # type: ignore[arg-type]
            )
            await transport.open()
            return transport

        self.transport = self.loop.run(build())
        return self.transport

    def at(self, host: str) -> str:
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def replicas(self, holds: Callable[[dict[str, Replica]], bool]) -> dict[str, Replica]:
        """Waits until `holds` is True of the last posted replicas, and returns these by address."""

        def last(reports: list[object]) -> dict[str, Replica]:
            changes = [report for report in reports if isinstance(report, ReplicasChanged)]
            return {replica.address: replica for replica in changes[-1].replicas} if changes else {}

        return last(list(self.decode.reports.wait_until(lambda reports: holds(last(list(reports))))))

    def others_may_come(self) -> bool:
        """Returns whether the last report says that further replicas may come."""
        changes = [report for report in self.decode.reports.wait_until(bool) if isinstance(report, ReplicasChanged)]
        return changes[-1].others_may_come

    def ready(self, *hosts: str) -> None:
        """Waits until exactly these hosts are replicas, and all of them are ready."""
        wanted = {self.at(host) for host in hosts}
        self.replicas(lambda each: set(each) == wanted and all(replica.is_ready for replica in each.values()))

    def close(self) -> None:
        self.names.release()
        if self.transport is not None:
            self.loop.run(self.transport.close())
        for replica in self._running:
            self.loop.run(replica.stop())
        self.loop.close()
        self._held.close()


def num_connections_to(host: str) -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(
        bool(each.raddr) and each.raddr.ip.endswith(host) and each.status == "ESTABLISHED" for each in connections
    )


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_every_address_behind_a_name_is_a_replica_that_serves_rows(rig: Rig) -> None:
    for host in (FIRST, SECOND):
        rig.bring_up(host)
    rig.names.hosts["prefill"] = (FIRST, SECOND)
    transport = rig.connect("dns:///prefill:PORT")
    rig.ready(FIRST, SECOND)
    for host in (FIRST, SECOND):
        transport.start(StartHandoff(host, rig.at(host), (row(),)))
        assert rig.decode.ended(host).error is None
        accepted = rig.decode.arrived(host)[0]
        assert isinstance(accepted, Accepted)
    assert not rig.names.is_loop_thread, "a look-up blocks"
    assert rig.others_may_come()


def test_of_fixed_addresses_there_will_be_no_others(rig: Rig) -> None:
    rig.bring_up(FIRST)
    rig.connect(f"{FIRST}:PORT")
    rig.ready(FIRST)
    assert not rig.others_may_come()


def test_replicas_come_and_go_with_the_lines_of_a_file(rig: Rig, tmp_path: Path) -> None:
    first, file = rig.bring_up(FIRST), tmp_path / "prefill"
    rig.bring_up(SECOND)
    file.write_text(f"{rig.at(FIRST)}\n")
    transport = rig.connect(f"file://{file}")
    rig.ready(FIRST)
    assert rig.others_may_come()
    file.write_text(f"{rig.at(SECOND)}\n")
    rig.ready(FIRST, SECOND)
    rig.stop(first)
    rig.ready(SECOND)
    transport.start(StartHandoff("call", rig.at(SECOND), (row(),)))
    assert rig.decode.ended("call").error is None


def test_a_file_that_is_missing_is_reported_by_its_name_until_it_is_there(rig: Rig, tmp_path: Path) -> None:
    rig.bring_up(FIRST)
    name = f"file://{tmp_path}/prefill"
    rig.connect(name)
    missing = rig.replicas(lambda each: name in each and "not looked up yet" not in str(each[name].error))[name]
    assert not missing.is_ready and "No such file" in str(missing.error)
    (tmp_path / "prefill").write_text(f"{rig.at(FIRST)}\n")
    rig.ready(FIRST)


def test_a_replica_that_left_the_name_stays_while_it_is_ready_and_is_let_go_when_it_is_gone(rig: Rig) -> None:
    rig.bring_up(FIRST)
    leaving = rig.bring_up(SECOND)
    rig.names.hosts["prefill"] = (FIRST, SECOND)
    transport = rig.connect("dns:///prefill:PORT")
    rig.ready(FIRST, SECOND)
    rig.names.hosts["prefill"] = (FIRST,)
    rig.names.wait_for_more()
    transport.start(StartHandoff("call", rig.at(SECOND), (row(),)))
    assert rig.decode.ended("call").error is None, "it is ready"
    rig.stop(leaving)
    rig.ready(FIRST)
    transport.start(StartHandoff("next", rig.at(SECOND), (row(),)))
    assert "is not a replica" in str(rig.decode.ended("next").error)


def test_a_replica_that_left_the_name_and_is_not_ready_keeps_its_calls_to_their_end(rig: Rig) -> None:
    rig.bring_up(FIRST)
    leaving = rig.bring_up(SECOND, frames=(ACCEPTED,))
    leaving.hangs = True
    rig.names.hosts["prefill"] = (FIRST, SECOND)
    transport = rig.connect("dns:///prefill:PORT")
    rig.ready(FIRST, SECOND)
    transport.start(StartHandoff("call", rig.at(SECOND), (row(),)))
    rig.decode.reports.wait_until(lambda reports: any(isinstance(each, FrameArrived) for each in reports))
    rig.names.hosts["prefill"] = (FIRST,)
    leaving.health = health_pb2.HealthCheckResponse.NOT_SERVING
    rig.replicas(lambda each: rig.at(SECOND) in each and not each[rig.at(SECOND)].is_ready)
    rig.names.wait_for_more()
    assert rig.at(SECOND) in rig.replicas(bool)
    assert rig.decode.num_ends("call") == 0
    rig.stop(leaving)
    assert isinstance(rig.decode.ended("call").error, PrefillUnavailable)
    rig.ready(FIRST)


def test_a_replica_that_was_let_go_is_not_looked_at_and_has_no_connection(rig: Rig) -> None:
    rig.bring_up(FIRST)
    leaving = rig.bring_up(SECOND)
    rig.names.hosts["prefill"] = (FIRST, SECOND)
    rig.connect("dns:///prefill:PORT")
    rig.ready(FIRST, SECOND)
    assert num_connections_to(SECOND) > 0
    rig.names.hosts["prefill"] = (FIRST,)
    leaving.health = health_pb2.HealthCheckResponse.NOT_SERVING
    rig.ready(FIRST)
    for _ in range(100):
        rig.names.wait_for_more()
        if not num_connections_to(SECOND):
            break
    assert num_connections_to(SECOND) == 0
    num_looks = leaving.num_looks
    rig.names.wait_for_more()
    assert leaving.num_looks == num_looks


def test_a_replica_that_returns_to_the_name_is_a_replica_again(rig: Rig) -> None:
    replica = rig.bring_up(FIRST)
    rig.names.hosts["prefill"] = (FIRST,)
    rig.connect("dns:///prefill:PORT")
    rig.ready(FIRST)
    rig.names.hosts["prefill"] = (SECOND,)
    rig.stop(replica)
    rig.replicas(lambda each: list(each) == [rig.at(SECOND)])
    rig.bring_up(FIRST)
    rig.names.hosts["prefill"] = (FIRST,)
    rig.ready(FIRST)


def test_a_look_up_that_fails_keeps_what_was_found_and_is_logged_once(rig: Rig, logged: Callable[[], str]) -> None:
    rig.bring_up(FIRST)
    rig.names.hosts["prefill"] = (FIRST,)
    rig.connect("dns:///prefill:PORT")
    rig.ready(FIRST)
    known = rig.decode.reports.all()
    del rig.names.hosts["prefill"]
    rig.names.wait_for_more()
    assert rig.decode.reports.all() == known
    rig.bring_up(SECOND)
    rig.names.hosts["prefill"] = (FIRST, SECOND)
    rig.ready(FIRST, SECOND)
    failures = [line for line in logged().splitlines() if "failed" in line]
    assert len(failures) == 1
    assert f"dns:///prefill:{rig.port}" in failures[0] and "the script does not know it" in failures[0]


def test_a_name_that_is_not_known_is_a_replica_that_is_not_ready_until_it_is(rig: Rig) -> None:
    rig.bring_up(FIRST)
    rig.connect("dns:///prefill:PORT")
    name = f"dns:///prefill:{rig.port}"
    replicas = rig.replicas(lambda each: name in each and "not looked" not in str(each[name].error))
    assert list(replicas) == [name]
    assert not replicas[name].is_ready
    assert isinstance(replicas[name].error, PrefillUnavailable)
    assert "the script does not know it" in str(replicas[name].error)
    rig.names.hosts["prefill"] = (FIRST,)
    rig.ready(FIRST)


def test_a_look_up_that_hangs_is_told_is_never_begun_twice_and_holds_up_neither_others_nor_the_end(rig: Rig) -> None:
    rig.bring_up(FIRST)
    rig.names.hosts["other"] = (FIRST,)
    rig.names.hold("prefill")
    transport = rig.connect(
        "dns:///prefill:PORT", "dns:///other:PORT", timeouts=replace(TIMEOUTS, look_up_timeout_s=0.01)
    )
    name = f"dns:///prefill:{rig.port}"
    rig.replicas(lambda each: name in each and "no answer within 0.01 s" in str(each[name].error))
    rig.replicas(lambda each: rig.at(FIRST) in each and each[rig.at(FIRST)].is_ready)
    rig.names.wait_for_more(10)
    rig.loop.run(transport.close())
    assert rig.names.most_under_way == 1
    rig.names.release()
    rig.names.wait_for_none_under_way()


def test_an_address_that_is_named_in_several_ways_is_one_replica(rig: Rig) -> None:
    rig.bring_up(FIRST)
    rig.names.hosts.update(prefill=(FIRST, SECOND), other=(SECOND,))
    rig.bring_up(SECOND)
    rig.connect(f"{FIRST}:PORT", "dns:///prefill:PORT", "dns:///other:PORT")
    rig.ready(FIRST, SECOND)
    rig.names.hosts["prefill"] = (FIRST,)
    rig.names.wait_for_more(4)
    assert list(rig.replicas(bool)) == [rig.at(FIRST), rig.at(SECOND)]


def test_a_fixed_address_stays_whatever_the_names_say(rig: Rig) -> None:
    replica = rig.bring_up(FIRST)
    rig.bring_up(SECOND)
    rig.names.hosts["prefill"] = (FIRST, SECOND)
    rig.connect(f"{FIRST}:PORT", "dns:///prefill:PORT")
    rig.ready(FIRST, SECOND)
    rig.names.hosts["prefill"] = (SECOND,)
    rig.stop(replica)
    rig.replicas(lambda each: not each[rig.at(FIRST)].is_ready)
    rig.names.wait_for_more()
    assert set(rig.replicas(bool)) == {rig.at(FIRST), rig.at(SECOND)}


@needs_ipv6
def test_an_address_may_be_of_the_sixth_version(rig: Rig) -> None:
    replica = RawReplica(host="::1")
    rig.loop.run(replica.start())
    rig.port = replica.port
    rig.connect("dns:///[::1]:PORT", "[0:0:0:0:0:0:0:1]:PORT", look_up=look_up)
    rig.replicas(lambda each: bool(each) and all(replica.is_ready for replica in each.values()))
    assert list(rig.replicas(bool)) == [f"[0:0:0:0:0:0:0:1]:{rig.port}"], "written differently, the same"
    rig.loop.run(replica.stop())


def test_the_system_s_resolver_names_each_address_once() -> None:
    assert look_up("127.0.0.1", 5) == ("127.0.0.1:5",)
    assert look_up("::1", 5) == ("[::1]:5",)
    assert "127.0.0.1:5" in look_up("localhost", 5)
    for unknown in ("no-such-host.invalid", "a..b"):
        with pytest.raises(OSError):
            look_up(unknown, 5)


def test_of_a_name_with_addresses_of_both_versions_those_of_the_fourth_are_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [*socket.getaddrinfo("::1", 5), *socket.getaddrinfo(FIRST, 5), *socket.getaddrinfo(SECOND, 5)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert look_up("both", 5) == (f"{FIRST}:5", f"{SECOND}:5")


@pytest.mark.parametrize("certified", ["prefill.example", FIRST])
def test_the_certificate_of_a_replica_that_was_found_must_name_the_name(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory, certified: str
) -> None:
    authority = Authority(tmp_path_factory.mktemp("site"), "site")
    files = authority.issue("replica", host=certified)
    replica = RawReplica(host=FIRST, port=rig.port)
    replica.credentials = server_credentials(files.certificate, files.key, None)
    rig.loop.run(replica.start())
    rig.names.hosts["prefill.example"] = (FIRST,)
    access = PrefillAccess(channel_credentials(authority.ca, None, None))
    rig.connect("dns:///prefill.example:PORT", access=access)
    if certified == "prefill.example":
        rig.ready(FIRST)
    else:
        found = rig.replicas(lambda each: "UNAVAILABLE" in str(each.get(rig.at(FIRST))))
        assert "ostname" in str(found[rig.at(FIRST)].error)
    rig.loop.run(replica.stop())
