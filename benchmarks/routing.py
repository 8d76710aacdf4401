"""Measures what routing by prefix brings: conversations with two decode and three prefill services.

    python -m benchmarks.routing [--conversations 40] [--turns 6]

The same conversations are held three times, each with new processes and the demo model:

routed        one client of both decode services sends each request to the one that has the conversation, and that
              service chooses the replica that has it
least loaded  the requests go to the decode services in turn, and each takes the replica that has least to do
killed        like routed, but one replica is killed after the third turn. That turn and the next are held one
              conversation after another, so that it is known which replica had which

All conversations begin alike, and each turn begins with everything said before. A turn begins when the turn before has
ended in all of them. The exit status is 1 if routing finds cached less than three quarters of what earlier turns had
computed, if it finds less than that after the kill of what the other replicas had computed, or if one service gets more
than one and a half times its share of the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from baton.client import AsyncClient
from baton.events import Completion
from baton.local_pair import LocalPair
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.machine import demo_model_dir
from common.config.fast_paths import FastPath

ROUTED, LEAST_LOADED, KILLED = "routed", "least loaded", "killed"
NUM_PREFILL, NUM_DECODE = 3, 2
NUM_SHARED, NUM_FIRST, NUM_MORE, NUM_NEW = 64, 128, 32, 16
"""Numbers of tokens: the beginning that all share, the rest of a first prompt, what each turn adds, and an answer."""
KILLED_AFTER = 3
VICTIM = "prefill-0"
LEAST_FOUND, MOST_SHARE = 0.75, 1.5


@dataclass
class Talk:
    """A conversation: everything said so far, and for each turn the length of its prompt and how much was cached."""

    said: list[int]
    num_prompt: list[int] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    had_by: str = ""  # the prefill service that computed the last prompt before the kill


@dataclass
class Result:
    """The outcome of the conversations in one arrangement.

    `rows` has an entry for each turn: how many rows each service got, by the service's name.
    """

    talks: list[Talk]
    wall_s: float
    rows: list[dict[str, int]]

    @property
    def found(self) -> float:
        """The share of tokens that was found cached, among those of the prompts that the turn before had computed."""
        cached = sum(sum(talk.num_cached[1:]) for talk in self.talks)
        return cached / sum(sum(talk.num_prompt[:-1]) for talk in self.talks)

    def imbalance(self, role: str) -> float:
        """Returns the rows of the service that got most of them, divided by the mean of all services of the role."""
        totals: dict[str, int] = {}
        for turn in self.rows:
            for name, rows in turn.items():
                if name.startswith(role):
                    totals[name] = totals.get(name, 0) + rows
        return max(totals.values()) * len(totals) / sum(totals.values())


def found_after_the_kill(result: Result, *, by_killed: bool) -> float:
    """Returns the share of tokens that was found cached, as `Result.found` counts it, in the turn after the kill.

    Only some conversations count: those whose prompt before the kill was computed by the killed replica, or the others.
    """
    talks = [talk for talk in result.talks if (talk.had_by == VICTIM) == by_killed]
    num_had = sum(talk.num_prompt[KILLED_AFTER - 1] for talk in talks)
    return sum(talk.num_cached[KILLED_AFTER] for talk in talks) / num_had


def rows_of(pair: LocalPair) -> dict[str, int]:
    """Returns how many rows each running service has had."""
    found = {}
    for service, address in zip(pair.services, pair.metrics_addresses, strict=True):
        if service.is_running:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                families = list(text_string_to_metric_families(answer.read().decode()))
            samples = [sample for family in families for sample in family.samples]
            found[service.name] = sum(int(each.value) for each in samples if each.name == "baton_requests_total")
    return found


async def hold(pair: LocalPair, clients: Sequence[AsyncClient], args: argparse.Namespace, name: str) -> Result:
    draw = random.Random("routing")
    vocab_size = (await clients[0].model_info()).vocab_size

    def some(number: int) -> list[int]:
        return [draw.randrange(1000, vocab_size) for _ in range(number)]

    shared = some(NUM_SHARED)
    talks = [Talk([*shared, *some(NUM_FIRST)]) for _ in range(args.conversations)]
    says = [[some(NUM_MORE) for _ in range(args.turns)] for _ in talks]
    rows, before = [], rows_of(pair)
    begun_s = time.perf_counter()
    for turn in range(args.turns):
        is_told_apart = name == KILLED and turn in (KILLED_AFTER - 1, KILLED_AFTER)
        places = asyncio.Semaphore(1 if is_told_apart else args.at_once)

        async def answer(number: int, talk: Talk, turn: int = turn, places: asyncio.Semaphore = places) -> None:
            async with places:
                had = rows_of(pair) if name == KILLED and turn + 1 == KILLED_AFTER else {}
                client = clients[(number + turn) % len(clients)]
                done: Completion = await client.complete(
                    token_ids=talk.said, max_tokens=NUM_NEW, temperature=0, ignore_eos=True
                )
                if had:
                    (talk.had_by,) = (
                        each for each, rows in rows_of(pair).items() if "prefill" in each and rows > had[each]
                    )
            talk.num_prompt.append(len(talk.said))
            talk.num_cached.append(done.timings.num_cached_tokens)
            talk.said += [*done.token_ids, *says[number][turn]]

        order = list(enumerate(talks))
        draw.shuffle(order)
        await asyncio.gather(*(answer(number, talk) for number, talk in order))
        now = rows_of(pair)
        rows.append({service: now[service] - before[service] for service in now})
        before = now
        if name == KILLED and turn + 1 == KILLED_AFTER:
            next(service for service in pair.prefill if service.name == VICTIM).kill()
    return Result(talks, time.perf_counter() - begun_s, rows)


def measure(name: str, args: argparse.Namespace) -> Result:
    flags = (f"--disabled-fast-paths={FastPath.PREFIX_ROUTING}",) if name == LEAST_LOADED else ()
    with LocalPair(
        model=str(demo_model_dir()),
        dtype="bfloat16",
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        decode_args=("--local-prefill-tokens=0", *flags),
        prefill_args=("--max-kv-tokens=32768",),
        exposes_metrics=True,
    ) as pair:

        async def run() -> Result:
            groups = pair.decode_addresses if name == LEAST_LOADED else [",".join(pair.decode_addresses)]
            clients = [AsyncClient(address, resume=True) for address in groups]
            try:
                return await hold(pair, clients, args, name)
            finally:
                for client in clients:
                    await client.close()

        return asyncio.run(run())


def render(run: BenchmarkRun, results: dict[str, Result], args: argparse.Namespace) -> tuple[str, bool]:
    """Returns the table and whether all bounds are met."""
    about = (
        f"{args.conversations} conversations of {args.turns} turns, {args.at_once} requests at a time, {NUM_PREFILL} "
        f"prefill and {NUM_DECODE} decode services, the demo model in bfloat16."
    )
    lines = [*run.heading("Routing by prefix", about), ""]
    by_turn = [str(turn + 1) for turn in range(1, args.turns)]
    columns = ["requests", "found", *(f"turn {turn}" for turn in by_turn), "most, prefill", "most, decode", "s"]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, result in results.items():
        found = [
            sum(talk.num_cached[turn] for talk in result.talks)
            / sum(talk.num_prompt[turn - 1] for talk in result.talks)
            for turn in range(1, args.turns)
        ]
        figures = [f"{share:.0%}" for share in (result.found, *found)]
        figures += [f"{result.imbalance(role):.2f}" for role in ("prefill", "decode")]
        lines.append(f"| {name} | {' | '.join(figures)} | {result.wall_s:.0f} |")
    lines += [
        "",
        "Found: cached tokens of a turn's prompt, of those that the turn before had computed. Most: the rows of the "
        "service that got most, divided by the mean of its kind.",
    ]
    routed, killed = results[ROUTED], results[KILLED]
    kept, gone = (found_after_the_kill(killed, by_killed=by_killed) for by_killed in (False, True))
    bounds: list[tuple[str, float, str, float, Callable[[float, float], bool]]] = [
        ("found, routed", routed.found, "at least", LEAST_FOUND, float.__ge__),
        ("most, prefill, routed", routed.imbalance("prefill"), "at most", MOST_SHARE, float.__le__),
        ("most, decode, routed", routed.imbalance("decode"), "at most", MOST_SHARE, float.__le__),
        ("found after the kill of what other replicas had", kept, "at least", LEAST_FOUND, float.__ge__),
        ("found after the kill of what the killed one had", gone, "at most", kept, float.__le__),
    ]
    met = [holds(value, bound) for _, value, _, bound, holds in bounds]
    lines += ["", "| bound | | | met |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {value:.2f} | {words} {bound:g} | {is_met} |"
        for (name, value, words, bound, _), is_met in zip(bounds, met, strict=True)
    ]
    return "\n".join(lines), all(met)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    results = {name: measure(name, args) for name in (ROUTED, LEAST_LOADED, KILLED)}
    run = BenchmarkRun.of("routing")
    table, is_met = render(run, results, args)
    print(table)
    if not args.no_save:
        run.save("routing", table)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
