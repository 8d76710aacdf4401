"""What it costs a pair that its timeline is recorded, and what a span costs on either side of that.

python -m benchmarks.timeline_overhead

Under one steady load the pair is recorded and left alone in turn, and each round begins with the other of the two;
figures are medians over rounds, ratios are taken within a round. Writes a dated table into benchmarks/results.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from baton.client import AsyncClient
from baton.local_pair import LocalPair
from baton.v1 import timeline_pb2, timeline_pb2_grpc
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir
from benchmarks.steady_load import SteadyLoad
from common.telemetry.timeline import Timeline

LEAST_RATIO = 0.98
CONCURRENCY = 8
PROMPT_TOKENS = 64
NUM_SPANS = 200_000

Way = Callable[[str, float], Coroutine[Any, Any, int]]
"""What is done with a service, by its address, for so many seconds."""


async def record(address: str, duration_s: float) -> int:
    """Record a service and throw away what comes: reading it is not the pair's work. Returns how many events came."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = timeline_pb2.RecordTimelineRequest(duration_s=duration_s)
        stream = timeline_pb2_grpc.TimelineStub(channel).Record(request)
        return sum([len(part.events.events) async for part in stream])


async def leave_alone(_address: str, duration_s: float) -> int:
    await asyncio.sleep(duration_s)
    return 0


async def measure(pair: LocalPair, rounds: int, window_s: float) -> tuple[dict[str, list[float]], int]:
    """Tokens a second by what was done meanwhile, and how many events were recorded in all."""
    rates: dict[str, list[float]] = {"left alone": [], "recorded": []}
    ways: list[tuple[str, Way]] = [("left alone", leave_alone), ("recorded", record)]
    num_events = 0
    async with AsyncClient(pair.decode_addresses[0]) as client:
        info = await client.model_info()
        new_tokens = info.max_context_tokens - PROMPT_TOKENS
        async with SteadyLoad(
            client,
            concurrency=CONCURRENCY,
            num_prompt_tokens=PROMPT_TOKENS,
            num_new_tokens=new_tokens,
            vocab_size=info.vocab_size,
        ) as load:
            for number in range(rounds):
                print(f"round {number + 1} of {rounds}", file=sys.stderr)
                for name, way in ways if number % 2 == 0 else reversed(ways):
                    before, start_s = load.num_tokens, time.perf_counter()
                    done = await asyncio.gather(*(way(service.address, window_s) for service in pair.services))
                    rates[name].append((load.num_tokens - before) / (time.perf_counter() - start_s))
                    num_events += sum(done)
                    load.check()
    return rates, num_events


def span_ns(*, recording: bool) -> float:
    """CPU time of one `with track.span(...)`, its loop taken off. The best of five."""
    timeline = Timeline()
    track = timeline.track("engine")
    if recording:
        timeline.start(max_events=1000)

    def spans() -> None:
        for _ in range(NUM_SPANS):
            with track.span("step"):
                pass

    def nothing() -> None:
        for _ in range(NUM_SPANS):
            pass

    spans_s, nothing_s = (min(timeit.repeat(work, timer=time.thread_time, number=1)) for work in (spans, nothing))
    return 1e9 * (spans_s - nothing_s) / NUM_SPANS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    with full_speed_pair(model=str(demo_model_dir()), dtype="bfloat16") as pair:
        rates, num_events = asyncio.run(measure(pair, args.rounds, args.window_s))
    ratios = [recorded / alone for alone, recorded in zip(rates["left alone"], rates["recorded"], strict=True)]
    ratio = statistics.median(ratios)
    run = BenchmarkRun.of("timeline_overhead")
    verdict = "met" if ratio >= LEAST_RATIO else "MISSED"
    table = "\n".join(
        [
            *run.heading(
                "The cost of a timeline",
                f"SmolLM2-135M-Instruct, bfloat16, {CONCURRENCY} requests at a time, {args.rounds} rounds of "
                f"{args.window_s:g} s each way, both services recorded.",
            ),
            "",
            "| | tokens/s, median | least | most |",
            "|---|---|---|---|",
            *(
                f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |"
                for name, values in rates.items()
            ),
            "",
            f"Recorded against left alone: {ratio:.3f} (>= {LEAST_RATIO}: {verdict}); "
            f"{num_events / (args.rounds * args.window_s):.0f} events a second. A span takes "
            f"{span_ns(recording=False):.0f} ns while nobody records, "
            f"{span_ns(recording=True):.0f} ns while somebody does.",
        ]
    )
    print(table)
    if not args.no_save:
        run.save("timeline-overhead", table)
    return 0 if ratio >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
