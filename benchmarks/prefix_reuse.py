"""Measures what the prefix cache brings callers of the gateway: requests behind one long beginning, conversations, and
requests that share nothing.

    python -m benchmarks.prefix_reuse [--peer-url http://HOST:PORT/v1] [--rounds 3] [--unrelated-rounds 12]

Two pairs run with the demo model in bfloat16 and the services' defaults, one with the cache and one without.
`--peer-url` names another OpenAI-compatible server of the same model, which is already running on this machine. In each
round every server gets every workload, in alternating order, and the words of a round are new. The exit status is 1 if
requests that share nothing are slower with the cache by more than 2%, or if a bound on the ratio to the peer is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from baton.free_ports import LOOPBACK
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import full_speed_pair

CACHED, PLAIN, PEER = "Baton", "Baton without the cache", "peer"
WORDS = ["time", "river", "stone", "bright", "model", "city", "green", "paper", "light", "train", "music", "water"]
SHARED, CHATS = "16 requests behind 600 words", "4 chats of 8 turns"
UNRELATED, ALONE = "24 requests that share nothing", "the same, one at a time"
START = time.time_ns()
"""A number that makes the words of each run new, because a peer may have those of an earlier run cached."""
LEAST_UNRELATED = 0.98
"""The least speed with the cache, as a share of that without it: of tokens/s with eight requests at a time, and of the
rate from a prompt to its first token when it is alone.

