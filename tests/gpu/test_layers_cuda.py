"""Tests of decoder layers on a device: models run with our layers, and kernels that are launched early read nothing too
early.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from common.attention.backend import ATTENTION_NAME, ForwardInput
from common.attention.choice import overlaps_kernels
from common.attention.triton_attention import HeadShape, TritonAttention
from common.model.gpu_layers import GpuDecoderLayer, GpuLinear, fuse_layers
from common.model.layers_triton import LayerKernels
from common.model.loader import load_target

pytestmark = pytest.mark.gpu

NUM_LAYERS = 24
HEADS = HeadShape(8, 4, 64, torch.float32)
NUM_REPLAYS = 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_the_layers_of_known_architectures_are_fused(
    architecture: str, dtype: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    target = load_target(tiny_model_dir(architecture), device="cuda", dtype=dtype)
    num_fused = 0 if architecture == "phi3" else target.num_layers
    assert len(target.modules_of(GpuDecoderLayer)) == num_fused and isinstance(target.output_head, GpuLinear)


@pytest.mark.parametrize("options", [{"attention": "torch"}, {"optimizes_modules": False}], ids=str)
def test_a_model_keeps_its_own_layers_where_that_is_asked_for(
    options: dict[str, Any], tiny_model_dir: Callable[[str], Path]
) -> None:
    target = load_target(tiny_model_dir("llama"), device="cuda", dtype="float32", **options)
    assert not target.modules_of(GpuDecoderLayer) and not target.modules_of(GpuLinear)


def replayed_logits(num_tokens: int, *, overlaps: bool) -> list[Tensor]:
    """Records the forward of one row once, replays it repeatedly, and returns the logits of each replay. Each replay
    reads the K and V that it wrote.
    """
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS.num_heads,
        num_key_value_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
        vocab_size=1000,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION_NAME).eval().requires_grad_(False)
    assert fuse_layers(model, LayerKernels(overlaps=overlaps)) == NUM_LAYERS
    backend = TritonAttention(HEADS, overlaps=overlaps)
    places = torch.arange(num_tokens, device="cuda")
    batch = ForwardInput(
        input_ids=7 + places,
        positions=places,
        out_cache_loc=1 + places,
        req_to_token=torch.arange(1, 1025, device="cuda").view(1, 1024),
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device="cuda"),
        seq_lens=torch.full((1,), num_tokens, device="cuda"),
        prefix_lens=(0,),
        extend_lens=(num_tokens,),
        max_seq_len=1024,
        kv=torch.zeros((NUM_LAYERS, 2, 1025, HEADS.num_kv_heads, HEADS.head_dim), device="cuda"),
        logits_rows=None,
    )

    def forward() -> Tensor:
        plan = backend.plan(batch)
        logits: Tensor = model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            attention_plan=plan,
        ).logits
        return logits

    with torch.inference_mode():
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = forward()
        kept = []
        for _ in range(NUM_REPLAYS):
            graph.replay()
            kept.append(logits.clone())
    torch.cuda.synchronize()
    return kept


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_kernels_that_overlap_compute_the_same(num_tokens: int) -> None:
    if not overlaps_kernels(torch.device("cuda")):
        pytest.skip("this device starts no kernel while another runs")
    (expected, *_), seen = (replayed_logits(num_tokens, overlaps=overlaps) for overlaps in (False, True))
    assert torch.isfinite(expected).all() and all(torch.equal(logits, expected) for logits in seen)
