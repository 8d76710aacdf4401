"""Measures the cost of a decode step against the machine's best rates, and then that of prefill.

    python -m benchmarks.step_costs

It reports the time between forwards, the scheduling time and the forward's time, and compares the bytes and operations
of a forward with the best rates, which are measured in the same run. Times come from the running pair's timeline, under
a steady load through the client. Writes a dated table and JSON into benchmarks/results.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict

from baton.client import AsyncClient
from baton.load_generator import Workload, run_workload
from baton.server_info import ModelInfo
from baton.timeline import ServiceTimeline, record_timelines
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.ceilings import Ceilings
from benchmarks.forwards import StepFigures, forwards, step_figures
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir
from benchmarks.model_costs import BYTES_OF_DTYPE, ModelCosts
from benchmarks.steady_load import SteadyLoad

LEAST_BUSY = {8: 0.95}
"""The least share of time in which the forward stream must be computing, by concurrency."""
PROMPT_TOKENS = 128
PREFILL = Workload(8, 16, num_prompt_tokens=1024, num_new_tokens=1)
PREFILL_S = 30.0


async def measure_prefill(decode: str, prefill: str) -> ServiceTimeline:
    """Records the prefill service for half a minute, while prompts come as fast as they are computed."""
    async with AsyncClient(decode) as client:
        vocab_size = (await client.model_info()).vocab_size
        load = asyncio.create_task(run_workload([client], PREFILL, vocab_size=vocab_size))
        (timeline,) = await asyncio.to_thread(record_timelines, [prefill], duration_s=PREFILL_S)
        records = await load
    failed = [record.error for record in records if record.error is not None]
    assert not failed, failed[0]
    return timeline


async def measure(address: str, levels: list[int], seconds: float) -> tuple[ModelInfo, dict[int, StepFigures]]:
    figures: dict[int, StepFigures] = {}
    async with AsyncClient(address) as client:
        info = await client.model_info()
        for level in levels:
            print(f"{level} at a time", file=sys.stderr)
            async with SteadyLoad(
                client,
                concurrency=level,
                num_prompt_tokens=PROMPT_TOKENS,
                num_new_tokens=info.max_context_tokens - PROMPT_TOKENS,
                vocab_size=info.vocab_size,
            ) as load:
                (timeline,) = await asyncio.to_thread(record_timelines, [address], duration_s=seconds)
                load.check()
                if load.num_begun > level:  # the prefill of another request would count as time between forwards
                    raise RuntimeError(f"a request ended within {seconds:g} s: record for less time")
            figures[level] = step_figures(timeline, num_rows=level)
    return info, figures


def render(
    run: BenchmarkRun,
    costs: ModelCosts,
    ceilings: Ceilings,
    figures: dict[int, StepFigures],
    prefill: ServiceTimeline,
) -> tuple[str, bool]:
    """Returns the table, and whether every bound is met."""
    lines = [
        *run.heading(
            "What a decode step costs",
            f"SmolLM2-135M-Instruct, {costs.dtype}, {PROMPT_TOKENS}-token prompts, greedy, from the pair's timeline; "
            f"times in ms. At best {ceilings}.",
        ),
        "",
        "| at a time | steps | forward | between forwards, median / p99 | schedule | stream busy | bound | MB read "
        "| GFLOP | at best | of it reached |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    is_met = True
    for level, step in figures.items():
        num_bytes, num_flops = costs.num_bytes(step.context_tokens), costs.num_flops(level, step.context_tokens)
        best_s = ceilings.bound_s(num_bytes=num_bytes, num_flops=num_flops, dtype=costs.dtype)
        least = LEAST_BUSY.get(level)
        met = least is None or step.busy >= least
        is_met &= met
        verdict = "" if least is None else f">= {least:.0%}: {'met' if met else 'MISSED'}"
        lines.append(
            f"| {level} | {step.num_steps} | {step.forward_s * 1e3:.2f} "
            f"| {step.between_s * 1e3:.3f} / {step.between_p99_s * 1e3:.3f} | {step.schedule_s * 1e3:.2f} "
            f"| {step.busy:.1%} | {verdict} | {num_bytes / 1e6:.0f} | {num_flops / 1e9:.2f} | {best_s * 1e3:.2f} "
            f"| {best_s / step.forward_s:.0%} |"
        )
    return "\n".join([*lines, "", prefill_line(costs, ceilings, prefill)]), is_met


def prefill_line(costs: ModelCosts, ceilings: Ceilings, prefill: ServiceTimeline) -> str:
    computed = [
        forward for forward in forwards(prefill) if "tokens" in forward.figures
    ]  # the end of the recording cut off the others
    num_flops = sum(
        costs.num_prefill_flops(num_tokens=forward.figures["tokens"], num_attended=forward.figures["attended"])
        for forward in computed
    )
    num_tokens = sum(forward.figures["tokens"] for forward in computed)
    seconds = sum(forward.end_ns - forward.start_ns for forward in computed) / 1e9
    share = num_flops / seconds / ceilings.flops_per_s[costs.dtype]
    return (
        f"Prefill, {PREFILL.concurrency} prompts of {PREFILL.num_prompt_tokens} at a time: {len(computed)} forwards of "
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.0f} tokens/s, {num_flops / seconds / 1e9:.0f} "
        f"GFLOP/s, {share:.0%} of what matrices are multiplied with at best."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each recording")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(BYTES_OF_DTYPE))
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    levels = [int(level) for level in args.concurrency.split(",")]
    model_dir = demo_model_dir()
    with full_speed_pair(model=str(model_dir), dtype=args.dtype) as pair:
        info, figures = asyncio.run(measure(pair.decode_addresses[0], levels, args.seconds))
        print("prefill", file=sys.stderr)
        prefill = asyncio.run(measure_prefill(pair.decode_addresses[0], pair.prefill_addresses[0]))
    ceilings = Ceilings.measured(info.device)
    costs = ModelCosts.of(model_dir, dtype=info.dtype, kv_bytes_per_token=info.layer_groups["target"])
    run = BenchmarkRun.of("step_costs")
    table, is_met = render(run, costs, ceilings, figures, prefill)
    print(table)
    if not args.no_save:
        measured = {str(level): asdict(step) for level, step in figures.items()}
        run.save("step-costs", table, {"ceilings": asdict(ceilings), "model": asdict(costs), "steps": measured})
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
