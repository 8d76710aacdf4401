"""Measures what priorities and shares are worth under a flood, with the demo model and real services.

python -m benchmarks.priority

- **Priority.** A flood of requests comes at once, and ten more after it, one by one. The table shows the ten's time to
  first token without the flood, beside a flood of their own priority, and beside one of a worse priority.
- **Starvation.** A flood of priority 0 goes on, with requests waiting at all times, and a few of a worse priority come
  in between. The table shows how long they wait for a row. The bound is the time in which waiting makes their priority
  0, and then the flood's longest wait for a row, because those that came before go first.
- **Newcomers.** Greedy tenants have more long requests open than there are rows, and then another tenant sends short
  ones, one by one. The table shows their time to first token, and the greedy ones' tokens per second, with and without
  `reclaim_after_s`: three times, on two pairs at once, so that both have the same machine in the same seconds. (Each
  slows the other, about equally, because greedy ones keep both pairs busy.)
- **Tenants.** One tenant floods the service, and another one keeps a few requests waiting. The table shows the tokens
  per second of each, in the same window of time, as one client, with equal weights, and with weights of 1 and 3.

Exit status 1: the ten's median is not better with priorities, a bound is missed, tenants of equal weights differ by
more than a quarter, or greedy ones lose more than a twentieth of their tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass

from baton.client import AsyncClient
from baton.events import Delta
from baton.load_generator import FIRST_PROMPT_TOKEN_ID, RequestRecord, percentile, send_prompts
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir

NUM_ROWS = 8
VOCAB_SIZE = 49_152
NUM_HIGH = 10
HIGH_INTERVAL_S = 1.0
LOW_PRIORITY = 10
STEP_S = 5.0
STARVING_PRIORITY = 2
TENANTS = {"flooding": 4 * NUM_ROWS, "modest": 2 * NUM_ROWS}
"""The tenants, and how many requests each keeps open. Rows fall free together, and weights decide who gets them only
while both wait: with as many requests as rows, one of three times the weight got 0.7 to 2.6 times as much.
"""
WARM_UP_S = 15.0
"""Longer than the queue of both takes once."""
LEAST_FAIR_RATIO = 0.75
LEAST_GREEDY_RATIO = 0.95
NUM_TURNS = 3
RECLAIM_AFTER_S = (0, 1)
NEWCOMER_INTERVAL_S = 6.0
"""Two pairs share the machine, so each makes half as many steps in it as it would make alone."""
NEWCOMER_GIVES_UP_S = 10.0  # without reclaiming it would wait for the end of a generation of minutes
GREEDY_WINDOW_S = 30.0
"""How long newcomers come and the greedy ones' tokens are counted."""


@dataclass(frozen=True, slots=True)
class Load:
    """The address of a decode service, and the lengths of all requests."""

    address: str
    num_prompt_tokens: int
    num_new_tokens: int

    def prompts(self, number: int) -> list[list[int]]:
        return [
            [random.randrange(FIRST_PROMPT_TOKEN_ID, VOCAB_SIZE) for _ in range(self.num_prompt_tokens)]
            for _ in range(number)
        ]

    async def send(
        self,
        number: int,
        *,
        at_a_time: int,
        client: AsyncClient | None = None,
        priority: int | None = None,
        tenant: str | None = None,
    ) -> list[RequestRecord]:
        """Sends `number` requests, by a client of their own unless one is given. Raises the error of the first that
        failed.
        """
        async with AsyncExitStack() as stack:
            records = await send_prompts(
                [await stack.enter_async_context(AsyncClient(self.address)) if client is None else client],
                self.prompts(number),
                concurrency=at_a_time,
                num_new_tokens=self.num_new_tokens,
                priority=priority,
                tenant=tenant,
            )
        for record in records:
            if record.error is not None:
                raise record.error
        return records


async def one_by_one(load: Load, *, priority: int, number: int, interval_s: float) -> list[RequestRecord]:
    """Sends requests at intervals, whether the earlier ones have ended or not."""
    sent = []
    for _ in range(number):
        sent.append(asyncio.create_task(load.send(1, at_a_time=1, priority=priority)))
        await asyncio.sleep(interval_s)
    return [record for records in await asyncio.gather(*sent) for record in records]


async def beside_a_flood(load: Load, num_flooding: int, *, flood_priority: int) -> tuple[list[float], float]:
    """Returns the times to first token of the ten requests, and the longest one of the flood."""
    flood = asyncio.create_task(load.send(num_flooding, at_a_time=max(num_flooding, 1), priority=flood_priority))
    await asyncio.sleep(0.5)
    high = await one_by_one(load, priority=0, number=NUM_HIGH, interval_s=HIGH_INTERVAL_S)
    return [record.ttft_s for record in high], max((record.ttft_s for record in await flood), default=0.0)


