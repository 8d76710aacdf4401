"""Tests that a model with quantised weights is loaded as the model of the weights that they stand for, or refused with
one line that names file and field.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from common.checkpoints.digest import compute_fingerprint
from common.errors import UnsupportedModel
from common.model.loader import load_model
from common.wire.fingerprint import first_difference
from tests.support.loading import load_target
from tests.support.models import random_model, save_tiny_model
from tests.support.quantized import FORMATS, QuantizedModel, save_kv_scales, save_quantized_model

LAYER = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], QuantizedModel]:
    made: dict[str, QuantizedModel] = {}
    sources = {name: save_tiny_model(tmp_path_factory.mktemp(name), name) for name in ("llama", "gpt_oss")}

    def make(kind: str) -> QuantizedModel:
        if kind not in made:
            source = sources[FORMATS[kind].architecture]
            made[kind] = save_quantized_model(tmp_path_factory.mktemp(kind), kind, source)
        return made[kind]

    return make


def weights_of(directory: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    _, model = load_model(directory, dtype=dtype, attention="eager")
    tensors: dict[str, Tensor] = model.state_dict()
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_loaded_weights_are_those_that_the_stored_ones_stand_for(
    kind: str, dtype: torch.dtype, quantized: Callable[[str], QuantizedModel]
) -> None:
    model = quantized(kind)
    seen, expected = weights_of(model.directory, dtype), weights_of(model.whole_dir, dtype)
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert seen[name].dtype == tensor.dtype and torch.equal(seen[name], tensor), name


@pytest.mark.parametrize("kind", ["fp8-blocks", "compressed-tensors-w4a16"])
def test_experts_may_be_quantised_too(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 4}
    config = Qwen3MoeConfig(vocab_size=64, num_key_value_heads=2, moe_intermediate_size=32, head_dim=32, **sizes)
    random_model(config).save_pretrained(str(tmp_path / "source"))
    model = save_quantized_model(tmp_path, kind, tmp_path / "source")
    seen, expected = (weights_of(path, torch.float32) for path in (model.directory, model.whole_dir))
    assert any("experts" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(seen[name], tensor), name


@pytest.mark.parametrize("kind", ["fp8-blocks", "compressed-tensors-w4a16"])
def test_a_quantised_model_can_be_fused_into_a_program(kind: str, quantized: Callable[[str], QuantizedModel]) -> None:
    target = load_target(quantized(kind).directory, device="cpu", dtype="float32", fuses=True)
    assert target.new_decoder is not None


@pytest.mark.parametrize("kind", ["fp8-blocks", "compressed-tensors-w4a16"])
def test_the_fingerprint_tells_a_quantised_model_from_the_weights_it_stands_for(
    kind: str, quantized: Callable[[str], QuantizedModel], tmp_path: Path
) -> None:
    model = quantized(kind)
    ours, theirs = (
        compute_fingerprint(
            path, load_target(path, device="cpu", dtype="float32"), protocol_version=1, cache_dir=tmp_path
        )
        for path in (model.directory, model.whole_dir)
    )
    assert first_difference(ours, theirs) is not None
    assert ours.target_weights_digest != theirs.target_weights_digest


def refusal(model: QuantizedModel, tmp_path: Path, change: Change | None = None, tensors: Change | None = None) -> str:
    """Loads a copy of the model with a changed quantization_config or changed tensors. Returns the one-line error."""
    directory = Path(shutil.copytree(model.directory, tmp_path / "broken"))
    if change is not None:
        config = json.loads((directory / "config.json").read_text())
        change(config["quantization_config"])
        (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        stored = load_file(directory / "model.safetensors")
        tensors(stored)
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel) as raised:
        load_target(directory, device="cpu", dtype="float32")
    message = str(raised.value)
    assert "\n" not in message and message.startswith("broken") and len(message) < 1000, message
    return message


def settings(**changes: Any) -> Change:
    return lambda config: config.update(changes)


def weights(**changes: Any) -> Change:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(changes)


def two_groups(config: dict[str, Any]) -> None:
    first = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {
        **first,
        "targets": ["re:.*mlp.*"],
        "weights": {**first["weights"], "num_bits": 8},
    }


W4 = "compressed-tensors-w4a16"
CONFIGS: dict[str, tuple[str, Change, str]] = {
    "an-unknown-format": ("fp8-blocks", settings(quant_method="tomorrow"), "quant_method 'tomorrow' is not served"),
    "gptq": ("fp8-blocks", settings(quant_method="gptq"), "quant_method 'gptq' needs the library gptqmodel"),
    "blocks-of-nothing": ("fp8-blocks", settings(weight_block_size=[0, 32]), r"weight_block_size is \[0, 32\]"),
    "other-floats": ("fp8-blocks", settings(fmt="e5m2"), "quantization_config.fmt is 'e5m2'"),
    "experts-of-4-bits": ("fp8-blocks", settings(expert_dtype="fp4"), "quantization_config.expert_dtype is 'fp4'"),
    "integers-as-kv": (
        W4,
        settings(kv_cache_scheme={"num_bits": 8}),
        "kv_cache_scheme.type is 'int', and has to be 'f",
    ),
    "scales-of-kv-at-run-time": (
        W4,
        settings(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": True}),
        "kv_cache_scheme.dynamic is True, and has to be False",
    ),
    "rotations": (W4, settings(transform_config={"config_groups": {"R1": {}}}), "transform_config is not supported"),
    "sparse": (W4, settings(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: sparse weights"),
    "other-storage": (W4, settings(format="nvfp4-pack-quantized"), "group_0: .* 4 bits and format 'nvfp4-pack-quantiz"),
    "sixteen-bits": (W4, weights(num_bits=16), "group_0: weights of type int, 16 bits"),
    "a-strategy-of-tomorrow": (W4, weights(strategy="tomorrow"), "config.json: quantization_config: .*strategy"),
    "no-groups": (W4, settings(config_groups={}), "config_groups: 0 different schemes"),
    "two-schemes": (W4, two_groups, "config_groups: 2 different schemes, and one is supported"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_are_not_served_are_refused_by_name(
    case: str, quantized: Callable[[str], QuantizedModel], tmp_path: Path
) -> None:
    kind, change, named = CONFIGS[case]
    message = refusal(quantized(kind), tmp_path, change)
    assert message.startswith("broken/config.json: quantization_config")
    assert re.search(named, message), message


def replaced(part: str, new: Callable[[Tensor], Tensor]) -> Change:
    name = f"{LAYER}.{part}"
    return lambda tensors: tensors.update({name: new(tensors[name])})


def of_experts(part: str, new: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({EXPERTS + part: new(tensors[EXPERTS + part])})


def added(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def cut_to(num_rows: int, num_scales: int) -> Change:
    """Cuts a weight in FP8 and its scales to these numbers of rows."""
    return lambda tensors: tensors.update(
        {
            f"{LAYER}.weight": tensors[f"{LAYER}.weight"][:num_rows].clone(),
            f"{LAYER}.weight_scale_inv": tensors[f"{LAYER}.weight_scale_inv"][:num_scales].clone(),
        }
    )


def absent(part: str) -> Change:
    return lambda tensors: tensors.pop(f"{LAYER}.{part}")


KV_SCALE = "model.layers.1.self_attn.v_scale"
KV_SCALES: dict[str, tuple[Change, str]] = {
    "none": (lambda tensors: tensors.pop(KV_SCALE), "layer 1 has no v_scale for its KV"),
    "of-a-layer-that-is-not-there": (
        added(KV_SCALE.replace("1", "2"), torch.ones(1)),
        "layers.2.self_attn.v_scale is one more than the 2 layers have",
    ),
    "of-each-head": (added(KV_SCALE, torch.ones(2)), rf"{KV_SCALE} is \[1.0, 1.0\]"),
    "zero": (added(KV_SCALE, torch.zeros(1)), rf"{KV_SCALE} is \[0.0\]"),
    "infinite": (added(KV_SCALE, torch.tensor([torch.inf])), rf"{KV_SCALE} is \[inf\]"),
}


@pytest.mark.parametrize("case", KV_SCALES)
def test_scales_of_kv_that_are_wrong_are_named(
    case: str, quantized: Callable[[str], QuantizedModel], tmp_path: Path
) -> None:
    model = quantized("compressed-tensors-fp8")
    with_scales = QuantizedModel(tmp_path / "quantized", model.whole_dir)
    shutil.copytree(model.directory, with_scales.directory)
    save_kv_scales(with_scales.directory, [(1.0, 1.0)] * 2)
    change, named = KV_SCALES[case]
    message = refusal(with_scales, tmp_path, tensors=change)
    assert re.search(named, message), message


TENSORS: dict[str, tuple[str, Change, str]] = {
    "no-scales": ("fp8-blocks", absent("weight_scale_inv"), f"{LAYER}.weight needs a tensor {LAYER}.weight_scale_inv"),
    "no-numbers": ("fp8-blocks", absent("weight"), f"{LAYER}.weight_scale_inv needs a tensor {LAYER}.weight"),
    "whole-beside-scales": ("fp8-blocks", replaced("weight", Tensor.float), f"{LAYER}.weight is of F32"),
    "integer-scales": ("fp8-blocks", replaced("weight_scale_inv", Tensor.int), "weight_scale_inv is of I32"),
    "too-few-scales": (
        "fp8-blocks",
        replaced("weight_scale_inv", lambda s: s[:1].clone()),
        r"is \[1, 2\], and \[3, 2\] fit",
    ),
    "cut-blocks": (
        "fp8-blocks",
        cut_to(80, 3),
        rf"{LAYER}.weight is \[80, 64\], no multiple of the \[32, 32\] that share a scale",
    ),
    "another-size": (
        "fp8-blocks",
        cut_to(64, 2),
        rf"{LAYER}.weight is \[64, 64\], which config.json says is \[96, 64\]",
    ),
    "infinite-scales": ("fp8-blocks", replaced("weight_scale_inv", lambda s: s * torch.inf), f"{LAYER}.weight has NaN"),
    "a-scale-of-no-weight": (
        "fp8-blocks",
        added("model.norm.weight_scale_inv", torch.ones(1, 1)),
        "model.norm.weight is of F32, and has to be of F8_E4M3",
    ),
    "an-unused-tensor-of-no-weight": (
        "fp8-whole",
        added("model.norm.activation_scale", torch.ones(())),
        "not known in LlamaForCausalLM: model.norm.activation_scale",
    ),
    "experts-without-scales": (
        "mxfp4",
        lambda tensors: tensors.pop(f"{EXPERTS}_scales"),
        f"{EXPERTS}_blocks needs a tensor {EXPERTS}_scales",
    ),
    "half-blocks": ("mxfp4", of_experts("_blocks", lambda b: b[..., :8].clone()), "has to be blocks of 16 bytes"),
    "experts-with-too-few-scales": (
        "mxfp4",
        of_experts("_scales", lambda s: s[:, :1].clone()),
        rf"{EXPERTS}_scales is \[8, 1, 3\], and \[8, 64, 3\] fit",
    ),
    "blocks-of-floats": ("mxfp4", of_experts("_blocks", Tensor.float), f"{EXPERTS}_blocks is of F32, and has to be"),
    "whole-experts-beside-blocks": (
        "mxfp4",
        added(EXPERTS, torch.zeros(8, 96, 64)),
        f"{EXPERTS} is {EXPERTS}_blocks again",
    ),
    "an-exponent-past-all-numbers": ("mxfp4", of_experts("_scales", lambda s: s.fill_(255)), f"{EXPERTS} has NaN"),
    "no-packed-numbers": (W4, absent("weight_packed"), f"needs a tensor {LAYER}.weight_packed"),
    "another-shape": (W4, replaced("weight_shape", lambda s: s + 8), rf"weight_shape is \[104, 72\], and {LAYER}"),
    "zero-points-of-symmetric-weights": (
        W4,
        added(f"{LAYER}.weight_zero_point", torch.zeros(12, 2, dtype=torch.int32)),
        f"not known in LlamaForCausalLM: {LAYER}.weight_zero_point",
    ),
    "no-zero-points": (
        "compressed-tensors-w4a16-zero-points",
        absent("weight_zero_point"),
        f"needs a tensor {LAYER}.weight_zero_point",
    ),
    "too-few-zero-points": (
        "compressed-tensors-w4a16-zero-points",
        replaced("weight_zero_point", lambda z: z[:6].clone()),
        r"weight_zero_point is \[6, 2\], and \[12, 2\] fit",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_parts_that_make_no_weight_are_refused_by_name(
    case: str, quantized: Callable[[str], QuantizedModel], tmp_path: Path
) -> None:
    kind, change, named = TENSORS[case]
    message = refusal(quantized(kind), tmp_path, tensors=change)
    assert re.search(named, message), message


def test_fp8_weights_need_a_config_that_says_so(quantized: Callable[[str], QuantizedModel], tmp_path: Path) -> None:
    message = refusal(quantized("fp8-blocks"), tmp_path, lambda config: config.clear())
    assert "quantization_config.quant_method is None" in message


def test_a_library_that_is_not_installed_is_named(
    quantized: Callable[[str], QuantizedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantized(W4)
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    message = refusal(model, tmp_path)
    assert "quant_method 'compressed-tensors' needs the library compressed-tensors, which is not installed" in message
