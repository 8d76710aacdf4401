"""Tests of the output of `baton`'s commands, and of their exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Self

import grpc
import pytest
from typer.testing import CliRunner, Result

from baton.cli import services
from baton.cli.main import app
from baton.errors import Unavailable
from baton.running_pairs import announced
from baton.v1 import types_pb2
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started
from tests.support.free_ports import free_address


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def json_lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generate_writes_only_the_text_to_standard_output(server: ScriptedServer) -> None:
    result = run("generate", "Hi", "--address", server.address)
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert "2 tokens (length)" in result.stderr


def test_generate_prints_one_event_a_line(server: ScriptedServer) -> None:
    result = run("generate", "Hi", "--address", server.address, "--json")
    first, *deltas, last = json_lines(result)
    assert first == {
        "event": "started",
        "request_id": "r1",
        "num_prompt_tokens": 3,
        "seed": 7,
        "is_reasoning_open": False,
        "prompt_token_ids": [],
    }
    assert [(line["event"], line["token_ids"], line["text"]) for line in deltas] == [
        ("delta", [5], "Hel"),
        ("delta", [6], "lo"),
    ]
    assert (last["event"], last["reason"], last["timings"]["kv_bytes"]) == ("finished", "length", 1000)


def test_the_bytes_of_a_token_are_numbers_in_json(server: ScriptedServer) -> None:
    euro_begun = types_pb2.TokenLogprob(token_id=5, logprob=-0.5, token=b"\xe2\x82")
    server.inference.script = [started(), delta([5], "", [types_pb2.PositionLogprobs(chosen=euro_begun)]), finished()]
    result = run("generate", "Hi", "--address", server.address, "--json")
    assert json_lines(result)[1]["logprobs"] == [
        {"chosen": {"token_id": 5, "logprob": -0.5, "token": [0xE2, 0x82]}, "top": []}
    ]


def test_generate_sends_every_option(server: ScriptedServer) -> None:
    options = {
        "--temperature": "0.5",
        "--top-p": "0.75",
        "--top-k": "4",
        "--min-p": "0.25",
        "--seed": "9",
        "--max-tokens": "7",
        "--min-tokens": "2",
        "--stop": "END",
        "--stop-token-id": "3",
        "--repetition-penalty": "1.5",
        "--presence-penalty": "-1",
        "--frequency-penalty": "1",
        "--logit-bias": "5=-2.5",
        "--logprobs": "2",
        "--request-id": "mine",
        "--generated-token-ids": "8,9",
        "--timeout-s": "100",
    }
    flags = [part for pair in options.items() for part in pair]
    result = run("generate", "--token-ids", "1,2", "--ignore-eos", *flags, "--address", server.address)
    assert result.exit_code == 0, result.stderr
    request = server.inference.requests.get(timeout=BOUND_S)
    sent = request.sampling
    assert (list(request.token_ids.ids), list(request.generated_token_ids)) == ([1, 2], [8, 9])
    assert (request.request_id, list(sent.stop), list(sent.stop_token_ids)) == ("mine", ["END"], [3])
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p, sent.seed) == (0.5, 0.75, 4, 0.25, 9)
    assert (sent.max_tokens, sent.min_tokens, sent.ignore_eos, sent.logprobs) == (7, 2, True, 2)
    assert (sent.repetition_penalty, sent.presence_penalty, sent.frequency_penalty) == (1.5, -1.0, 1.0)
    assert dict(sent.logit_bias) == {5: -2.5}
    assert server.inference.deadlines_s.get(timeout=BOUND_S) is not None


@pytest.mark.parametrize("prompt", [("-",), ()], ids=["asked for", "no argument"])
def test_generate_reads_a_pipe_and_leaves_what_is_not_given_to_the_server(
    server: ScriptedServer, prompt: tuple[str, ...]
) -> None:
    assert run("generate", *prompt, "--address", server.address, stdin="from a pipe").exit_code == 0
    request = server.inference.requests.get(timeout=BOUND_S)
    assert request.text == "from a pipe"
    assert request.sampling.ListFields() == []


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_says_what_the_server_takes_for_options_that_are_not_given(command: str) -> None:
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", run(command, "--help").stdout).split())
    sampling = words.partition("Sampling")[2].partition("Connection")[0]
    flags = set(re.findall(r"--(?!no-)[a-z-]+", sampling))
    assert {"--temperature", "--top-p", "--seed", "--max-tokens"} <= flags
    assert sampling.count("[default: ") == len(flags - {"--json"})
    assert re.search(r"--temperature .*? \[default: \(the model's, else 1\.0\)\]", sampling)


def test_the_figures_of_a_level_are_one_line_of_a_terminal(server: ScriptedServer) -> None:
    result = run("bench", "--address", server.address, "--concurrency", "1,128", "--new-tokens", "2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["at", "time", "1", "128", "TTFT,"]


@pytest.mark.parametrize("options", [(), ("--chat",), ("--system", "Be brief.")])
def test_generate_without_any_prompt_is_a_usage_error(server: ScriptedServer, options: tuple[str, ...]) -> None:
    result = run("generate", *options, "--address", server.address, stdin="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give one, on standard input or as an argument" in result.stderr
    assert server.inference.requests.empty()


def test_a_pipe_that_is_not_utf_8_is_a_usage_error(server: ScriptedServer) -> None:
    result = run("generate", "--address", server.address, stdin=b"caf\xe9")
    assert (result.exit_code, "not UTF-8" in result.stderr) == (2, True)


def test_text_of_a_stream_that_breaks_ends_with_a_line(server: ScriptedServer) -> None:
    server.inference.script = [started(), delta([5], "Hel"), failure(14, "gone")]
    for command in (("generate", "Hi"), ("chat",)):
        result = run(*command, "--address", server.address, stdin="Hi\n")
        assert (result.exit_code, result.stdout, result.stderr) == (
            1,
            "Hel\n",
            f"UNAVAILABLE: {server.address}: gone\n",
        )


class Terminal:
    """A command that runs on a terminal of its own. Tests read what it shows and type into it."""

    def __init__(self, *arguments: str) -> None:
        self._shown = b""
        self._terminal, of_command = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton", *arguments], stdin=of_command, stdout=of_command, stderr=of_command
        )
        os.close(of_command)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def type_ctrl_c(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def read_until(self, words: str) -> str:
        """Returns the output since the last call, up to these words."""
        while words.encode() not in self._shown:
            assert select.select([self._terminal], [], [], BOUND_S)[0], f"nothing more came after {self._shown!r}"
            try:
                part = os.read(self._terminal, 4096)
            except OSError:  # Linux raises it for a terminal whose last process has ended
                part = b""
            assert part, f"it ended after {self._shown!r}"
            self._shown += part
        before, _, self._shown = self._shown.partition(words.encode())
        return before.decode()

    def end(self) -> int:
        """Waits for the command to end, and returns its exit status."""
        return self._process.wait(BOUND_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(BOUND_S)
        os.close(self._terminal)


def test_ctrl_c_stops_an_answer_and_at_the_prompt_ends_the_chat(server: ScriptedServer) -> None:
    answer = [started(), delta([5], "Hello"), finished(num_completion_tokens=1)]
    server.inference.scripts.extend([[started(), delta([5], "Hel"), server.inference.HOLD], answer])
    with Terminal("chat", "--address", server.address) as chat:
        chat.read_until("you> ")
        chat.type("one\n")
        chat.read_until("Hel")
        chat.type_ctrl_c()
        assert "\n" in chat.read_until("(stopped; this turn is forgotten)"), "on a line of its own"
        chat.read_until("you> ")
        chat.type("two\n")
        assert "Hello" in chat.read_until("you> ")
        chat.type_ctrl_c()
        assert chat.end() == 0


def test_an_answer_that_fails_leaves_the_conversation_to_go_on(server: ScriptedServer) -> None:
    answer = [started(), delta([5], "Hello"), finished(num_completion_tokens=1)]
    server.inference.scripts.extend([answer, [failure(14, "gone")], answer])
    with Terminal("chat", "--address", server.address) as chat:
        for line, shown in (("one", "Hello"), ("two", "UNAVAILABLE: gone"), ("three", "Hello")):
            chat.read_until("you> ")
            chat.type(f"{line}\n")
            chat.read_until(shown)
        chat.read_until("you> ")
        chat.type("/exit\n")
        assert chat.end() == 0
    *_, last = [server.inference.requests.get(timeout=BOUND_S).chat.messages for _ in range(3)]
    assert [message.content for message in last] == ["one", "Hello", "three"]


def test_chat_begins_with_the_model_and_the_address_or_with_the_error(server: ScriptedServer) -> None:
    with Terminal("chat", "--address", server.address) as chat:
        assert f"demo at {server.address}; /help" in chat.read_until("you> ")
        chat.type("/help\n")
        shown = chat.read_until("you> ")
        assert all(command in shown for command in ("/help", "/reset", "/exit", "Ctrl-C"))
    server.stop()
    with Terminal("chat", "--address", server.address) as chat:
        assert "you>" not in chat.read_until(f"UNAVAILABLE: nothing listens at {server.address}")
        assert chat.end() == 1


@pytest.mark.parametrize("module", ["baton", "baton.cli.main"])
def test_the_command_is_a_module_too(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert result.stdout == f"baton {version('baton-serve')}\n"


def test_generate_wraps_a_chat_message(server: ScriptedServer) -> None:
    run("generate", "Hi", "--system", "Be brief.", "--address", server.address)
    messages = server.inference.requests.get(timeout=BOUND_S).chat.messages
    assert [(message.role, message.content) for message in messages] == [("system", "Be brief."), ("user", "Hi")]


def test_an_error_is_one_line_and_status_1_or_a_json_line_when_asked(server: ScriptedServer) -> None:
    server.inference.script = [failure(3, "top_p: must be in (0, 1]", reason="INVALID_FIELD", field="top_p")]
    arguments = ["generate", "Hi", "--top-p", "0.5", "--address", server.address]
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"INVALID_ARGUMENT: {server.address}: top_p: must be in (0, 1]\n"
    result = run(*arguments, "--json")
    assert result.exit_code == 1
    message = f"{server.address}: top_p: must be in (0, 1]"
    error = {"code": "INVALID_ARGUMENT", "reason": "INVALID_FIELD", "message": message}
    assert json_lines(result) == [{"event": "error", **error, "metadata": {"field": "top_p"}}]


def test_who_shows_no_token_is_told_how_to(server: ScriptedServer) -> None:
    server.inference.script = [failure(16, "authorization: no bearer token was shown", reason="UNAUTHENTICATED")]
    result = run("generate", "Hi", "--address", server.address)
    assert result.stderr == (
        f"UNAUTHENTICATED: {server.address}: authorization: no bearer token was shown; give --token-file\n"
    )


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (["--logit-bias", "5"], "'5' is not ID=VALUE"),
        (["--logit-bias", "foo=1"], "'foo=1' is not ID=VALUE"),
        (["--token-ids", "a,b"], "'a,b' is not numbers"),
        (["--system", "x", "--token-ids", "1"], "makes a chat"),
        (["--chat", "--token-ids", "1"], "makes a chat"),
    ],
)
def test_a_value_that_cannot_be_read_is_a_usage_error(server: ScriptedServer, flag: list[str], words: str) -> None:
    result = run("generate", *flag, "--address", server.address)
    assert result.exit_code == 2
    assert flag[0] in result.stderr and words in result.stderr


def test_chat_carries_the_conversation_on(server: ScriptedServer) -> None:
    result = run(
        "chat", "--address", server.address, "--max-tokens", "4", stdin="one\n\ntwo\n/reset\nthree\n/exit\nno\n"
    )
    assert (result.exit_code, result.stdout) == (0, "Hello\n" * 3)
    asked = [server.inference.requests.get(timeout=BOUND_S).chat.messages for _ in range(3)]
    assert [[(message.role, message.content) for message in messages] for messages in asked] == [
        [("user", "one")],
        [("user", "one"), ("assistant", "Hello"), ("user", "two")],
        [("user", "three")],
    ]
    assert server.inference.requests.empty()


def test_a_word_behind_a_slash_is_a_command_of_chat_and_no_message(server: ScriptedServer) -> None:
    result = run("chat", "--address", server.address, stdin="/help\n/quit\n/etc/passwd is what?\n")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert "/reset   forget" in result.stderr.partition("there is no command /quit")[0]
    (message,) = server.inference.requests.get(timeout=BOUND_S).chat.messages
    assert message.content == "/etc/passwd is what?"


@pytest.mark.parametrize("address", ["http://127.0.0.1:50051", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "a b:1"])
@pytest.mark.parametrize("command", ["info", "health", "role", "trace"])
def test_what_is_no_address_is_refused_in_words_at_once(command: str, address: str) -> None:
    result = run(command, "--address", address)
    assert (result.exit_code, result.stderr.splitlines()) == (1, [result.stderr.strip()])
    assert result.stderr.startswith(f"INVALID_ARGUMENT: address: '{address}' is not HOST:PORT")
    assert ("leave http:// away" in result.stderr) == address.startswith("http")


@pytest.mark.parametrize("is_buffered", [False, True])
def test_an_output_for_which_there_is_no_room_is_told_in_a_line(is_buffered: bool) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    command = [sys.executable, "-m", "baton", "--version"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, timeout=BOUND_S
        )
    assert (ended.returncode, ended.stderr) == (1, "the output: No space left on device\n")
    closed = ["sh", "-c", f"{' '.join(command)} >&-"]
    assert subprocess.run(closed, check=False, capture_output=True, timeout=BOUND_S).returncode == 0


@contextmanager
def answering(text: bytes) -> Iterator[str]:
    """Yields the address of a server that sends `text` to every connection and closes it."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(text)
            self.request.recv(1024)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"HTTP/1.1 505 HTTP Version Not Supported\r\n\r\n", "speaks HTTP/1 and no gRPC: it may be Baton's gateway"),
        (b"SSH-2.0-OpenSSH_9\r\n", "does not speak gRPC: it is no service of Baton"),
    ],
    ids=["HTTP", "SSH"],
)
def test_what_else_answers_at_an_address_is_said_and_where_the_pair_is(
    server: ScriptedServer, text: bytes, words: str
) -> None:
    with answering(text) as address:
        for arguments in (["info"], ["generate", "Hi"], ["chat"]):
            alone = run(*arguments, "--address", address, stdin="Hi\n").stderr
            with announced([server.address]):
                beside = run(*arguments, "--address", address, stdin="Hi\n").stderr
            assert alone.startswith(f"UNAVAILABLE: {address} {words}") and len(alone.splitlines()) == 1
            assert beside == f"{alone.strip()}; the pair of `baton up` here is at {server.address}\n"
        assert words in run("health", "--address", address).stderr
        assert words in run("bench", "--address", address).stderr


