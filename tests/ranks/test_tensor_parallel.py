"""Tests that a pair whose models are cut among ranks computes the tokens of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.model.target import TargetModel
from tests.support.draft_heads import save_copy_head
from tests.support.drafted import SHAPES, Counts
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.loading import load_draft, load_target
from tests.support.models import SMALL_VOCAB_SIZE, save_last_token_model
from tests.support.pair import MakePair, PairOptions
from tests.support.ranked import ranked_model

RankedTarget = Callable[..., TargetModel]


@pytest.fixture
def ranked() -> Iterator[RankedTarget]:
    """A function from a directory and a number of ranks to a model, which is cut if there are several."""
    with ExitStack() as stack:

        def load(directory: Path, num_ranks: int, **changed: Any) -> TargetModel:
            if num_ranks == 1:
                return load_target(directory, device="cpu", dtype="float32", **changed)
            return stack.enter_context(ranked_model(directory, num_ranks, **changed))[0]

        yield load


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the ranks of the two services. Llama and most others have 4 query heads over 2 KV heads."""

    architecture: str
    prefill: int
    decode: int
    shape: str | None = None
    chunk_tokens: int = 16
    shares_memory: bool = False
    has_own_kv: bool = False


QUICK = Case("llama", 2, 1, "tree-4x3-15", shares_memory=True)
CASES = [
    Case("qwen2", 3, 2, "chain-4"),
    Case("phi3, windows", 1, 3, chunk_tokens=64),
    Case("gpt_oss", 2, 2),
    Case("gemma3_text", 1, 2, "chain-4", shares_memory=True),
    Case("phi3, windows", 3, 2, "tree-4x3-15", has_own_kv=True),
]


@pytest.mark.parametrize("case", [QUICK, *(pytest.param(case, marks=pytest.mark.thorough) for case in CASES)], ids=str)
def test_tokens_equal_generate(case: Case, ranked: RankedTarget, make_pair: MakePair, tmp_path: Path) -> None:
    weights = {"context_weight": 0.05, "mlp_weight": 0.05}
    directory = save_last_token_model(tmp_path / "target", architecture=case.architecture, **weights)
    prefill, decode = (
        ranked(directory, number, **({"own_kv_on": "cpu"} if case.has_own_kv and number > 1 else {}))
        for number in (case.prefill, case.decode)
    )
    heads = [None, None]
    if case.shape is not None:
        head_dir = save_copy_head(tmp_path / "head", target_dir=directory, family="eagle3")
        heads = [load_draft(head_dir, target=each, device="cpu", dtype="float32") for each in (prefill, decode)]
        for each, head in zip((prefill, decode), heads, strict=True):
            each.capture_hidden(head.capture)
    drafts = {} if case.shape is None else SHAPES[case.shape]
    options = PairOptions(chunk_tokens=case.chunk_tokens, shares_memory=case.shares_memory, **drafts)
    pair = make_pair(decode, options, draft=heads[1], prefill_model=prefill, prefill_draft=heads[0])
    check_tokens_equal_generate(
        pair,
        directory,
        crowd=True,
        chunk_tokens=case.chunk_tokens,
        vocab_size=SMALL_VOCAB_SIZE,
        min_together=4,
    )
    if case.shape is not None:
        counts = Counts.of(pair.outcomes.values())
        assert counts.num_accepted > 0 and counts.num_rejected > 0, counts
