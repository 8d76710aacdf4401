"""Tests that speculation on CUDA, in float32 without TF32, changes no token: greedy or sampled, with a chain, a tree or
several layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.device.factory import open_device
from common.draft.head import DraftHead
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.gpu.drafted import load_drafted
from tests.support.drafted import SAMPLED, SHAPES, Counts, assert_same, tokens_per_step
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.models import SMALL_VOCAB_SIZE
from tests.support.pair import InProcessPair, PairOptions

pytestmark = pytest.mark.gpu
HEADS = [("eagle3", 1, "chain-1"), ("eagle3", 1, "chain-4"), ("eagle3", 1, "tree-4x3-15"), ("nextn", 5, "chain-5")]

# A GPU finishes a step of a tiny model before one more segment is copied: early rows end while later ones still land.
MIN_TOGETHER = 2

MakeCudaPair = Callable[..., InProcessPair]


@pytest.fixture
def make_cuda_pair() -> Iterator[MakeCudaPair]:
    made: list[InProcessPair] = []

    def make(target: TargetModel, options: PairOptions, *, draft: DraftHead | None = None) -> InProcessPair:
        made.append(
            InProcessPair(target, new_device=lambda: open_device("cuda", num_threads=1), draft=draft, options=options)
        )
        return made[-1]

    try:
        yield make
        for pair in made:
            pair.settle()
    finally:
        for pair in made:
            pair.close()


@pytest.mark.parametrize("replays_forwards", [True, False], ids=["graphs", "no-graphs"])
@pytest.mark.parametrize("chunk_tokens", [16, 512])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("mode", ["alone", "crowd"])
@pytest.mark.parametrize(("family", "num_layers", "shape"), HEADS)
def test_greedy_tokens_equal_generate(
    family: str,
    num_layers: int,
    shape: str,
    mode: str,
    overlap: bool,
    chunk_tokens: int,
    replays_forwards: bool,
    make_cuda_pair: MakeCudaPair,
    tmp_path: Path,
) -> None:
    target_dir, target, head = load_drafted(tmp_path, family, num_layers, logits_std=12.0)
    options = PairOptions(
        overlap=overlap, chunk_tokens=chunk_tokens, replays_forwards=replays_forwards, **SHAPES[shape]
    )
    pair = make_cuda_pair(target, options, draft=head)
    check_tokens_equal_generate(
        pair,
        target_dir,
        crowd=mode == "crowd",
        chunk_tokens=chunk_tokens,
        vocab_size=SMALL_VOCAB_SIZE,
        num_tokens=64,
        min_together=MIN_TOGETHER,
    )
    assert tokens_per_step(pair) > 0.9 * options.spec_info.max_accept_len


@pytest.mark.parametrize("replays_forwards", [True, False], ids=["graphs", "no-graphs"])
@pytest.mark.parametrize("options", SAMPLED)
@pytest.mark.parametrize(("family", "num_layers", "shape"), HEADS)
def test_a_seed_gives_the_same_output_with_and_without_drafts(
    family: str,
    num_layers: int,
    shape: str,
    options: str,
    replays_forwards: bool,
    make_cuda_pair: MakeCudaPair,
    tmp_path: Path,
) -> None:
    _, target, head = load_drafted(tmp_path, family, num_layers, logits_std=1.5)

    def run(draft: DraftHead | None) -> InProcessPair:
        pair_options = PairOptions(replays_forwards=replays_forwards, **SHAPES[shape])
        pair = make_cuda_pair(target, pair_options, draft=draft)
        for number in range(12):
            sampling = ResolvedSampling(seed=number, max_tokens=30, temperature=0.7, **SAMPLED[options])
            pair.submit(str(number), [4 + (5 * number + place) % 50 for place in range(3 + 4 * number)], sampling)
        pair.run()
        return pair

    plain, speculating = run(None), run(head)
    for name, expected in plain.outcomes.items():
        assert_same(speculating.outcomes[name], expected)
    assert Counts.of(speculating.outcomes.values()).num_accepted > 0
