"""Sends requests to decode services and measures the answers as a client sees them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.client import AsyncClient
from baton.errors import BatonError
from baton.events import Delta, Finished
from baton.requests import SamplingOptions
from common.telemetry.stats import SpeculationCounts, Timings

FIRST_PROMPT_TOKEN_ID = 100  # the ids below it are usually special tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A load of `num_requests` greedy requests of fixed lengths, at most `concurrency` of them at a time."""

    concurrency: int
    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int
    prompt_seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Returns the prompts as random token ids, so that no two requests share a prefix."""
        random_numbers = random.Random(self.prompt_seed)
        first = min(FIRST_PROMPT_TOKEN_ID, vocab_size - 1)
        return [
            [random_numbers.randrange(first, vocab_size) for _ in range(self.num_prompt_tokens)]
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, timed by the client. `token_times_s` has the arrival time of each token, which is the same for all
    tokens of one Delta event.
    """

    sent_s: float
    token_times_s: tuple[float, ...]
    ended_s: float
    timings: Timings | None
    error: BatonError | None
    speculation: SpeculationCounts | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The measurements of one workload. Rates count the tokens of requests that succeeded.

    `decode_tokens_per_s` leaves out each request's first token, and divides by the time from the earliest first token
    to the last token of all requests. `full_load_tokens_per_s` counts only the `full_load_s` in which `concurrency`
    requests decode, with none still in prefill. `handoff_mb_per_s` is the median over requests of the KV size divided
    by the prefill and transfer time (KV is sent while the prompt is still being computed). `exposed_transfer_*_s` is
    the transfer time after the prefill's end.
    """

    concurrency: int
    num_requests: int
    num_failed: int
    num_tokens: int
    wall_s: float
    tokens_per_s: float
    decode_tokens_per_s: float
    full_load_tokens_per_s: float
    full_load_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    inter_token_p50_s: float
    inter_token_p99_s: float
    kv_bytes: int
    handoff_mb_per_s: float
    exposed_transfer_p50_s: float
    exposed_transfer_p99_s: float
    first_error: str | None


class _Options(SamplingOptions, total=False):
    priority: int | None
    tenant: str | None


async def run_workload(
    clients: Sequence[AsyncClient],
    workload: Workload,
    *,
    vocab_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Sends the requests of `workload`, spread over `clients` in turn. Failures are in the result, and not raised."""
    return await send_prompts(
        clients,
        workload.prompts(vocab_size),
        concurrency=workload.concurrency,
        num_new_tokens=workload.num_new_tokens,
        clock=clock,
    )


async def send_prompts(
    clients: Sequence[AsyncClient],
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    num_new_tokens: int,
    ignore_eos: bool = True,
    priority: int | None = None,
    tenant: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Sends requests with the given prompts like `run_workload`. Records are in the order of sending."""
    options: _Options = {
        "max_tokens": num_new_tokens,
        "temperature": 0.0,
        "ignore_eos": ignore_eos,
        "priority": priority,
        "tenant": tenant,
    }
    turns = zip(itertools.cycle(clients), prompts, strict=False)

    async def send_in_turn() -> list[RequestRecord]:
        return [
            await _send(client, token_ids, options, clock)
            for client, token_ids in turns  # all senders share this iterator: each takes the next prompt
        ]

    per_sender = await asyncio.gather(*(send_in_turn() for _ in range(concurrency)))
    return sorted(itertools.chain.from_iterable(per_sender), key=lambda record: record.sent_s)


async def _send(
    client: AsyncClient, token_ids: Sequence[int], options: _Options, clock: Callable[[], float]
) -> RequestRecord:
    sent_s = clock()
    token_times_s: list[float] = []
    timings: Timings | None = None
    speculation: SpeculationCounts | None = None
    error: BatonError | None = None
    try:
        events = client.generate(token_ids=token_ids, **options)
        async with events:
            async for event in events:
                match event:
                    case Delta():
                        token_times_s.extend([clock()] * len(event.token_ids))
                    case Finished():
                        timings, speculation = event.timings, event.speculation
    except BatonError as caught:
        error = caught
    return RequestRecord(sent_s, tuple(token_times_s), clock(), timings, error, speculation)


def summarize(workload: Workload, records: Sequence[RequestRecord]) -> LoadReport:
    """Computes the report of a finished workload. Figures without any measurement are 0.

    Raises ValueError when there is no record.
    """
    if not records:
        raise ValueError("no request was sent")
    done = [record for record in records if record.error is None and record.token_times_s]
    errors = [record.error for record in records if record.error is not None]
    wall_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    num_tokens = sum(len(record.token_times_s) for record in done)
    decode_s = (
        max(record.token_times_s[-1] for record in done) - min(record.token_times_s[0] for record in done)
        if done
        else 0.0
    )
    ttft_s = [record.ttft_s for record in done]
    gaps_s = [gap for record in done for gap in _gaps_s(record.token_times_s)]
    timings = [record.timings for record in done if record.timings is not None]
    handoff_rates = [each.kv_bytes / each.handoff_s / 1e6 for each in timings if each.handoff_s > 0]
    transfers_s = [each.transfer_s for each in timings]
    num_at_full_load, full_load_s = _full_load(done, workload.concurrency)
    return LoadReport(
        concurrency=workload.concurrency,
        num_requests=len(records),
        num_failed=len(records) - len(done),
        num_tokens=num_tokens,
        wall_s=wall_s,
        tokens_per_s=_rate(num_tokens, wall_s),
        decode_tokens_per_s=_rate(num_tokens - len(done), decode_s),
        full_load_tokens_per_s=_rate(num_at_full_load, full_load_s),
        full_load_s=full_load_s,
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=percentile(ttft_s, 99),
        inter_token_p50_s=percentile(gaps_s, 50),
        inter_token_p99_s=percentile(gaps_s, 99),
        kv_bytes=sum(each.kv_bytes for each in timings),
        handoff_mb_per_s=percentile(handoff_rates, 50),
        exposed_transfer_p50_s=percentile(transfers_s, 50),
        exposed_transfer_p99_s=percentile(transfers_s, 99),
        first_error=str(errors[0]) if errors else None,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that is at least as large as `percent` % of all values; 0 if there are none."""
    if not values:
        return 0.0
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(0, int(rank) - 1)]


def _gaps_s(token_times_s: Sequence[float]) -> list[float]:
    """Returns the seconds before each token after the first. Tokens that arrive together share the gap before them
    evenly.
    """
    arrivals = [(time_s, len(list(group))) for time_s, group in itertools.groupby(token_times_s)]
    return [
        (time_s - previous_s) / count
        for (previous_s, _), (time_s, count) in itertools.pairwise(arrivals)
        for _ in range(count)
    ]


def _full_load(records: Sequence[RequestRecord], concurrency: int) -> tuple[int, float]:
    """Returns how many tokens arrive while exactly `concurrency` of the requests decode, and how many seconds that is.

    A request decodes from its first token to its last.
    """
    decoding = [(record.token_times_s[0], record.token_times_s[-1]) for record in records]
    bounds_s = sorted({time_s for interval in decoding for time_s in interval})
    num_tokens, seconds = 0, 0.0
    for begin_s, end_s in itertools.pairwise(bounds_s):
        if sum(first_s <= begin_s and end_s <= last_s for first_s, last_s in decoding) == concurrency:
            num_tokens += sum(begin_s < time_s <= end_s for record in records for time_s in record.token_times_s)
            seconds += end_s - begin_s
    return num_tokens, seconds


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
