"""Which features of the pair work together. Runs of the pair say so: the features that each of their requests used."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"

FEATURES = (
    *("windows", "experts", "quantised weights", "KV in FP8"),
    *("prefix reuse", "local prompts", "retraction", "no overlap"),
    "tensor parallelism",
    *("chains of drafts", "trees of drafts", "draft heads of several layers"),
    *("grammars", "log-probabilities", "several choices"),
    *("KV in shared memory", "KV through NIXL"),
)

EITHER = {
    frozenset({"chains of drafts", "trees of drafts"}): "draft_topk",
    frozenset({"KV in shared memory", "KV through NIXL"}): "kv_transport",
}
"""Pairs of features that are two values of one setting."""

REFUSED = {frozenset({"trees of drafts", "draft heads of several layers"}): "draft_topk"}
"""Pairs of features that are refused at start, each with the setting that the error names."""

BESIDE = frozenset(frozenset({"local prompts", transport}) for transport in ("KV in shared memory", "KV through NIXL"))
"""Pairs of features that no request can use both: the KV of a local prompt is not handed over. One pair serves both."""

UNTESTED = "not tested"
"""The cell of a pair of features that no request used both. No such pair is allowed."""

Used = frozenset[str]
"""The features that one request used."""


def cells(runs: Sequence[Sequence[Used]]) -> dict[tuple[str, str], str]:
    """Returns what is known of each pair of features, if these are the features that requests of some runs used."""
    by_run = [set(run) for run in runs]

    def cell(pair: tuple[str, str]) -> str:
        both = frozenset(pair)
        if (setting := EITHER.get(both)) is not None:
            return f"either: `{setting}`"
        if (setting := REFUSED.get(both)) is not None:
            return f"refused: `{setting}`"
        if both in BESIDE:
            is_tested = any(all(any(name in used for used in run) for name in pair) for run in by_run)
            return "side by side" if is_tested else UNTESTED
        return "yes" if any(used >= both for run in by_run for used in run) else UNTESTED

    return {pair: cell(pair) for pair in combinations(FEATURES, 2)}


def table(runs: Sequence[Sequence[Used]]) -> str:
    """Returns the matrix as a table in Markdown."""
    known = cells(runs)
    lines = ["| | " + " | ".join(FEATURES[:-1]) + " |", "|---" * len(FEATURES) + "|"]
    for feature in FEATURES[1:]:
        row = [known.get((other, feature), "") for other in FEATURES[:-1]]
        lines.append(f"| {feature} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"
