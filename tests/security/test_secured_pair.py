"""Tests of two real processes with mutual TLS and tokens on every connection, as an operator would run them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton import Client, Tls, errors
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus
from tests.security.certificates import Authority
from tests.support.running_pair import BOUND_S, HANDS_ALL_OVER, RECONNECT_AT_ONCE, wait_until

FOR_CLIENTS, FOR_DECODE, OLD = "client-token-0123456789", "decode-token-9876543210", "old-token"
_LISTEN = "0A"
_LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""The hexadecimal addresses of 127.0.0.1, as IPv4 and as the IPv4-mapped IPv6 address that gRPC uses."""


def listening_addresses(pid: int) -> set[str]:
    """Returns the hexadecimal addresses on which a process's TCP sockets listen, as Linux shows them."""
    ours = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if entry.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in ours:
                found.add(fields[1].partition(":")[0])
    return found


class SecuredPair:
    def __init__(self, model: Path, directory: Path) -> None:
        authority = Authority(directory, "site")
        (directory / "clients").write_text(f"{OLD}\n{FOR_CLIENTS}\n")
        (directory / "replicas").write_text(f"{FOR_DECODE}\n")

        def secured(role: str, token_file: Path) -> list[str]:
            files = authority.issue(role)
            tls = (f"--tls-cert={files.certificate}", f"--tls-key={files.key}", f"--tls-ca={authority.ca}")
            return ["--num-threads=1", "--max-kv-tokens=1024", f"--auth-token-file={token_file}", *tls]

        self.processes = LocalPair(
            model=str(model),
            dtype="float32",
            prefill_args=secured("prefill", directory / "replicas"),
            decode_args=[
                *secured("decode", directory / "clients"),
                HANDS_ALL_OVER,
                "--prefill-tls",
                f"--prefill-tls-ca={authority.ca}",
                f"--prefill-token-file={directory / 'replicas'}",
            ],
            log_dir=directory / "logs",
        )
        self.services = self.processes.services
        (self.address,) = self.processes.decode_addresses
        ours, theirs = authority.issue("client"), Authority(directory, "stranger").issue("client")
        self.tls = Tls(ca_file=authority.ca, cert_file=ours.certificate, key_file=ours.key)
        self.nobodys_tls = Tls(ca_file=authority.ca, cert_file=theirs.certificate, key_file=theirs.key)

    def client(self, token: str | None = FOR_CLIENTS, tls: Tls | None = None) -> Client:
        return Client(self.address, tls=tls or self.tls, token=token, channel_overrides=RECONNECT_AT_ONCE)


@pytest.fixture
def pair(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> Iterator[SecuredPair]:
    pair = SecuredPair(tiny_model_dir("llama"), tmp_path)
    try:
        pair.processes.start()  # only its own clients may ask whether it is ready
        yield pair
    finally:
        pair.processes.stop()


@pytest.mark.thorough
def test_who_has_a_certificate_and_a_token_is_served_and_no_secret_is_logged(pair: SecuredPair) -> None:
    with pair.client(token=None) as prober:  # health probes have no token
        wait_until(
            lambda: prober.health("baton.v1.Inference") is HealthStatus.SERVING,
            about=lambda: [service.log_tail() for service in pair.services],
        )
        with pytest.raises(errors.Unauthenticated):
            prober.complete("the", max_tokens=2)
    with pair.client(tls=pair.nobodys_tls) as stranger, pytest.raises(errors.Unavailable):
        stranger.health()
    with pair.client(token=FOR_DECODE) as confused, pytest.raises(errors.Unauthenticated):
        confused.load()

    for token in (FOR_CLIENTS, OLD):
        with pair.client(token) as client:
            assert len(client.complete("the", max_tokens=3, ignore_eos=True).token_ids) == 3

    for service in pair.services:
        service.check()
        assert len(listening_addresses(service.pid)) == 1
        assert listening_addresses(service.pid) <= _LOOPBACK
        service.terminate()
        assert service.wait(BOUND_S)
    for service in pair.services:
        logged = service.log_file.read_text()
        lines = [json.loads(line) for line in logged.splitlines() if line.startswith("{")]
        assert [line["event"] for line in lines].count("config") == 1
        assert not any(token in logged for token in (FOR_CLIENTS, FOR_DECODE, OLD))
        assert "tokens_in_plain_text" not in logged