async def starving(load: Load, num_flooding: int) -> tuple[list[float], float]:
    """Returns how long the requests of a worse priority waited for a row, and the longest wait of the flood."""
    flood = asyncio.create_task(load.send(num_flooding, at_a_time=3 * NUM_ROWS, priority=0))
    await asyncio.sleep(1.0)
    low = await one_by_one(load, priority=STARVING_PRIORITY, number=3, interval_s=1.0)
    assert not flood.done(), "the flood ended before the others got their rows"
    return _queue_s(low), max(_queue_s(await flood))


def _queue_s(records: Sequence[RequestRecord]) -> list[float]:
    return [record.timings.queue_s for record in records if record.timings is not None]


@dataclass(frozen=True, slots=True)
class Greed:
    """Greedy tenants, each of which keeps `num_open` requests of `num_prompt` and `num_new` tokens open."""

    num_tenants: int
    num_open: int
    num_prompt: int
    num_new: int
    pool: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.num_tenants} x {self.num_open} of {self.num_prompt} + {self.num_new} | {' '.join(self.pool)}"


GREEDS = (
    Greed(1, 8, 8, 1_800, ("--max-rows=8", "--max-kv-tokens=2048")),
    Greed(3, 8, 8, 2_000, ("--max-rows=8",)),
    Greed(1, 64, 1_000, 100, ()),  # of prompts of 7,500 tokens a slow machine computes none in the window
    Greed(3, 32, 8, 7_500, ("--max-rows=64",)),
)


