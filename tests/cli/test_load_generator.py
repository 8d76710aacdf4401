"""Tests of the figures that a load run reports, given arrivals on a scripted clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner

from baton import AsyncClient
from baton.cli.main import app
from baton.errors import Unavailable
from baton.load_generator import RequestRecord, Workload, percentile, run_workload, summarize
from common.telemetry.stats import Timings
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started

WORKLOAD = Workload(concurrency=2, num_requests=2, num_prompt_tokens=4, num_new_tokens=3)


def timings(prefill_s: float, transfer_s: float, kv_bytes: int) -> Timings:
    return Timings(0.0, prefill_s, transfer_s, 0.0, 0.0, kv_bytes, 1, 0)


def record(sent_s: float, *token_times_s: float, handoff: Timings | None = None) -> RequestRecord:
    return RequestRecord(sent_s, token_times_s, token_times_s[-1], handoff, None)


def test_rates_and_latencies() -> None:
    report = summarize(
        WORKLOAD,
        [
            record(0.0, 1.0, 2.0, 4.0, handoff=timings(0.5, 0.5, 2_000_000)),
            record(0.0, 3.0, 4.0, 5.0, handoff=timings(1.0, 1.0, 2_000_000)),
        ],
    )
    assert (report.num_requests, report.num_failed, report.num_tokens, report.wall_s) == (2, 0, 6, 5.0)
    assert report.tokens_per_s == 6 / 5
    assert report.decode_tokens_per_s == 4 / 4  # without the two first tokens, from 1.0 to 5.0
    assert (report.full_load_tokens_per_s, report.full_load_s) == (2 / 1, 1.0)  # from 3.0 to 4.0, when both decode
    assert (report.ttft_p50_s, report.ttft_p99_s) == (1.0, 3.0)
    assert (report.inter_token_p50_s, report.inter_token_p99_s) == (1.0, 2.0)
    assert (report.kv_bytes, report.handoff_mb_per_s) == (4_000_000, 1.0)
    assert (report.exposed_transfer_p50_s, report.exposed_transfer_p99_s) == (0.5, 1.0)


def test_tokens_of_one_delta_share_its_gap() -> None:
    report = summarize(WORKLOAD, [record(0.0, 1.0, 4.0, 4.0, 4.0)])
    assert (report.inter_token_p50_s, report.inter_token_p99_s) == (1.0, 1.0)


def test_failures_are_counted_and_leave_the_rates_alone() -> None:
    failed = RequestRecord(0.0, (1.0,), 2.0, None, Unavailable("no prefill"))
    report = summarize(WORKLOAD, [failed, record(0.0, 1.0, 2.0)])
    assert (report.num_failed, report.num_tokens, report.first_error) == (1, 2, "no prefill")
    only_failures = summarize(WORKLOAD, [failed])
    assert (only_failures.num_failed, only_failures.tokens_per_s, only_failures.ttft_p99_s) == (1, 0.0, 0.0)


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (75, 3.0), (99, 4.0), (100, 4.0)])
def test_a_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_prompts_repeat_with_their_seed_only() -> None:
    assert WORKLOAD.prompts(1000) == WORKLOAD.prompts(1000)
    first, second = WORKLOAD.prompts(1000)
    assert first != second
    assert all(len(prompt) == 4 and 0 <= min(prompt) <= max(prompt) < 1000 for prompt in (first, second))


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as client:
        yield client


async def test_every_request_is_sent_once_with_fixed_lengths(server: ScriptedServer, client: AsyncClient) -> None:
    server.inference.script = [started(), delta([1], "a"), delta([2, 3], "b"), finished(num_completion_tokens=3)]
    workload = Workload(concurrency=2, num_requests=5, num_prompt_tokens=4, num_new_tokens=3)
    ticks = itertools.count()
    records = await run_workload([client], workload, vocab_size=1000, clock=lambda: float(next(ticks)))
    assert [len(record.token_times_s) for record in records] == [3] * 5
    assert all(record.error is None and record.timings is not None for record in records)
    requests = [server.inference.requests.get(timeout=BOUND_S) for _ in range(5)]
    assert server.inference.requests.empty()
    assert sorted(list(request.token_ids.ids) for request in requests) == sorted(workload.prompts(1000))
    assert {(request.sampling.max_tokens, request.sampling.ignore_eos) for request in requests} == {(3, True)}


async def test_a_failed_request_is_a_record(server: ScriptedServer, client: AsyncClient) -> None:
    server.inference.script = [started(), failure(14, "no prefill")]
    records = await run_workload([client], WORKLOAD, vocab_size=1000)
    assert [type(record.error) for record in records] == [Unavailable, Unavailable]


def test_bench_reports_every_concurrency(server: ScriptedServer) -> None:
    server.inference.script = [started(), delta([1], "a"), delta([2], "b"), finished(num_completion_tokens=2)]
    arguments = ["bench", "--address", server.address, "--concurrency", "1,3", "--new-tokens", "2"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    reports = [json.loads(line)["report"] for line in result.stdout.splitlines()]
    assert [(report["concurrency"], report["num_requests"], report["num_tokens"]) for report in reports] == [
        (1, 1, 2),
        (3, 3, 6),
    ]
    server.inference.script = [failure(14, "no prefill")]
    assert CliRunner().invoke(app, arguments).exit_code == 1
