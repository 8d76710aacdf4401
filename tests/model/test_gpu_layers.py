"""Tests that the GPU's layers compute the same as transformers, in Triton's interpreter. tests/gpu runs them on a
device.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import LlamaConfig, MistralConfig, OlmoConfig, Phi3Config, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.olmo.modeling_olmo import OlmoForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM

from benchmarks.kernel_variants import Variant
from common.attention.backend import ATTENTION_NAME, AttentionPlan, LayerAttention
from common.device.triton_launch import Launch
from common.model import gpu_layers
from common.model.cutting import add_up, cut_model
from common.model.gpu_layers import GpuLinear, GpuRMSNorm, fuse_layers
from common.model.layers_triton import LayerKernels, Norm
from common.model.part import Part
from common.model.replace import replace_modules
from tests.ranks.in_turns import InTurns

DTYPES = [
    torch.float32,
    *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in (torch.bfloat16, torch.float16)),
]
KERNELS = LayerKernels()
MODELS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
}
OTHER_MODELS = [name for name in MODELS if name not in ("llama", "qwen3")]
NUM_LAYERS = 2


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_close(seen: Tensor, expected: Tensor, roundings: int = 2) -> None:
    """Asserts that the error is at most `roundings` rounding steps of the number format, relative to the largest
    expected number.
    """
    assert (seen.shape, seen.dtype) == (expected.shape, expected.dtype)
    allowed = roundings * max(torch.finfo(seen.dtype).eps, 1e-6) * float(expected.abs().max())
    torch.testing.assert_close(seen, expected, atol=allowed, rtol=0)


def llama_norm(width: int, dtype: torch.dtype, seed: int = 1) -> tuple[Norm, nn.Module]:
    module = LlamaRMSNorm(width, eps=1e-3).requires_grad_(False)
    module.weight.copy_(1 + 0.3 * random(width, seed=seed))
    module.to(dtype)
    return Norm(module.weight, 1e-3), module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 48), (5, 1100), (3, 64), (0, 48)])
def test_a_norm_agrees_with_transformers(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    ours, theirs = llama_norm(width, dtype)
    x, added = random(num_tokens, width, dtype=dtype), random(num_tokens, width, dtype=dtype, seed=2)
    seen = KERNELS.normed(x, ours)
    torch.testing.assert_close(seen, theirs(x), rtol=max(2 * torch.finfo(dtype).eps, 1e-5), atol=0)
    total, normed = KERNELS.added_and_normed(x, added, ours)
    assert torch.equal(total, x + added), "the sum is the next residual"
    torch.testing.assert_close(normed, theirs(x + added), rtol=max(2 * torch.finfo(dtype).eps, 1e-5), atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(("num_tokens", "heads", "head_dim"), [(1, (4, 2), 16), (3, (5, 1), 40)])
def test_queries_and_keys_are_rotated_and_values_are_not(
    num_tokens: int, heads: tuple[int, int], head_dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    num_queries, num_keys = heads
    states = random(num_tokens, num_queries + 2 * num_keys, head_dim, dtype=dtype)
    cosines, sines = random(2, num_tokens, head_dim, dtype=dtype, seed=3)
    query_norm, key_norm = llama_norm(head_dim, dtype, 4), llama_norm(head_dim, dtype, 5)
    query, key, value = states.clone().split((num_queries, num_keys, num_keys), dim=1)
    if has_norms:
        query, key = query_norm[1](query), key_norm[1](key)
    turned = apply_rotary_pos_emb(query, key, cosines, sines, unsqueeze_dim=1)
    KERNELS.rotate(
        states,
        (cosines, sines),
        num_query_heads=num_queries,
        num_key_heads=num_keys,
        norms=(query_norm[0], key_norm[0]) if has_norms else None,
    )
    check_close(states, torch.cat([*turned, value], dim=1))


def test_a_rotation_of_half_a_head_is_refused_aloud() -> None:
    with pytest.raises(AssertionError, match="whole heads"):
        KERNELS.rotate(random(3, 4, 16), (random(3, 8), random(3, 8)), num_query_heads=2, num_key_heads=1, norms=None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 48), (3, 1500)])
def test_a_gate_agrees_with_pytorch(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    joined = 3 * random(num_tokens, 2 * width, dtype=dtype)
    check_close(KERNELS.gated(joined), silu(joined[:, :width]) * joined[:, width:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beside", [(), ("norm",), ("added",), ("norm", "gated"), ("bias",), ("norm", "gated", "bias")])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"),
    [(1100, 10), *(pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in ((48, 7), (9000, 3)))],
)
def test_one_token_is_multiplied_as_by_a_linear_layer(
    num_inputs: int, num_outputs: int, beside: Sequence[str], dtype: torch.dtype
) -> None:
    is_gated = "gated" in beside
    num_rows = num_outputs * (2 if is_gated else 1)
    x = random(1, num_inputs, dtype=dtype)
    weight = (random(num_rows, num_inputs, seed=1) / num_inputs**0.5).to(dtype)
    bias = random(num_rows, dtype=dtype, seed=2) if "bias" in beside else None
    added = random(1, num_outputs, dtype=dtype, seed=3) if "added" in beside else None
    norm, theirs = llama_norm(num_inputs, dtype)
    expected = linear(theirs(x) if "norm" in beside else x, weight, bias)
    if is_gated:
        expected = silu(expected[:, :num_outputs]) * expected[:, num_outputs:]
    if added is not None:
        expected = added + expected
    seen = KERNELS.multiplied(x, weight, bias, norm=norm if "norm" in beside else None, added=added, is_gated=is_gated)
    check_close(seen, expected, roundings=6)


class Mixed(AttentionPlan):
    """A fake attention. Its output depends on all of its inputs, so a wrong input shows."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        return (query + (0.3 * key + value).repeat_interleave(shared, dim=1)) * how.scaling * (1 + layer)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, config, options = MODELS[name]
    options = {"tie_word_embeddings": False, **options}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": NUM_LAYERS}
    made = config(hidden_size=44, intermediate_size=40, vocab_size=20, **sizes, **options)
    model = kind._from_config(made, attn_implementation=ATTENTION_NAME, dtype=dtype)
    for seed, weight in enumerate(model.requires_grad_(False).eval().parameters()):
        weight.copy_(0.2 * random(*weight.shape, seed=seed) + (weight.dim() == 1))
    return model


