"""Measures how much recording its timeline slows a pair down, and the time of a single span.

    python -m benchmarks.timeline_overhead

First eight requests at a time only decode; then eight short ones keep both services busy with prompts and handoffs. The
pair runs in groups of four adjacent windows: two of them are recorded and two are not, in the order A B B A, so that
changes in the machine's speed affect both kinds alike. A recording is made as by `baton trace` with its default length,
over new connections, and is sent after its end. Each group of four gives a ratio, and the median ratio is compared with
the bound. Groups in which a decoding request ended do not count. The table also shows the services' CPU time per token,
as the kernel counts it, which other processes affect less.

Writes a dated table into benchmarks/results. The exit status is 1 when a bound is missed, or too little was recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.client import AsyncClient
from baton.client.channel import channel_options
from baton.local_pair import LocalPair
from baton.v1 import timeline_pb2, timeline_pb2_grpc
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir
from benchmarks.steady_load import SteadyLoad
from common.telemetry.timeline import Timeline
from common.telemetry.timeline_rpc import ANSWER_TIMEOUT_S, DEFAULT_DURATION_S

LEAST_RATIO = 0.98
CONCURRENCY = 8
PROMPT_TOKENS = 64
CONTEXT_TOKENS = 2048
FEW_NEW_TOKENS = 16
LEAST_PAIRINGS = 2
NUM_SPANS = 200_000

Way = Callable[[str, float], Coroutine[Any, Any, int]]
"""An action on a service, given its address and a duration in seconds: recording it, or leaving it alone."""


@dataclass(frozen=True, slots=True)
class Window:
    """The measurements of one window. `cpu_s` is the CPU time of both services."""

    num_tokens: int
    num_events: int
    seconds: float
    cpu_s: float

    def __add__(self, other: Window) -> Window:
        return Window(
            self.num_tokens + other.num_tokens,
            self.num_events + other.num_events,
            self.seconds + other.seconds,
            self.cpu_s + other.cpu_s,
        )

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def cpu_ms_per_token(self) -> float:
        return 1000 * self.cpu_s / self.num_tokens


@dataclass(frozen=True, slots=True)
class Pairing:
    """The sums of the two windows without and the two windows with recording, out of a group of four."""

    alone: Window
    recorded: Window

    @property
    def rate_ratio(self) -> float:
        return self.recorded.tokens_per_s / self.alone.tokens_per_s

    @property
    def cpu_ratio(self) -> float:
        return self.recorded.cpu_ms_per_token / self.alone.cpu_ms_per_token


async def record(address: str, duration_s: float) -> int:
    """Records a service and returns the number of events. The events are dropped, because reading them is not the
    pair's work.
    """
    async with grpc.aio.insecure_channel(address, channel_options(None, None)) as channel:
        request = timeline_pb2.RecordTimelineRequest(duration_s=duration_s)
        stream = timeline_pb2_grpc.TimelineStub(channel).Record(request, timeout=duration_s + ANSWER_TIMEOUT_S)
        return sum([len(part.events.events) async for part in stream])


async def leave_alone(_address: str, duration_s: float) -> int:
    await asyncio.sleep(duration_s)
    return 0


def cpu_s(pair: LocalPair) -> float:
    """Returns the CPU time in seconds that the services' processes have taken so far, in all threads."""
    ticks = 0
    for service in pair.services:
        fields = Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime; see man 5 proc
    return ticks / os.sysconf("SC_CLK_TCK")


async def window(pair: LocalPair, load: SteadyLoad, way: Way, seconds: float) -> Window:
    """Runs `way` on all services for `seconds`, and measures tokens and CPU time until it returns.

    So the window of a recording includes the time in which the recording is sent, which is part of its cost.
    """
    num_tokens, begun_cpu_s, begun_s = load.num_tokens, cpu_s(pair), time.perf_counter()
    done = await asyncio.gather(*(way(service.address, seconds) for service in pair.services))
    load.check()
    return Window(load.num_tokens - num_tokens, sum(done), time.perf_counter() - begun_s, cpu_s(pair) - begun_cpu_s)


async def four_windows(pair: LocalPair, load: SteadyLoad, window_s: float, *, begins_alone: bool) -> Pairing:
    one, other = (leave_alone, record) if begins_alone else (record, leave_alone)
    first, second, third, fourth = [await window(pair, load, way, window_s) for way in (one, other, other, one)]
    outer, inner = first + fourth, second + third
    return Pairing(outer, inner) if begins_alone else Pairing(inner, outer)


