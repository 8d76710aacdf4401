"""Tests of TLS and mutual TLS from decode to prefill: trusted peers are served, and all others are told why not and do
no harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from baton import Client, Tls, errors
from common.errors import ConfigError, PrefillUnavailable
from common.rpc.tls import channel_credentials, server_credentials
from decode_service.handoff.grpc_replica import PrefillAccess
from decode_service.handoff.grpc_transport import GrpcTransport
from decode_service.messages import Replica, StartHandoff
from tests.handoff.samples import prebuilt, row
from tests.handoff.scripted_prefill import RecordingDecode, ScriptedPrefill
from tests.security.certificates import LONG_AGO, Authority, Files
from tests.security.transports import looking_at
from tests.support.loop_thread import LoopThread
from tests.support.prefill_edge import start_prefill_edge


class Rig:
    """A prefill server with the given credentials, and decode transports that try to reach it."""

    def __init__(self) -> None:
        self.loop = LoopThread()
        self.prefill = ScriptedPrefill()
        self._num_calls = 0
        self._closings: list[Callable[[], Any]] = []

    def serve(self, credentials: grpc.ServerCredentials | None) -> str:
        edge = self.loop.run(start_prefill_edge(self.prefill, credentials=credentials))
        self._closings.append(lambda: self.loop.run(edge.server.stop(0)))
        return edge.address

    def look(self, address: str, credentials: grpc.ChannelCredentials | None) -> tuple[RecordingDecode, GrpcTransport]:
        decode, transport = self.loop.run(looking_at(address, access=PrefillAccess(credentials)))
        self._closings.append(lambda: self.loop.run(transport.close()))
        return decode, transport

    def is_served(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        """Asserts that a whole handoff to the address succeeds."""
        decode, transport = self.look(address, credentials)
        decode.latest_replica(lambda replica: replica.is_ready)
        transport.start(StartHandoff("call", address, (row(),)))
        self._num_calls += 1
        call_id = self.prefill.opened(self._num_calls)[-1].call_id
        self.prefill.emit(call_id, prebuilt(0))
        self.prefill.finish(call_id)
        assert decode.ended("call").error is None

    def refusal(self, address: str, credentials: grpc.ChannelCredentials | None) -> str:
        """Returns the reason why the replica is not ready, as GetLoad and the log give it."""
        decode, _ = self.look(address, credentials)
        replica: Replica = decode.latest_replica(lambda replica: "not looked" not in str(replica.error))
        assert not replica.is_ready
        assert isinstance(replica.error, PrefillUnavailable)
        return str(replica.error)

    def close(self) -> None:
        for close in reversed(self._closings):
            close()
        self.loop.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


def server(files: Files, client_ca: Path | None = None) -> grpc.ServerCredentials | None:
    return server_credentials(files.certificate, files.key, client_ca)


def client(ca: Path, files: Files | None = None) -> grpc.ChannelCredentials:
    return channel_credentials(ca, files and files.certificate, files and files.key)


def test_a_replica_whose_certificate_is_trusted_is_served(rig: Rig, ours: Authority) -> None:
    rig.is_served(rig.serve(server(ours.issue("server"))), client(ours.ca))


def test_mutual_tls_serves_who_has_a_certificate_and_refuses_everyone_else(
    rig: Rig, ours: Authority, theirs: Authority
) -> None:
    address = rig.serve(server(ours.issue("mutual"), ours.ca))
    trusted = client(ours.ca, ours.issue("client"))
    rig.is_served(address, trusted)

    assert "UNAVAILABLE" in rig.refusal(address, client(ours.ca)), "no certificate"
    assert "UNAVAILABLE" in rig.refusal(address, client(ours.ca, theirs.issue("client"))), "another authority's"
    expired = ours.issue("expired-client", expires=LONG_AGO)
    assert "UNAVAILABLE" in rig.refusal(address, client(ours.ca, expired)), "one that is over"
    assert "UNAVAILABLE" in rig.refusal(address, None), "plain text"

    rig.is_served(address, trusted)


FAULTS = {
    "another authority": "the certificate of .* is not trusted",
    "expired": "the certificate of .* has expired",
    "another host": "the certificate of .* is for another hostname",
    "plain text": "does not speak TLS",
}
"""For each fault of a server's certificate, the error that a connecting peer reports."""


def faulty_server(fault: str, ours: Authority, theirs: Authority) -> grpc.ServerCredentials | None:
    match fault:
        case "another authority":
            return server(theirs.issue("server"))
        case "expired":
            return server(ours.issue("expired", expires=LONG_AGO))
        case "another host":
            return server(ours.issue("elsewhere", host="elsewhere.example"))
        case _:
            return None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_cannot_be_trusted_is_given_nothing_and_the_reason_is_named(
    rig: Rig, ours: Authority, theirs: Authority, fault: str
) -> None:
    address = rig.serve(faulty_server(fault, ours, theirs))

    assert re.search(FAULTS[fault], rig.refusal(address, client(ours.ca))), "by the decode service"

    with Client(address, tls=Tls(ca_file=ours.ca)) as user, pytest.raises(errors.Unavailable, match=FAULTS[fault]):
        user.health()


@pytest.mark.parametrize("text", ["", "garbage\n", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"])
def test_a_file_that_is_no_certificate_key_or_authority_is_named(tmp_path: Path, text: str) -> None:
    files = Authority(tmp_path, "site").issue("server")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text(text)
    for certificate, key in ((wrong, files.key), (files.certificate, wrong)):
        with pytest.raises(ConfigError, match=r"^tls_cert: .*wrong\.pem"):
            server_credentials(certificate, key, None)
    with pytest.raises(ConfigError, match=r"^tls_ca: .*wrong\.pem"):
        server_credentials(files.certificate, files.key, wrong)
    with pytest.raises(ConfigError, match=r"^prefill_tls_ca: .*wrong\.pem"):
        channel_credentials(wrong, None, None)


def test_a_private_key_that_others_may_read_is_warned_about(tmp_path: Path) -> None:
    files = Authority(tmp_path, "site").issue("server")
    for mode, expected in ((0o600, []), (0o644, ["tls_key"])):
        files.key.chmod(mode)
        with capture_logs() as log:
            server_credentials(files.certificate, files.key, None)
        assert [line["setting"] for line in log if line["event"] == "secret_open_to_others"] == expected
