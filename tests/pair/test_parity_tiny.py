"""Tests that greedy output equals transformers' `generate`, token for token, in every mode (field rule A3, invariant
I12).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.model.target import TargetModel
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.models import ARCHITECTURES
from tests.support.pair import MakePair, PairOptions

CHUNKS = (16, 64, 512)
MODES = [(mode, overlap) for mode in ("alone", "crowd") for overlap in (True, False)]
CASES = [
    (architecture, mode, overlap, CHUNKS[(number + place) % len(CHUNKS)])
    for number, architecture in enumerate(ARCHITECTURES)
    for place, (mode, overlap) in enumerate(MODES)
]
"""Each architecture in every mode and with every chunk size, and each mode with every chunk size."""


@pytest.mark.parametrize(("architecture", "mode", "overlap", "chunk_tokens"), CASES)
def test_tokens_equal_generate(
    architecture: str,
    mode: str,
    overlap: bool,
    chunk_tokens: int,
    make_pair: MakePair,
    tiny_target: Callable[[str], TargetModel],
    tiny_model_dir: Callable[[str], Path],
) -> None:
    pair = make_pair(tiny_target(architecture), PairOptions(overlap=overlap, chunk_tokens=chunk_tokens))
    check_tokens_equal_generate(
        pair, tiny_model_dir(architecture), crowd=mode == "crowd", chunk_tokens=chunk_tokens, alone_step=3
    )
