"""What a loaded model says of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from common.errors import UnsupportedModel
from common.kv.layer_group import LayerGroupSpec
from common.model.loader import load_target
from common.model.target import TargetModel
from tests.model.conftest import Reference
from tests.model.paged_model import PagedModel
from tests.support.models import END_ID, VOCAB_SIZE, save_last_token_model, save_tiny_model


def test_the_layer_group_is_the_shape_of_the_models_kv(tiny_target: Callable[[str], TargetModel]) -> None:
    model = tiny_target("qwen3")
    assert model.layer_group == LayerGroupSpec(
        name="target", num_layers=2, num_planes=2, num_heads=2, head_dim=32, dtype="float32"
    )
    assert (model.vocab_size, model.max_context_tokens, model.eos_token_ids) == (VOCAB_SIZE, 4096, (END_ID,))


def test_every_end_token_of_the_generation_config_ends_the_output(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "llama")
    GenerationConfig(eos_token_id=[7, END_ID]).save_pretrained(str(directory))
    assert load_target(directory, device="cpu", dtype="float32").eos_token_ids == (7, END_ID)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrower_dtype_gives_about_the_same_logits(
    dtype: str, tiny_model_dir: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    model = load_target(tiny_model_dir("llama"), device="cpu", dtype=dtype)
    assert (model.layer_group.dtype, model.dtype) == (dtype, getattr(torch, dtype))
    prompt = [9, 40, 41, 200, 77, 5]
    paged = PagedModel(model, num_rows=1)
    paged.extend({1: prompt[:-1]})
    logits = paged.decode({1: prompt[-1]})
    assert logits.dtype == torch.float32
    expected = reference("llama").logits(prompt)[-1]
    assert torch.corrcoef(torch.stack([logits[0], expected]))[0, 1] > 0.99


def test_the_logits_of_a_last_token_model_depend_on_nothing_else(tmp_path: Path) -> None:
    model = load_target(save_last_token_model(tmp_path), device="cpu", dtype="float32")
    paged = PagedModel(model, num_rows=2)
    logits = paged.extend({1: [5, 6, 7, 11], 2: [11]})
    torch.testing.assert_close(logits[0], logits[1])
    assert logits[0].std() > 0.5


def test_every_layer_of_a_forward_is_counted_as_it_begins(tiny_target: Callable[[str], TargetModel]) -> None:
    model = tiny_target("llama")
    paged = PagedModel(model, num_rows=1)
    before = model.num_layers_begun
    paged.extend({1: [9, 40, 41]})
    assert model.num_layers_begun - before == model.num_layers
    paged.decode({1: 5})
    assert model.num_layers_begun - before == 2 * model.num_layers


def test_a_directory_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=tmp_path.name):
        load_target(tmp_path, device="cpu", dtype="float32")
