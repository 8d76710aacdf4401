"""Tests on CUDA, in float32 without TF32, that conversations give the same tokens and drafts with cached KV (warm) as
without (cold), and send only what is not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.device.factory import open_device
from common.draft.head import DraftHead
from common.model.loader import load_target
from common.model.target import TargetModel
from tests.gpu.drafted import load_drafted
from tests.support.conversations import SIDES, MakeForOptions, compare, hold_cold, talks
from tests.support.drafted import SHAPES
from tests.support.pair import InProcessPair, PairOptions

pytestmark = pytest.mark.gpu


@pytest.fixture
def makes_for() -> Iterator[Callable[..., MakeForOptions]]:
    """A function that takes a model and a head, and returns a function that makes pairs of them."""
    made: list[InProcessPair] = []

    def of(target: TargetModel, draft: DraftHead | None = None) -> MakeForOptions:
        def make(options: PairOptions) -> InProcessPair:
            made.append(
                InProcessPair(
                    target, new_device=lambda: open_device("cuda", num_threads=1), draft=draft, options=options
                )
            )
            return made[-1]

        return make

    yield of
    for pair in made:
        pair.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "at-once"])
@pytest.mark.parametrize("sides", SIDES)
def test_conversations_are_the_same_cold_and_warm(
    sides: str,
    at_once: bool,
    temperature: float,
    tiny_model_dir: Callable[[str], Path],
    makes_for: Callable[..., MakeForOptions],
) -> None:
    model = load_target(tiny_model_dir("llama"), device="cuda", dtype="float32")
    every = talks(16 if at_once else 3, model.vocab_size, temperature=temperature)
    make, options = makes_for(model), replace(SIDES[sides], chunk_tokens=16)
    compare(make, options, hold_cold(make, options, every, at_once=at_once), at_once=at_once)


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "at-once"])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize(
    ("family", "num_layers", "shape"), [("eagle3", 1, "chain-4"), ("eagle3", 1, "tree-4x3-15"), ("nextn", 5, "chain-5")]
)
def test_drafts_are_the_same_cold_and_warm(
    family: str,
    num_layers: int,
    shape: str,
    sides: str,
    at_once: bool,
    tmp_path: Path,
    makes_for: Callable[..., MakeForOptions],
) -> None:
    _, target, head = load_drafted(tmp_path, family, num_layers, logits_std=12.0)
    options = replace(SIDES[sides], chunk_tokens=16, **SHAPES[shape])
    every = talks(16 if at_once else 3, target.vocab_size)
    make = makes_for(target, head)
    bursts = compare(make, options, hold_cold(make, options, every, at_once=at_once), at_once=at_once)
    turns = [turn for burst in bursts for turn in burst.turns]
    assert sum(sum(turn.accepted_at) for turn in turns) > len(turns), "few drafts were accepted"