async def newcomers(load: Load, greed: Greed) -> tuple[list[float], float]:
    """Returns the times to first token of the newcomer's requests, infinite where it gave up, and the greedy tenants'
    output tokens per second in GREEDY_WINDOW_S from the first of them on.
    """
    greedy = Load(load.address, greed.num_prompt, greed.num_new)
    times_s: list[float] = []

    async def generate(client: AsyncClient, tenant: str) -> None:
        while True:
            (prompt,) = greedy.prompts(1)
            stream = client.generate(
                token_ids=prompt,
                max_tokens=greed.num_new,
                temperature=1.0,
                top_p=1.0,
                ignore_eos=True,
                tenant=tenant,
            )
            async for event in stream:
                if isinstance(event, Delta):
                    times_s.extend([time.perf_counter()] * len(event.token_ids))

    async with AsyncClient(load.address) as client:
        tasks = [
            asyncio.create_task(generate(client, f"greedy {number}"))
            for number in range(greed.num_tenants)
            for _ in range(greed.num_open)
        ]
        await asyncio.sleep(WARM_UP_S)
        begin_s, ttfts_s = time.perf_counter(), []
        while time.perf_counter() < begin_s + GREEDY_WINDOW_S:
            try:
                async with asyncio.timeout(NEWCOMER_GIVES_UP_S):
                    (record,) = await load.send(1, at_a_time=1, tenant="newcomer")
                ttfts_s.append(record.ttft_s)
            except TimeoutError:
                ttfts_s.append(math.inf)
            await asyncio.sleep(NEWCOMER_INTERVAL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    num_tokens = sum(begin_s <= each < begin_s + GREEDY_WINDOW_S for each in times_s)
    assert num_tokens, "the greedy ones got no token"
    return ttfts_s, num_tokens / GREEDY_WINDOW_S


async def newcomers_of_both(loads: Sequence[Load], greed: Greed) -> list[tuple[list[float], float]]:
    """Measures newcomers on several pairs in the same seconds."""
    return await asyncio.gather(*(newcomers(load, greed) for load in loads))


async def tenants(load: Load, *, window_s: float) -> dict[str, float]:
    """Returns the output tokens per second of each tenant, in the same `window_s` seconds."""
    begin_s = time.perf_counter() + WARM_UP_S
    end_s = begin_s + window_s

    async def until_the_end(client: AsyncClient, tenant: str) -> list[RequestRecord]:
        records = []
        while time.perf_counter() < end_s:
            records += await load.send(1, at_a_time=1, client=client, tenant=tenant)
        return records

    async def tokens_per_s(tenant: str, at_a_time: int) -> float:
        async with AsyncClient(load.address) as client:
            parts = await asyncio.gather(*(until_the_end(client, tenant) for _ in range(at_a_time)))
        times_s = [each for records in parts for record in records for each in record.token_times_s]
        return sum(begin_s <= each < end_s for each in times_s) / window_s

    rates = await asyncio.gather(*(tokens_per_s(tenant, at_a_time) for tenant, at_a_time in TENANTS.items()))
    return dict(zip(TENANTS, rates, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flood", type=int, default=40, help="requests of the flood")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--window-s", type=float, default=30.0, help="how long tenants are watched")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    rows = ("--max-rows", str(NUM_ROWS), "--priority-step-s", str(STEP_S))

    @contextmanager
    def a_pair(
        *decode_args: str,
        rows: Sequence[str] = rows,
        num_prompt_tokens: int = args.prompt_tokens,
        num_new_tokens: int = args.new_tokens,
        as_served: bool = False,
    ) -> Iterator[Load]:
        with full_speed_pair(
            model=str(demo_model_dir()),
            reuses_prefixes=as_served,
            hands_all_over=not as_served,
            prefill_args=rows,
            decode_args=(*rows, *decode_args),
        ) as pair:
            yield Load(pair.decode_addresses[0], num_prompt_tokens, num_new_tokens)

    async def measure_priority(load: Load) -> tuple[list[list[str]], list[float], bool]:
        await load.send(NUM_ROWS, at_a_time=NUM_ROWS)
        table, medians = [], []
        for about, num_flooding, flood_priority in (
            ("no flood", 0, 0),
            ("a flood of their own priority, 0", args.flood, 0),
            (f"a flood of priority {LOW_PRIORITY}", args.flood, LOW_PRIORITY),
        ):
            ttfts_s, longest_s = await beside_a_flood(load, num_flooding, flood_priority=flood_priority)
            medians.append(percentile(ttfts_s, 50))
            table.append([about, *(f"{each:.2f}" for each in (medians[-1], percentile(ttfts_s, 95), longest_s))])
        waited_s, longest_s = await starving(load, 3 * args.flood)
        bound_s = STARVING_PRIORITY * STEP_S + longest_s
        starved = f"{max(waited_s):.1f} s at most, of a bound of {bound_s:.1f} s (the flood itself {longest_s:.1f} s)"
        table.append([starved])
        return table, medians, max(waited_s) <= bound_s

    with a_pair() as load:
        table, medians, is_bounded = asyncio.run(measure_priority(load))
    *lines, (starved,) = table
    run = BenchmarkRun.of("priority")
    about = f"demo model, {NUM_ROWS} rows, {args.prompt_tokens} + {args.new_tokens} tokens a request."
    text = [*run.heading("Priority and tenants", about), ""]
    text += [f"Time to first token of {NUM_HIGH} requests of priority 0, one every {HIGH_INTERVAL_S:.0f} s:", ""]
    text += ["| beside | median s | p95 s | longest of the flood, s |", "|---|---|---|---|"]
    text += [f"| {' | '.join(line)} |" for line in lines]
    text += [
        "",
        f"Three of priority {STARVING_PRIORITY} in a flood of priority 0 (`priority_step_s` {STEP_S:.0f}) waited",
    ]
    text += [f"{starved}.", ""]
    text += [
        "Without and with `reclaim_after_s`: a newcomer's TTFT (median, longest), the greedy ones' tokens/s, and how",
        "many of these they keep.",
        "",
        "| greedy tenants | pool | weights | without: s | with: s | without: tokens/s | with: tokens/s | kept |",
        "|---|---|---|---|---|---|---|---|",
    ]
    is_cheap = True
    for greed, weights in [*((greed, "*=1") for greed in GREEDS), (GREEDS[0], "greedy 0=4,*=1")]:
        turns: list[list[tuple[list[float], float]]] = []
        for _ in range(NUM_TURNS):
            with ExitStack() as stack:
                loads = [
                    stack.enter_context(
                        a_pair(
                            f"--tenant-weights={weights}",
                            f"--reclaim-after-s={reclaim_after_s}",
                            "--max-queued-requests=512",
                            rows=greed.pool,
                            num_prompt_tokens=3,
                            num_new_tokens=3,
                            as_served=True,  # what gave way is cached in decode, which computes what is left
                        )
                    )
                    for reclaim_after_s in RECLAIM_AFTER_S
                ]
                turns.append(asyncio.run(newcomers_of_both(loads, greed)))
        ratios = [with_it / without for (_, without), (_, with_it) in turns]
        waited, rates = [], []
        for ttfts_s, each_rate in (zip(*of_one, strict=True) for of_one in zip(*turns, strict=True)):
            all_s = [each for of_turn in ttfts_s for each in of_turn]
            waited.append(f"{percentile(all_s, 50):.2f}, {max(all_s):.2f}")
            rates.append(f"{percentile(each_rate, 50):.1f}")
        ratio = f"{percentile(ratios, 50):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        text.append(f"| {greed} | {weights} | {' | '.join([*waited, *rates, ratio])} |")
        is_cheap = is_cheap and percentile(ratios, 50) >= LEAST_GREEDY_RATIO
    text.append("")
    text += ["| output tokens/s | flooding | modest | modest to flooding |", "|---|---|---|---|"]
    fairness = []
    for name, options in (
        ("one client", ()),
        ("weights 1 and 1", ("--tenant-weights", "*=1")),
        ("1 and 3", ("--tenant-weights", "modest=3,*=1")),
    ):
        with a_pair(*options) as load:
            of_tenants = asyncio.run(tenants(load, window_s=args.window_s))
        fairness.append(of_tenants["modest"] / of_tenants["flooding"])
        text.append(f"| {name} | {of_tenants['flooding']:.0f} | {of_tenants['modest']:.0f} | {fairness[-1]:.2f} |")
    print("\n".join(text))
    if not args.no_save:
        run.save("priority", "\n".join(text))
    is_fair = LEAST_FAIR_RATIO <= fairness[1] <= 1 / LEAST_FAIR_RATIO
    sys.exit(0 if medians[2] < medians[1] and is_bounded and is_fair and is_cheap else 1)


if __name__ == "__main__":
    main()
