"""Measures serving: transformers' `generate`, Baton through its gRPC client, and a peer, all in one run.

Every round measures all of them in turn on the same weights and prompts, so that changes in the machine's speed affect
all alike. Figures are medians over rounds; ratios are taken within a round. Writes a dated table and JSON into
benchmarks/results. The exit status is 1 when a bound is missed, or when a requested peer failed.

`--model experts` measures a random mixture of experts instead of the demo model. `generate` then also runs as many
requests in one batch as Baton runs at a time, and each of Baton's rates is compared with that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from baton.load_generator import LoadReport, Workload, percentile, run_workload, summarize
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.cancellation import measure_cancellation
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir, save_experts_model
from benchmarks.peer import add_peer_argument, peer_row, run_peer

LIMITS: dict[str, dict[int, float]] = {"demo": {1: 4.0, 32: 8.0}, "experts": {1: 2.0, 8: 2.0}}
"""The least ratio of decode tokens/s to `generate`, by model and concurrency. Others are shown without a bound."""
NAMES = {"demo": "SmolLM2-135M-Instruct", "experts": "a random Mixtral of 8 experts, 2 a token, 317M weights"}
PEER_LIMIT = 1.0
"""The least ratio to the peer's tokens/s for as many sequences. Baton's tokens/s are those while all requests decode.
"""
LEAST_FULL_LOAD_S = 3.0
"""The least time in seconds in which all requests decode. With a shorter time the bound counts as missed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(NAMES), default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument(
        "--new-tokens", type=int, default=512, help="so many that all requests decode for a while after the last prompt"
    )
    parser.add_argument("--reference-requests", type=int, default=2, help="requests of `generate` a round")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--by-operators", action="store_true", help="the pair fuses no forwards")
    add_peer_argument(parser)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-experts-") as directory:
        sys.exit(measure(args, save_experts_model(Path(directory)) if args.model == "experts" else demo_model_dir()))


def measure(args: argparse.Namespace, model_dir: Path) -> int:
    """Measures the model in `model_dir`, and prints and saves the table. Returns the exit status."""
    levels = [int(level) for level in args.concurrency.split(",")]
    batches = sorted({1, *(levels if args.model == "experts" else ())})
    rounds: list[dict[str, Any]] = []
    rows = (
        "--max-rows",
        str(max(levels)),
        "--max-kv-tokens",
        str(max(levels) * (args.prompt_tokens + args.new_tokens + 16)),
    )
    pair_options = {"model": str(model_dir), "dtype": args.dtype, "prefill_args": rows, "decode_args": rows}
    with full_speed_pair(fuses=not args.by_operators, **pair_options) as pair:
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            references = {batch: run_reference(model_dir, args, batch, seed=number) for batch in batches}
            reports = asyncio.run(run_baton(pair.decode_addresses[0], levels, args, seed=number))
            peer = (
                run_peer(
                    args.peer,
                    dtype=args.dtype,
                    num_prompt_tokens=args.prompt_tokens,
                    num_new_tokens=args.new_tokens,
                    batches=levels,
                )
                if args.peer
                else None
            )
            rounds.append({"references": references, "baton": reports, "peer": peer})
    cancellation = measure_cancellation() if args.model == "demo" else {}
    run = BenchmarkRun.of("serving")
    result = {
        "date": run.date,
        "machine": run.machine,
        "python": platform.python_version(),
        "command": run.command,
        "model": args.model,
        "dtype": args.dtype,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "is_peer_wanted": args.peer is not None,
        "rounds": [{**r, "baton": [asdict(b) for b in r["baton"]]} for r in rounds],
        "cancellation_s": cancellation,
    }
    table, is_met = render(run, rounds, levels, result)
    print(table)
    if not args.no_save:
        run.save("serving" if args.model == "demo" else f"serving-{args.model}", table, result)
    return 0 if is_met else 1


