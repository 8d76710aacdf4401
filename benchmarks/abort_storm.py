"""Measures how much 500 requests that are all cancelled within a second slow down the requests that stay.

    python -m benchmarks.abort_storm

Every round sends the same long requests twice: once with such a storm of cancellations in their middle, once without.
The order alternates. Figures are medians over rounds; ratios are taken within a round. Writes a dated table into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass

from baton.client import AsyncClient
from baton.load_generator import RequestRecord, Workload, run_workload
from baton.local_pair import LocalPair
from baton.requests import SamplingOptions
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.machine import demo_model_dir

NUM_SURVIVORS = 8
NUM_CANCELLED = 500
STORM_AFTER_S = 4.0
STORM_BOUND_S = 1.0
DURING_S = (STORM_AFTER_S, STORM_AFTER_S + 3.0)
"""The window around the storm, in seconds after the start.

In it the two cores that decode also send, admit, begin to prefill and cancel 500 requests.
"""
AFTER_S = (STORM_AFTER_S + 3.0, STORM_AFTER_S + 8.0)
LEAST_RATIO = 0.9
PROMPT_TOKENS = 64
MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class Storm:
    """The times of one storm, in seconds at the client.

    `sending_s` is the time until all requests were admitted, `cancelling_s` the time to cancel them all.
    """

    num_cancelled: int
    sending_s: float
    cancelling_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The tokens per second of the requests that stay.

    `whole` covers the time from their first token to their last, which is `seconds` long. `during` and `after` cover
    the windows DURING_S and AFTER_S, which count from the first request sent.
    """

    seconds: float
    whole: float
    during: float
    after: float

    @classmethod
    def of(cls, records: list[RequestRecord]) -> Rates:
        failed = [record.error for record in records if record.error is not None]
        assert not failed, failed[0]
        times_s = sorted(token_s for record in records for token_s in record.token_times_s)
        begun_s = min(record.sent_s for record in records)

        def within(window: tuple[float, float]) -> float:
            start_s, end_s = window
            return sum(start_s <= token_s - begun_s < end_s for token_s in times_s) / (end_s - start_s)

        assert times_s[-1] - begun_s >= AFTER_S[1], "the survivors ended too early: give them more tokens"
        seconds = times_s[-1] - times_s[0]
        return cls(seconds, (len(times_s) - 1) / seconds, within(DURING_S), within(AFTER_S))


@dataclass(frozen=True, slots=True)
class Round:
    """The rates of the same requests without and with the storm."""

    calm: Rates
    stormy: Rates
    storm: Storm

    @property
    def ratio(self) -> float:
        return self.stormy.whole / self.calm.whole

    @property
    def ratio_during(self) -> float:
        return self.stormy.during / self.calm.during

    @property
    def ratio_after(self) -> float:
        return self.stormy.after / self.calm.after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    rows = ("--max-rows", str(MAX_ROWS), "--max-kv-tokens", str(MAX_ROWS * (PROMPT_TOKENS + args.new_tokens + 16)))
    with LocalPair(
        model=str(demo_model_dir()),
        prefill_args=rows,
        decode_args=(*rows, "--local-prefill-tokens=0", "--max-queued-requests", str(2 * NUM_CANCELLED)),
    ) as pair:
        address = pair.decode_addresses[0]
        # A warm-up, so that everything has run once before it is measured.
        asyncio.run(_run(address, args.new_tokens, None))
        rounds = [_measure(address, args.new_tokens, number) for number in range(args.rounds)]
    run = BenchmarkRun.of("abort_storm")
    table = _table(run, rounds, args)
    print(table)
    if not args.no_save:
        run.save("abort-storm", table)
    is_storm = all(
        each.storm.num_cancelled == NUM_CANCELLED and each.storm.cancelling_s <= STORM_BOUND_S for each in rounds
    )
    return 0 if is_storm and min(_median(rounds, "ratio"), _median(rounds, "ratio_after")) >= LEAST_RATIO else 1


