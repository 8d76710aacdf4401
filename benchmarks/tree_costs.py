"""Measures what the prefix tree's operations cost: for a number of rows, in a tree of a million cached tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.kv.prefix_tree import HeldPrefix, PrefixTree

CACHED_TOKENS = 1_000_000
BATCH_SIZES = (1, 8, 64, 256)
BOUND_US = 25.0
"""The longest time that one operation on the prefix tree may take for a row, in µs, at any number of rows."""
_SEQUENCE_TOKENS = 2000
_FOUND_TOKENS = 1500
_NEW_TOKENS = 200
_BLOCK_TOKENS = 500
"""Sequences branch off each other after this many tokens, so that a path has several nodes."""
_LOOKAHEAD = 1
_NAMESPACE = ""

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TreeCost:
    """The median time of each operation at one number of rows, in microseconds for all rows together."""

    num_rows: int
    us: dict[str, float]


def filled_tree(numbers: np.random.Generator) -> tuple[PrefixTree, list[Tokens]]:
    """Returns a tree with CACHED_TOKENS cached tokens that nobody holds, and the sequences in it.

    Groups of four sequences share their first tokens, as conversations behind one system prompt do.
    """
    tree, sequences, num_slots = PrefixTree(_LOOKAHEAD), [], 0
    while tree.num_slots < CACHED_TOKENS:
        shared = numbers.integers(0, 50_000, _BLOCK_TOKENS)
        for _ in range(4):
            tokens = np.concatenate([shared, numbers.integers(0, 50_000, _SEQUENCE_TOKENS - _BLOCK_TOKENS)])
            held = tree.hold(tokens, _NAMESPACE, _SEQUENCE_TOKENS)
            num_new = _SEQUENCE_TOKENS - _LOOKAHEAD - held.num_tokens
            tree.insert(held, tokens[held.num_tokens :], np.arange(num_slots, num_slots + num_new))
            num_slots += num_new
            tree.let_go(held)
            sequences.append(tokens)
    return tree, sequences


def measure_tree(num_rounds: int) -> list[TreeCost]:
    """Measures each operation for each of BATCH_SIZES: medians of `num_rounds` rounds.

    Each row finds 1,500 tokens, which end inside a node, and adds 200. As many are evicted.
    """
    numbers = np.random.default_rng(0)
    tree, sequences = filled_tree(numbers)
    costs = []
    for num_rows in BATCH_SIZES:
        rounds = []
        for _ in range(num_rounds):
            new = numbers.integers(0, 50_000, (num_rows, _NEW_TOKENS + _LOOKAHEAD))
            chosen = numbers.choice(len(sequences), num_rows, replace=False)
            asked = [np.concatenate([sequences[i][:_FOUND_TOKENS], end]) for i, end in zip(chosen, new, strict=True)]
            rounds.append(one_round(tree, asked))
        medians = {name: 1e6 * statistics.median(each[name] for each in rounds) for name in rounds[0]}
        costs.append(TreeCost(num_rows, medians))
    return costs


def one_round(tree: PrefixTree, asked: list[Tokens]) -> dict[str, float]:
    """Returns the seconds that each operation takes for all rows. `asked` are their tokens."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        begun_s = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - begun_s

    held: list[HeldPrefix] = []
    timed("match", lambda: [tree.match(tokens, _NAMESPACE) for tokens in asked])
    timed("hold", lambda: held.extend(tree.hold(tokens, _NAMESPACE, len(tokens) - 1) for tokens in asked))
    added = [tokens[each.num_tokens :] for each, tokens in zip(held, asked, strict=True)]
    slots = [np.arange(len(tokens) - _LOOKAHEAD) for tokens in added]
    timed("insert", lambda: list(map(tree.insert, held, added, slots)))
    timed("let go", lambda: list(map(tree.let_go, held)))
    timed("evict", lambda: [tree.evict(len(each)) for each in slots])
    return seconds


def tree_table(costs: list[TreeCost]) -> tuple[list[str], bool]:
    """Returns the lines of the table, and whether each operation stays within BOUND_US for a row, which its last line
    says.
    """
    names = list(costs[0].us)
    about = f"Each row finds {_FOUND_TOKENS:,} tokens and adds {_NEW_TOKENS}; as many are evicted."
    lines = [
        "",
        f"**the prefix tree, with {CACHED_TOKENS:,} cached tokens**",
        "",
        f"{about} µs for all rows, and for one.",
        "",
        f"| rows | {' | '.join(names)} |",
        "|" + "---|" * (1 + len(names)),
    ]
    for cost in costs:
        figures = [f"{cost.us[name]:.0f} ({cost.us[name] / cost.num_rows:.1f})" for name in names]
        lines.append(f"| {cost.num_rows} | {' | '.join(figures)} |")
    most = max(us / cost.num_rows for cost in costs for us in cost.us.values())
    is_met = most <= BOUND_US
    verdict = f"{most:.0f} µs for a row at most, bound {BOUND_US:.0f}: {'met' if is_met else 'MISSED'}."
    return [*lines, "", verdict], is_met
