"""Measures how decoding and prefill slow each other down on the same cores: gaps between tokens, and prompt tokens/s.

    python -m benchmarks.beside_prompts

Each configuration of the prefill service runs as a pair of its own. At first requests decode alone; then they decode
while prompts are computed, one after the other. Prints a table and saves it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise

from baton.client import AsyncClient
from baton.load_generator import RequestRecord, Workload, percentile, run_workload
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import BY_OPERATORS, full_speed_pair
from benchmarks.machine import demo_model_dir

ARRANGEMENTS = {
    "operators, half of the cores": (BY_OPERATORS,),
    "fused, one thread": ("--num-threads=1",),
    "fused, all cores": (),
}
_NEW_TOKENS = 192


@dataclass(frozen=True, slots=True)
class Beside:
    """The results of one round: gaps between decoded tokens in milliseconds, and prompts in tokens/s.

    "Alone" means that only one of the two runs, "beside" that both run at the same time.
    """

    alone_p50_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    prompts_alone: float
    prompts_beside: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=1, help="that decode")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    tokens = f"--max-kv-tokens={4 * (args.prompt_tokens + 64) + args.streams * 2 * _NEW_TOKENS}"
    seen: dict[str, list[Beside]] = {name: [] for name in ARRANGEMENTS}
    for number in range(args.rounds):
        for name, flags in ARRANGEMENTS.items():
            with full_speed_pair(
                model=str(demo_model_dir()),
                dtype="bfloat16",
                prefill_args=(tokens, *flags),
                decode_args=(tokens,),
                fuses_prompts=BY_OPERATORS not in flags,
            ) as pair:
                seen[name].append(asyncio.run(measure(pair.decode_addresses[0], args, seed=number)))
    run = BenchmarkRun.of("beside_prompts")
    table = render(run, seen, args)
    print(table)
    if not args.no_save:
        run.save("beside-prompts", table, {name: [asdict(each) for each in rounds] for name, rounds in seen.items()})


async def measure(address: str, args: argparse.Namespace, seed: int) -> Beside:
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size

        async def decode() -> list[RequestRecord]:
            workload = Workload(args.streams, args.streams, 32, _NEW_TOKENS, prompt_seed=seed)
            return succeeded(await run_workload([client], workload, vocab_size=vocab_size))

        async def prompts(number: int) -> list[RequestRecord]:
            workload = Workload(1, number, args.prompt_tokens, 1, prompt_seed=seed)
            return succeeded(await run_workload([client], workload, vocab_size=vocab_size))

        alone = gaps_ms(await decode())
        prompts_alone = await prompts(2)
        decoding = asyncio.create_task(decode())
        beside: list[RequestRecord] = []
        while not decoding.done():
            beside += await prompts(1)
        records = await decoding
        while_prompts = gaps_ms(records, until_s=beside[-1].ended_s)
        return Beside(
            alone_p50_ms=statistics.median(alone),
            beside_p50_ms=statistics.median(while_prompts),
            beside_p99_ms=percentile(while_prompts, 99),
            prompts_alone=rate(prompts_alone, args.prompt_tokens),
            prompts_beside=rate([each for each in beside if each.ended_s <= records[0].ended_s], args.prompt_tokens),
        )


def succeeded(records: list[RequestRecord]) -> list[RequestRecord]:
    for record in records:
        if record.error is not None:
            raise record.error
    return records


def gaps_ms(records: list[RequestRecord], until_s: float = float("inf")) -> list[float]:
    """Returns the gaps between tokens that came until `until_s`.

    The first gap of each request is left out, because the handoff causes it.
    """
    times = [record.token_times_s[1:] for record in records]
    return [1e3 * (after - before) for each in times for before, after in pairwise(each) if after <= until_s]


def rate(records: list[RequestRecord], num_tokens: int) -> float:
    return num_tokens / statistics.median(record.ttft_s for record in records) if records else float("nan")


def render(run: BenchmarkRun, seen: dict[str, list[Beside]], args: argparse.Namespace) -> str:
    def median(rounds: list[Beside], name: str) -> float:
        return statistics.median([float(asdict(each)[name]) for each in rounds])

    lines = [
        *run.heading(
            "Decoding beside prompts",
            f"SmolLM2-135M-Instruct, bfloat16, {args.streams} streams, prompts of {args.prompt_tokens} tokens, one "
            f"after the other; medians of {args.rounds} rounds. Gaps between tokens in ms, prompts in tokens/s to the "
            "first token.",
        ),
        "",
        "| prefill service | gap alone | gap beside, p50 | gap beside, p99 | prompts alone | prompts beside |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in seen.items():
        cells = [f"{median(rounds, field):.1f}" for field in ("alone_p50_ms", "beside_p50_ms", "beside_p99_ms")]
        cells += [f"{median(rounds, field):.0f}" for field in ("prompts_alone", "prompts_beside")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
