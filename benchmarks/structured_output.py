"""Compares constrained with unconstrained output of the demo model: tokens/s at several concurrencies, in turns.

    python -m benchmarks.structured_output

A constrained request writes a JSON array of objects by a schema, and an unconstrained one as many tokens without end
tokens. Figures are medians over rounds; ratios are taken within a round. Writes a dated table into benchmarks/results.
The exit status is 1 if constrained output has less than 0.9 of the unconstrained tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from baton import AsyncClient, ChatMessage
from baton.requests import SamplingOptions
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.mask_costs import SCHEMA

LEAST_RATIO = 0.9
_ASKED = "Write a JSON array of {} famous people with their name, year of birth, fields and whether they are alive."


async def tokens_per_s(client: AsyncClient, concurrency: int, new_tokens: int, *, is_constrained: bool) -> float:
    """Runs `concurrency` requests at a time, each of `new_tokens` tokens, and returns the output tokens/s of all."""
    sampling: SamplingOptions = {"max_tokens": new_tokens, "min_tokens": new_tokens, "temperature": 0.0}
    if is_constrained:
        sampling["json_schema"] = {**SCHEMA, "minItems": new_tokens}  # it does not end before
    else:
        sampling["ignore_eos"] = True
    chats = [[ChatMessage("user", _ASKED.format(10 + number))] for number in range(concurrency)]
    begun_s = time.perf_counter()
    answers = await asyncio.gather(*(client.complete(chat=chat, **sampling) for chat in chats))
    wall_s = time.perf_counter() - begun_s
    assert all(answer.usage.num_completion_tokens == new_tokens for answer in answers), "an output ended early"
    return concurrency * new_tokens / wall_s


async def measure(address: str, levels: list[int], num_rounds: int, new_tokens: int) -> dict[int, list[list[float]]]:
    """Returns the tokens/s without and with a grammar, for each concurrency and round. The two take turns in being
    first.
    """
    found: dict[int, list[list[float]]] = {level: [] for level in levels}
    async with AsyncClient(address) as client:
        for number in range(num_rounds + 1):
            for level in levels:
                order = [False, True] if number % 2 else [True, False]
                pair = {each: await tokens_per_s(client, level, new_tokens, is_constrained=each) for each in order}
                if number:  # the first round warms up
                    found[level].append([pair[False], pair[True]])
    return found


def table_of(found: dict[int, list[list[float]]]) -> tuple[list[str], bool]:
    """Returns the lines of the table, and whether the bound is met at every concurrency."""
    lines = ["", "| concurrency | tokens/s | constrained | ratio | bound |", "|---|---|---|---|---|"]
    is_met = True
    for level, rounds in found.items():
        free, bound = (statistics.median(each) for each in zip(*rounds, strict=True))
        ratio = statistics.median(constrained / plain for plain, constrained in rounds)
        is_met &= ratio >= LEAST_RATIO
        verdict = "met" if ratio >= LEAST_RATIO else "MISSED"
        lines.append(f"| {level} | {free:.0f} | {bound:.0f} | {ratio:.2f} | {LEAST_RATIO}: {verdict} |")
    return lines, is_met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    levels = [int(level) for level in args.concurrency.split(",")]
    run = BenchmarkRun.of("structured_output")
    with full_speed_pair(model="demo", dtype=args.dtype) as pair:
        found = asyncio.run(measure(pair.decode_addresses[0], levels, args.rounds, args.new_tokens))
    lines, is_met = table_of(found)
    about = f"the demo model, {args.dtype}; {args.new_tokens} tokens a request; medians of {args.rounds} rounds."
    table = "\n".join([*run.heading("Output under a JSON schema", about), *lines])
    print(table)
    if not args.no_save:
        run.save("structured-output", table)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