def logits_of(model: Any, num_tokens: int) -> Tensor:
    ids = torch.arange(7, 7 + num_tokens).unsqueeze(0)
    logits: Tensor = model(input_ids=ids, position_ids=3 + ids, use_cache=False, attention_plan=Mixed()).logits
    return logits


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHER_MODELS)]
)
def test_a_models_layers_are_fused_and_compute_the_same(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    expected = [logits_of(model, num_tokens) for num_tokens in (1, 3)]
    assert fuse_layers(model, KERNELS) == NUM_LAYERS
    assert isinstance(model.model.norm, GpuRMSNorm) and isinstance(model.get_output_embeddings(), GpuLinear)
    for num_tokens, logits in zip((1, 3), expected, strict=True):
        check_close(logits_of(model, num_tokens), logits, roundings=10)


@pytest.mark.parametrize("num_tokens", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_ranks_add_up_inside_the_layers_of_a_cut_model(num_tokens: int) -> None:
    name = "llama with biases"
    expected = logits_of(model_of(name), num_tokens)
    turn, collectives = InTurns.ranks(2)

    def logits_of_rank(rank: int) -> Tensor:
        with turn:  # Triton's interpreter knows no threads
            model, part = model_of(name), Part(rank, 2, collectives[rank])
            partial = cut_model(model, part, name=name)
            assert fuse_layers(model, KERNELS) == NUM_LAYERS
            add_up(model, partial, part)
            return logits_of(model, num_tokens)

    with ThreadPoolExecutor(2) as ranks:
        for logits in ranks.map(logits_of_rank, range(2)):
            check_close(logits, expected, roundings=10)


@pytest.mark.parametrize("num_tokens", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_layer_leaves_what_it_is_given_as_it_was(num_tokens: int) -> None:
    """A layer must not change the states it is given, because a draft head keeps them."""
    model = model_of("llama")
    fuse_layers(model, KERNELS)
    states, rotation = random(1, num_tokens, 44), random(2, 1, num_tokens, 12)
    before = states.clone()
    model.model.layers[0](states, position_embeddings=(rotation[0], rotation[1]), attention_plan=Mixed())
    assert torch.equal(states, before)


def held_bytes(model: nn.Module) -> int:
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen3"])
def test_no_weight_is_held_twice(name: str) -> None:
    model = model_of(name)
    before = held_bytes(model) - sum(weight.nbytes for weight in model.parameters() if weight.dim() == 1)
    query = weakref.ref(model.model.layers[0].self_attn.q_proj)
    fuse_layers(model, KERNELS)
    gc.collect()
    assert query() is None and held_bytes(model) == before, "norms' weights are no parameters any more"


def test_modules_that_are_replaced_are_freed_one_by_one() -> None:
    """Each module is freed before the next is replaced, because a GPU seldom has room for two models."""
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]))
    seen: list[weakref.ref[nn.Module]] = []

    def replacement(module: nn.Module) -> nn.Module | None:
        if not isinstance(module, nn.Linear):
            return None
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(module))
        return nn.Identity()

    assert replace_modules(model, replacement) == 3


