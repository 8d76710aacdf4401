"""`baton up`, `demo` and `bench` as people run them: processes of their own that leave none behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton.cli.demo_answer import TOKEN_IDS
from baton.errors import InvalidArgument
from baton.gateway_process import checked_listen
from common.demo_model import demo_model_path
from tests.cli.conftest import BOUND_S, await_end
from tests.client.scripted_inference import ScriptedServer, delta, started

BATON = [sys.executable, "-c", "from baton.cli.main import main; main()"]


class Command:
    """A running `baton` command with --json."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*BATON, *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.service_pids: list[int] = []

    def lines_until(self, is_last: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Everything printed up to that line; fails when the command ends before it."""
        lines = []
        assert self.process.stdout is not None
        for text in self.process.stdout:
            lines.append(json.loads(text))
            if is_last(lines[-1]):
                return lines
        pytest.fail(f"ended with {self.process.wait(BOUND_S)} after {lines}: {self._stderr()}")

    def ready(self) -> dict[str, Any]:
        line = self.lines_until(lambda line: line["event"] == "ready")[-1]
        self.service_pids = [service["pid"] for service in line["services"]]
        return line

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        out, _ = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()]

    def _stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@pytest.fixture
def command() -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start(*arguments: str) -> Command:
        commands.append(Command(*arguments))
        return commands[-1]

    yield start
    for each in commands:
        for pid in (each.process.pid, *each.service_pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.communicate(timeout=BOUND_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_stops_cleanly(command: Callable[..., Command], number: signal.Signals) -> None:
    up = command("up", "--model=tiny", "--prefill=2")
    assert [service["name"] for service in up.ready()["services"]] == ["prefill-0", "prefill-1", "decode-0"]
    loads = up.lines_until(lambda line: line["event"] == "load" and line["name"] == "decode-0")
    assert loads[-1]["load"]["rows"]["total"] == 4
    up.process.send_signal(number)
    status, lines = up.end()
    assert (status, lines[-1]) == (0, {"event": "stopped"})
    assert await_end(up.service_pids)


def test_up_with_a_gateway_answers_http_and_stops_it_too(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ("BATON_TLS_CERT", "BATON_TLS_KEY"):  # of services of another kind: these speak in plain
        monkeypatch.setenv(setting, "/no/such/file")
    up = command("up", "--model=tiny", "--gateway", "--gateway-listen=127.0.0.1:0", "--refresh-s=0.1")
    ready = up.ready()
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", ready["gateway"])
    assert [service["name"] for service in ready["services"]] == ["prefill-0", "decode-0", "gateway"]
    with urllib.request.urlopen(f"{ready['gateway']}/v1/models", timeout=BOUND_S) as response:
        assert "--model=tiny" in json.load(response)["data"][0]["id"]
    log = Path(ready["services"][-1]["log"]).read_text().splitlines()
    (config,) = [line for line in map(json.loads, log) if line["event"] == "config"]
    assert len(config["metrics_targets"]) == 2, "the status page shows both services"
    up.process.send_signal(signal.SIGTERM)
    assert up.end()[0] == 0
    assert await_end(up.service_pids)


@pytest.mark.parametrize("address", ["8000", ":8000", "host:", "host:http", "host:65536", "a/b:80", "a b:80", "ü:80"])
def test_what_is_no_address_to_listen_on_is_refused_by_the_option_s_name(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--gateway-listen: .* is not HOST:PORT"):
        checked_listen(address)


def test_the_port_to_listen_on_may_be_any_that_is_free() -> None:
    assert checked_listen("127.0.0.1:8000") == "127.0.0.1:8000"
    assert checked_listen("::1:8000") == checked_listen("[::1]:8000") == "[::1]:8000"
    assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", checked_listen("127.0.0.1:0"))


def test_up_refuses_an_address_of_its_gateway_before_anything_starts(command: Callable[..., Command]) -> None:
    status, lines = command("up", "--model=tiny", "--gateway", "--gateway-listen=here").end()
    assert status == 1
    (error,) = lines
    assert (error["reason"], error["metadata"]) == ("INVALID_FIELD", {"field": "gateway_listen"})


def test_up_ends_when_its_gateway_dies(command: Callable[..., Command]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        listen = f"127.0.0.1:{held.getsockname()[1]}"
        up = command("up", "--model=tiny", "--gateway", f"--gateway-listen={listen}", "--start-timeout-s=20")
        status, lines = up.end()
    assert (status, lines[-1]["reason"], lines[-1]["metadata"]["service"]) == (1, "SERVICE_DIED", "gateway")
    assert f"listen: cannot listen on {listen}" in lines[-1]["message"]


def test_up_that_is_killed_leaves_no_process(command: Callable[..., Command]) -> None:
    up = command("up", "--model=tiny")
    up.ready()
    up.process.kill()
    assert await_end(up.service_pids)


def test_up_interrupted_while_it_starts_leaves_no_process(command: Callable[..., Command]) -> None:
    up = command("up", "--model=tiny", "--decode-arg=--fake-trouble=never-ready")
    alive: set[int] = set()
    up.lines_until(lambda line: alive.add(line["pid"]) or len(alive) == 2)
    up.process.send_signal(signal.SIGINT)
    status, lines = up.end()
    assert (status, lines[-1]["event"]) == (0, "stopped")
    assert await_end(alive)


def test_up_ends_with_a_service_that_dies(command: Callable[..., Command]) -> None:
    up = command("up", "--model=tiny", "--prefill-arg=--fake-trouble=die")
    status, lines = up.end()
    assert status == 1
    assert (lines[-1]["event"], lines[-1]["reason"]) == ("error", "SERVICE_DIED")
    assert lines[-1]["metadata"] == {"service": "prefill-0", "returncode": "3"}
    assert "no such model: nonesuch" in lines[-1]["message"]


def test_up_ends_when_a_service_dies_later(command: Callable[..., Command]) -> None:
    up = command("up", "--model=tiny", "--refresh-s=0.1")
    up.ready()
    os.kill(up.service_pids[0], signal.SIGKILL)
    status, lines = up.end()
    assert (status, lines[-1]["reason"]) == (1, "SERVICE_DIED")
    assert await_end(up.service_pids)


def test_bench_starts_its_own_pair_and_stops_it(command: Callable[..., Command]) -> None:
    bench = command("bench", "--model=tiny", "--draft=head", "--concurrency=2", "--new-tokens=4", "--prompt-tokens=4")
    status, lines = bench.end()
    assert status == 0
    assert (lines[-1]["report"]["num_tokens"], lines[-1]["report"]["handoff_mb_per_s"]) == (8, 2.0)


def test_up_says_what_to_do_next() -> None:
    up = subprocess.Popen([*BATON, "up", "--model=tiny"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert up.stderr is not None
    lines = list(iter_until(up.stderr, "ready: "))
    up.terminate()
    _, rest = up.communicate(timeout=BOUND_S)
    assert "baton generate --chat --address 127.0.0.1:" in lines[-1]
    assert any(line.startswith("decode-0 (127.0.0.1:") and line.endswith("is ready\n") for line in lines)
    assert (up.returncode, rest.splitlines()[-1]) == (0, "stopped")


def test_interrupting_generate_cancels_the_call() -> None:
    server = ScriptedServer()
    server.inference.script = [started(), delta([5], "Hel"), server.inference.HOLD]
    generate = subprocess.Popen(
        [*BATON, "generate", "Hi", "--address", server.address, "--json"], stdout=subprocess.PIPE
    )
    assert generate.stdout is not None
    generate.stdout.readline()
    generate.send_signal(signal.SIGINT)
    generate.communicate(timeout=BOUND_S)
    assert generate.returncode == 130
    assert server.inference.call_ended.wait(BOUND_S)
    server.stop()


def iter_until(lines: Iterable[str], start: str) -> Iterator[str]:
    for line in lines:
        yield line
        if line.startswith(start):
            return


@pytest.fixture
def cached_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    demo_model_path(tmp_path / "baton").mkdir(parents=True)


@pytest.mark.usefixtures("cached_demo_model")
def test_demo_ends_well_with_the_committed_answer(command: Callable[..., Command]) -> None:
    token_ids = ",".join(map(str, TOKEN_IDS))
    status, lines = command("demo", f"--decode-arg=--fake-token-ids={token_ids}").end()
    assert status == 0
    assert (lines[-1]["event"], lines[-1]["matches_committed_answer"]) == ("demo", True)
    assert (lines[-1]["kv_bytes"], lines[-1]["handoff_s"]) == (1_000_000, 0.5)


@pytest.mark.usefixtures("cached_demo_model")
def test_demo_fails_on_any_other_answer(command: Callable[..., Command]) -> None:
    status, lines = command("demo").end()
    assert status == 1
    assert (lines[-1]["event"], lines[-1]["reason"]) == ("error", "DEMO_ANSWER_DIFFERS")
    assert lines[-1]["message"] == f"token 0 is 0, committed is {TOKEN_IDS[0]}"
