"""Measures short prompts that the decode service computes itself against prompts that are handed over.

    python -m benchmarks.local_prefill [--rounds 3]

Two pairs run with the demo model in bfloat16: one computes prompts of up to 512 tokens in the decode service, the other
hands all over. In each of them streams decode without a pause, and prompts arrive, one after the other, of each length
in turn. The table shows the time to the prompts' first tokens, and the gaps between the tokens of the streams while
prompts arrive. The default of `local_prefill_tokens` follows from it. Nothing is reused: all prompts are new.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from baton.client import AsyncClient
from baton.events import Delta
from baton.load_generator import percentile
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir

LOCAL, HANDED_OVER = "local", "handed over"
LENGTHS = (32, 64, 128, 256, 512)
PAUSE_S = 0.1
"""The time from a prompt's first token to the next prompt."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The figures of one round for one prompt length, in ms: times to the first token, and gaps between the streams'
    tokens.
    """

    ttft_p50_ms: float
    ttft_p90_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    num_streams: int
    num_prompts: int
    num_rounds: int


async def measure(addresses: dict[str, str], load: Load) -> dict[tuple[str, int], list[Beside]]:
    """Measures each prompt length at each server, in turn, and returns the rounds by server and length.

    Length 0 means that the streams decode and no prompts arrive.
    """
    seen: dict[tuple[str, int], list[Beside]] = {}
    for number in range(load.num_rounds + 1):  # the first round warms up
        print(f"round {number} of {load.num_rounds}", file=sys.stderr)
        for length in (0, *LENGTHS):
            for name in sorted(addresses, reverse=bool(number % 2)):
                beside = await measure_length(addresses[name], load, length, seed=number)
                if number:
                    seen.setdefault((name, length), []).append(beside)
    return seen


async def measure_length(address: str, load: Load, length: int, *, seed: int) -> Beside:
    draw = random.Random(f"{seed} {length}")
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size

        def prompt(num_tokens: int) -> list[int]:
            return [draw.randrange(1000, vocab_size) for _ in range(num_tokens)]

        async with streams(client, [prompt(32) for _ in range(load.num_streams)]) as token_times_s:
            ttft_ms, since_s = [], time.perf_counter()
            for _ in range(load.num_prompts):
                begun_s = time.perf_counter()
                if length:
                    await client.complete(token_ids=prompt(length), max_tokens=1, temperature=0)
                ttft_ms.append(1e3 * (time.perf_counter() - begun_s))
                await asyncio.sleep(PAUSE_S)
            until_s = time.perf_counter()
        gaps_ms = [
            1e3 * (after - before)
            for times_s in token_times_s
            for before, after in pairwise(times_s)
            if before >= since_s and after <= until_s
        ]
    return Beside(
        ttft_p50_ms=statistics.median(ttft_ms),
        ttft_p90_ms=percentile(ttft_ms, 90),
        gap_p50_ms=statistics.median(gaps_ms),
        gap_p99_ms=percentile(gaps_ms, 99),
    )


@asynccontextmanager
async def streams(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> AsyncIterator[list[list[float]]]:
    """Keeps a stream decoding for each prompt. Yields a list for each stream, which gets the time of each token.

    The block begins when all streams decode. At its end they are closed; it is an error if one has ended before.
    """
    token_times_s: list[list[float]] = [[] for _ in prompts]
    are_decoding = [asyncio.Event() for _ in prompts]

    async def decode(number: int) -> None:
        async with client.generate(
            token_ids=prompts[number], max_tokens=8000, temperature=0, ignore_eos=True
        ) as events:
            async for event in events:
                if isinstance(event, Delta):
                    token_times_s[number] += [time.perf_counter()] * len(event.token_ids)
                    if len(token_times_s[number]) > 1:
                        are_decoding[number].set()

    tasks = [asyncio.create_task(decode(number)) for number in range(len(prompts))]
    try:
        await asyncio.gather(*(each.wait() for each in are_decoding))
        yield token_times_s
        assert not any(task.done() for task in tasks), "a stream ended while prompts were measured"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def render(run: BenchmarkRun, seen: dict[tuple[str, int], list[Beside]], load: Load) -> str:
    about = (
        f"demo model in bfloat16, {load.num_streams} streams, {load.num_prompts} prompts of each length, one after the "
        f"other with {1e3 * PAUSE_S:.0f} ms between; medians of {load.num_rounds} rounds, in ms."
    )
    columns = ["prompt tokens", "computed", *(name.removesuffix("_ms").replace("_", " ") for name in Beside.__slots__)]
    lines = [*run.heading("Short prompts in the decode service", about), ""]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for length in (0, *LENGTHS):
        for name in (LOCAL, HANDED_OVER):
            rounds = [asdict(each) for each in seen[name, length]]
            figures = [f"{statistics.median(each[column] for each in rounds):.1f}" for column in Beside.__slots__]
            if not length:
                figures[:2] = ["", ""]
            lines.append(f"| {length or 'no prompts'} | {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8, help="that decode")
    parser.add_argument("--prompts", type=int, default=24, help="of each length, in each round")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    load = Load(args.streams, args.prompts, args.rounds)
    model: dict[str, Any] = {"model": str(demo_model_dir()), "dtype": "bfloat16"}
    with (
        full_speed_pair(**model, decode_args=(f"--local-prefill-tokens={max(LENGTHS)}",)) as local,
        full_speed_pair(**model, decode_args=("--local-prefill-tokens=0",)) as handing_over,
    ):
        addresses = {LOCAL: local.decode_addresses[0], HANDED_OVER: handing_over.decode_addresses[0]}
        seen = asyncio.run(measure(addresses, load))
    run = BenchmarkRun.of("local_prefill")
    table = render(run, seen, load)
    print(table)
    if not args.no_save:
        run.save("local-prefill", table)


if __name__ == "__main__":
    main()
