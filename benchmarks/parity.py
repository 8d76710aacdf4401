"""Compares the gRPC pair with transformers' `generate` token for token, in float32.

With SmolLM2 and no draft head, six configurations cover every pair of values of {alone, 16 at once} x {overlap on, off}
x {chunk 16, 64, 512}. With a draft head, twelve cover every pair of these and of {chain of 3, chain of 4, tree,
adaptive depth}. Two of the six and two of the twelve also run outside prompts: the first turns of a JSON-lines file
(`--turns`), whose lines each have a "turns" list. With Gemma 3 270M, whose layers have a window of 512 tokens, three
configurations run prompts that are shorter and longer than the window, and some that end near its end. With ranks,
SmolLM2 with its 3 KV heads is cut unequally, on one side or on both, with and without a draft head.

Writes its tables into benchmarks/results. The exit status is 1 if anything but a tie of two logits diverges, if there
is more than one tie in 5,000 tokens, or if a fixed depth commits at most 1.5 tokens per forward of the target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncClient
from baton.events import Completion, tokens_per_forward
from baton.local_pair import LocalPair
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.machine import demo_model_dir
from common.checkpoints.demo_model import DEMO_MODEL_NAME
from tests.parity.prompts import PROMPTS, ParityPrompt
from tests.parity.reference import MAX_TIES_PER_TOKEN, Divergence, Reference
from tests.parity.window_model import WINDOW_MODEL_NAME, WINDOW_TOKENS, window_model_dir

NEW_TOKENS = 64
DEFAULT_TURNS = Path("../shared/prompts/mt_bench.jsonl")


@dataclass(frozen=True, slots=True)
class Configuration:
    concurrency: int
    overlap: bool
    chunk_tokens: int
    shape: str = ""
    with_turns: bool = False
    prefill_ranks: int = 1
    decode_ranks: int = 1

    def __str__(self) -> str:
        mode = "alone" if self.concurrency == 1 else f"{self.concurrency} at once"
        drafts = f", {self.shape}" if self.shape else ""
        ranks = f", {self.prefill_ranks} x {self.decode_ranks} ranks" if self.is_ranked else ""
        return f"{mode}, overlap {'on' if self.overlap else 'off'}, chunk {self.chunk_tokens}{drafts}{ranks}"

    @property
    def is_ranked(self) -> bool:
        return self.prefill_ranks > 1 or self.decode_ranks > 1


SHAPES = {
    "chain of 3": ("--num-draft-tokens=3", "--no-adaptive-depth"),
    "chain of 4": ("--num-draft-tokens=4", "--no-adaptive-depth"),
    "tree": ("--num-draft-steps=3", "--num-draft-tokens=9", "--no-adaptive-depth"),
    "adaptive": ("--num-draft-tokens=4",),
}
TREE_TOPK = "--draft-topk=3"
MIN_TOKENS_PER_FORWARD = 1.5
PLAIN = (
    Configuration(16, True, 64, with_turns=True),
    Configuration(1, False, 64),
    Configuration(16, False, 16),
    Configuration(1, True, 16),
    Configuration(16, False, 512, with_turns=True),
    Configuration(1, True, 512),
)
WINDOWS = (
    Configuration(16, True, 64),
    Configuration(1, False, 512),
    Configuration(16, False, 16),
)
RANKS = (
    Configuration(16, True, 64, prefill_ranks=2),
    Configuration(16, False, 512, "chain of 4", prefill_ranks=2),
    Configuration(16, True, 64, decode_ranks=2),
    Configuration(16, True, 16, "tree", decode_ranks=2),
    Configuration(16, True, 512, prefill_ranks=2, decode_ranks=2),
    Configuration(16, True, 64, "chain of 4", prefill_ranks=2, decode_ranks=2),
    Configuration(16, False, 64, prefill_ranks=3),
    Configuration(16, True, 64, "tree", prefill_ranks=3),
)
NEAR_THE_WINDOW = (-40, -1, 0, 1, 40)
"""Lengths of cut prompts, beyond those of the window. The outputs of the first leave the window."""

SPECULATING = (
    Configuration(1, True, 16, "chain of 3"),
    Configuration(16, False, 64, "chain of 3"),
    Configuration(16, True, 512, "chain of 3"),
    Configuration(16, True, 64, "chain of 4", with_turns=True),
    Configuration(1, False, 16, "chain of 4"),
    Configuration(1, False, 512, "chain of 4"),
    Configuration(16, False, 16, "tree"),
    Configuration(1, True, 64, "tree"),
    Configuration(16, True, 512, "tree", with_turns=True),
    Configuration(16, True, 16, "adaptive"),
    Configuration(1, False, 64, "adaptive"),
    Configuration(1, True, 512, "adaptive"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"plain": PLAIN, "speculating": SPECULATING, "ranks": RANKS}
    parser.add_argument("--turns", type=Path, default=DEFAULT_TURNS, help="skipped, and said so, when it is not there")
    parser.add_argument("--only", choices=[*parts, "windows"], help="one part of the configurations")
    args = parser.parse_args()
    demo = () if args.only == "windows" else parts.get(args.only, PLAIN + SPECULATING + RANKS)
    is_met = True
    if demo:
        reference = Reference(demo_model_dir(), new_tokens=NEW_TOKENS)
        own, turns = own_prompts(reference), outside_prompts(args.turns, reference)
        about = f"{DEMO_MODEL_NAME}; {len(own)} prompts of the project's own, {len(turns)} first turns of MT-bench"
        is_met = compare(reference, about, f"parity-{args.only}" if args.only else "parity", demo, own, turns)
    if args.only in (None, "windows"):
        reference = Reference(window_model_dir(), new_tokens=NEW_TOKENS)
        own = own_prompts(reference)
        num_short = sum(len(ids) < WINDOW_TOKENS for _, ids in own)
        prompts = own + cut_prompts(own)
        about = f"{WINDOW_MODEL_NAME}; {len(prompts)} prompts, {num_short} of them far shorter than a window"
        is_met &= compare(reference, about, "parity-windows", WINDOWS, prompts, [])
    sys.exit(0 if is_met else 1)


def compare(
    reference: Reference,
    about: str,
    name: str,
    configurations: tuple[Configuration, ...],
    own: list[tuple[str, list[int]]],
    turns: list[tuple[str, list[int]]],
) -> bool:
    """Runs the configurations, saves their table as `name`, and returns whether it meets all bounds.

    `about` is a phrase for the table's heading. `turns` are prompts of some configurations, `own` of all.
    """
    benchmark_run = BenchmarkRun.of("parity")
    lines = [
        *benchmark_run.heading(
            "Parity with `generate`",
            f"float32, greedy, {NEW_TOKENS} new tokens, through the gRPC client; {about}.",
        ),
        "",
        "| configuration | prompts | tokens | equal prompts | ties | divergences | tokens per forward |",
        "|---|---|---|---|---|---|---|",
    ]
    details: list[str] = []
    is_met = True
    for configuration in configurations:
        prompts = own + (turns if configuration.with_turns else [])
        completions = asyncio.run(run(reference.model_dir, configuration, prompts))
        outputs = [list(completion.token_ids) for completion in completions]
        accepted = tokens_per_forward(done.speculation for done in completions if done.speculation is not None)
        found = [reference.compare(of, ids, tokens) for (of, ids), tokens in zip(prompts, outputs, strict=True)]
        divergences = [divergence for divergence in found if divergence is not None]
        num_tokens = sum(len(tokens) for tokens in outputs)
        ties = [divergence for divergence in divergences if divergence.is_tie]
        is_met &= len(ties) == len(divergences) and len(ties) <= max(1, num_tokens * MAX_TIES_PER_TOKEN)
        if configuration.shape not in ("", "adaptive"):
            is_met &= accepted > MIN_TOKENS_PER_FORWARD
        lines.append(row(configuration, len(prompts), num_tokens, divergences, ties, accepted))
        details += [f"- {configuration}: {divergence}" for divergence in divergences]
        print(lines[-1], file=sys.stderr, flush=True)
        table = "\n".join([*lines, "", *details]).rstrip()
        # Saves after each configuration, so that finished results are kept if a later one fails.
        benchmark_run.save(name, table)
    return is_met


def own_prompts(reference: Reference) -> list[tuple[str, list[int]]]:
    return [(prompt.name, reference.prompt_ids(prompt)) for prompt in PROMPTS]


def cut_prompts(prompts: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Returns the beginnings of the longest prompt that end near the end of the window."""
    name, ids = max(prompts, key=lambda prompt: len(prompt[1]))
    lengths = [WINDOW_TOKENS + more for more in NEAR_THE_WINDOW]
    return [(f"{name}, {length} tokens", ids[:length]) for length in lengths]


