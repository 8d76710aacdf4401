"""Tests that commands find the pairs which `baton up` runs on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import options
from baton.cli.main import app
from baton.errors import Unavailable
from baton.local_pair import LocalPair
from baton.running_pairs import announced, choosing_ports, running_pairs
from baton.service_process import ChildProcess
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started
from tests.support.free_ports import free_ports

KEEPS_A_PAIR = """
import sys
from baton.running_pairs import announced
with announced(sys.argv[1:], [int(address.rpartition(":")[2]) for address in sys.argv[1:]]):
    print("announced", flush=True)
    sys.stdin.read()
"""


def keeper(*addresses: str) -> subprocess.Popen[str]:
    """Returns a process that announces a pair with these addresses until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPS_A_PAIR, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "announced\n"
    return process


def end(process: subprocess.Popen[str], *, kill: bool = False) -> None:
    if kill:
        process.kill()
    process.communicate()


def test_a_pair_is_found_while_its_keeper_lives_however_that_ends(tmp_path: Path) -> None:
    assert running_pairs() == []
    first, second = keeper("127.0.0.1:1"), keeper("127.0.0.1:2", "127.0.0.1:3")
    assert sorted(running_pairs()) == ["127.0.0.1:1", "127.0.0.1:2,127.0.0.1:3"]
    end(first)
    assert running_pairs() == ["127.0.0.1:2,127.0.0.1:3"]
    end(second, kill=True)
    assert len(list(tmp_path.rglob("*.pair.json"))) == 1, "nobody removed it"
    assert running_pairs() == []
    assert list(tmp_path.rglob("*.pair.json")) == []


def test_ports_of_a_pair_that_does_not_listen_yet_are_not_chosen_again() -> None:
    port, other = free_ports(2)
    process = keeper(f"127.0.0.1:{port}")
    with choosing_ports() as taken_ports:
        assert taken_ports == {port}
        pairs = [LocalPair(decode_port=wanted, taken_ports=taken_ports) for wanted in (port, other)]
    assert pairs[0].decode_addresses != (f"127.0.0.1:{port}",)
    assert pairs[1].decode_addresses == (f"127.0.0.1:{other}",)
    end(process)
    with choosing_ports() as taken_ports:
        assert taken_ports == frozenset()


def test_no_service_of_a_pair_is_given_a_port_that_the_pair_was_asked_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_port, gateway_port, *others = free_ports(7)

    class FirstNotTaken:
        def __init__(self, count: int, *, taken: Collection[int]) -> None:
            self.numbers = [port for port in (decode_port, gateway_port, *others) if port not in taken][:count]

    monkeypatch.setattr("baton.local_pair.HeldPorts", FirstNotTaken)
    pair = LocalPair(decode_port=decode_port, gateway_listen=f"127.0.0.1:{gateway_port}")
    assert pair.decode_addresses == (f"127.0.0.1:{decode_port}",)
    assert gateway_port in pair.ports and len(set(pair.ports)) == 5, "prefill, decode, their metrics and the gateway"


def test_who_chooses_for_too_long_is_told_of_to_those_who_wait() -> None:
    with choosing_ports(), pytest.raises(Unavailable, match="another `baton up` has been choosing"):  # noqa: SIM117
        with choosing_ports(wait_s=0.1):
            pass
    with choosing_ports(wait_s=0.1) as taken_ports:
        assert taken_ports == frozenset()


def test_a_place_that_cannot_be_written_keeps_nobody_from_serving(tmp_path: Path) -> None:
    (tmp_path / "baton").write_text("in the way")
    with choosing_ports() as taken_ports, announced(["127.0.0.1:1"], [1]):
        assert (running_pairs(), taken_ports) == ([], frozenset())


@pytest.mark.parametrize("is_found", [True, False])
def test_up_says_when_other_commands_cannot_find_its_pair(
    is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: ChildProcess) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildProcess, "start", interrupted)
    if not is_found:
        (tmp_path / "baton").write_text("in the way")
    said = CliRunner().invoke(app, ["up", "--model=tiny"]).stderr
    assert ("other commands do not find this pair" in said) != is_found, said


