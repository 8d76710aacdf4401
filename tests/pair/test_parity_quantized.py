"""Tests that the greedy output of a pair with quantised weights equals transformers' `generate`, token for token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.model.loader import load_target
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.pair import MakePair, PairOptions
from tests.support.quantized import FORMATS, save_quantized_model

CHUNK_TOKENS = 64


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_equal_generate(
    kind: str, make_pair: MakePair, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where transformers computes something else from the quantised weights, it generates from those they stand for."""
    model = save_quantized_model(tmp_path, kind, tiny_model_dir(FORMATS[kind].architecture))
    pair = make_pair(
        load_target(model.directory, device="cpu", dtype="float32"), PairOptions(chunk_tokens=CHUNK_TOKENS)
    )
    reference = model.directory if FORMATS[kind].is_reference else model.whole_dir
    check_tokens_equal_generate(pair, reference, crowd=True, chunk_tokens=CHUNK_TOKENS)
