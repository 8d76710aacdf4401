"""Tests of `baton up`, `demo` and `bench` as users run them, in processes of their own. They leave no process
behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.demo import ANSWER_TOKEN_IDS
from baton.cli.main import app
from baton.errors import InvalidArgument
from baton.full_speed import are_fused
from baton.local_pair import LocalPair
from baton.running_pairs import running_pairs
from baton.service_process import ChildProcess
from common.checkpoints.demo_model import demo_model_path
from tests.cli.conftest import BOUND_S, await_end
from tests.client.scripted_inference import ScriptedServer, delta, started
from tests.support.free_ports import free_ports
from tests.support.running_pair import wait_until

BATON = [sys.executable, "-c", "from baton.cli.main import main; main()"]


class Command:
    """A `baton` command that runs with --json. Tests read the lines that it prints."""

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
        """Returns all lines printed up to the one for which `is_last` is True. Fails if the command ends before
        that.
        """
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


def test_up_stops_cleanly(command: Callable[..., Command]) -> None:
    up = command("up", "--model=tiny", "--prefill=2")
    assert [service["name"] for service in up.ready()["services"]] == ["prefill-0", "prefill-1", "decode-0"]
    loads = up.lines_until(lambda line: line["event"] == "load" and line["name"] == "decode-0")
    assert loads[-1]["load"]["rows"]["total"] == 4
    up.process.send_signal(signal.SIGTERM)
    status, lines = up.end()
    assert (status, lines[-1]) == (0, {"event": "stopped"})
    assert await_end(up.service_pids)


@pytest.mark.thorough
def test_up_with_a_gateway_answers_http_and_stops_it_too(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ("BATON_TLS_CERT", "BATON_TLS_KEY"):  # set for other services; these use no TLS
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
    with pytest.raises(InvalidArgument, match=r"gateway_listen: .* is not HOST:PORT"):
        LocalPair(gateway_listen=address)


def test_the_port_to_listen_on_may_be_any_that_is_free(tmp_path: Path) -> None:
    def url(listen: str) -> str | None:
        return LocalPair(gateway_listen=listen, log_dir=tmp_path).gateway_url

    assert url("127.0.0.1:8000") == "http://127.0.0.1:8000"
    assert url("::1:8000") == url("[::1]:8000") == "http://[::1]:8000"
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", url("127.0.0.1:0") or "")


HELD = "HELD"
"""In the cases below, this word is replaced by the address of a port that is already in use."""


@pytest.fixture
def held() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gateway-listen=here"], "gateway_listen: 'here' is not HOST:PORT"),
        (
            ["--gateway", f"--gateway-listen={HELD}"],
            f"gateway_listen: cannot listen on {HELD}: Address already in use; take another port, or 0 for a free one",
        ),
        (
            ["--gateway", "--gateway-listen=192.0.2.1:80"],
            "gateway_listen: cannot listen on 192.0.2.1:80: Cannot assign",
        ),
        (["--gateway", "--gateway-listen=a..b:80"], "gateway_listen: cannot listen on a..b:80: "),
        ([f"--decode-arg=--metrics-listen={HELD}"], f"metrics_listen: cannot listen on {HELD}: Address already in use"),
        (
            ["--prefill-arg=--metrics-listen=127.0.0.1:9", "--decode-arg=--metrics-listen=127.0.0.1:9"],
            "metrics_listen: 1",
        ),
        (
            ["--gateway", "--decode-arg=--metrics-listen=127.0.0.1:0"],
            "metrics_listen: the pair gives its services ports for metrics, which its gateway reads",
        ),
        (["--model=/no/such/model"], "model: /no/such/model: there is no such file or directory"),
        (["--model=empty"], "model: empty: is a directory without config.json"),
        (["--model=absent.gguf"], "model: absent.gguf: there is no such file"),
        (["--draft=./absent"], "draft: ./absent: there is no such file or directory"),
        (["--decode-arg=--draft=head"], "draft: prefill has none, decode has head: give --draft alike to both kinds"),
        (
            ["--model=demo", "--prefill-arg=--draft=none"],
            "draft: prefill has none, decode has demo: give --draft alike",
        ),
        (
            ["--draft=head", "--prefill-arg=--draft-topk=2"],
            "draft_topk: prefill has 2, decode has 1: give --draft-topk",
        ),
        (
            ["--decode-arg=--kv-dtype=fp8_e4m3"],
            "kv_dtype: prefill has auto, decode has fp8_e4m3: give --kv-dtype",
        ),
        (["--decode-arg=--dtype=float32"], "dtype: prefill has bfloat16, decode has float32: give --dtype alike"),
        (
            ["--decode-config=decode.yaml", "--draft=head"],
            "dtype: prefill has bfloat16, decode has float16: give --dtype alike",
        ),
        (["--decode-config=absent.yaml"], "decode: config: absent.yaml: No such file"),
        (["--prefill-config=decode.yaml"], "prefill: unknown key: num_draft_tokens"),
        (["--dtype=int8"], "prefill: dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        (["--device=gpu"], "prefill: device: 'gpu' is neither cpu, cuda nor cuda:<index>"),
        (["--max-rows=0"], "prefill: max_rows: "),
        (["--device=cuda:99"], "device: 'cuda:99' is not there; "),
        (
            ["--device=cuda", "--prefill-arg=--memory-share=0.6", "--decode-arg=--memory-share=0.5"],
            "memory_share: 1 prefill service of 0.6 and 1 decode service of 0.5 are more than all of cuda:0",
        ),
        (
            ["--device=cuda", "--decode=2", "--prefill-arg=--max-kv-tokens=9", "--decode-arg=--memory-share=0.6"],
            "memory_share: 2 decode services of 0.6 are more than all of cuda:0",
        ),
        (["--decode-arg=--warp=9"], "decode: unrecognized arguments: --warp=9"),
        (["--decode-arg=--listen=127.0.0.1:1"], "listen: decode services started here listen where they are told"),
        (["--decode-arg=--prefill=127.0.0.1:1"], "prefill: which prefill services there are is said by how many"),
        (["--prefill-arg=--auth-token-file=x"], "prefill_token_file: the prefill services want a token, and decode"),
        (["--gateway", "--decode-arg=--auth-token-file=x"], "decode_token_file: the decode services want a token, and"),
        (
            ["--prefill-arg=--tls-cert=c", "--prefill-arg=--tls-key=k"],
            "tls_cert: the services of a pair that is started",
        ),
        (["--log-dir=decode.yaml"], "log_dir: decode.yaml: File exists"),
        (["--log-dir=/proc/1/logs"], "log_dir: /proc/1/logs: "),
    ],
)
def test_up_says_in_one_line_what_is_wrong_before_anything_starts(
    arguments: list[str], words: str, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decode.yaml").write_text("dtype: float16\nnum_draft_tokens: 2\ndraft: head\n")
    monkeypatch.setattr(ChildProcess, "start", lambda process: pytest.fail(f"{process.name} was started"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "logs"))
    for directory in ("logs", "empty"):
        (tmp_path / directory).mkdir()
    model = [] if any("--model" in each for each in arguments) else ["--model=tiny"]
    result = CliRunner().invoke(app, ["up", *model, *(each.replace(HELD, held) for each in arguments)])
    assert result.exit_code == 1, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.partition(": ")[2].startswith(words.replace(HELD, held)), line
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.thorough
def test_a_variable_of_the_gateway_that_it_cannot_follow_is_told_by_its_end_within_the_start(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEY_FILE", "/no/such/keys")
    monkeypatch.setenv("FAKE_DECODE", "--fake-trouble=never-ready")
    status, lines = command("up", "--model=tiny", "--gateway", "--gateway-listen=127.0.0.1:0").end()
    assert (status, lines[-1]["reason"], lines[-1]["metadata"]["service"]) == (1, "SERVICE_DIED", "gateway")
    found = re.fullmatch(r"gateway ended with status 2: api_key_file: (.*); its log: (.*)", lines[-1]["message"])
    assert found and "/no/such/keys" in found[1] and Path(found[2]).exists()


@pytest.mark.thorough
def test_services_that_can_never_work_together_end_a_start_at_once(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DECODE", "--fake-trouble=mismatch")
    status, lines = command("up", "--model=tiny", "--start-timeout-s=1000").end()
    assert (status, lines[-1]["reason"]) == (1, "FINGERPRINT_MISMATCH")
    assert lines[-1]["message"].startswith("decode-0: fingerprints differ in dtype; its log: ")


@pytest.mark.thorough
def test_up_tells_people_what_to_do_next_and_where_metrics_and_logs_are() -> None:
    arguments = ["up", "--model=tiny", "--gateway-listen=127.0.0.1:0"]
    with subprocess.Popen([*BATON, *arguments], stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        said = []
        for line in up.stderr:
            said.append(line)
            if line.startswith("metrics: "):
                break
        up.send_signal(signal.SIGINT)
        ending = up.stderr.readlines()
        assert up.wait(BOUND_S) == 0
    assert any(line.startswith("decode-0 (127.0.0.1:") and line.endswith("is ready\n") for line in said)
    assert "baton generate --chat --address 127.0.0.1:" in "".join(said)
    assert re.search(r"; logs: \S+ \(removed on Ctrl-C; --log-dir keeps them\)\n", "".join(said))
    assert re.search(r"its metrics: http://127\.0\.0\.1:\d+/metrics$", said[-2].strip())
    assert re.findall(r"http://127\.0\.0\.1:\d+/metrics \(([a-z]+-0)\)", said[-1]) == ["prefill-0", "decode-0"]
    assert ending[-2].startswith("stopping: requests that run may end first, for up to 40 s")
    assert ending[-1] == "stopped\n"


@pytest.mark.thorough
def test_a_second_interrupt_stops_a_pair_that_does_not_end(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DECODE", "--fake-trouble=ignore-sigterm")
    up = command("up", "--model=tiny", "--stop-timeout-s=1000", "--gateway-listen=127.0.0.1:0")
    log = Path(up.ready()["services"][-1]["log"])
    up.process.send_signal(signal.SIGINT)
    assert up.lines_until(lambda line: line["event"] == "stopping")[-1]["timeout_s"] == 1000
    wait_until(lambda: '"event": "stopped"' in log.read_text())  # the gateway ends first, before decode
    up.process.send_signal(signal.SIGINT)
    status, lines = up.end()
    assert (status, lines[-1]["event"]) == (0, "stopped")
    assert await_end(up.service_pids)


@pytest.mark.thorough
def test_a_service_that_answers_and_is_not_ready_says_why(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DECODE", "--fake-trouble=never-ready")
    up = command("up", "--model=tiny", "--gateway", "--gateway-listen=127.0.0.1:0")
    seen = up.lines_until(lambda line: line["event"] == "phase" and line["name"] == "gateway")
    assert seen[-1]["phase"] == "alive"
    assert seen[-1]["why"] == "waits for decode-0"
    whys = {line["name"]: line["why"] for line in seen if line["event"] == "phase" and line["phase"] == "ready"}
    assert set(whys.values()) <= {""}


@pytest.mark.thorough
def test_up_that_is_killed_leaves_no_process(command: Callable[..., Command]) -> None:
    up = command("up", "--model=tiny")
    up.ready()
    up.process.kill()
    assert await_end(up.service_pids)


@pytest.mark.thorough
def test_up_interrupted_while_it_starts_leaves_no_process(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DECODE", "--fake-trouble=never-ready")
    up = command("up", "--model=tiny")
    alive: set[int] = set()
    up.lines_until(lambda line: alive.add(line["pid"]) or len(alive) == 2)
    assert len(running_pairs()) == 1, "other commands wait for it"
    up.process.send_signal(signal.SIGINT)
    status, lines = up.end()
    assert (status, lines[-1]["event"]) == (0, "stopped")
    assert await_end(alive)


@pytest.fixture
def first_is_loading(command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """A function that starts a pair whose processes load for ever and listen on no port yet. It returns the ports
    chosen for them.
    """
    monkeypatch.setenv("FAKE_PREFILL", "--fake-trouble=loads")
    monkeypatch.setenv("FAKE_DECODE", "--fake-trouble=loads")

    def start(*arguments: str) -> list[int]:
        command("up", "--model=tiny", *arguments)
        wait_until(lambda: running_pairs() != [])
        (addresses,) = running_pairs()
        return [int(address.rpartition(":")[2]) for address in addresses.split(",")]

    return start


@pytest.mark.thorough
def test_a_pair_takes_no_port_of_another_that_is_still_loading(
    first_is_loading: Callable[..., list[int]], command: Callable[..., Command]
) -> None:
    (first,) = first_is_loading()
    command("up", "--model=tiny")
    wait_until(lambda: len(running_pairs()) == 2)
    assert {int(address.rpartition(":")[2]) for address in running_pairs()} > {first}


@pytest.mark.thorough
def test_a_gateway_where_another_pair_that_is_loading_will_have_its_own_is_told_so(
    first_is_loading: Callable[..., list[int]], command: Callable[..., Command]
) -> None:
    (port,) = free_ports(1)
    listen = f"--gateway-listen=127.0.0.1:{port}"
    first_is_loading(listen)
    status, lines = command("up", "--model=tiny", listen).end()
    assert (status, lines[-1]["event"], lines[-1]["metadata"]) == (1, "error", {"field": "gateway_listen"})
    words = f"gateway_listen: another `baton up` has port {port}; take another, or 0 for a free one"
    assert lines[-1]["message"] == words


@pytest.mark.thorough
def test_up_ends_with_a_service_that_dies_while_it_starts(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PREFILL", "--fake-trouble=die")
    status, lines = command("up", "--model=tiny").end()
    assert status == 1
    assert (lines[-1]["event"], lines[-1]["reason"]) == ("error", "SERVICE_DIED")
    assert lines[-1]["metadata"] == {"service": "prefill-0", "returncode": "3"}
    words, _, log = lines[-1]["message"].partition("; its log: ")
    assert words == "prefill-0 ended with status 3: no such model: nonesuch"
    assert Path(log).read_text() == "first line\nno such model: nonesuch\n"
    assert not any(line["event"] == "restarted" for line in lines)


@pytest.mark.thorough
def test_a_process_that_dies_while_it_serves_is_started_again_where_it_was(command: Callable[..., Command]) -> None:
    up = command("up", "--model=tiny", "--gateway", "--gateway-listen=127.0.0.1:0", "--refresh-s=0.1")
    ready = up.ready()

    def answers() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{ready['gateway']}/v1/models", timeout=BOUND_S) as response:
            return bool(response.status == 200)
        return False

    for before in ready["services"]:
        name = before["name"]
        os.kill(before["pid"], signal.SIGKILL)
        *_, ended = up.lines_until(lambda line: line["event"] == "ended")
        assert (ended["name"], ended["returncode"], ended["restart_in_s"]) == (name, -9, 0.5)
        assert ended["message"] == f"{name} was ended by SIGKILL; its log: {before['log']}"
        *_, restarted = up.lines_until(lambda line: line["event"] == "restarted")
        up.service_pids.append(restarted["pid"])
        assert (restarted["name"], restarted["address"]) == (name, before["address"])
        up.lines_until(partial(_is_ready, name))
        wait_until(answers)
    assert len({*up.service_pids}) == 2 * len(ready["services"])
    up.process.send_signal(signal.SIGTERM)
    assert up.end()[0] == 0
    assert await_end(up.service_pids)


def _is_ready(name: str, line: dict[str, Any]) -> bool:
    return line["event"] == "phase" and (line["name"], line["phase"]) == (name, "ready")


@pytest.mark.thorough
def test_up_ends_with_a_service_that_dies_later_when_told_so(command: Callable[..., Command]) -> None:
    up = command("up", "--model=tiny", "--refresh-s=0.1", "--no-restart")
    up.ready()
    os.kill(up.service_pids[0], signal.SIGKILL)
    status, lines = up.end()
    assert (status, lines[-1]["reason"]) == (1, "SERVICE_DIED")
    assert await_end(up.service_pids)


@pytest.mark.thorough
def test_bench_starts_its_own_pair_and_stops_it(command: Callable[..., Command]) -> None:
    bench = command("bench", "--model=tiny", "--draft=head", "--concurrency=2", "--new-tokens=4", "--prompt-tokens=4")
    status, lines = bench.end()
    assert status == 0
    assert (lines[-1]["report"]["num_tokens"], lines[-1]["report"]["kv_bytes"]) == (8, 2000)


def test_interrupting_generate_cancels_the_call(server: ScriptedServer) -> None:
    server.inference.script = [started(), delta([5], "Hel"), server.inference.HOLD]
    command = [*BATON, "generate", "Hi", "--address", server.address, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as generate:
        assert generate.stdout is not None
        generate.stdout.readline()
        generate.send_signal(signal.SIGINT)
        generate.communicate(timeout=BOUND_S)
    assert generate.returncode == 130
    assert server.inference.call_ended.wait(BOUND_S)


def test_a_metrics_page_that_breaks_off_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        def break_off() -> None:
            listening.accept()[0].close()

        breaking = threading.Thread(target=break_off)
        breaking.start()
        with pytest.raises(OSError, match=f"^http://{address}/metrics: "):
            are_fused([address])
        breaking.join(BOUND_S)


@pytest.fixture
def cached_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    demo_model_path(tmp_path / "baton").mkdir(parents=True)


@pytest.mark.thorough
@pytest.mark.usefixtures("cached_demo_model")
@pytest.mark.parametrize(
    ("trouble", "words"),
    [("", "/metrics: Connection refused"), (" --fake-trouble=secret-metrics", "/metrics: 401 Unauthorized")],
)
def test_demo_ends_well_with_the_committed_answer_and_the_speed_of_a_pair_as_it_is_by_default(
    command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch, trouble: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_PREFILL", trouble)
    monkeypatch.setenv("FAKE_DECODE", f"--fake-token-ids={','.join(map(str, ANSWER_TOKEN_IDS))}{trouble}")
    demo = command("demo")
    out, said = demo.process.communicate(timeout=BOUND_S)
    status, lines = demo.process.returncode, [json.loads(line) for line in out.splitlines()]
    assert "it is not known whether kernels are compiled: http://127.0.0.1:" in said and words in said
    assert (status, lines[-1]["event"], lines[-1]["matches_committed_answer"]) == (0, "demo", True)
    assert (lines[-1]["dtype"], lines[-1]["is_full_speed"]) == ("bfloat16", None), "these tell nothing of kernels"
    assert (lines[-1]["kv_bytes"], lines[-1]["handoff_s"]) == (lines[-1]["num_prompts"] * 1000, 0.625)
    assert lines[-1]["num_prompts"] > 1
    assert min(lines[-1]["decode_tokens_per_s"], lines[-1]["decode_tokens_per_s_without_drafts"]) > 0


@pytest.mark.thorough
@pytest.mark.usefixtures("cached_demo_model")
def test_demo_fails_on_any_other_answer(command: Callable[..., Command]) -> None:
    status, lines = command("demo").end()
    assert status == 1
    assert (lines[-1]["event"], lines[-1]["reason"]) == ("error", "DEMO_ANSWER_DIFFERS")
    assert lines[-1]["message"] == f"token 0 is 0, committed is {ANSWER_TOKEN_IDS[0]}"