def test_what_is_no_announcement_misleads_nobody(tmp_path: Path) -> None:
    process = keeper("127.0.0.1:1")
    for name, text in (
        ("7.pair.json", "{"),
        ("8.pair.json", "[1]"),
        ("9.pair.json", '{"decode": ["127.0.0.1:9"], "ports": [9]}'),
    ):
        (tmp_path / "baton" / name).write_text(text)
    assert running_pairs() == ["127.0.0.1:1"]
    end(process)


def test_commands_go_to_the_pair_that_runs_here_unless_told_otherwise(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, arguments, input="Hi\n")
        return result.exit_code, result.stdout

    with announced([server.address]):
        assert run("generate", "Hi") == (0, "Hello\n")
        assert run("chat") == (0, "Hello\n")
        assert "demo (LlamaForCausalLM)" in run("info")[1]
        assert run("info", "--address", "127.0.0.1:1")[0] == 1
        monkeypatch.setenv("BATON_ADDRESS", "127.0.0.1:1")
        assert run("info")[0] == 1


def test_where_there_is_none_the_error_says_so_and_where_was_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setattr(options, "DEFAULT_ADDRESS", nobody)
    words = f"no pair of `baton up` runs here, and {nobody} does not answer: "
    for arguments in (["info"], ["generate", "Hi"], ["chat"]):
        result = CliRunner().invoke(app, arguments, input="Hi\n")
        assert (result.exit_code, words in result.stderr) == (1, True), result.stderr
    assert words not in CliRunner().invoke(app, ["info", "--address", nobody]).stderr


def test_what_was_asked_is_named_where_nobody_named_it(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "DEFAULT_ADDRESS", server.address)
    result = CliRunner().invoke(app, ["generate", "Hi"])
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert f"no pair of `baton up` runs here: {server.address} was asked" in result.stderr
    assert "was asked" not in CliRunner().invoke(app, ["generate", "Hi", "--address", server.address]).stderr
    server.inference.script = [failure(3, "top_p: must be in (0, 1]", reason="INVALID_FIELD", field="top_p")]
    with announced([server.address]):
        result = CliRunner().invoke(app, ["generate", "Hi"])
    assert (result.exit_code, f"{server.address}: top_p" in result.stderr) == (1, True), result.stderr


def test_of_several_the_newest_is_taken_and_said(server: ScriptedServer) -> None:
    older = keeper("127.0.0.1:1")
    with announced([server.address]):
        result = CliRunner().invoke(app, ["generate", "Hi"])
    end(older)
    assert result.stdout == "Hello\n"
    assert f"2 pairs run here: this is {server.address}, not 127.0.0.1:1" in result.stderr


def waiting(*arguments: str) -> subprocess.Popen[str]:
    """Starts a command and waits until it prints that it is waiting for a pair."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from baton.cli.main import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "is loading: waiting" in line, line
    return process


@pytest.mark.parametrize(
    "arguments",
    [
        ("info",),
        pytest.param(("generate", "Hi"), marks=pytest.mark.thorough),
        pytest.param(("info", "--address=127.0.0.1:{port}"), marks=pytest.mark.thorough),
        pytest.param(("info", "--address=localhost:{port}"), marks=pytest.mark.thorough),
    ],
)
def test_commands_wait_for_a_pair_that_is_still_loading(arguments: tuple[str, ...]) -> None:
    port = free_ports(1)[0]
    with announced([f"127.0.0.1:{port}"]):
        process = waiting(*(argument.format(port=port) for argument in arguments))
        server = ScriptedServer(port=port)
        server.inference.script = [started(), delta([5], "Hello"), finished()]
        out, _ = process.communicate(timeout=BOUND_S)
        server.stop()
    assert (process.returncode, bool(out)) == (0, True)


@pytest.mark.thorough
def test_a_pair_that_ends_while_it_loads_ends_the_wait() -> None:
    with announced([f"127.0.0.1:{free_ports(1)[0]}"]):
        process = waiting("info")
    _, error = process.communicate(timeout=BOUND_S)
    assert (process.returncode, "ended before it was ready" in error) == (1, True), error


def test_a_pair_that_loads_for_too_long_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "LOADING_S", 0.0)
    with announced([f"127.0.0.1:{free_ports(1)[0]}"]):
        result = CliRunner().invoke(app, ["info"])
    assert (result.exit_code, "is still loading after 0 s" in result.stderr) == (1, True), result.stderr
