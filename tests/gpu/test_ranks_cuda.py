"""Ranks of GPUs compute what one process computes, with forwards that are recorded and without.

On a machine with one GPU there is one rank. Then this shows only that NCCL is opened, that graphs with its operations
can be recorded, and that the fused layers that add up compute the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.device.factory import open_device
from common.draft.head import DraftHead
from common.draft.load import load_draft
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.gpu.drafted import load_drafted
from tests.support.drafted import SHAPES
from tests.support.pair import InProcessPair, PairOptions
from tests.support.ranked import ranked_model

pytestmark = pytest.mark.gpu

NUM_RANKS = min(2, torch.cuda.device_count())
SIZES: dict[str, Any] = {"decode_rows": 5, "context_tokens": 128}


@pytest.mark.parametrize("shape", ["chain-4", "tree-4x3-15"])
@pytest.mark.parametrize("replays", [True, False], ids=["replayed", "not-replayed"])
def test_ranks_of_gpus_compute_the_same(shape: str, replays: bool, tmp_path: Path) -> None:
    directory, *alone = load_drafted(tmp_path, "eagle3", 1, context_weight=0.05, mlp_weight=0.05)
    expected = tokens_of(*alone, PairOptions(**SIZES, **SHAPES[shape]))
    with ranked_model(directory, NUM_RANKS, own_kv_on="cuda") as (target, ranks):
        head = load_draft(tmp_path / "head", target=target, device="cuda", dtype="float32")
        target.capture_hidden(head.capture)
        options = PairOptions(replays_forwards=replays, **SIZES, **SHAPES[shape])
        assert tokens_of(target, head, options) == expected
        assert ranks.behind == "" and ranks.loss is None


def tokens_of(target: TargetModel, head: DraftHead, options: PairOptions) -> list[list[int]]:
    pair = InProcessPair(target, new_device=lambda: open_device("cuda", num_threads=1), draft=head, options=options)
    try:
        assert (pair.decode.recorded is not None) == options.replays_forwards
        outcomes = [
            pair.submit(
                str(number),
                [4 + (5 * number + place) % 50 for place in range(2 + 5 * number)],
                ResolvedSampling(seed=number, max_tokens=12, temperature=0.7 * (number % 2)),
            )
            for number in range(5)
        ]
        pair.run()
        pair.settle()
        return [outcome.token_ids for outcome in outcomes]
    finally:
        pair.close()