class Changed(Qwen3DecoderLayer):
    """A class of transformers with a changed method, as another version might have it."""

    change = ""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **keywords: Any) -> Any:
        if self.change == "input":
            hidden_states = 1.01 * hidden_states
        if self.change == "rotation":
            position_embeddings = position_embeddings[::-1]
        output = super().forward(hidden_states, position_embeddings=position_embeddings, **keywords)
        return output + 0.01 if self.change == "output" else output


@pytest.mark.parametrize(("change", "num_fused"), [("", NUM_LAYERS), ("input", 0), ("rotation", 0), ("output", 0)])
def test_a_layer_that_the_library_changed_is_left_alone(
    change: str, num_fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_layers, "LAYERS", (Changed,))
    monkeypatch.setattr(Changed, "change", change)
    model = model_of("qwen3")
    for layer in model.model.layers:
        layer.__class__ = Changed
    expected = logits_of(model, 3)
    assert fuse_layers(model, KERNELS) == num_fused
    check_close(logits_of(model, 3), expected, roundings=10)


@pytest.mark.parametrize("change", ["attention", "mlp", "norm", "linear", "activation"])
def test_a_layer_with_another_part_is_left_alone(change: str) -> None:
    class Own(nn.Linear):
        """A module class of an unknown library."""

    model = model_of("qwen3")
    for layer in model.model.layers:
        if change == "linear":
            layer.mlp.down_proj.__class__ = Own
        elif change == "activation":
            layer.mlp.act_fn = nn.GELU()
        else:
            part, name = {
                "attention": (layer.self_attn, "attention"),
                "mlp": (layer.mlp, "mlp"),
                "norm": (layer.self_attn.q_norm, "norm"),
            }[change]
            part.__class__ = type(name, (type(part),), {})
    expected = logits_of(model, 3)
    assert fuse_layers(model, KERNELS) == 0
    check_close(logits_of(model, 3), expected, roundings=10)


@pytest.mark.parametrize(("kind", "config"), [(OlmoForCausalLM, OlmoConfig), (Phi3ForCausalLM, Phi3Config)])
def test_layers_of_other_classes_are_left_alone(kind: type[Any], config: type[Any]) -> None:
    made = config(
        hidden_size=32, num_attention_heads=2, intermediate_size=48, vocab_size=50, num_hidden_layers=1, pad_token_id=0
    )
    model = kind(made)
    layer = model.model.layers[0]
    assert fuse_layers(model, KERNELS) == 0 and model.model.layers[0] is layer


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.thorough)])
def test_numbers_of_tokens_make_no_kernels_of_their_own(name: str) -> None:
    """There is one kernel for a single token, and one for every other number of tokens."""
    model = model_of(name)
    seen: set[Variant] = set()

    def launch(launched: Launch) -> None:
        seen.add(Variant.of(launched))
        launched.run()

    fuse_layers(model, LayerKernels(launch=launch))
    variants: dict[int, set[Variant]] = {}
    for num_tokens in (1, 2, 3, 8):
        seen.clear()
        logits_of(model, num_tokens)
        variants[num_tokens] = {*seen}
    assert variants[2] == variants[3] == variants[8]
    assert variants[1] and variants[1] != variants[2]


def test_launches_overlap_only_where_the_device_can() -> None:
    for overlaps in (False, True):
        launches: list[Launch] = []
        kernels = LayerKernels(overlaps=overlaps, launch=launches.append)
        kernels.normed(random(2, 8), Norm(random(8), 0.0))
        assert launches[0].constants["OVERLAPS"] == overlaps and ("launch_pdl" in launches[0].options) == overlaps
