"""Tests of a benchmark's peer (another serving program to compare with): the arguments that it is started with, and
that a peer which fails meets no bound.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from typing import Any

import pytest

from baton.load_generator import LoadReport
from benchmarks import serving, speculation
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.peer import PeerFigures, peer_row, run_peer

RUN = BenchmarkRun(date="2026-01-01", machine="a machine", command="python -m benchmarks.nothing")


def peer(batch: int = 1, decode_tokens_per_s: float = 50.0, dtype: str = "bfloat16") -> PeerFigures:
    row = {"batch": batch, "decode_tokens_per_s": decode_tokens_per_s, "prefill_tokens_per_s": 1000.0}
    return {"peer": "another", "dtype": dtype, "threads": 2, "rows": [row]}


def run(program: str, num_threads: int | None = None) -> PeerFigures | None:
    """Runs a peer that consists of these lines of Python."""
    return run_peer(
        shlex.join([sys.executable, "-c", f"import json, sys\n{program}", "MODEL"]),
        dtype="bfloat16",
        num_prompt_tokens=128,
        num_new_tokens=512,
        batches=[1, 8],
        num_threads=num_threads,
    )


def test_a_peer_is_told_the_contexts() -> None:
    told = "MODEL --prompt 128 --generate 512 --batch 1,8"
    echo = "print(json.dumps({'dtype': 'bfloat16', 'rows': [], 'told': ' '.join(sys.argv[1:])}))"
    assert (run(echo) or {})["told"] == told
    assert (run(echo, num_threads=2) or {})["told"] == f"{told} --threads 2"


@pytest.mark.parametrize("program", ["sys.exit('no such model')", "print('no JSON')", "print('[\"no JSON object\"]')"])
def test_a_peer_that_fails_has_no_figures(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(program) is None
    assert "no such model" in (said := capsys.readouterr().err) or "no JSON" in said


def test_a_peer_that_is_not_there_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = run_peer("no-such-program", dtype="bfloat16", num_prompt_tokens=1, num_new_tokens=1, batches=[1])
    assert figures is None and "cannot be run" in capsys.readouterr().err


def test_a_peer_in_another_dtype_ends_the_run() -> None:
    with pytest.raises(SystemExit, match="the peer computes in float32, this run in bfloat16"):
        run(f"print({json.dumps(json.dumps(peer(dtype='float32')))})")


def test_rows_are_found_by_batch() -> None:
    assert peer_row(peer(batch=8), 1) is None
    assert peer_row(None, 1) is None
    assert (peer_row(peer(batch=8), 8) or {})["decode_tokens_per_s"] == 50.0


def serving_of(found: PeerFigures | None, full_load_s: float = 9.0) -> tuple[str, bool]:
    """Returns the table of a benchmark round with one request, and whether its bounds were met. All bounds but those
    that compare with the peer are met.
    """
    zeros: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(LoadReport)}
    figures = {"decode_tokens_per_s": 100.0, "full_load_tokens_per_s": 100.0, "tokens_per_s": 90.0}
    report = LoadReport(**{**zeros, **figures, "full_load_s": full_load_s})
    reference = {"decode_tokens_per_s": 10.0, "tokens_per_s": 10.0, "ttft_p50_s": 1.0}
    reference |= {"inter_token_p50_s": 0.1, "inter_token_p99_s": 0.1}
    result = {"model": "demo", "dtype": "bfloat16", "prompt_tokens": 128, "new_tokens": 512, "cancellation_s": {}}
    rounds = [{"references": {1: reference}, "baton": [report], "peer": found}]
    return serving.render(RUN, rounds, [1], {**result, "is_peer_wanted": True})


def test_a_window_that_is_too_short_meets_no_bound() -> None:
    table, is_met = serving_of(peer(), full_load_s=1.0)
    assert not is_met and "2.00 in less than 3 s (>= 1.0: MISSED)" in table


def speculation_of(found: PeerFigures | None) -> tuple[str, bool]:
    rates = {"decode_tokens_per_s": 100.0, "full_load_tokens_per_s": 100.0, "tokens_per_s": 90.0}
    on = {**rates, "drafted_per_step": 2.0, "tokens_per_forward": 2.0}
    entry = {"round": 0, "concurrency": 1, "on": on, "off": {**rates, "decode_tokens_per_s": 50.0}, "peer": found}
    result = {"dtype": "bfloat16", "new_tokens": 128, "chain": 4, "acceptance": {}, "speed": [entry]}
    return speculation.render(RUN, {**result, "absent": ["humaneval.jsonl"], "is_peer_wanted": True})


@pytest.mark.parametrize("judged", [serving_of, speculation_of])
def test_a_benchmark_is_judged_by_the_peer_that_was_asked_for(
    judged: Callable[[PeerFigures | None], tuple[str, bool]],
) -> None:
    table, is_met = judged(peer())
    assert is_met and ": met)" in table and "MISSED" not in table
    for found in (None, peer(batch=8), peer(decode_tokens_per_s=200.0)):
        table, is_met = judged(found)
        assert not is_met and ": MISSED" in table


def test_outside_prompts_that_are_not_there_are_named() -> None:
    table, _ = speculation_of(peer())
    assert "not measured on outside prompts that are not there: humaneval.jsonl" in table
