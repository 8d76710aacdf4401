"""How busy the forward stream is kept under load, and what the decode service's threads take from each other.

python -m benchmarks.contention

A pair on the demo model, driven through its client; the decode service tells what its threads did
(benchmarks/watched_decode.py). Only the time in which all requests decode counts: from the last one's first token to
the first one's end. Writes a dated table into benchmarks/results. Exit status 1 when the forward stream is busy for
less than 95% of the time at 8 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncClient
from baton.load_generator import RequestRecord, Workload, run_workload
from baton.local_pair import MODULES, LocalPair
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.machine import demo_model_dir
from benchmarks.watched_decode import ThreadTimes

BOUND_AT = 8
LEAST_BUSY = 0.95
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the time in which all requests decoded. `kept_s`: what a step of the engine neither computed nor waited for a
    stream: it waited for the interpreter, or for a core.
    """

    concurrency: int
    num_steps: int
    step_s: float
    busy: float
    forward_cpu: float
    schedule_s: float
    kept_s: float


def shares(concurrency: int, records: list[RequestRecord], samples: list[ThreadTimes]) -> Shares:
    failed = [record.error for record in records if record.error is not None]
    assert not failed, failed[0]
    begun_s = max(record.token_times_s[0] for record in records)
    ended_s = min(record.token_times_s[-1] for record in records)
    within = [sample for sample in samples if begun_s <= sample.at_s <= ended_s]
    assert len(within) > 10, "too short to say: give the requests more tokens"
    first, last = within[0], within[-1]
    seconds, num_steps = last.at_s - first.at_s, last.num_steps - first.num_steps
    busy_s = last.busy_s - first.busy_s
    computed_s = last.step_cpu_s - first.step_cpu_s
    waited_s = last.wait_s - first.wait_s
    return Shares(
        concurrency=concurrency,
        num_steps=num_steps,
        step_s=seconds / num_steps,
        busy=busy_s / seconds,
        forward_cpu=(last.busy_cpu_s - first.busy_cpu_s) / busy_s,
        schedule_s=computed_s / num_steps,
        kept_s=max(0.0, last.step_s - first.step_s - computed_s - waited_s) / num_steps,
    )


async def run_load(address: str, concurrency: int, num_new_tokens: int) -> list[RequestRecord]:
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size
        for workload in (
            Workload(concurrency, concurrency, PROMPT_TOKENS, 8, prompt_seed=-1),
            Workload(concurrency, concurrency, PROMPT_TOKENS, num_new_tokens),
        ):
            records = await run_workload([client], workload, vocab_size=vocab_size)
    return records


def measure(args: argparse.Namespace, levels: list[int], interval: str) -> list[Shares]:
    max_rows = max(levels)
    rows = ["--max-rows", str(max_rows), "--max-kv-tokens", str(max_rows * (PROMPT_TOKENS + args.new_tokens + 16))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "watch"
        flags = [f"--watch={path}", *([f"--switch-interval={interval}"] if interval else [])]
        with LocalPair(
            model=str(demo_model_dir()),
            modules={**MODULES, "decode": "benchmarks.watched_decode"},
            prefill_args=rows,
            decode_args=[*rows, *flags],
        ) as pair:
            measured = []
            for level in levels:
                records = asyncio.run(run_load(pair.decode_addresses[0], level, args.new_tokens))
                lines = path.read_text().splitlines()[:-1]
                measured.append(shares(level, records, [ThreadTimes(**json.loads(line)) for line in lines]))
            return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", default="8,32")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--switch-intervals", default=",0.0005", help="seconds, empty for the interpreter's own")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    levels = [int(level) for level in args.concurrency.split(",")]
    run = BenchmarkRun.of("contention")
    lines = [
        *run.heading(
            "Threads of the decode service under load",
            f"SmolLM2-135M-Instruct, prompts of {PROMPT_TOKENS} tokens, {args.new_tokens} new ones, greedy.",
        ),
        "",
        "| switch interval | requests | steps | ms a step | forward stream busy | of that its thread's CPU | "
        "engine's CPU a step, ms | engine kept waiting by others, ms a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    is_met = True
    for interval in args.switch_intervals.split(","):
        for figures in measure(args, levels, interval):
            if figures.concurrency == BOUND_AT and not interval:
                is_met = figures.busy >= LEAST_BUSY
            lines.append(
                f"| {interval or 'default'} | {figures.concurrency} | {figures.num_steps} | {1e3 * figures.step_s:.2f} "
                f"| {figures.busy:.1%} | {figures.forward_cpu:.0%} | {1e3 * figures.schedule_s:.2f} "
                f"| {1e3 * figures.kept_s:.2f} |"
            )
    lines += ["", f"Busy at least {LEAST_BUSY:.0%} at {BOUND_AT} requests: {'met' if is_met else 'MISSED'}."]
    table = "\n".join(lines)
    print(table)
    if not args.no_save:
        run.save("contention", table)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