def test_an_error_names_the_address_where_its_own_words_do_not() -> None:
    other = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    for command in ("health", "bench", "info"):
        assert run(command, "--address", address).stderr.startswith(f"UNIMPLEMENTED: {address}: "), command
    other.stop(grace=0).wait(BOUND_S)


def test_nothing_but_the_line_of_the_error_comes_of_a_connection_that_fails(server: ScriptedServer) -> None:
    command = [sys.executable, "-c", "from baton.cli.main import main; main()", "info", "--tls"]
    result = subprocess.run(
        [*command, "--address", server.address], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"UNAVAILABLE: {server.address} does not speak TLS: leave TLS off, or give another address\n"
    )


def test_info_shows_model_and_load(server: ScriptedServer) -> None:
    result = run("info", "--address", server.address)
    assert result.exit_code == 0
    assert server.address in result.stdout
    assert "demo (LlamaForCausalLM)" in result.stdout
    assert "1 of 4 free, 1 reserved, 1 transferring, 1 running" in result.stdout
    assert "not ready: connection refused, 0 rows, should have 7 tokens cached" in " ".join(result.stdout.split())
    assert "degraded" in result.stdout
    assert re.search(r"^\s*end tokens\s+2\s*$", result.stdout, re.MULTILINE)


def test_info_as_json_has_both(server: ScriptedServer) -> None:
    (line,) = json_lines(run("info", "--address", server.address, "--json"))
    assert (line["model"]["vocab_size"], line["load"]["rows"]["total"]) == (49152, 4)