async def measure_decoding(pair: LocalPair, rounds: int, window_s: float) -> list[Pairing]:
    """Measures windows in which requests only decode.

    Each round starts eight requests and ends when one of them ends. The group of four windows in which that happens is
    not returned.
    """
    pairings: list[Pairing] = []
    async with AsyncClient(pair.decode_addresses[0]) as client:
        info = await client.model_info()
        for number in range(rounds):
            print(f"decoding, round {number + 1} of {rounds}", file=sys.stderr)
            async with SteadyLoad(
                client,
                concurrency=CONCURRENCY,
                num_prompt_tokens=PROMPT_TOKENS,
                num_new_tokens=info.max_context_tokens - PROMPT_TOKENS,
                vocab_size=info.vocab_size,
            ) as load:
                while True:
                    pairing = await four_windows(pair, load, window_s, begins_alone=len(pairings) % 2 == 0)
                    if load.num_begun > CONCURRENCY:
                        break
                    pairings.append(pairing)
    return pairings


async def measure_prompts(pair: LocalPair, num_pairings: int, window_s: float) -> list[Pairing]:
    print("prompts", file=sys.stderr)
    async with (
        AsyncClient(pair.decode_addresses[0]) as client,
        SteadyLoad(
            client,
            concurrency=CONCURRENCY,
            num_prompt_tokens=PROMPT_TOKENS,
            num_new_tokens=FEW_NEW_TOKENS,
            vocab_size=(await client.model_info()).vocab_size,
        ) as load,
    ):
        return [
            await four_windows(pair, load, window_s, begins_alone=number % 2 == 0) for number in range(num_pairings)
        ]


def span_ns(*, recording: bool) -> float:
    """Returns the CPU time of one `with track.span(...)` in ns, without the loop around it: the best of five tries."""
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


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns a 95 % confidence interval of the median. It uses ranks, so it holds for any distribution."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor((len(values) - 1) / 2 - half))
    return ordered[low], ordered[len(values) - 1 - low]


def row(name: str, values: Sequence[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"| {name} | {middle:.{digits}f} | {low:.{digits}f} .. {high:.{digits}f} |"


def section(name: str, pairings: Sequence[Pairing]) -> tuple[list[str], bool]:
    """Returns a section with its own table, and whether the bound is met. There must be at least LEAST_PAIRINGS
    pairings.
    """
    ratios = [pairing.rate_ratio for pairing in pairings]
    ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
    events_per_s = sum(p.recorded.num_events for p in pairings) / sum(p.recorded.seconds for p in pairings)
    is_met = ratio >= LEAST_RATIO
    lines = [
        "",
        f"**{name}**, {len(pairings)} times four windows",
        "",
        "| of each four windows | median | middle half |",
        "|---|---|---|",
        row("left alone, tokens/s", [pairing.alone.tokens_per_s for pairing in pairings], 1),
        row("recorded, tokens/s", [pairing.recorded.tokens_per_s for pairing in pairings], 1),
        row("their ratio", ratios, 3),
        row("left alone, CPU ms a token", [pairing.alone.cpu_ms_per_token for pairing in pairings], 3),
        row("recorded, CPU ms a token", [pairing.recorded.cpu_ms_per_token for pairing in pairings], 3),
        row("their ratio", [pairing.cpu_ratio for pairing in pairings], 3),
        "",
        f"Tokens/s recorded against left alone: {ratio:.3f} (>= {LEAST_RATIO}: {'met' if is_met else 'MISSED'}), "
        f"19 times of 20 within {low:.3f} .. {high:.3f}; {events_per_s:.0f} events a second.",
    ]
    return lines, is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="of requests that only decode")
    parser.add_argument("--window-s", type=float, default=DEFAULT_DURATION_S)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    context = f"--max-context-tokens={CONTEXT_TOKENS}"
    with full_speed_pair(
        model=str(demo_model_dir()), dtype="bfloat16", prefill_args=(context,), decode_args=(context,)
    ) as pair:
        decoding = asyncio.run(measure_decoding(pair, args.rounds, args.window_s))
        if len(decoding) < LEAST_PAIRINGS:
            print(f"requests ended before {LEAST_PAIRINGS} times four windows of {args.window_s:g} s", file=sys.stderr)
            return 1
        prompts = asyncio.run(measure_prompts(pair, len(decoding), args.window_s))
    off_ns, on_ns = span_ns(recording=False), span_ns(recording=True)
    run = BenchmarkRun.of("timeline_overhead")
    of_decoding, is_decoding_met = section(f"{CONCURRENCY} requests that only decode", decoding)
    of_prompts, is_prompts_met = section(f"{CONCURRENCY} requests at a time of {FEW_NEW_TOKENS} new tokens", prompts)
    table = "\n".join(
        [
            *run.heading(
                "The cost of a timeline",
                f"SmolLM2-135M-Instruct, bfloat16, {PROMPT_TOKENS}-token prompts, both services recorded, windows of "
                f"{args.window_s:g} s.",
            ),
            *of_decoding,
            *of_prompts,
            "",
            f"A span takes {off_ns:.0f} ns while nobody records, {on_ns:.0f} ns while somebody does.",
        ]
    )
    print(table)
    if not args.no_save:
        run.save("timeline-overhead", table)
    return 0 if is_decoding_met and is_prompts_met else 1


if __name__ == "__main__":
    sys.exit(main())
