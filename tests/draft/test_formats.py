"""A head gives the same results in every format that can express it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.draft.head import DraftHead
from tests.draft.conftest import Load
from tests.draft.paged_draft import PagedDraft
from tests.support.draft_heads import save_eagle3_head, save_mtp_head
from tests.support.head_parts import load_head, save_head

IDS = [5, 9, 2, 14, 77, 31, 8]


def run(head: DraftHead) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits of a prompt, the logits of a chained step after it, and the KV of both."""
    captured = torch.randn((len(IDS), head.capture.num_states * 64), generator=torch.Generator().manual_seed(1))
    pool = PagedDraft(head, num_rows=1)
    output = pool.extend({1: (IDS, head.fuse(captured))})[1]
    step = pool.decode({1: (3, output[-1:])})[1]
    return head.logits(output), head.logits(step), pool.kv[0][:, pool.slots(1)]


def assert_same(first: DraftHead, second: DraftHead) -> None:
    assert first.capture == second.capture
    assert torch.equal(first.token_ids, second.token_ids)
    assert all(map(torch.equal, run(first), run(second)))


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True, "norm_output": True, "fc_norm": True}], ids=str)
@pytest.mark.parametrize("style", ["layers", "sglang", "speculators"])
def test_an_eagle3_head_is_the_same_in_every_format(
    style: Any, options: dict[str, Any], tmp_path: Path, target_dir: Path, load: Load
) -> None:
    """This includes the captured layers: SGLang's config names a layer whose output is captured, and the other styles
    the layer whose input is.
    """
    first = save_eagle3_head(tmp_path / "first", target_dir=target_dir, captured_layers=(1, 3, 6), **options)
    second = save_eagle3_head(
        tmp_path / "second", target_dir=target_dir, captured_layers=(1, 3, 6), style=style, **options
    )
    assert load(first).capture.layers == (1, 3, 6)
    assert_same(load(first), load(second))


def test_an_embedding_in_the_checkpoint_is_used(tmp_path: Path, target_dir: Path, load: Load) -> None:
    plain = load(save_eagle3_head(tmp_path / "plain", target_dir=target_dir))
    config, tensors = load_head(tmp_path / "plain")
    embedding = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    same = load(save_head(tmp_path / "same", config, {**tensors, "embed_tokens.weight": embedding}))
    assert_same(plain, same)
    other = load(save_head(tmp_path / "other", config, {**tensors, "embed_tokens.weight": embedding.flip(0)}))
    assert not torch.equal(run(plain)[0], run(other)[0])


@pytest.mark.parametrize("change", ["flags in eagle_config", "tables of the rotation"])
def test_what_published_heads_have_besides_changes_nothing(
    change: str, tmp_path: Path, target_dir: Path, load: Load
) -> None:
    """Some keep their flags in `eagle_config`. Old ones have tables of the rotation, which follow from the config."""
    first = save_eagle3_head(tmp_path / "first", target_dir=target_dir, norm_before_fc=True)
    config, tensors = load_head(first)
    if change == "flags in eagle_config":
        config["eagle_config"] = {"norm_before_fc": config.pop("norm_before_fc")}
    else:
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert_same(load(first), load(save_head(tmp_path / "second", config, tensors)))


def test_tensors_may_be_spread_over_files(tmp_path: Path, target_dir: Path, load: Load) -> None:
    whole = save_eagle3_head(tmp_path / "whole", target_dir=target_dir)
    config, tensors = load_head(whole)
    names = sorted(tensors)
    spread = save_head(tmp_path / "spread", config, {name: tensors[name] for name in names[::2]})
    (spread / "model.safetensors").rename(spread / "model-00001-of-00002.safetensors")
    save_head(spread, config, {name: tensors[name] for name in names[1::2]})
    assert_same(load(whole), load(spread))


def test_more_or_fewer_states_than_three_may_be_captured(tmp_path: Path, target_dir: Path, load: Load) -> None:
    for style in ("midlayer", "sglang"):
        head = load(
            save_eagle3_head(tmp_path / style, target_dir=target_dir, captured_layers=(0, 2, 4, 5, 6), style=style)  # type: ignore[arg-type]
        )
        assert head.capture.layers == (0, 2, 4, 5, 6)
        assert head.fuse(torch.ones(1, 5 * 64)).shape == (1, 64)


@pytest.mark.parametrize("with_target", [False, True])
def test_an_mtp_layer_alone_may_be_numbered_from_nought(
    with_target: bool, tmp_path: Path, target_dir: Path, load: Load
) -> None:
    """SGLang exports a single MTP layer in this way, with a config of one layer."""
    merged = save_mtp_head(tmp_path / "merged", target_dir=target_dir, layout="nextn", with_target=with_target)
    config, tensors = load_head(merged)
    alone = {
        name.replace("model.layers.6.", "model.layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.6.")
    }
    assert_same(load(merged), load(save_head(tmp_path / "alone", {**config, "num_hidden_layers": 1}, alone)))


def test_mimo_v2_layers_are_counted_where_the_config_does_not(tmp_path: Path, target_dir: Path, load: Load) -> None:
    first = save_mtp_head(tmp_path / "first", target_dir=target_dir, layout="mimo_v2", num_layers=3)
    config, tensors = load_head(first)
    del config["num_nextn_predict_layers"]
    second = load(save_head(tmp_path / "second", config, tensors))
    assert second.layer_group.num_layers == 3
    assert_same(load(first), second)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    ids=["at the top", "in rope_parameters"],
)
def test_the_base_of_the_rotation_is_read_from_either_place(
    rope: dict[str, Any], tmp_path: Path, target_dir: Path, load: Load
) -> None:
    first = load(save_eagle3_head(tmp_path / "first", target_dir=target_dir, rope_theta=500.0))
    second = load(save_eagle3_head(tmp_path / "second", target_dir=target_dir, **rope))
    assert_same(first, second)
    other = load(save_eagle3_head(tmp_path / "other", target_dir=target_dir))
    assert not torch.equal(run(first)[0], run(other)[0])


def test_a_scaled_rotation_is_transformers_own(tmp_path: Path, target_dir: Path, load: Load) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    head: Any = load(save_eagle3_head(tmp_path / "head", target_dir=target_dir, rope_scaling=dict(scaling)))
    expected = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 10000.0, **scaling})
    )
    unscaled = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    assert torch.equal(head._rope.inv_freq, expected.inv_freq)
    assert not torch.equal(expected.inv_freq, unscaled.inv_freq)
