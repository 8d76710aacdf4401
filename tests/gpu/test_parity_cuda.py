"""Tests that the tokens equal `generate`'s on CUDA, in float32 without TF32, with the forward on its own stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.device.factory import open_device
from common.model.loader import KvDtype, load_target
from tests.support.fp8_kv import fp8_attention
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.models import ARCHITECTURES
from tests.support.pair import InProcessPair, PairOptions
from tests.support.quantized import save_quantized_model

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
    with pair_on_gpu(directory, PairOptions(overlap=overlap, chunk_tokens=chunk_tokens)) as pair:
        check_tokens_equal_generate(
            pair, directory, crowd=mode == "crowd", chunk_tokens=chunk_tokens, min_together=MIN_TOGETHER
        )


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_tokens_equal_those_of_kv_in_fp8(architecture: str, tiny_model_dir: Callable[[str], Path]) -> None:
    directory = tiny_model_dir(architecture)
    with pair_on_gpu(directory, PairOptions(chunk_tokens=16), kv_dtype="fp8_e4m3") as pair:
        check_tokens_equal_generate(
            pair, directory, crowd=True, chunk_tokens=16, min_together=MIN_TOGETHER, attention=fp8_attention()
        )


@pytest.mark.parametrize("kind", ["fp8-blocks", "compressed-tensors-w4a16"])
def test_tokens_of_quantised_weights_equal_generates(
    kind: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = save_quantized_model(tmp_path, kind, tiny_model_dir("llama"))
    with pair_on_gpu(model.directory, PairOptions(chunk_tokens=16)) as pair:
        check_tokens_equal_generate(pair, model.whole_dir, crowd=True, chunk_tokens=16, min_together=MIN_TOGETHER)


@contextmanager
def pair_on_gpu(directory: Path, options: PairOptions, *, kv_dtype: KvDtype = "auto") -> Iterator[InProcessPair]:
    model = load_target(directory, device="cuda", dtype="float32", kv_dtype=kv_dtype)
    pair = InProcessPair(model, new_device=lambda: open_device("cuda", num_threads=1), options=options)
    try:
        yield pair
        pair.settle()
    finally:
        pair.close()