Times to first token with eight at a time are not compared: half of the prompts wait for another one's, and the median
lies between the two groups, so that of two pairs without a cache one round's median can be half the other's.
"""
MOST_SHARED_TTFT, MOST_TURN_TTFT, MOST_CHAT_WALL = 0.5, 0.8, 0.7
"""Bounds on ratios to the peer: of the median time to first token, for prompts with a shared beginning and for a chat's
later turns, and of the time that the chats take.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: the seconds until its first text, its text, and its counts of tokens."""

    ttft_s: float
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int


@dataclass
class Result:
    """One server's answers to one workload in one round, and the seconds that the round took.

    `by_turn` [turns] holds the answers of each turn. A workload without turns has one.
    """

    wall_s: float
    by_turn: list[list[Answer]]

    @property
    def answers(self) -> list[Answer]:
        return [answer for turn in self.by_turn for answer in turn]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_new_tokens for answer in self.answers) / self.wall_s

    @property
    def cached_share(self) -> float:
        answers = self.answers
        return sum(each.num_cached_tokens for each in answers) / sum(each.num_prompt_tokens for each in answers)

    def ttft_s(self, share: float, turn: int | None = None) -> float:
        """Returns the quantile `share` of the time to first token, over one turn or all."""
        times = sorted(answer.ttft_s for answer in (self.answers if turn is None else self.by_turn[turn]))
        return times[min(len(times) - 1, int(len(times) * share))]


@dataclass
class Server:
    name: str
    client: openai.AsyncOpenAI
    results: dict[str, list[Result]] = field(default_factory=dict)

    def median(self, workload: str, figure: Callable[[Result], float]) -> float:
        return statistics.median(map(figure, self.results[workload]))


async def answer_of(server: Server, *, max_tokens: int, **prompt: object) -> Answer:
    """Sends one request, whose prompt is the argument `prompt` or `messages`, and reads its stream."""
    create = server.client.chat.completions.create if "messages" in prompt else server.client.completions.create
    begun_s, first_s, text, usage = time.perf_counter(), 0.0, [], None
    stream = await create(  # type: ignore[call-overload]  # one of two overloads, by the kind of the prompt
        model="demo",
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **prompt,
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            if piece:
                first_s = first_s or time.perf_counter()
                text.append(piece)
    assert usage is not None and first_s, "the stream had no text or no usage"
    details = usage.prompt_tokens_details
    num_cached = (details.cached_tokens or 0) if details else 0
    return Answer(first_s - begun_s, "".join(text), usage.prompt_tokens, num_cached, usage.completion_tokens)


def some_words(draw: random.Random, number: int) -> str:
    return " ".join(draw.choices(WORDS, k=number))


async def in_turns(server: Server, prompts: Sequence[str], *, at_once: int, max_tokens: int) -> Result:
    """Sends `prompts`, at most `at_once` at a time, and returns the answers as one turn."""
    places = asyncio.Semaphore(at_once)

    async def one(prompt: str) -> Answer:
        async with places:
            return await answer_of(server, prompt=prompt, max_tokens=max_tokens)

    begun_s = time.perf_counter()
    answers = list(await asyncio.gather(*map(one, prompts)))
    return Result(time.perf_counter() - begun_s, [answers])


async def shared(server: Server, seed: int) -> Result:
    draw = random.Random(f"shared {START} {seed}")
    beginning = some_words(draw, 600)
    prompts = [f"{beginning} {some_words(draw, draw.randint(16, 48))}" for _ in range(16)]
    return await in_turns(server, prompts, at_once=4, max_tokens=32)


async def unrelated(server: Server, seed: int) -> Result:
    return await in_turns(server, unrelated_prompts(UNRELATED, seed), at_once=8, max_tokens=64)


async def alone(server: Server, seed: int) -> Result:
    return await in_turns(server, unrelated_prompts(ALONE, seed), at_once=1, max_tokens=8)


def unrelated_prompts(workload: str, seed: int) -> list[str]:
    draw = random.Random(f"{workload} {START} {seed}")
    return [some_words(draw, draw.randint(32, 256)) for _ in range(24)]


async def chats(server: Server, seed: int) -> Result:
    by_turn: list[list[Answer]] = [[] for _ in range(8)]

    async def chat(number: int) -> None:
        draw = random.Random(f"chat {START} {seed} {number}")
        messages = [{"role": "system", "content": some_words(draw, 100)}]
        for turn in by_turn:
            messages.append({"role": "user", "content": some_words(draw, 24)})
            answer = await answer_of(server, messages=messages, max_tokens=48)
            turn.append(answer)
            messages.append({"role": "assistant", "content": answer.text})

    begun_s = time.perf_counter()
    await asyncio.gather(*map(chat, range(4)))
    return Result(time.perf_counter() - begun_s, by_turn)


WORKLOADS: dict[str, Callable[[Server, int], Awaitable[Result]]] = {
    SHARED: shared,
    CHATS: chats,
    UNRELATED: unrelated,
    ALONE: alone,
}


async def measure(urls: dict[str, str], num_rounds: dict[str, int]) -> dict[str, Server]:
    """Measures every server with as many rounds of each workload as `num_rounds` says, after one round as a warm-up."""
    servers = {name: Server(name, openai.AsyncOpenAI(base_url=url, api_key="none")) for name, url in urls.items()}
    for number in range(max(num_rounds.values()) + 1):
        print(f"round {number} of {max(num_rounds.values())}", file=sys.stderr)
        order = list(servers.values())[:: 1 if number % 2 else -1]
        for name, workload in WORKLOADS.items():
            for server in order if number <= num_rounds[name] else ():
                result = await workload(server, number)
                if number:
                    server.results.setdefault(name, []).append(result)
    for server in servers.values():
        await server.client.close()
    return servers


def render(run: BenchmarkRun, servers: dict[str, Server], num_rounds: dict[str, int]) -> tuple[str, bool]:
    """Returns the table and whether all bounds are met."""
    rounds = f"{num_rounds[SHARED]} rounds, {num_rounds[UNRELATED]} of those that share nothing"
    about = f"demo model in bfloat16, through HTTP, the services' defaults, medians of {rounds}."
    lines = [*run.heading("Prefix reuse", about), ""]
    columns = ["workload", "server", "TTFT p50, ms", "p90", "tokens/s", "wall, s", "prompt tokens cached"]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for workload in WORKLOADS:
        for server in servers.values():
            figures = [
                f"{1e3 * server.median(workload, lambda result: result.ttft_s(0.5)):.0f}",
                f"{1e3 * server.median(workload, lambda result: result.ttft_s(0.9)):.0f}",
                f"{server.median(workload, lambda result: result.tokens_per_s):.1f}",
                f"{server.median(workload, lambda result: result.wall_s):.1f}",
                f"{server.median(workload, lambda result: result.cached_share):.0%}",
            ]
            lines.append(f"| {workload} | {server.name} | {' | '.join(figures)} |")
    lines += ["", "Time to first token of the chats by turn, p50 and p90, ms:", ""]
    lines += ["| server | " + " | ".join(map(str, range(1, 9))) + " |", "|" + "---|" * 9]
    for server in servers.values():
        for share in (0.5, 0.9):
            by_turn = [server.median(CHATS, ttft_of_turn(turn, share)) for turn in range(8)]
            lines.append(
                f"| {server.name}, p{100 * share:.0f} | {' | '.join(f'{1e3 * each:.0f}' for each in by_turn)} |"
            )
    bounds, is_met = [], True
    for name, value, bound, is_upper in ratios(servers):
        met = value <= bound if is_upper else value >= bound
        is_met &= met
        bounds.append(f"| {name} | {value:.2f} | {'at most' if is_upper else 'at least'} {bound:.3g} | {met} |")
    lines += ["", "| ratio | | bound | met |", "|---|---|---|---|", *bounds]
    return "\n".join(lines), is_met


def ttft_of_turn(turn: int, share: float = 0.5) -> Callable[[Result], float]:
    return lambda result: result.ttft_s(share, turn)


def ttft_ratio(ours: Sequence[Result], theirs: Sequence[Result]) -> float:
    """Returns the median, over all requests, of the ratio between the times to first token of the same prompt."""
    pairs = [
        (mine.ttft_s, other.ttft_s)
        for one, another in zip(ours, theirs, strict=True)
        for mine, other in zip(one.answers, another.answers, strict=True)
    ]
    return statistics.median(mine / other for mine, other in pairs)


def ratios(servers: dict[str, Server]) -> list[tuple[str, float, float, bool]]:
    """Returns each ratio with its name, its bound, and whether the bound is an upper one.

    A ratio compares figures of the same round, or of the same prompt in it; the median over these is returned.
    """

    def ratio(workload: str, other: str, figure: Callable[[Result], float]) -> float:
        pairs = zip(servers[CACHED].results[workload], servers[other].results[workload], strict=True)
        return statistics.median(figure(mine) / figure(theirs) for mine, theirs in pairs)

    found = [
        (
            "tokens/s, nothing shared, to no cache",
            ratio(UNRELATED, PLAIN, lambda result: result.tokens_per_s),
            LEAST_UNRELATED,
            False,
        ),
        (
            "TTFT, nothing shared, one at a time, to no cache",
            ttft_ratio(servers[CACHED].results[ALONE], servers[PLAIN].results[ALONE]),
            1 / LEAST_UNRELATED,
            True,
        ),
    ]
    if PEER in servers:
        by_turn = [ratio(CHATS, PEER, ttft_of_turn(turn)) for turn in range(1, 8)]
        found += [
            ("TTFT p50, shared, to the peer", ratio(SHARED, PEER, lambda r: r.ttft_s(0.5)), MOST_SHARED_TTFT, True),
            ("TTFT p50, slowest turn after the first, to the peer", max(by_turn), MOST_TURN_TTFT, True),
            ("the chats' time, to the peer", ratio(CHATS, PEER, lambda r: r.wall_s), MOST_CHAT_WALL, True),
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-url", help="base URL of another OpenAI-compatible server of the same model")
    parser.add_argument("--unrelated-rounds", type=int, default=12, help="rounds of requests that share nothing")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    options: dict[str, Any] = {"model": "demo", "dtype": "bfloat16", "gateway_listen": f"{LOOPBACK}:0"}
    rounds, unrelated_rounds = args.rounds, args.unrelated_rounds
    num_rounds = {SHARED: rounds, CHATS: rounds, UNRELATED: unrelated_rounds, ALONE: unrelated_rounds}
    with (
        full_speed_pair(**options, hands_all_over=False, reuses_prefixes=True) as cached,
        full_speed_pair(**options, hands_all_over=False) as plain,
    ):
        urls = {CACHED: f"{cached.gateway_url}/v1", PLAIN: f"{plain.gateway_url}/v1"}
        if args.peer_url:
            urls[PEER] = args.peer_url
        servers = asyncio.run(measure(urls, num_rounds))
    run = BenchmarkRun.of("prefix_reuse")
    table, is_met = render(run, servers, num_rounds)
    print(table)
    if not args.no_save:
        run.save("prefix-reuse", table)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
