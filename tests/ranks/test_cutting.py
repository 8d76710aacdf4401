"""Tests that models are cut so that their ranks compute the same as the whole, or are refused by name.

The ranks are threads of this process. Each loads its part, and at the end of loading all of them together compute a
prompt in parts, which is compared with the whole model by transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, Starcoder2Config

from common.errors import StartupError, UnsupportedModel
from common.model import cutting
from common.model.part import MemberLost, Part
from common.model.target import TargetModel
from common.ranks.leader import open_ranks
from tests.ranks.in_turns import InTurns
from tests.support.loading import load_target
from tests.support.models import ARCHITECTURES, random_model
from tests.support.ranked import NoCollective

NORMS_OVER_ALL_HEADS = ("olmoe", "olmo2")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 268,
}


def load_parts(directory: Path, num_ranks: int) -> list[TargetModel | Exception]:
    """Loads the model on all ranks, in turns: transformers loads on one thread only. Returns what each rank has: its
    part, or the error.
    """
    turn, collectives = InTurns.ranks(num_ranks)

    def load(rank: int) -> TargetModel | Exception:
        with turn:
            torch.set_num_threads(1)
            try:
                part = Part(rank, num_ranks, collectives[rank])
                return load_target(directory, device="cpu", dtype="float32", part=part)
            except (UnsupportedModel, MemberLost) as error:
                collectives[rank].give_up()
                return error

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(load, range(num_ranks), timeout=100.0))


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=() if each in ("llama", "mixtral", "phi3, windows") else pytest.mark.thorough)
        for each in ARCHITECTURES
        if each not in NORMS_OVER_ALL_HEADS
    ],
)
def test_ranks_together_compute_what_the_whole_model_does(
    architecture: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    parts = load_parts(tiny_model_dir(architecture), 2)
    for part in parts:
        assert isinstance(part, TargetModel), part


def test_biases_are_added_once(tmp_path: Path) -> None:
    random_model(
        Starcoder2Config(**SIZES, num_key_value_heads=2, use_bias=True, bos_token_id=1, eos_token_id=2)
    ).save_pretrained(str(tmp_path))
    for part in load_parts(tmp_path, 2):
        assert isinstance(part, TargetModel), part


def test_a_module_that_is_cut_wrongly_ends_the_start(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_inputs = cutting.keep_inputs

    def keep_later_ones(layer: Any, columns: Sequence[int], part: Part) -> None:
        keep_inputs(layer, [(column + 1) % layer.in_features for column in columns], part)

    monkeypatch.setattr(cutting, "keep_inputs", keep_later_ones)
    errors = load_parts(tiny_model_dir("llama"), 2)
    assert any("computes something else" in str(error) for error in errors), errors
    assert not any(isinstance(each, TargetModel) for each in errors)


@pytest.mark.parametrize(
    ("architecture", "num_ranks", "why"),
    [
        *((each, 2, "cannot be cut for tensor_parallel: q_norm is over all heads") for each in NORMS_OVER_ALL_HEADS),
        ("llama", 5, "self_attn cannot be cut for tensor_parallel: 5 ranks, and 2 KV heads with 2 query heads each"),
        ("qwen3_moe", 3, "experts cannot be cut for tensor_parallel: its 32 columns make no 3 parts of whole 16 bytes"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    architecture: str, num_ranks: int, why: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    part = Part(0, num_ranks, NoCollective())
    with pytest.raises(UnsupportedModel, match=why):
        load_target(tiny_model_dir(architecture), device="cpu", dtype="float32", part=part)


def test_attention_with_other_projections_is_refused_by_name(tmp_path: Path) -> None:
    random_model(GPTNeoXConfig(**SIZES)).save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedModel, match=r"GPTNeoXForCausalLM cannot be cut for tensor_parallel: its attention"):
        load_target(tmp_path, device="cpu", dtype="float32", part=Part(0, 2, NoCollective()))


def test_ranks_need_the_engine_for_cpus(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^tensor_parallel: ranks need baton_cpu and numba"):
        open_ranks(None, torch.device("cpu"), tmp_path, {}, num_ranks=2, num_threads=1, kernels_dir=None, tf32=False)  # type: ignore[typeddict-item]
