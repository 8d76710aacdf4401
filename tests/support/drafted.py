"""Targets together with a draft head, and the shapes of drafts, sampling options and counts that the tests of
speculation share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.draft.paged_head import PagedHead
from common.model.loader import KvDtype
from common.model.target import TargetModel
from tests.support.loading import load_draft, load_target
from tests.support.pair import InProcessPair, Outcome

CHAINS: dict[str, dict[str, Any]] = {f"chain-{length}": {"num_draft_tokens": length} for length in range(1, 6)}
TREES: dict[str, dict[str, Any]] = {
    "tree-2x2-4": {"draft_topk": 2, "num_draft_steps": 2, "num_draft_tokens": 4},
    "tree-2x4-9": {"draft_topk": 2, "num_draft_steps": 4, "num_draft_tokens": 9},
    "tree-4x3-15": {"draft_topk": 4, "num_draft_steps": 3, "num_draft_tokens": 15},
}
SHAPES = {**CHAINS, **TREES}
"""PairOptions' speculation settings for each shape of drafts, by the shape's name."""

SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05, "top_k": 40},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    "bias": {"logit_bias": ((7, 3.0), (9, -4.0)), "num_logprobs": 3},
    "ends": {"min_tokens": 6, "eos_token_ids": (11, 12, 13), "stop_token_ids": (20, 21)},
}
"""Sampling options beside seed, length and temperature, as keyword arguments of ResolvedSampling, by name."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A target that captures the hidden states its draft head reads, together with that head."""

    directory: Path
    head_directory: Path
    target: TargetModel
    head: PagedHead


def load_drafted(target_dir: Path, head_dir: Path, *, fuses: bool = False, kv_dtype: KvDtype = "auto") -> Drafted:
    target = load_target(target_dir, device="cpu", dtype="float32", kv_dtype=kv_dtype, fuses=fuses)
    head = load_draft(head_dir, target=target, device="cpu", dtype="float32", fuses=fuses)
    target.capture_hidden(head.capture)
    return Drafted(target_dir, head_dir, target, head)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of verify steps and of drafted and accepted tokens, summed over several requests."""

    num_steps: int
    num_drafted: int
    num_accepted: int

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Counts:
        each = [outcome.finished.speculation for outcome in outcomes if outcome.finished]
        held = [counts for counts in each if counts is not None]
        return cls(
            sum(counts.num_verify_steps for counts in held),
            sum(counts.num_drafted_tokens for counts in held),
            sum(counts.num_accepted_tokens for counts in held),
        )

    @property
    def num_rejected(self) -> int:
        return self.num_drafted - self.num_accepted

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.num_accepted / self.num_steps


def tokens_per_step(pair: InProcessPair) -> float:
    return Counts.of(pair.outcomes.values()).tokens_per_step


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    """Asserts that both outcomes have the same tokens, ending and log-probabilities."""
    assert outcome.token_ids == expected.token_ids
    assert outcome.finished is not None and expected.finished is not None
    assert (outcome.finished.reason, outcome.finished.stop_token_id, outcome.finished.num_completion_tokens) == (
        expected.finished.reason,
        expected.finished.stop_token_id,
        expected.finished.num_completion_tokens,
    )
    assert [logprobs.top_ids for logprobs in outcome.logprobs] == [logprobs.top_ids for logprobs in expected.logprobs]
    assert [logprobs.chosen for logprobs in outcome.logprobs] == pytest.approx(
        [logprobs.chosen for logprobs in expected.logprobs], abs=1e-4
    )
