"""Tests that the tokens equal `generate`'s on CUDA, in float32 without TF32, with the forward on its own stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.device.factory import open_device
from common.model.loader import load_target
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.models import ARCHITECTURES
from tests.support.pair import InProcessPair, PairOptions

pytestmark = pytest.mark.gpu

# A GPU finishes a step of a tiny model before one more segment is copied: early rows end while later ones still land.
MIN_TOGETHER = 2


@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("mode", ["alone", "crowd"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_equal_generate(
    architecture: str, mode: str, overlap: bool, chunk_tokens: int, tiny_model_dir: Callable[[str], Path]
) -> None:
    directory = tiny_model_dir(architecture)
    model = load_target(directory, device="cuda", dtype="float32")
    options = PairOptions(overlap=overlap, chunk_tokens=chunk_tokens)
    pair = InProcessPair(model, new_device=lambda: open_device("cuda", num_threads=1), options=options)
    try:
        check_tokens_equal_generate(
            pair, directory, crowd=mode == "crowd", chunk_tokens=chunk_tokens, min_together=MIN_TOGETHER
        )
        pair.settle()
    finally:
        pair.close()
