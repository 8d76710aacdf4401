"""Measures the scheduling cost of a decode step by batch size: the engine with a worker that computes nothing.

    python -m benchmarks.schedule_side

It measures the engine's thread alone (requests, rows, slots, launching, results, events), and then the work of the
edge's thread on a step's tokens, before gRPC. There are six cases: without and with drafts (chains of 4, of which a
random number is accepted), each with rows that stay, with rows that end after 128 tokens and are replaced, and with
such rows and a prefix cache that has all slots. Then it measures the operations of the prefix tree by themselves
(tree_costs.py), and the masks of a step under a grammar (mask_costs.py). Writes a dated table into benchmarks/results.

The exit status is 1 if, in one of the cases, a step at the largest batch takes more than 1 ms of the engine's thread in
the median, or the time does not grow less than linearly with the batch size; or if an operation of the tree takes more
than 25 µs for a row. The mean is shown beside it: where rows are replaced, few steps begin and end many rows at once.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
from dataclasses import dataclass

import torch

from baton.load_generator import percentile
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.machine import CoreSpeed
from benchmarks.mask_costs import mask_table, measure_masks
from benchmarks.schedule_rig import STEPS_A_TURN, ScheduleRig
from benchmarks.tree_costs import CACHED_TOKENS, measure_tree, tree_table
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BOUND_US = 1000.0
OUTPUT_TOKENS = 128
CHAIN = SpecInfo.chain(4)
PARTS = ("next_batch", "launch", "finish", "other", "deliver")


@dataclass(frozen=True, slots=True)
class Case:
    """One case that is measured: the options of ScheduleRig, which documents them."""

    spec_info: SpecInfo = NO_DRAFTS
    output_tokens: int | None = None
    num_cached_tokens: int = 0


SCENARIOS = {
    "plain": Case(),
    "plain, rows replaced": Case(NO_DRAFTS, OUTPUT_TOKENS),
    "plain, rows replaced, cache full": Case(NO_DRAFTS, OUTPUT_TOKENS, CACHED_TOKENS),
    "drafts": Case(CHAIN),
    "drafts, rows replaced": Case(CHAIN, OUTPUT_TOKENS),
    "drafts, rows replaced, cache full": Case(CHAIN, OUTPUT_TOKENS, CACHED_TOKENS),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a step at one batch size. Times are in microseconds, and medians except for `p99` and `mean`.

    `num_running` is the mean number of rows in a step. `total` is the wall time of a step with the delivery of its
    events, and `p99` its 99th percentile. `cpu` is the thread's CPU time for it, and `mean` the mean of that, which
    other processes do not disturb. `parts` divides `total`. `edge` is the edge's time for one step's events. `core` has
    samples of the core's speed, taken between the steps.
    """

    batch_size: int
    num_running: float
    total: float
    p99: float
    cpu: float
    mean: float
    parts: dict[str, float]
    edge: float
    core: CoreSpeed


def measure(batch_size: int, case: Case, num_steps: int) -> Cost:
    rig = ScheduleRig(
        num_rows=batch_size,
        spec_info=case.spec_info,
        output_tokens=case.output_tokens,
        num_cached_tokens=case.num_cached_tokens,
    )
    rig.start()
    for _ in range(num_steps // 4):
        rig.step()
    rig.watch.forget()
    rig.num_tokens = 0
    core = CoreSpeed()
    for _ in range(num_steps):
        rig.step()
        core.sample()
    num_running = rig.num_tokens / num_steps
    rig.close()
    seconds = rig.watch.seconds
    parts = {part: median_us(seconds[part]) for part in ("next_batch", "launch", "finish", "deliver")}
    parts["other"] = median_us(seconds["total"]) - sum(parts.values())
    return Cost(
        batch_size=batch_size,
        num_running=num_running,
        total=median_us(seconds["total"]),
        p99=1e6 * percentile(seconds["total"], 99),
        cpu=median_us(seconds["cpu"]),
        mean=1e6 * statistics.fmean(seconds["cpu"]),
        parts=parts,
        edge=median_us(seconds["edge"]) / STEPS_A_TURN,
        core=core,
    )


def median_us(seconds: list[float]) -> float:
    return 1e6 * statistics.median(seconds)


def exponent(costs: list[Cost]) -> float | None:
    """Returns the exponent with which the cost grows from the smallest to the largest batch size; 1 is linear.

    Returns None if there is only one size.
    """
    first, last = costs[0], costs[-1]
    if first.batch_size == last.batch_size:
        return None
    return math.log(last.total / first.total) / math.log(last.batch_size / first.batch_size)


def judged(costs: list[Cost]) -> tuple[str, bool]:
    """Returns a line that says whether the bounds are met, and whether they are. A single batch size has no bound on
    growth.
    """
    last, growth = costs[-1], exponent(costs)
    is_met = last.total <= BOUND_US and (growth is None or growth < 1)
    grows = "" if growth is None else f", growth exponent {growth:.2f}, less than 1"
    verdict = "met" if is_met else "MISSED"
    mean = f"{last.mean / 1e3:.2f} in the mean"
    return f"{last.total / 1e3:.2f} ms at {last.batch_size} rows ({mean}), at most 1 ms{grows}: {verdict}.", is_met


def table_of(name: str, costs: list[Cost]) -> list[str]:
    best_s = min(cost.core.best_s for cost in costs)
    lines = [
        "",
        f"**{name}**",
        "",
        "| batch | rows in a step | schedule side, µs | p99 | CPU | CPU, mean | "
        + " | ".join(PARTS)
        + " | µs a row | edge, µs a token event | core's speed, of its best |",
        "|" + "---|" * (len(PARTS) + 9),
    ]
    for cost in costs:
        speed = best_s / cost.core.median_s
        figures = [cost.total, cost.p99, cost.cpu, cost.mean, *(cost.parts[part] for part in PARTS)]
        lines.append(
            f"| {cost.batch_size} | {cost.num_running:.1f} | "
            + " | ".join(f"{figure:.0f}" for figure in figures)
            + f" | {cost.total / cost.num_running:.2f} | {cost.edge / cost.num_running:.1f} | {speed:.0%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-sizes", default=",".join(map(str, BATCH_SIZES)))
    parser.add_argument("--scenarios", default=";".join(SCENARIOS), help="names, separated by semicolons")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    batch_sizes = sorted({int(size) for size in args.batch_sizes.split(",")})
    gc.freeze()  # as the services do after their imports; the garbage collector stays on
    torch.set_num_threads(1)
    run = BenchmarkRun.of("schedule_side")
    lines = run.heading(
        "The schedule side of a decode step",
        f"one thread; a worker that computes nothing; half of the requests greedy; medians of {args.steps} steps.",
    )
    is_met = True
    for name in args.scenarios.split(";"):
        costs = [measure(size, SCENARIOS[name], args.steps) for size in batch_sizes]
        lines += table_of(name, costs)
        verdict, is_kept = judged(costs)
        lines += ["", verdict]
        is_met &= is_kept
    tree_lines, is_kept = tree_table(measure_tree(args.steps))
    lines += [*tree_lines, *mask_table(measure_masks(args.steps // 4))]
    is_met &= is_kept
    table = "\n".join(lines)
    print(table)
    if not args.no_save:
        run.save("schedule-side", table)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
