"""Measures where the time of a speculating step goes, for one request at a time.

    python -m benchmarks.speculating_step

It times each part of a step on the forward stream, for draft chains of fixed lengths and for adaptive depth. Times come
from the running pair's timeline, while it answers outside prompts, or the project's own if there are none. Tokens/s are
measured at the client. Writes a dated table into benchmarks/results.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from itertools import pairwise
from typing import Any

from baton.client import AsyncClient
from baton.events import tokens_per_forward
from baton.load_generator import Workload, send_prompts, summarize
from baton.timeline import ServiceTimeline, record_timelines
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.forwards import forwards
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir
from benchmarks.prompts import OUTSIDE_TURNS, ChatTokens, first_turns

PIECES = ("resolve", "draft", "verify", "read")
NUM_PROMPTS = 12  # from each file
NEW_TOKENS = 128
MAX_TOKENS = 8192
ADAPTIVE = "adaptive"


async def measure(address: str, prompts: list[list[int]], seconds: float) -> str:
    """Measures a running pair on `prompts`, one at a time, and returns its row of the table without the first cell.

    The timeline is recorded for `seconds`.
    """
    workload = Workload(1, len(prompts), 0, NEW_TOKENS)

    async with AsyncClient(address, rpc_timeout_s=30.0) as client:

        async def answer(chosen: list[list[int]]) -> Any:
            return await send_prompts([client], chosen, concurrency=1, num_new_tokens=NEW_TOKENS, ignore_eos=False)

        await answer(prompts[:4])  # warms up; the depth policy of speculative decoding learns from requests
        records = await answer(prompts)
        load = asyncio.create_task(answer(prompts))
        (timeline,) = await asyncio.to_thread(record_timelines, [address], duration_s=seconds)
        await load
    report = summarize(workload, records)
    assert report.num_failed == 0, report.first_error
    counts = [record.speculation for record in records if record.speculation is not None]
    return (
        f"{report.decode_tokens_per_s:.1f} | {tokens_per_forward(counts) if counts else 1.0:.2f} | {pieces(timeline)}"
    )


def pieces(timeline: ServiceTimeline) -> str:
    """Returns table cells with medians in ms: the time from one step to the next, then each part of a step."""
    times_ms: dict[str, list[float]] = defaultdict(list)
    for event in timeline.tracks["forward"]:
        times_ms[event.name].append(event.duration_ns / 1e6)
    steps = [(next_.start_ns - one.start_ns) / 1e6 for one, next_ in pairwise(forwards(timeline))]
    columns = [steps, *(times_ms[name] for name in PIECES)]
    return " | ".join(f"{statistics.median(times):.2f}" if times else "" for times in columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", default=f"0,1,2,3,4,{ADAPTIVE}", help="0: without a head")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each recording")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    model_dir = demo_model_dir()
    tokens = ChatTokens(model_dir)
    turns = [turn for path in OUTSIDE_TURNS if path.exists() for turn in first_turns(path, NUM_PROMPTS)]
    prompts = tokens.of_chats(turns) if turns else tokens.of_project()
    run = BenchmarkRun.of("speculating_step")
    lines = [
        *run.heading(
            "Where a speculating step's time goes",
            f"SmolLM2-135M-Instruct, {args.dtype}, greedy, one request at a time; "
            f"{'' if turns else 'prompts of the project, as outside ones are not there; '}medians, times in ms.",
        ),
        "",
        f"| drafts | decode tokens/s | tokens per forward | step | {' | '.join(PIECES)} |",
        "|" + "---|" * (4 + len(PIECES)),
    ]
    for chain in args.chains.split(","):
        print(f"drafts: {chain}", file=sys.stderr)
        draft_args = (f"--draft={args.draft}",) if chain != "0" else ()
        depth_args = (f"--num-draft-tokens={chain}", "--no-adaptive-depth") if chain not in ("0", ADAPTIVE) else ()
        limits = (f"--max-kv-tokens={MAX_TOKENS}",)
        with full_speed_pair(
            model=str(model_dir),
            dtype=args.dtype,
            prefill_args=(*draft_args, *limits),
            decode_args=(*draft_args, *depth_args, *limits, "--max-rows=8"),
        ) as pair:
            lines.append(f"| {chain} | {asyncio.run(measure(pair.decode_addresses[0], prompts, args.seconds))} |")
    table = "\n".join(lines)
    print(table)
    if not args.no_save:
        run.save("speculating-step", table)


if __name__ == "__main__":
    main()