def run_reference(model_dir: Path, args: argparse.Namespace, batch: int, seed: int) -> dict[str, Any]:
    """Measures `generate` with `batch` requests in a call."""
    num_requests = batch * max(1, args.reference_requests // batch)
    workload = Workload(batch, num_requests, args.prompt_tokens, args.new_tokens, prompt_seed=1000 + seed)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as prompts:
        json.dump(workload.prompts(vocab_size_of(model_dir)), prompts)
        prompts.flush()
        command = [sys.executable, "-m", "benchmarks.reference_generate", str(model_dir), prompts.name]
        command += ["--new-tokens", str(args.new_tokens), "--dtype", args.dtype, "--batch", str(batch)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measured: dict[str, Any] = json.loads(out.splitlines()[-1])
    gaps_s, ttft_s = measured.pop("gaps_s"), measured.pop("ttft_s")
    return {
        **measured,
        "ttft_p50_s": percentile(ttft_s, 50),
        "inter_token_p50_s": percentile(gaps_s, 50),
        "inter_token_p99_s": percentile(gaps_s, 99),
    }


async def run_baton(address: str, levels: list[int], args: argparse.Namespace, seed: int) -> list[LoadReport]:
    reports = []
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size
        warm_up = Workload(1, 1, args.prompt_tokens, 8, prompt_seed=-1)
        await run_workload([client], warm_up, vocab_size=vocab_size)
        for level in levels:
            num_requests = max(level, args.reference_requests)
            workload = Workload(level, num_requests, args.prompt_tokens, args.new_tokens, prompt_seed=1000 + seed)
            report = summarize(workload, await run_workload([client], workload, vocab_size=vocab_size))
            assert report.num_failed == 0, report.first_error
            reports.append(report)
    return reports


def peer_tokens_per_s(row: dict[str, float], result: dict[str, Any]) -> float:
    """Returns tokens/s over the time of prompts and decoding together, or 0 if the peer does not report the prompts'
    time.
    """
    if not row.get("prefill_tokens_per_s"):
        return 0.0
    request_s = (
        result["prompt_tokens"] / row["prefill_tokens_per_s"] + result["new_tokens"] / row["decode_tokens_per_s"]
    )
    return float(result["new_tokens"] / request_s)


def vocab_size_of(model_dir: Path) -> int:
    return int(json.loads((model_dir / "config.json").read_text())["vocab_size"])


def render(
    run: BenchmarkRun, rounds: list[dict[str, Any]], levels: list[int], result: dict[str, Any]
) -> tuple[str, bool]:
    """Returns the table, and whether the median ratio meets every bound."""
    references = {batch: [r["references"][batch] for r in rounds] for batch in rounds[0]["references"]}
    limits = LIMITS[result["model"]]

    def median(values: list[float], scale: float = 1.0) -> str:
        return f"{statistics.median(values) * scale:.1f}"

    lines = [
        *run.heading(
            "Serving",
            f"{NAMES[result['model']]}, {result['dtype']}, {result['prompt_tokens']}-token prompts, "
            f"{result['new_tokens']} new tokens, greedy; medians of {len(rounds)} rounds.",
        ),
        "",
        "| | decode tokens/s | of `generate` | while all decode | of the peer | end-to-end tokens/s | of `generate` "
        "| of the peer | TTFT p50 ms | between tokens p50 / p99 ms | handoff MB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| transformers `generate`, {'sequential' if batch == 1 else f'batch {batch}'} "
            f"| {median([r['decode_tokens_per_s'] for r in reference])} | 1.0 | | "
            f"| {median([r['tokens_per_s'] for r in reference])} | 1.0 | "
            f"| {median([r['ttft_p50_s'] for r in reference], 1e3)} "
            f"| {median([r['inter_token_p50_s'] for r in reference], 1e3)} "
            f"/ {median([r['inter_token_p99_s'] for r in reference], 1e3)} | |"
            for batch, reference in references.items()
        ),
    ]
    is_met = True

    def judged(ratios: list[float], bound: float | None) -> str:
        nonlocal is_met
        if not ratios:
            return ""
        ratio = statistics.median(ratios)
        is_met &= bound is None or ratio >= bound
        verdict = "" if bound is None else f" (>= {bound}: {'met' if ratio >= bound else 'MISSED'})"
        return f"{ratio:.2f}{verdict}"

    def judged_peer(ratios: list[float], full_load_s: float) -> str:
        """Returns the table cell with the ratio to the peer and whether its bound is met, and records a missed bound.

        The bound is also missed if a requested peer failed, or if the time in which all requests decoded together,
        `full_load_s`, is too short.
        """
        nonlocal is_met
        if result["is_peer_wanted"] and not ratios:
            is_met = False
            return f"no figure (>= {PEER_LIMIT}: MISSED)"
        if ratios and full_load_s < LEAST_FULL_LOAD_S:
            is_met = False
            return f"{statistics.median(ratios):.2f} in less than {LEAST_FULL_LOAD_S:g} s (>= {PEER_LIMIT}: MISSED)"
        return judged(ratios, PEER_LIMIT)

    for place, level in enumerate(levels):
        reports, reference = [r["baton"][place] for r in rounds], references.get(level, references[1])
        ratios = [b.decode_tokens_per_s / r["decode_tokens_per_s"] for b, r in zip(reports, reference, strict=True)]
        end_ratios = [b.tokens_per_s / r["tokens_per_s"] for b, r in zip(reports, reference, strict=True)]
        beside = [
            (b, row) for b, r in zip(reports, rounds, strict=True) if (row := peer_row(r["peer"], level)) is not None
        ]
        full_load_s = min(b.full_load_s for b in reports)
        peer_ratios = [b.full_load_tokens_per_s / row["decode_tokens_per_s"] for b, row in beside]
        whole_ratios = [b.tokens_per_s / whole for b, row in beside if (whole := peer_tokens_per_s(row, result))]
        lines.append(
            f"| Baton, {level} at a time | {median([b.decode_tokens_per_s for b in reports])} "
            f"| {judged(ratios, limits.get(level))} "
            f"| {median([b.full_load_tokens_per_s for b in reports])}, {full_load_s:.1f} s "
            f"| {judged_peer(peer_ratios, full_load_s)} "
            f"| {median([b.tokens_per_s for b in reports])} | {statistics.median(end_ratios):.2f} "
            f"| {judged(whole_ratios, None)} "
            f"| {median([b.ttft_p50_s for b in reports], 1e3)} "
            f"| {median([b.inter_token_p50_s for b in reports], 1e3)} "
            f"/ {median([b.inter_token_p99_s for b in reports], 1e3)} "
            f"| {median([b.handoff_mb_per_s for b in reports])} |"
        )
    measured = [r["peer"] for r in rounds if r["peer"]]
    for level in levels:
        rows = [row for peer in measured if (row := peer_row(peer, level)) is not None]
        if not rows:
            continue
        rates = [row["decode_tokens_per_s"] for row in rows]
        lines.append(
            f"| {measured[0]['peer']}, batch {level} (library, no server) | {median(rates)} "
            f"| {statistics.median(rates) / statistics.median([r['decode_tokens_per_s'] for r in references[1]]):.2f} "
            f"| {median(rates)} | 1.0 | {median([peer_tokens_per_s(row, result) for row in rows])} | | 1.0 | | | |"
        )
    if result["cancellation_s"]:
        lines += [
            "",
            "Cancellation, tiny model: seconds from dropping the stream until both services hold nothing (bound 0.5):",
        ]
    for phase, seconds in result["cancellation_s"].items():
        met = seconds < 0.5
        is_met &= met
        lines.append(f"- {phase}: {seconds:.3f}{'' if met else ' MISSED'}")
    return "\n".join(lines), is_met


if __name__ == "__main__":
    main()
