"""Measures prefill tokens/s of one prompt at a time: through a pair's gRPC client, of the engine alone, and of a peer.

Every round measures all of them in turn, at each prompt length. Figures are medians over rounds; ratios are taken
within a round. Through the pair, the time is the client's, from sending a prompt to its first token. With --peer, the
exit status is 1 unless the pair's rate is at least the peer's at every length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from typing import Any

from baton.client import AsyncClient
from baton.load_generator import Workload, run_workload
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir
from benchmarks.peer import add_peer_argument, peer_row, run_peer
from common.host.cores import num_cores

MIN_RATIO = 1.0
DTYPE = "bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", default="512,2048", help="lengths in tokens")
    parser.add_argument("--threads", type=int, default=num_cores(), help="of the prefill forward, and of the peer's")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    add_peer_argument(parser)
    parser.add_argument("--by-operators", action="store_true", help="prompts by operators")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    lengths = [int(length) for length in args.prompts.split(",")]
    tokens = ("--max-kv-tokens", str(2 * max(lengths) + 64))
    forwards = ["--num-threads", str(args.threads), "--chunk-tokens", str(args.chunk_tokens)]
    if args.by_operators:
        forwards.append("--disabled-fast-paths=fused_forwards")
    rounds: list[list[dict[str, float]]] = []
    with full_speed_pair(
        model=str(demo_model_dir()),
        dtype=DTYPE,
        prefill_args=(*tokens, *forwards),
        decode_args=tokens,
        fuses_prompts=not args.by_operators,
    ) as pair:
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            rounds.append(asyncio.run(measure_round(pair.decode_addresses[0], lengths, args, seed=number)))
    run = BenchmarkRun.of("prefill")
    table, is_met = render(run, lengths, rounds, args)
    print(table)
    if not args.no_save:
        run.save("prefill", table, {"rounds": rounds})
    sys.exit(0 if is_met else 1)


async def measure_round(
    address: str, lengths: list[int], args: argparse.Namespace, seed: int
) -> list[dict[str, float]]:
    """Measures each prompt length once. Returns for each a dictionary of tokens/s.

    Its keys are `engine`, `bound` (the engine's best possible rate), `pair`, and `peer` if there is one.
    """
    engine = await asyncio.to_thread(run_engine, lengths, args)
    rows = []
    async with AsyncClient(address) as client:
        for length, alone in zip(lengths, engine["rows"], strict=True):
            row = {"engine": alone["tokens_per_s"], "bound": alone["bound_tokens_per_s"]}
            row["pair"] = await pair_rate(client, length, seed)
            if args.peer:
                peer = await asyncio.to_thread(
                    run_peer,
                    args.peer,
                    dtype=DTYPE,
                    num_prompt_tokens=length,
                    num_new_tokens=1,
                    batches=[1],
                    num_threads=args.threads,
                )
                if rate := (peer_row(peer, 1) or {}).get("prefill_tokens_per_s"):
                    row["peer"] = rate
            rows.append(row)
    return rows


def run_engine(lengths: list[int], args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.prefill_forward", "--prompts", ",".join(map(str, lengths))]
    command += ["--threads", str(args.threads), "--chunk-tokens", str(args.chunk_tokens)]
    if args.by_operators:
        command.append("--by-operators")
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return measured


async def pair_rate(client: AsyncClient, length: int, seed: int) -> float:
    """Returns the pair's prefill tokens/s: the median of three requests."""
    vocab_size = (await client.model_info()).vocab_size
    workload = Workload(1, 3, length, 2, prompt_seed=seed)
    records = await run_workload([client], workload, vocab_size=vocab_size)
    failed = [record.error for record in records if record.error is not None]
    assert not failed, failed[0]
    return length / statistics.median(record.ttft_s for record in records)


def render(
    run: BenchmarkRun, lengths: list[int], rounds: list[list[dict[str, float]]], args: argparse.Namespace
) -> tuple[str, bool]:
    lines = [
        *run.heading(
            "Prefill",
            f"SmolLM2-135M-Instruct, {DTYPE}, one prompt at a time, {args.threads} threads, "
            f"{'by operators' if args.by_operators else 'fused'}, chunks of {args.chunk_tokens}; tokens/s, medians "
            f"of {len(rounds)} rounds.",
        ),
        "",
        "The bound is all matrix products and attention at the rate of the packed linear layers.",
        "",
        "| prompt | bound | engine | share of the bound | through the pair | peer | pair / peer | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    is_met = True
    for place, length in enumerate(lengths):
        rows = [each[place] for each in rounds]
        compared = [row for row in rows if "peer" in row]
        cells = ["", "", ""]
        if args.peer:
            ratio = statistics.median(row["pair"] / row["peer"] for row in compared) if compared else 0.0
            met = ratio >= MIN_RATIO
            is_met &= met
            peer = f"{statistics.median(row['peer'] for row in compared):.0f}" if compared else "failed"
            cells = [peer, f"{ratio:.2f}", f">= {MIN_RATIO}: {'met' if met else 'MISSED'}"]
        bound, engine, pair = (statistics.median(row[name] for row in rows) for name in ("bound", "engine", "pair"))
        share = statistics.median(row["engine"] / row["bound"] for row in rows)
        lines.append(f"| {length} | {bound:.0f} | {engine:.0f} | {share:.2f} | {pair:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines), is_met


if __name__ == "__main__":
    main()
