"""Fused blocks and norms replace a model's own only where they compute the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Glm4MoeConfig, LlamaConfig, OlmoConfig, Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoAttention, OlmoMLP
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from baton_cpu.blocks import decoder_blocks
from baton_cpu.blocks.decoder_blocks import PackedAttention, PackedGatedMLP, fuse_blocks
from baton_cpu.blocks.linear import can_pack
from baton_cpu.blocks.norm import CpuRMSNorm, replace_norms
from baton_cpu.compiler.numbers import number_format
from common.attention.backend import ATTENTION_NAME
from common.model.loader import DTYPES as TORCH_DTYPES
from tests.support.loading import load_target

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUSED = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), (2, 2)),
    "phi3": (0, 0),
    "mixtral": (2, 0),
    "qwen3_moe": (2, 0),
    "olmoe": (0, 0),
}
"""How many attention blocks, and how many MLPs, are fused in each tiny model. Phi-3 has joined layers of its own, so
none of its blocks is fused. OLMoE normalises all heads together, and experts are no MLPs.
"""


def modules_of(directory: Path, dtype: str, **options: Any) -> list[nn.Module]:
    target: Any = load_target(directory, device="cpu", dtype=dtype, **options)
    return list(target._model.modules())


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("architecture", FUSED)
def test_the_blocks_of_known_architectures_are_fused(
    architecture: str, dtype: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    modules = modules_of(tiny_model_dir(architecture), dtype)
    num_fused = FUSED[architecture] if can_pack(torch.ones(2, 2, dtype=TORCH_DTYPES[dtype])) else (0, 0)
    kinds = (PackedAttention, PackedGatedMLP)
    assert tuple(sum(isinstance(module, kind) for module in modules) for kind in kinds) == num_fused
    num_norms = 2 * 2 + 1 + (2 * 2 if architecture in ("qwen3", "qwen3_moe", "olmoe") else 0)
    assert sum(isinstance(module, CpuRMSNorm) for module in modules) == num_norms


def test_a_model_keeps_its_own_modules_where_that_is_asked_for(tiny_model_dir: Callable[[str], Path]) -> None:
    modules = modules_of(tiny_model_dir("llama"), "float32", optimizes_modules=False)
    assert all(type(module).__module__.startswith(("torch.", "transformers.")) for module in modules)


def attention_block(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    config = Qwen3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    return nn.Sequential(Qwen3Attention(config, layer_idx=0)).requires_grad_(False).to(dtype).eval()


def test_an_attention_block_is_replaced_and_its_weights_are_freed() -> None:
    model = attention_block()
    query = weakref.ref(model[0].q_proj)
    assert fuse_blocks(model) == 1
    assert isinstance(model[0], PackedAttention)
    gc.collect()
    assert query() is None


class Changed(Qwen3Attention):
    """A class of transformers with a changed method, as another version might have it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.change = ""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **keywords: Any) -> Any:
        if self.change == "input":
            hidden_states = 1.01 * hidden_states
        if self.change == "rotation":
            position_embeddings = position_embeddings[::-1]
        if self.change == "scaling":
            self.scaling = 0.5
        if self.change == "scaling by length":
            self.scaling = 1 / hidden_states.shape[1]
        output, weights = super().forward(hidden_states, position_embeddings, attention_mask, **keywords)
        return (output + 0.01 if self.change == "output" else output), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("change", "num_fused"),
    [("", 1), ("input", 0), ("rotation", 0), ("scaling", 1), ("scaling by length", 0), ("output", 0)],
)
def test_a_block_that_the_library_changed_is_left_alone(
    change: str, num_fused: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replacement takes over what the block says of its attention, and nothing else."""
    monkeypatch.setattr(decoder_blocks, "ATTENTIONS", (Changed,))
    model = attention_block(dtype)
    model[0].__class__ = Changed
    model[0].change = change
    assert fuse_blocks(model) == num_fused * can_pack(torch.ones(2, 2, dtype=dtype))


def test_blocks_of_other_classes_with_the_same_parts_are_left_alone() -> None:
    """These classes clip values, rotate only a part of each head, or have a changed method."""
    olmo = OlmoConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48, clip_qkv=8.0)
    glm = Glm4MoeConfig(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16, partial_rotary_factor=0.5
    )
    blocks = [OlmoAttention(olmo, 0), OlmoMLP(olmo), Glm4MoeAttention(glm, 0), Changed(Qwen3Config(hidden_size=32), 0)]
    assert fuse_blocks(nn.ModuleList(blocks)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("std", [0.02, 1.0])
@pytest.mark.parametrize(("activation", "num_fused"), [("silu", 1), ("gelu", 0), ("quick_gelu", 0), ("mish", 0)])
def test_an_mlp_with_another_activation_is_left_alone(
    activation: str, num_fused: int, std: float, dtype: torch.dtype
) -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=48, hidden_act=activation)
    torch.manual_seed(0)
    model = nn.Sequential(LlamaMLP(config)).requires_grad_(False)
    for weight in model.parameters():
        nn.init.normal_(weight, std=std)
    model.to(dtype)
    x = torch.randn(1, 5, 32).to(dtype)
    expected = model(x)
    assert fuse_blocks(model) == num_fused * can_pack(torch.ones(2, 2, dtype=dtype))
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(model(x), expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)


def test_a_rotation_of_half_a_head_is_refused_aloud() -> None:
    model = attention_block()
    fuse_blocks(model)
    rotation = (torch.ones(1, 3, 8), torch.ones(1, 3, 8))
    with pytest.raises(AssertionError, match="whole heads"):
        model[0](torch.ones(1, 3, 32), rotation, attention_plan=None)


def test_a_number_format_refuses_other_numbers() -> None:
    with pytest.raises(AssertionError, match=r"torch\.bfloat16 was given torch\.float32"):
        number_format(torch.bfloat16).array(torch.ones(2))


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


@pytest.mark.parametrize("kind", [GemmaRMSNorm, Olmo2RMSNorm])
def test_a_norm_of_another_kind_is_left_alone(kind: type[nn.Module]) -> None:
    """One of these norms adds 1 to the weight, and the other rounds after multiplying by it."""
    model = nn.Sequential(kind(8)).requires_grad_(False)
    assert replace_norms(model) == 0
    assert type(model[0]) is kind
