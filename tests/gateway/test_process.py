"""Tests of `python -m gateway`: its signals and its exit status."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.main import run_gateway
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import Answer, GatewayHere
from tests.support.running_pair import wait_until

BODY: dict[str, Any] = {"model": "demo", "prompt": "hi"}


@contextmanager
def running(
    decode: str, log: Path, *flags: str, within: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], GatewayHere]]:
    """Runs a gateway process. `within` is a command that is put before the gateway's own command line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "GRPC_"))}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "gateway", "--listen=127.0.0.1:0", f"--decode={decode}", *flags],
            stderr=file,
            env=environment,
        )

    def port() -> int | None:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        return next((line["port"] for line in lines if line["event"] == "serving"), None)

    try:
        wait_until(lambda: port() is not None, about=log.read_text)
        yield process, GatewayHere(None, None, port() or 0)  # type: ignore[arg-type]
    finally:
        process.kill()
        process.wait()


def begun(gateway: GatewayHere) -> Iterator[Any]:
    """Begins a stream, and returns its chunks behind the first."""
    chunks = iter(gateway.openai().completions.create(**BODY, stream=True))
    assert next(chunks).choices[0].text == "a"
    return chunks


@pytest.fixture
def scripted_end(scripted: ScriptedServer) -> Callable[[], None]:
    """Lets the decode service admit a request and answer "a". It adds "b" once the returned function is called."""
    may_end: queue.Queue[None] = queue.Queue()

    def script() -> Iterator[Any]:
        yield started()
        yield delta([1], "a")
        may_end.get(timeout=BOUND_S)
        yield delta([2], "b")
        yield finished(num_completion_tokens=2)

    scripted.inference.scripts.append(script())  # type: ignore[arg-type]  # read once
    scripted.become_ready()
    return lambda: may_end.put(None)


def turned_away(gateway: GatewayHere) -> Answer:
    """Polls /health until it answers 503, and returns that answer."""
    answers: list[Answer] = []

    def is_told() -> bool:
        answers.append(gateway.ask("GET", "/health"))
        return answers[-1].status == 503

    wait_until(is_told)
    return answers[-1]


def test_sigterm_lets_open_requests_end_and_takes_no_others(
    scripted: ScriptedServer, scripted_end: Callable[[], None], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with running(scripted.address, log) as (process, gateway):
        assert gateway.ask("GET", "/health").status == 200
        chunks = begun(gateway)
        process.send_signal(signal.SIGTERM)
        assert turned_away(gateway).json["reason"] == "the gateway is stopping"
        refused = gateway.ask("POST", "/v1/completions", BODY)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "stopping", "1")
        scripted_end()
        assert [chunk.choices[0].text for chunk in chunks] == ["b", ""]
        assert process.wait(BOUND_S) == 0
        gateway.clients[0].close()
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert [events[0], events[1], events[-1]] == ["config", "serving", "stopped"]


def test_a_stream_that_outlasts_the_grace_period_ends_with_an_error(
    scripted: ScriptedServer, scripted_end: Callable[[], None], tmp_path: Path
) -> None:
    with running(scripted.address, tmp_path / "log", "--grace-period-s=0.2") as (process, gateway):
        chunks = begun(gateway)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopped before the request's end") as caught:
            next(chunks)
        assert caught.value.code == "stopping"
        assert process.wait(BOUND_S) == 0
        gateway.clients[0].close()
    assert scripted.inference.call_ended.wait(BOUND_S)
    scripted_end()


def test_a_second_signal_ends_it_at_once(
    scripted: ScriptedServer, scripted_end: Callable[[], None], tmp_path: Path
) -> None:
    with running(scripted.address, tmp_path / "log", "--grace-period-s=600") as (process, gateway):
        begun(gateway)
        process.send_signal(signal.SIGTERM)
        turned_away(gateway)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == -signal.SIGTERM
        gateway.clients[0].close()
    scripted_end()


def test_it_raises_its_limit_of_descriptors_and_writes_nothing_but_lines_of_the_log(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    """gRPC has much to say of a decode service that speaks no TLS, and says it by itself."""
    few, flags = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh"), ("--decode-tls", "--admission-timeout-s=1")
    with running(scripted.address, tmp_path / "log", *flags, within=few) as (process, gateway):
        soft, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)

        def told() -> str:
            return str(gateway.ask("POST", "/v1/completions", BODY).error["message"])

        wait_until(lambda: "does not speak TLS" in told(), about=told)  # a busy machine may connect too late for one
    assert soft > 64
    assert all(json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-choices=0"], "max_choices: "),
        (["--decode=dns:///x:1,y:2"], "decode is one dns:///NAME:PORT or file:///PATH"),
        (["--decode=file:///x,y:2"], "decode is one dns:///NAME:PORT or file:///PATH"),
        (["--tls-cert=x"], "tls_cert and tls_key go together"),
        (["--config=absent.yaml"], "config: absent.yaml"),
    ],
)
def test_a_wrong_configuration_exits_with_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in os.environ if each.startswith("BATON_")]:
        monkeypatch.delenv(name)
    assert run_gateway(flags) == 2
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["event"], line["error"][: len(message)]) == ("cannot_start", message)


def test_a_wrong_configuration_is_said_in_the_format_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gateway(["--log-format=console", "--max-choices=0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot_start" in line and "max_choices: " in line and not line.startswith("{")


def test_a_taken_port_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert run_gateway([f"--listen={address}"]) == 2
    *_, last = map(json.loads, capsys.readouterr().err.splitlines())
    words = "Address already in use; take another port, or 0 for a free one"
    assert last["error"] == f"listen: cannot listen on {address}: {words}"


def test_a_start_that_cannot_be_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gateway(["--listen=127.0.0.1:0", "--decode=a..b:1,a..c:2"]) == 1
    *_, last = map(json.loads, capsys.readouterr().err.splitlines())
    assert last["error"] == "decode: a..b:1,a..c:2: none of these is known"