def test_info_names_each_of_several_services_that_does_not_answer(server: ScriptedServer) -> None:
    server.become_ready()
    dead = free_address()
    both = f"{dead},{server.address}"
    reason = f"nothing listens at {dead} (connection refused)"
    assert re.search(rf"no answer +{re.escape(reason)}", run("info", "--address", both).stdout)
    (line,) = json_lines(run("info", "--address", both, "--json"))
    assert line["failures"] == {dead: reason}


def test_plan_says_what_it_watches_before_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(addresses: list[str], **_: Any) -> None:
        raise Unavailable(f"looked at {addresses}")

    monkeypatch.setattr(services, "sample_loads", looked)
    result = run("plan", "-a", "h:1", "-a", "h:2", "--window-s", "30")
    assert result.stderr == "watching for 30 s: h:1, h:2\nUNAVAILABLE: looked at ['h:1', 'h:2']\n"
    assert run("plan", "-a", "h:1, h:2,", "--window-s", "30").stderr == result.stderr
    assert len(json_lines(run("plan", "-a", "h:1", "--json"))) == 1
    assert "h:1 is named twice" in run("plan", "-a", "h:1", "-a", "h:1").stderr


def test_trace_and_role_say_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(addresses: list[str], **_: Any) -> None:
        raise Unavailable(f"recorded {addresses}")

    monkeypatch.setattr(services, "record_timelines", recorded)
    result = run("trace", "-a", "h:1,h:2", "--seconds", "9")
    assert result.stderr == "recording for 9 s: h:1, h:2\nUNAVAILABLE: recorded ['h:1', 'h:2']\n"
    assert len(json_lines(run("trace", "-a", "h:1", "--json"))) == 1
    dead = free_address()
    first, error = run("role", "-a", dead, "decode").stderr.splitlines()
    assert (first, error[:13]) == (f"waiting until {dead} is a decode service", "UNAVAILABLE: ")


@pytest.mark.parametrize(
    ("service", "said", "status"),
    [("", "serving", 0), ("baton.v1.Inference", "not_serving", 1), ("baton.v1.Nothing", "unknown_service", 1)],
)
def test_health_ends_with_the_answer(server: ScriptedServer, service: str, said: str, status: int) -> None:
    result = run("health", "--address", server.address, "--service", service)
    assert (result.stdout, result.exit_code) == (f"{said}\n", status)
    explained = f"does not serve {service!r}: a decode service serves baton.v1.Inference"
    assert (explained in result.stderr) == (said == "unknown_service")


def test_health_of_nothing_is_status_1(server: ScriptedServer) -> None:
    server.stop()
    result = run("health", "--address", server.address)
    assert result.exit_code == 1
    assert result.stderr.startswith("UNAVAILABLE: ")
