"""Tests of both services as users start them: `python -m`, with a tiny model and signals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from baton.errors import ServiceDied
from baton.local_pair import LocalPair
from baton.service_process import ServiceProcess
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.support.running_pair import running_pair

START_BOUND_S = 90.0
END_BOUND_S = 30.0


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "GRPC_"))}


@pytest.fixture
def pair(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> Iterator[LocalPair]:
    with running_pair(
        tiny_model_dir("llama"), shared_args=("--max-kv-tokens=4096",), log_dir=tmp_path, exposes_metrics=True
    ) as running:
        yield running.processes


def lines(service: ServiceProcess, event: str) -> list[dict[str, object]]:
    """Returns the lines with this event in the service's log."""
    lines = [json.loads(line) for line in service.log_file.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def exit_status(service: ServiceProcess) -> int:
    assert service.wait(END_BOUND_S)
    with pytest.raises(ServiceDied) as ended:
        service.check()
    return ended.value.returncode


def assert_metrics(pair: LocalPair) -> None:
    prefill, decode = (
        urllib.request.urlopen(f"http://{address}/metrics", timeout=END_BOUND_S).read().decode()
        for address in pair.metrics_addresses
    )
    assert 'baton_requests_total{outcome="length"} 1.0' in decode
    assert "baton_transfer_seconds_count 1.0" in decode
    assert 'baton_requests_total{outcome="prebuilt"} 1.0' in prefill
    for text in (decode, prefill):
        assert 'baton_rows{state="free"} 32.0' in text
        assert "baton_batch_size_count" in text


def test_a_pair_counts_its_requests_and_sigterm_lets_a_stream_end_before_both_exit_in_order(
    pair: LocalPair,
) -> None:
    (prefill,), (decode,) = pair.prefill, pair.decode
    request = inference_pb2.GenerateRequest(
        request_id="long",
        token_ids=inference_pb2.TokenIds(ids=[1, 5, 6, 7]),
        sampling=types_pb2.SamplingParams(max_tokens=1000, ignore_eos=True, seed=1),
    )
    with grpc.insecure_channel(decode.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        short = inference_pb2.GenerateRequest(
            text="the", sampling=types_pb2.SamplingParams(max_tokens=3, ignore_eos=True)
        )
        list(stub.Generate(short, timeout=END_BOUND_S))
        assert_metrics(pair)
        events = stub.Generate(request, timeout=END_BOUND_S)
        assert next(events).started.request_id == "long"
        num_tokens = len(next(events).delta.token_ids)

        decode.terminate()

        for event in events:
            num_tokens += len(event.delta.token_ids)
        assert num_tokens == 1000
        assert event.finished.reason == inference_pb2.FINISH_REASON_LENGTH
    assert exit_status(decode) == 0
    prefill.terminate()
    assert exit_status(prefill) == 0

    _, line = lines(decode, "request_finished")
    assert (line["request_id"], line["num_output_tokens"], line["outcome"]) == ("long", 1000, "length")
    for service in pair.services:
        (config,) = lines(service, "config")
        assert config["listen"] == service.address
        assert len(lines(service, "stopped")) == 1


@pytest.mark.parametrize("module", ["prefill_service", "decode_service"])
def test_a_wrong_configuration_exits_with_2_and_a_model_that_is_not_there_with_1(module: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("max_row: 3\n")

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *flags],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
        )

    wrong = run(f"--config={tmp_path / 'wrong.yaml'}")
    (line,) = map(json.loads, wrong.stderr.splitlines())
    assert (wrong.returncode, line["event"], line["error"]) == (2, "cannot_start", "unknown key: max_row")
    for_people = run(f"--config={tmp_path / 'wrong.yaml'}", "--log-format=console").stderr
    assert "unknown key: max_row" in for_people and not for_people.startswith("{")
    for setting, flags in ("model", ()), ("draft", ("--model=demo",)):
        path = tmp_path / "absent"
        absent = run(f"--{setting}={path}", *flags)
        *_, last = map(json.loads, absent.stderr.splitlines())
        assert absent.returncode == 1
        assert last["error"] == f"{setting}: {path}: there is no such file or directory"


@pytest.mark.parametrize("module", ["prefill_service", "decode_service"])
def test_a_service_that_cannot_listen_says_why_in_json_lines_and_nothing_else(
    module: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        listen = f"127.0.0.1:{held.getsockname()[1]}"
        flags = (f"--model={tiny_model_dir('llama')}", f"--listen={listen}", "--max-kv-tokens=64", "--num-threads=1")
        ended = subprocess.run(
            [sys.executable, "-m", module, *flags],
            check=False,
            capture_output=True,
            text=True,
            timeout=START_BOUND_S,
            env=environment(),
        )
    *_, last = map(json.loads, ended.stderr.splitlines())
    words = "Address already in use; take another port, or 0 for a free one"
    assert (ended.returncode, last["error"]) == (2, f"listen: cannot listen on {listen}: {words}")
