"""Measures the gain from drafts: acceptance on outside prompts, and speed with and without the draft head, in one run.

Acceptance is measured on greedy first turns with a chain of `--chain` drafts at every step: tokens per forward of the
target, and acceptance by position. For speed, two pairs on the same weights take turns on the same prompts: one with
the head and adaptive depth, one without. The one that goes first changes with the round; ratios are taken within a
round. A peer gets prompts of the same average length. Writes a dated table and JSON into benchmarks/results. The exit
status is 1 when a bound is missed, or when a requested peer failed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from baton.events import Completion, tokens_per_forward
from baton.load_generator import Workload, send_prompts, summarize
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import full_speed_pair
from benchmarks.machine import demo_model_dir
from benchmarks.peer import PeerFigures, add_peer_argument, peer_row, run_peer
from benchmarks.prompts import OUTSIDE_TURNS, ChatTokens, Prompts, first_turns
from common.telemetry.stats import SpeculationCounts

MIN_TOKENS_PER_FORWARD = 2.0
LIMITS = {1: 1.2, 8: 0.95, 32: 0.95}
"""The least ratio of decode tokens/s with the head to those without, by concurrency."""
PEER_LIMIT = 1.2
"""The least ratio to a peer's tokens/s without drafts, for one request at a time.

Baton's tokens/s are taken while the request decodes, with the head.
"""
MAX_CONTEXT = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--chain", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=Path, nargs="*", help="JSON lines with a list of turns each")
    parser.add_argument("--max-turns", type=int, help="of each file")
    add_peer_argument(parser)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    levels = [int(level) for level in args.concurrency.split(",")] if args.rounds else []
    wanted = OUTSIDE_TURNS if args.turns is None else args.turns
    turns, absent = [path for path in wanted if path.exists()], [path.name for path in wanted if not path.exists()]
    if absent and args.turns is not None:
        parser.error(f"{', '.join(absent)} not there")
    if not levels and not turns:
        parser.error("without prompts and without rounds there is nothing to measure")
    if args.peer and 1 not in levels:
        parser.error("a peer is measured beside one request at a time")
    run = BenchmarkRun.of("speculation")
    result = {**asyncio.run(measure(run, args, turns, levels)), "absent": absent}
    table, is_met = render(run, result)
    print(table)
    if not args.no_save:
        part = "" if levels and turns else "-acceptance" if turns else "-speed"
        run.save(f"speculation{part}", table, result)
    sys.exit(0 if is_met else 1)


async def measure(
    run: BenchmarkRun, args: argparse.Namespace, turns: Sequence[Path], levels: Sequence[int]
) -> dict[str, Any]:
    model_dir = demo_model_dir()
    tokens = ChatTokens(model_dir)
    rows = max([8, *levels])
    shared = {
        "model": str(model_dir),
        "dtype": args.dtype,
        "prefill_args": (f"--draft={args.draft}", "--max-kv-tokens=16384"),
        "decode_args": (
            f"--draft={args.draft}",
            f"--num-draft-tokens={args.chain}",
            f"--max-rows={rows}",
            f"--max-kv-tokens={rows * MAX_CONTEXT}",
        ),
    }
    result: dict[str, Any] = {
        "date": run.date,
        "machine": run.machine,
        "command": run.command,
        "dtype": args.dtype,
        "chain": args.chain,
        "new_tokens": args.new_tokens,
        "is_peer_wanted": args.peer is not None,
        "acceptance": {},
        "speed": [],
    }
    if turns:
        fixed_args = {**shared, "decode_args": (*shared["decode_args"], "--no-adaptive-depth")}
        with full_speed_pair(**fixed_args) as fixed:
            async with AsyncClient(fixed.decode_addresses[0]) as client:
                for path in turns:
                    prompts = tokens.of_chats(first_turns(path, args.max_turns))
                    result["acceptance"][path.stem] = await acceptance(client, prompts, args)
                    print(path.stem, result["acceptance"][path.stem], file=sys.stderr)
    if not levels:
        return result
    texts = tokens.of_project()
    plain = {
        **shared,
        "prefill_args": ("--max-kv-tokens=16384",),
        "decode_args": (f"--max-rows={rows}", f"--max-kv-tokens={rows * MAX_CONTEXT}"),
    }
    with full_speed_pair(**shared) as on, full_speed_pair(**plain) as off:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(pair.decode_addresses[0], rpc_timeout_s=30.0))
                for pair in (on, off)
            ]
            # Warms up: the depth policy of speculative decoding learns from requests, as in service.
            for client in clients:
                for level in levels:
                    await speed(client, texts, level, args.new_tokens, first=0)
            for number in range(args.rounds):
                for level in levels:
                    order = (0, 1) if number % 2 == 0 else (1, 0)
                    measured = {
                        ("on", "off")[side]: await speed(
                            clients[side], texts, level, args.new_tokens, first=number * num_requests_at(level)
                        )
                        for side in order
                    }
                    beside = peer_beside(texts, args) if args.peer and level == 1 else None
                    result["speed"].append({"round": number, "concurrency": level, **measured, "peer": beside})
                    print(result["speed"][-1], file=sys.stderr)
    return result


def peer_beside(prompts: Prompts, args: argparse.Namespace) -> PeerFigures | None:
    return run_peer(
        args.peer,
        dtype=args.dtype,
        num_prompt_tokens=round(statistics.mean(map(len, prompts))),
        num_new_tokens=args.new_tokens,
        batches=[1],
    )


async def acceptance(client: AsyncClient, prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    slots = asyncio.Semaphore(8)

    async def complete(token_ids: list[int]) -> Completion:
        async with slots:
            return await client.complete(token_ids=token_ids, temperature=0.0, max_tokens=args.new_tokens)

    completions = await asyncio.gather(*(complete(prompt) for prompt in prompts))
    counts: list[SpeculationCounts] = [done.speculation for done in completions if done.speculation is not None]
    num_steps = sum(count.num_verify_steps for count in counts)
    accepted = [sum(count.accepted_at[level] for count in counts) for level in range(args.chain)]
    return {
        "num_prompts": len(prompts),
        "num_tokens": sum(len(done.token_ids) for done in completions),
        "num_verify_steps": num_steps,
        "accepted_at": accepted,
        "tokens_per_forward": tokens_per_forward(counts),
    }


def num_requests_at(concurrency: int) -> int:
    return {1: 4, 8: 24}.get(concurrency, 2 * concurrency)


async def speed(
    client: AsyncClient, prompts: Prompts, concurrency: int, num_new_tokens: int, *, first: int
) -> dict[str, float]:
    """Measures the speed on prompts taken in turn, from number `first` on, with `concurrency` requests at a time.

    It sends two to four times as many requests as run at a time. With drafts, requests end at different times; if there
    were no more requests to follow, the slowest would decide the result.
    """
    num_requests = num_requests_at(concurrency)
    chosen = [prompts[(first + number) % len(prompts)] for number in range(num_requests)]
    records = await send_prompts(
        [client], chosen, concurrency=concurrency, num_new_tokens=num_new_tokens, ignore_eos=False
    )
    report = summarize(Workload(concurrency, num_requests, 0, num_new_tokens), records)
    assert report.num_failed == 0, report.first_error
    counts = [record.speculation for record in records if record.speculation is not None]
    num_steps = sum(count.num_verify_steps for count in counts)
    return {
        "decode_tokens_per_s": report.decode_tokens_per_s,
        "full_load_tokens_per_s": report.full_load_tokens_per_s,
        "tokens_per_s": report.tokens_per_s,
        "ttft_p50_s": report.ttft_p50_s,
        "num_tokens": report.num_tokens,
        "drafted_per_step": sum(count.num_drafted_tokens for count in counts) / num_steps if num_steps else 0.0,
        "tokens_per_forward": tokens_per_forward(counts),
    }


def render(run: BenchmarkRun, result: dict[str, Any]) -> tuple[str, bool]:
    """Returns the table, and whether every bound is met."""
    is_met = True
    positions = " | ".join(f"draft {position}" for position in range(1, result["chain"] + 1))
    lines = [
        *run.heading(
            "Speculation",
            f"SmolLM2-135M-Instruct, {result['dtype']}, greedy, {result['new_tokens']} new tokens.",
        ),
    ]
    if result["acceptance"]:
        lines += [
            "",
            f"Acceptance of a chain of {result['chain']}, first turns; bound {MIN_TOKENS_PER_FORWARD}:",
            "",
            f"| prompts | tokens | tokens per forward of the target | | {positions} |",
            "|" + "---|" * (4 + result["chain"]),
        ]
    for name, measured in result["acceptance"].items():
        met = measured["tokens_per_forward"] >= MIN_TOKENS_PER_FORWARD
        is_met &= met
        rates = " | ".join(f"{count / measured['num_verify_steps']:.3f}" for count in measured["accepted_at"])
        lines.append(
            f"| {name}, {measured['num_prompts']} | {measured['num_tokens']} | {measured['tokens_per_forward']:.2f} "
            f"| {'met' if met else 'MISSED'} | {rates} |"
        )
    if result["absent"]:
        lines += [
            "",
            f"Acceptance was not measured on outside prompts that are not there: {', '.join(result['absent'])}.",
        ]
    if result["speed"]:
        lines += [
            "",
            "Speed with the head, its depth adapting, against without; medians, ratios within a round:",
            "",
            "| at a time | decode tokens/s with | without | ratio (of rounds) | bound | end to end with | without "
            "| ratio | drafts a step | tokens per forward |",
            "|" + "---|" * 10,
        ]
    for level in dict.fromkeys(entry["concurrency"] for entry in result["speed"]):
        entries = [entry for entry in result["speed"] if entry["concurrency"] == level]
        ratios = _ratios(entries, "decode_tokens_per_s")
        ratio = statistics.median(ratios)
        bound = LIMITS.get(level)
        met = bound is None or ratio >= bound
        is_met &= met
        verdict = "" if bound is None else f">= {bound}: {'met' if met else 'MISSED'}"
        lines.append(
            f"| {level} | {_median(entries, 'on', 'decode_tokens_per_s'):.1f} "
            f"| {_median(entries, 'off', 'decode_tokens_per_s'):.1f} "
            f"| {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {verdict} "
            f"| {_median(entries, 'on', 'tokens_per_s'):.1f} | {_median(entries, 'off', 'tokens_per_s'):.1f} "
            f"| {statistics.median(_ratios(entries, 'tokens_per_s')):.2f} "
            f"| {_median(entries, 'on', 'drafted_per_step'):.2f} "
            f"| {_median(entries, 'on', 'tokens_per_forward'):.2f} |"
        )
    if result["is_peer_wanted"]:
        beside = [entry for entry in result["speed"] if peer_row(entry["peer"], 1) is not None]
        lines += ["", _peer_line(beside)]
        is_met &= bool(beside) and _of_peer(beside) >= PEER_LIMIT
    return "\n".join(lines), is_met


def _peer_line(entries: Sequence[dict[str, Any]]) -> str:
    if not entries:
        return f"The peer printed no figure at batch 1 (>= {PEER_LIMIT}: MISSED)."
    rate, ratio = statistics.median(map(_peer_rate, entries)), _of_peer(entries)
    return (
        f"{entries[0]['peer']['peer']} without drafts, batch 1, decoding alone: {rate:.1f} tokens/s. "
        f"With the head, while it decodes: {_median(entries, 'on', 'full_load_tokens_per_s'):.1f}, {ratio:.2f} of it "
        f"(>= {PEER_LIMIT}: {'met' if ratio >= PEER_LIMIT else 'MISSED'}); without: "
        f"{_median(entries, 'off', 'full_load_tokens_per_s'):.1f}."
    )


def _of_peer(entries: Sequence[dict[str, Any]]) -> float:
    return statistics.median(float(entry["on"]["full_load_tokens_per_s"]) / _peer_rate(entry) for entry in entries)


def _peer_rate(entry: dict[str, Any]) -> float:
    row = peer_row(entry["peer"], 1)
    assert row is not None
    return row["decode_tokens_per_s"]


def _median(entries: Sequence[dict[str, Any]], side: str, figure: str) -> float:
    return float(statistics.median(entry[side][figure] for entry in entries))


def _ratios(entries: Sequence[dict[str, Any]], figure: str) -> list[float]:
    return [entry["on"][figure] / entry["off"][figure] for entry in entries]


if __name__ == "__main__":
    main()
