"""Tests of LocalPair: service processes on this machine become ready together, and none is left behind."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from baton import Client, errors
from baton.client import PrefillClient
from baton.local_pair import MODULES, LocalPair, ProcessPhase
from baton.server_info import HealthStatus
from common.addresses import host_and_port, why_not_listen
from tests.cli.conftest import await_end
from tests.support.free_ports import free_ports
from tests.support.running_pair import wait_until


def test_a_pair_is_entered_ready_drained_at_its_end_and_leaves_nothing_running(tmp_path: Path) -> None:
    seen: list[tuple[str, ProcessPhase]] = []
    with LocalPair(log_dir=tmp_path, on_phase=lambda service, phase, why: seen.append((service.name, phase))) as pair:
        assert {("prefill-0", ProcessPhase.READY), ("decode-0", ProcessPhase.READY)} <= set(seen)
        assert len(seen) == len(set(seen)), "each is reported once"
        pids = [service.pid for service in pair.services]
        with Client(pair.decode_addresses[0]) as client:
            assert client.health("baton.v1.Inference") is HealthStatus.SERVING
        with PrefillClient(pair.prefill_addresses[0]) as prefill:
            assert prefill.load().rows.total == 4
    assert len(pids) == 2
    assert await_end(pids)
    assert all(service.log_tail().endswith("drained") for service in pair.services)


def test_every_decode_service_knows_every_prefill_service(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "draft": "none", "decode_args": ["--no-adaptive-depth"]}
    pair = LocalPair(num_prefill=2, num_decode=2, log_dir=tmp_path, **settings)
    assert len({*pair.prefill_addresses, *pair.decode_addresses}) == 4
    flags = {"--model=demo", "--draft=none", "--log-format=json", "--dtype=float32", "--no-adaptive-depth"}
    for service in pair.decode:
        told = {f"--prefill={','.join(pair.prefill_addresses)}", f"--listen={service.address}"}
        assert flags | told <= {*service.arguments}
        assert not any(argument.startswith(("--device", "--config")) for argument in service.arguments)


def test_the_first_decode_service_has_the_port_that_is_wanted_where_that_is_free(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        taken = LocalPair(num_decode=2, decode_port=port, log_dir=tmp_path)
    free = LocalPair(num_decode=2, decode_port=port, log_dir=tmp_path)
    assert f"127.0.0.1:{port}" not in taken.decode_addresses
    assert free.decode_addresses[0] == f"127.0.0.1:{port}"
    assert f"--listen=127.0.0.1:{port}" in free.decode[0].arguments


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports are free at first, and no more is known")
def test_no_other_process_is_given_a_port_of_a_pair_before_its_service_listens_there(tmp_path: Path) -> None:
    pair = LocalPair(log_dir=tmp_path)

    def is_free(address: str) -> bool:
        with socket.socket() as other:
            try:
                other.bind(host_and_port(address))
            except OSError:
                return False
        return True

    addresses = [service.address for service in pair.services]
    assert not any(map(is_free, addresses))
    assert not any(map(why_not_listen, addresses)), "the services can listen"
    pair.stop()
    assert all(map(is_free, addresses))


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"device": "cuda"}, [0.45, 0.45]),
        ({"device": "cuda", "num_prefill": 2, "num_decode": 2}, [0.225] * 4),
        ({"device": "cuda", "decode_args": ["--device=cuda:0"]}, [0.45, 0.45]),
        ({"device": "cuda", "decode_args": ["--device=cuda:1"]}, [None, None]),
        ({"device": "cuda", "decode_args": ["--device=cuda:1"], "num_decode": 3}, [None, 0.3, 0.3, 0.3]),
        ({"device": "cuda", "decode_args": ["--memory-share=0.6"]}, [0.3, None]),
        ({"device": "cuda", "prefill_args": ["--memory-share", "0.2"], "num_decode": 2}, [None, 0.35, 0.35]),
        ({}, [None, None]),
        ({"num_prefill": 2, "num_decode": 2}, [0.45] * 4),
        ({"decode_args": ["--device=cuda"]}, [None, None]),
    ],
)
def test_services_on_one_device_divide_its_memory_where_they_are_told_nothing(
    options: dict[str, Any], shares: list[float | None], tmp_path: Path
) -> None:
    pair = LocalPair(log_dir=tmp_path, **options)
    given = [
        next((argument for argument in service.arguments if argument.startswith("--memory-share=0.")), None)
        for service in pair.services
    ]
    told = options.get("decode_args", [""])[0]
    found = [None if flag in (None, told) else float(flag.partition("=")[2]) for flag in given]
    assert found == shares


def test_a_memory_share_in_the_environment_is_not_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_MEMORY_SHARE", "0.5")
    pair = LocalPair(log_dir=tmp_path, device="cuda")
    assert not any("memory-share" in argument for service in pair.services for argument in service.arguments)


def test_a_service_that_dies_at_start_is_named_with_its_last_lines(tmp_path: Path) -> None:
    pair = LocalPair(decode_args=["--fake-trouble=die"], log_dir=tmp_path / "logs")
    with pytest.raises(errors.ServiceDied, match="decode-0 ended with status 3") as caught, pair:
        pytest.fail("entered")
    assert caught.value.log_tail.endswith("no such model: nonesuch")
    assert not any(service.is_running for service in pair.services)
    assert (tmp_path / "logs" / "decode-0.log").exists()


def test_a_service_that_never_becomes_ready_is_named() -> None:
    pair = LocalPair(prefill_args=["--fake-trouble=never-ready"], start_timeout_s=2.0)
    with pytest.raises(errors.StartTimedOut) as caught, pair:
        pytest.fail("entered")
    assert "prefill-0" in caught.value.waiting_for
    assert (pair.log_dir / "prefill-0.log").exists(), "a failed start keeps its logs"
    assert str(pair.log_dir) in str(caught.value)
    pair.stop()
    assert not any(service.is_running for service in pair.services)


def test_a_refusal_that_is_cut_is_one_without_a_reason_after_the_start() -> None:
    seen: list[tuple[str, ProcessPhase, str]] = []
    pair = LocalPair(
        modules={**MODULES, "gateway": "cut_gateway"},
        gateway_listen="127.0.0.1:0",
        on_phase=lambda service, phase, why: seen.append((service.name, phase, why)),
    )
    gateway = pair.gateway
    assert gateway is not None
    gateway.start()
    try:
        with pair.watch() as watch:

            def is_seen() -> bool:
                watch.look_at(gateway)
                return bool(seen)

            wait_until(is_seen)
            assert watch.why_not_ready(gateway) == ""
            watch.phases[gateway] = ProcessPhase.READY
            watch.look_at(gateway)
    finally:
        pair.stop()
    assert seen == [("gateway", ProcessPhase.ALIVE, "waits for decode-0"), ("gateway", ProcessPhase.ALIVE, "")]


def test_a_death_while_serving_is_noticed_and_a_killed_service_starts_again_at_its_address() -> None:
    with LocalPair() as pair:
        pair.check()
        first_pid = pair.decode[0].pid
        pair.decode[0].kill()
        assert pair.decode[0].wait(10.0)
        with pytest.raises(errors.ServiceDied, match="decode-0"):
            pair.check()
        pair.decode[0].start()
        pair.wait_ready()
        with Client(pair.decode_addresses[0]) as client:
            assert client.load().instance_id == str(pair.decode[0].pid) != str(first_pid)


def test_a_service_that_ignores_sigterm_is_killed_and_logs_of_a_pair_that_served_go() -> None:
    with LocalPair(decode_args=["--fake-trouble=ignore-sigterm"], stop_timeout_s=0.2) as pair:
        pids = [service.pid for service in pair.services]
    assert await_end(pids)
    assert not pair.log_dir.exists()
