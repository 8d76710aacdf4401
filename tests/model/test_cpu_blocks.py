"""Fused blocks and norms stand only where they compute what the model's own do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from common.model.attention import ATTENTION_NAME
from common.model.cpu_blocks import PackedAttention, PackedGatedMLP, fuse_blocks
from common.model.cpu_norm import CpuRMSNorm, replace_norms
from common.model.loader import load_target

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUSED = {"llama": 2, "qwen2": 2, "qwen3": 2, "mistral": 2, "phi3": 0}
"""Attention blocks, and MLPs, of each tiny model; Phi-3 has joined layers of its own."""


def modules_of(directory: Path, dtype: str) -> list[nn.Module]:
    target: Any = load_target(directory, device="cpu", dtype=dtype)
    return list(target._model.modules())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", FUSED)
def test_the_blocks_of_known_architectures_are_fused(
    architecture: str, dtype: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    modules = modules_of(tiny_model_dir(architecture), dtype)
    assert sum(isinstance(module, PackedAttention) for module in modules) == FUSED[architecture]
    assert sum(isinstance(module, PackedGatedMLP) for module in modules) == FUSED[architecture]
    num_norms = 2 * 2 + 1 + (2 * 2 if architecture == "qwen3" else 0)
    assert sum(isinstance(module, CpuRMSNorm) for module in modules) == num_norms


def qwen3_attention(kind: type[Qwen3Attention] = Qwen3Attention) -> nn.Module:
    config = Qwen3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    return nn.Sequential(kind(config, layer_idx=0)).requires_grad_(False).eval()


class Scaled(Qwen3Attention):
    """Another layer by the same names: what it does to the keys shows nowhere in its structure."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **keywords: Any) -> Any:
        return super().forward(2 * hidden_states, position_embeddings, attention_mask, **keywords)


class Clamped(Qwen3Attention):
    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **keywords: Any) -> Any:
        output, weights = super().forward(hidden_states, position_embeddings, attention_mask, **keywords)
        return output.clamp(-0.1, 0.1), weights


def test_an_attention_block_is_replaced() -> None:
    model = qwen3_attention()
    assert fuse_blocks(model) == 1
    assert isinstance(model[0], PackedAttention)


@pytest.mark.parametrize("kind", [Scaled, Clamped])
def test_an_attention_block_that_does_more_is_left_alone(kind: type[Qwen3Attention]) -> None:
    model = qwen3_attention(kind)
    assert fuse_blocks(model) == 0
    assert type(model[0]) is kind


@pytest.mark.parametrize(("activation", "num_fused"), [("silu", 1), ("gelu", 0), ("relu", 0)])
def test_an_mlp_with_another_activation_is_left_alone(activation: str, num_fused: int) -> None:
    config = Qwen3Config(hidden_size=32, intermediate_size=48)
    config.hidden_act, config.mlp_bias = activation, False
    torch.manual_seed(0)
    model = nn.Sequential(LlamaMLP(config)).requires_grad_(False)
    x = torch.randn(1, 5, 32)
    expected = model(x)
    assert fuse_blocks(model) == num_fused
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 48), (2, 7, 48), (5, 3, 48), (0, 48)], ids=str)
def test_a_norm_agrees_with_the_models_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(LlamaRMSNorm(48)).to(dtype).requires_grad_(False)
    nn.init.normal_(model[0].weight)
    x = 5 * torch.randn(shape).to(dtype)
    x = x.transpose(0, 1) if len(shape) == 3 else x
    expected = model(x)
    assert replace_norms(model) == 1
    seen = model(x)
    assert (seen.shape, seen.dtype) == (expected.shape, dtype)
    torch.testing.assert_close(seen, expected, rtol=max(2 * torch.finfo(dtype).eps, 1e-5), atol=0)


def test_a_norm_keeps_numbers_that_are_none() -> None:
    model = nn.Sequential(LlamaRMSNorm(8)).requires_grad_(False)
    assert replace_norms(model) == 1
    x = torch.ones(2, 8)
    x[1, 3] = float("nan")
    assert model(x).isfinite().all(-1).tolist() == [True, False]


def test_a_norm_of_another_kind_is_left_alone() -> None:
    model = nn.Sequential(GemmaRMSNorm(8)).requires_grad_(False)
    assert replace_norms(model) == 0
    assert type(model[0]) is GemmaRMSNorm