def _measure(address: str, num_new_tokens: int, number: int) -> Round:
    rates: dict[bool, Rates] = {}
    storm: Storm | None = None
    for is_stormy in (False, True) if number % 2 else (True, False):
        rates[is_stormy], met = asyncio.run(_run(address, num_new_tokens, NUM_CANCELLED if is_stormy else None))
        storm = met or storm
    assert storm is not None
    result = Round(rates[False], rates[True], storm)
    print(
        f"round {number + 1}: {result.calm.whole:.1f} and {result.stormy.whole:.1f} tokens/s, {result.ratio:.2f}; "
        f"during {result.ratio_during:.2f}, after {result.ratio_after:.2f}",
        flush=True,
    )
    return result


async def _run(address: str, num_new_tokens: int, num_cancelled: int | None) -> tuple[Rates, Storm | None]:
    workload = Workload(NUM_SURVIVORS, NUM_SURVIVORS, PROMPT_TOKENS, num_new_tokens)
    async with AsyncClient(address) as client, AsyncClient(address) as leaving:
        vocab_size = (await client.model_info()).vocab_size
        surviving = asyncio.create_task(run_workload([client], workload, vocab_size=vocab_size))
        storm = None
        if num_cancelled is not None:
            await asyncio.sleep(STORM_AFTER_S)
            storm = await _storm(leaving, num_cancelled, vocab_size)
            assert not surviving.done(), "the storm came too late: give the survivors more tokens"
        return Rates.of(await surviving), storm


async def _storm(client: AsyncClient, num_requests: int, vocab_size: int) -> Storm:
    """Sends `num_requests` requests, waits until all have been admitted, and cancels them all.

    By then some of them have a row and are being prefilled; the others are queued.
    """
    prompts = Workload(1, num_requests, PROMPT_TOKENS, 1, prompt_seed=1).prompts(vocab_size)
    begun_s = time.perf_counter()
    options: SamplingOptions = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "ignore_eos": True}
    streams = [client.generate(token_ids=prompt, **options) for prompt in prompts]
    await asyncio.gather(*(anext(stream) for stream in streams))  # the first event is Started: the request is admitted
    sent_s = time.perf_counter()
    for stream in streams:
        await stream.aclose()
    return Storm(len(streams), sent_s - begun_s, time.perf_counter() - sent_s)


def _median(rounds: list[Round], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in rounds))


def _table(run: BenchmarkRun, rounds: list[Round], args: argparse.Namespace) -> str:
    lines = [
        *run.heading(
            f"{NUM_CANCELLED} requests cancelled within a second",
            f"{NUM_SURVIVORS} requests of the demo model run to their end of {args.new_tokens} tokens; "
            f"{STORM_AFTER_S:g} s after their begin {NUM_CANCELLED} others are admitted and all cancelled.",
        ),
        "",
        f"Windows: {DURING_S[0]:g} to {DURING_S[1]:g} s after the begin, and {AFTER_S[0]:g} to {AFTER_S[1]:g} s.",
        "",
        "| round | undisturbed, tokens/s | with the storm, tokens/s | ratio | seconds lost, of | in the storm's window "
        "| after it | sending, s | cancelling, s |",
        "|" + "---|" * 9,
        *(
            f"| {number + 1} | {each.calm.whole:.1f} | {each.stormy.whole:.1f} | {each.ratio:.2f} "
            f"| {each.stormy.seconds - each.calm.seconds:.1f} of {each.calm.seconds:.1f} "
            f"| {each.ratio_during:.2f} | {each.ratio_after:.2f} "
            f"| {each.storm.sending_s:.2f} | {each.storm.cancelling_s:.2f} |"
            for number, each in enumerate(rounds)
        ),
        f"| median | | | {_median(rounds, 'ratio'):.2f} (bound {LEAST_RATIO:g}) | "
        f"| {_median(rounds, 'ratio_during'):.2f} | {_median(rounds, 'ratio_after'):.2f} (bound {LEAST_RATIO:g}) | | |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
