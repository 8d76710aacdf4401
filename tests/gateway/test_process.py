"""Tests of `python -m gateway`: its signals and its exit status."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.main import run_gateway
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import COMPLETIONS, Answer, GatewayHere, post
from tests.security.certificates import Authority
from tests.support.running_pair import wait_until

BODY: dict[str, Any] = {"model": "demo", "prompt": "hi"}
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


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
        chunks = iter(gateway.openai().completions.create(**BODY, stream=True))
        assert next(chunks).choices[0].text == "a"
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
        chunks = iter(gateway.openai().completions.create(**BODY, stream=True))
        assert next(chunks).choices[0].text == "a"
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
        chunks = iter(gateway.openai().completions.create(**BODY, stream=True))
        assert next(chunks).choices[0].text == "a"
        process.send_signal(signal.SIGTERM)
        turned_away(gateway)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == -signal.SIGTERM
        gateway.clients[0].close()
    scripted_end()


FEW_DESCRIPTORS = ("sh", "-c", 'ulimit -n 160; exec "$@"', "sh")


def open_connections(
    gateway: GatewayHere, stack: ExitStack, *, source: str = "127.0.0.1", num: int = 300
) -> Iterator[socket.socket]:
    """Opens up to `num` connections, more than a gateway with few file descriptors can hold."""
    for _ in range(num):
        yield stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), BOUND_S, (source, 0)))


@pytest.mark.parametrize("sent", [b"", post(BODY)[:-1]], ids=["silent", "half a body"])
def test_connections_without_a_whole_request_make_room_for_others(
    scripted: ScriptedServer, tmp_path: Path, sent: bytes
) -> None:
    log = tmp_path / "log"
    with running(scripted.address, log, within=FEW_DESCRIPTORS) as (_, gateway), ExitStack() as stack:
        for connection in open_connections(gateway, stack):
            connection.sendall(sent)
        assert [gateway.ask("GET", "/health/live").status for _ in range(5)] == [200] * 5
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines if line["level"] == "warning"] == ["connections_full"], "one for all"


def test_where_all_have_a_request_others_are_told_when_to_come_again(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.inference.script = [started(), scripted.inference.HOLD]
    log, answers = tmp_path / "log", []
    with running(scripted.address, log, within=FEW_DESCRIPTORS) as (_, gateway), ExitStack() as stack:
        for connection in open_connections(gateway, stack):
            connection.sendall(post(BODY))
            answers.append(gateway.ask("GET", "/health/live"))
            if answers[-1].status != 200:
                break
    assert len(answers) > 40
    assert (answers[-1].status, answers[-1].error["code"], answers[-1].headers["retry-after"]) == (
        503,
        "unavailable",
        "1",
    )
    warnings = [json.loads(line) for line in log.read_text().splitlines() if '"warning"' in line]
    assert [line["event"] for line in warnings] == ["connections_full"]


OTHER = ("127.0.0.2", 0)


def test_one_address_that_has_all_connections_keeps_no_other_out(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.inference.script = [started(), scripted.inference.HOLD]
    with (
        running(scripted.address, tmp_path / "log", "--max-open-requests=300", within=FEW_DESCRIPTORS) as (_, gateway),
        ExitStack() as stack,
    ):
        for connection in open_connections(gateway, stack):
            connection.sendall(post(BODY))
            if gateway.ask("GET", "/health/live").status == 503:
                break
        assert [gateway.ask("GET", "/health/live", source=OTHER).status for _ in range(20)] == [200] * 20


def test_silent_connections_of_one_address_yield_to_another_that_has_many_requests(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    scripted.inference.script = [started(), scripted.inference.HOLD]
    with running(scripted.address, tmp_path / "log", within=FEW_DESCRIPTORS) as (_, gateway), ExitStack() as stack:
        for connection in open_connections(gateway, stack, source=OTHER[0], num=40):
            connection.sendall(post(BODY))
        assert gateway.ask("GET", "/health/live", source=OTHER).status == 200  # earlier requests were read
        silent = list(open_connections(gateway, stack))
        assert [gateway.ask("GET", "/health/live", source=OTHER).status for _ in range(20)] == [200] * 20
        assert len(silent) == 300


def test_who_has_few_connections_loses_none_to_who_has_many(scripted: ScriptedServer, tmp_path: Path) -> None:
    with running(scripted.address, tmp_path / "log", within=FEW_DESCRIPTORS) as (_, gateway), ExitStack() as stack:
        few = list(open_connections(gateway, stack, source=OTHER[0], num=4))
        many = list(open_connections(gateway, stack))
        for connection in few:
            connection.sendall(LIVE)
            assert connection.recv(1024).startswith(b"HTTP/1.1 200 ")
        assert len(many) == 300


def test_an_upload_on_a_reused_connection_goes_on_while_silent_ones_make_room(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    scripted.inference.script = [started(), delta([1], "a"), finished()]
    body, num_sent = json.dumps({**BODY, "prompt": "x" * (1 << 20)}).encode(), 0
    with running(scripted.address, tmp_path / "log", within=FEW_DESCRIPTORS) as (_, gateway), ExitStack() as stack:
        upload = stack.enter_context(closing(gateway.connect()))
        upload.request("GET", "/health/live")
        assert upload.getresponse().read() == b'{"status":"ok"}'
        upload.putrequest("POST", COMPLETIONS)
        upload.putheader("content-type", "application/json")
        upload.putheader("content-length", str(len(body)))
        upload.endheaders()
        silent = list(open_connections(gateway, stack, num=60))
        assert gateway.ask("GET", "/health/live").status == 200  # earlier requests were read
        for _ in open_connections(gateway, stack):
            upload.send(body[num_sent : num_sent + 2048])
            num_sent += 2048
        upload.send(body[num_sent:])
        assert upload.getresponse().status == 200
        assert len(silent) == 60


@pytest.mark.parametrize("more", [b"", b"x"], ids=["stopped", "dripping"])
def test_slow_bodies_make_room_before_who_is_silent_for_a_moment(
    scripted: ScriptedServer, tmp_path: Path, more: bytes
) -> None:
    """A body does not count as slow until it has been on its way for a moment."""
    begun = post({**BODY, "prompt": "x" * 10_000})[:200]
    with running(scripted.address, tmp_path / "log", within=FEW_DESCRIPTORS) as (_, gateway), ExitStack() as stack:
        slow: list[socket.socket] = []

        def open_slow(source: str, num: int) -> None:
            for connection in open_connections(gateway, stack, source=source, num=num):
                connection.sendall(begun)
                slow.append(connection)

        def is_served() -> bool:
            for connection in slow:
                with suppress(ConnectionError):  # the gateway closes it, to serve others
                    connection.sendall(more)
            (fresh,) = open_connections(gateway, stack, num=1)
            assert gateway.ask("GET", "/health/live", source=OTHER).status == 200  # the gateway has accepted it
            open_slow("127.0.0.4", 2)
            with suppress(ConnectionError):
                fresh.sendall(LIVE)
                return fresh.recv(1024).startswith(b"HTTP/1.1 200 ")
            return False

        open_slow(OTHER[0], 60)
        open_slow("127.0.0.3", 60)
        wait_until(is_served, bound_s=10.0)  # no body is refused in the first 15 s


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
def test_tls_handshakes_that_do_not_come_make_room_for_others(
    scripted: ScriptedServer, tmp_path: Path, sent: bytes
) -> None:
    authority = Authority(tmp_path, "ours")
    files = authority.issue("gateway")
    tls = (f"--tls-cert={files.certificate}", f"--tls-key={files.key}")
    with (
        running(scripted.address, tmp_path / "log", *tls, within=FEW_DESCRIPTORS) as (_, gateway),
        ExitStack() as stack,
    ):
        for connection in open_connections(gateway, stack):
            connection.sendall(sent)
        context = ssl.create_default_context(cafile=str(authority.ca))
        for source in ("127.0.0.1", OTHER[0]):
            (connection,) = open_connections(gateway, stack, source=source, num=1)
            with context.wrap_socket(connection, server_hostname="127.0.0.1") as honest:
                honest.sendall(LIVE)
                assert honest.recv(1024).startswith(b"HTTP/1.1 200 ")


def test_the_limit_of_descriptors_is_raised(scripted: ScriptedServer, tmp_path: Path) -> None:
    raised = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh")
    with running(scripted.address, tmp_path / "log", within=raised) as (process, _):
        soft, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert soft > 64


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


def test_nothing_but_lines_of_the_log_comes_of_a_decode_service_that_speaks_no_tls(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    with running(scripted.address, tmp_path / "log", "--decode-tls", "--admission-timeout-s=0.1") as (_, gateway):
        answer = gateway.ask("POST", "/v1/completions", BODY)
    assert "does not speak TLS" in answer.error["message"]
    assert all(json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines())


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


def test_a_start_that_cannot_be_exits_with_1() -> None:
    command = [sys.executable, "-m", "gateway", "--listen=127.0.0.1:0", "--decode=a..b:1,a..c:2"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    *_, last = map(json.loads, ended.stderr.splitlines())
    assert (ended.returncode, last["error"]) == (1, "decode: a..b:1,a..c:2: none of these is known")
