"""Measures what the masks of a step cost: for a number of rows that write JSON, with the demo model's vocabulary."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.machine import demo_model_dir
from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import MinLength, fill_nodes, num_words
from common.text.grammars import Grammars
from common.text.tokenizer import TextTokenizer

BATCH_SIZES = (1, 8, 64, 256)
_NUM_DRAFTS = 4
_ANY_LENGTH = MinLength(0, ())
_PEOPLE = [
    {"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "is_alive": False},
    {"name": "Grace Hopper", "born": 1906, "fields": ["computing"], "is_alive": False},
]
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "born": {"type": "integer"},
            "fields": {"type": "array", "items": {"enum": ["mathematics", "computing", "physics"]}},
            "is_alive": {"type": "boolean"},
        },
        "required": ["name", "born", "fields", "is_alive"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class MaskCost:
    """The median seconds of each part of a step at one number of rows, for all rows together."""

    num_rows: int
    seconds: dict[str, float]


def measure_masks(num_rounds: int) -> list[MaskCost]:
    """Measures the masks of a step for each of BATCH_SIZES rows, each row at a place of its own in the same JSON.

    Returns medians of `num_rounds` rounds.
    """
    directory = demo_model_dir()
    config = json.loads((directory / "config.json").read_text())
    vocab_size, tokenizer = config["vocab_size"], TextTokenizer.from_directory(directory)
    grammars = Grammars(lambda: tokenizer, vocab_size=vocab_size, eos_token_ids=[config["eos_token_id"]])
    output_ids = tokenizer.encode(json.dumps(_PEOPLE), adds_special_tokens=False)
    return [
        MaskCost(num_rows, _cost(grammars, vocab_size, output_ids, num_rows, num_rounds)) for num_rows in BATCH_SIZES
    ]


def _cost(
    grammars: Grammars, vocab_size: int, output_ids: Sequence[int], num_rows: int, num_rounds: int
) -> dict[str, float]:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    places = [row % (len(output_ids) - _NUM_DRAFTS) for row in range(num_rows)]
    matchers = [grammars.matcher(grammar, output_ids[:place]) for place in places]
    masks = np.zeros((_NUM_DRAFTS + 1, num_words(vocab_size)), np.int32)
    chain = range(_NUM_DRAFTS)
    names = ("accept", "masks", f"masks with {_NUM_DRAFTS} drafts", "looking ahead")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(num_rounds):
        begun_s = [time.perf_counter()]
        for row, place in enumerate(places):
            matchers[row].accept(output_ids[place])
        begun_s.append(time.perf_counter())
        for matcher in matchers:
            fill_nodes(matcher, masks, _ANY_LENGTH)
        begun_s.append(time.perf_counter())
        for matcher, place in zip(matchers, places, strict=True):
            fill_nodes(matcher, masks, _ANY_LENGTH, output_ids[place + 1 : place + 1 + _NUM_DRAFTS], chain)
        begun_s.append(time.perf_counter())
        for matcher, place in zip(matchers, places, strict=True):
            ahead = matcher.copy()
            ahead.accept(output_ids[place + 1])
            ahead.forced()
        begun_s.append(time.perf_counter())
        for name, one, other in zip(seconds, begun_s, begun_s[1:], strict=False):
            seconds[name].append(other - one)
        for row, place in enumerate(places):
            places[row] = (place + 1) % (len(output_ids) - _NUM_DRAFTS)
            if not places[row]:
                matchers[row] = grammars.matcher(grammar)
    return {name: statistics.median(each) for name, each in seconds.items()}


def mask_table(costs: list[MaskCost]) -> list[str]:
    names = list(costs[0].seconds)
    lines = [
        "",
        "**masks of rows that write JSON, with the demo model's vocabulary**",
        "",
        "Milliseconds for all rows of a step, and µs for one.",
        "",
        f"| rows | {' | '.join(names)} |",
        "|" + "---|" * (1 + len(names)),
    ]
    for cost in costs:
        figures = [f"{1e3 * cost.seconds[name]:.2f} ({1e6 * cost.seconds[name] / cost.num_rows:.0f})" for name in names]
        lines.append(f"| {cost.num_rows} | {' | '.join(figures)} |")
    return lines