def row(
    configuration: Configuration,
    num_prompts: int,
    num_tokens: int,
    found: list[Divergence],
    ties: list[Divergence],
    accepted: float,
) -> str:
    num_equal = num_prompts - len(found)
    return (
        f"| {configuration} | {num_prompts} | {num_tokens} | {num_equal} | {len(ties)} | {len(found) - len(ties)} "
        f"| {accepted:.2f} |"
    )


def outside_prompts(path: Path, reference: Reference) -> list[tuple[str, list[int]]]:
    if not path.exists():
        print(f"{path} is not there: only the project's own prompts run", file=sys.stderr)
        return []
    questions = [json.loads(line) for line in path.read_text().splitlines()]
    prompts = [ParityPrompt(f"mt_bench {question['question_id']}", question["turns"][0]) for question in questions]
    return [(prompt.name, reference.prompt_ids(prompt)) for prompt in prompts]


async def run(model_dir: Path, configuration: Configuration, prompts: list[tuple[str, list[int]]]) -> list[Completion]:
    overlap = () if configuration.overlap else ("--disabled-fast-paths=overlap",)
    head = ("--draft=demo", *((TREE_TOPK,) if configuration.shape == "tree" else ())) if configuration.shape else ()
    with LocalPair(
        model=str(model_dir),
        dtype="float32",
        prefill_args=(
            f"--chunk-tokens={configuration.chunk_tokens}",
            "--max-kv-tokens=24576",
            f"--tensor-parallel={configuration.prefill_ranks}",
            *head,
        ),
        decode_args=(
            f"--tensor-parallel={configuration.decode_ranks}",
            *overlap,
            "--local-prefill-tokens=0",
            "--max-kv-tokens=24576",
            "--max-rows=16",
            *head,
            *SHAPES.get(configuration.shape, ()),
        ),
    ) as pair:
        async with AsyncClient(pair.decode_addresses[0]) as client:
            slots = asyncio.Semaphore(configuration.concurrency)

            async def complete(ids: list[int]) -> Completion:
                async with slots:
                    return await client.complete(token_ids=ids, temperature=0.0, max_tokens=NEW_TOKENS)

            return list(await asyncio.gather(*(complete(ids) for _, ids in prompts)))


if __name__ == "__main__":
    main()
