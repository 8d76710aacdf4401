"""Tiny models with quantised weights, in each format that is served. The formats are written here from their
descriptions, without the libraries that read them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 32
_FP8_LARGEST = 448.0
_WORD_BITS = 32

Parts = dict[str, Tensor]
"""The tensors that a weight is stored in, by their last names."""

Quantize = Callable[[Tensor], tuple[Parts, Tensor]]
"""Returns a weight's parts, and the weight that they stand for."""


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """A format of quantised weights.

    `config` is the model's quantization_config. `is_reference` says whether transformers computes the same from the
    quantised model, if it is told nothing else. It rounds activations too where the config has them rounded, and cannot
    load zero points, unless it is told to multiply the weights out. The weights of a model of `architecture` whose
    names end with `suffix` are quantised.
    """

    config: dict[str, Any]
    quantize: Quantize
    is_reference: bool = True
    architecture: str = "llama"
    suffix: str | tuple[str, ...] = "_proj.weight"


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """A model with quantised weights in `directory`. `whole_dir` has the model of the weights that they stand for."""

    directory: Path
    whole_dir: Path


def save_quantized_model(directory: Path, kind: str, source: Path) -> QuantizedModel:
    """Saves the model in `source` twice, with quantised weights of the format FORMATS[kind] and with whole ones.

    The linear layers of its blocks are quantised, or its experts.
    """
    quantized_format = FORMATS[kind]
    model = QuantizedModel(directory / "quantized", directory / "whole")
    for path in (model.directory, model.whole_dir):
        shutil.copytree(source, path)
    stored, whole = (load_file(source / "model.safetensors") for _ in range(2))
    for name in [name for name in whole if name.endswith(quantized_format.suffix)]:
        parts, whole[name] = quantized_format.quantize(stored.pop(name))
        stored |= {f"{name.removesuffix('weight')}{part}": tensor.clone() for part, tensor in parts.items()}
    for path, tensors in ((model.directory, stored), (model.whole_dir, whole)):
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((model.directory / "config.json").read_text())
    config["quantization_config"] = quantized_format.config
    (model.directory / "config.json").write_text(json.dumps(config))
    return model


def save_kv_scales(directory: Path, scales: Sequence[tuple[float, float]]) -> None:
    """Adds scales of each layer's keys and values, for KV in FP8, to a model saved as compressed-tensors."""
    stored = load_file(directory / "model.safetensors")
    for layer, each in enumerate(scales):
        for part, scale in zip("kv", each, strict=True):
            stored[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([scale])
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    (directory / "config.json").write_text(json.dumps(config))


def _tiled(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Returns `weight` [R, C] as tiles of so many rows and columns: [R / rows, rows, C / columns, columns]."""
    return weight.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))


def _fp8(
    rows: int | None, columns: int | None, scale_name: str, scale_shape: tuple[int, ...] | None = None, **more: Any
) -> Quantize:
    """Returns a function that quantises to FP8 with one scale for each tile; None stands for all rows or columns."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        tiles = _tiled(weight, rows or weight.shape[0], columns or weight.shape[1])
        scale = tiles.abs().amax(dim=(1, 3), keepdim=True) / _FP8_LARGEST
        numbers = (tiles / scale).to(torch.float8_e4m3fn)
        whole = (numbers.float() * scale).reshape(weight.shape)
        flat = scale[:, 0, :, 0].contiguous()
        return {
            "weight": numbers.reshape(weight.shape),
            scale_name: flat if scale_shape is None else flat.reshape(scale_shape),
            **more,
        }, whole

    return quantize


def _int(num_bits: int, group_size: int | None, *, is_packed: bool, is_symmetric: bool = True) -> Quantize:
    """Returns a function that quantises to integers, with one scale for each row or each group of a row's columns.

    Scales are of bfloat16, as checkpoints have them.
    """
    lowest, highest = -(1 << num_bits - 1), (1 << num_bits - 1) - 1

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        groups = weight.unflatten(-1, (-1, group_size or weight.shape[1]))
        if is_symmetric:
            scale = (groups.abs().amax(-1) / highest).bfloat16()
            zeros = torch.zeros_like(scale, dtype=torch.int32)
        else:
            low, high = groups.amin(-1), groups.amax(-1)
            scale = ((high - low) / (highest - lowest)).bfloat16()
            zeros = (lowest - low / scale.float()).round().clamp(lowest, highest).int()
        each_scale, each_zero = scale.float().unsqueeze(-1), zeros.unsqueeze(-1)
        numbers = (groups / each_scale + each_zero).round().clamp(lowest, highest).int()
        whole = ((numbers - each_zero) * each_scale).reshape(weight.shape)
        numbers = numbers.reshape(weight.shape)
        if not is_packed:
            return {"weight": numbers.to(torch.int8), "weight_scale": scale}, whole
        parts = {
            "weight_packed": _packed(numbers - lowest, num_bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = _packed((zeros - lowest).T, num_bits).T.contiguous()
        return parts, whole

    return quantize


def _packed(numbers: Tensor, num_bits: int) -> Tensor:
    """Packs `numbers` [R, C], each from 0 to 2 ** num_bits - 1, into words [R, C * num_bits / 32] of int32.

    A word's lowest bits hold its first number.
    """
    per_word = _WORD_BITS // num_bits
    shifts = torch.arange(per_word, dtype=torch.int64) * num_bits
    words = (numbers.long().unflatten(-1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _compressed(stored_as: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _mxfp4(weight: Tensor) -> tuple[Parts, Tensor]:
    """Quantises experts' weights [experts, inputs, outputs] to FP4, with a power of two for each block of inputs."""
    blocks = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1, keepdim=True).log2().floor() - 2  # the largest number is 1.5 * 2 ** 2
    places = (blocks / 2**exponents).unsqueeze(-1).sub(_FP4_NUMBERS).abs().argmin(-1)
    whole = (_FP4_NUMBERS[places] * 2**exponents).flatten(2).transpose(1, 2).contiguous()
    numbers = places.to(torch.uint8)
    parts = {
        "_blocks": numbers[..., 0::2] | numbers[..., 1::2] << 4,
        "_scales": (exponents.squeeze(-1) + 127).to(torch.uint8),
    }
    return parts, whole


_FP4_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": BLOCK}
_FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}

FORMATS = {
    "fp8-blocks": QuantizedFormat(_FP8_CONFIG, _fp8(BLOCK, BLOCK, "weight_scale_inv")),
    "fp8-whole": QuantizedFormat(
        {**_FP8_CONFIG, "weight_block_size": None, "activation_scheme": "static"},
        _fp8(None, None, "weight_scale_inv", (), activation_scale=torch.tensor(0.01)),
    ),
    "mxfp4": QuantizedFormat(
        {"quant_method": "mxfp4"}, _mxfp4, architecture="gpt_oss", suffix=("gate_up_proj", "down_proj")
    ),
    "compressed-tensors-w8a16": QuantizedFormat(
        _compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        _int(8, None, is_packed=True),
    ),
    "compressed-tensors-w4a16": QuantizedFormat(
        _compressed("pack-quantized", {**_GROUPS, "symmetric": True}), _int(4, BLOCK, is_packed=True)
    ),
    "compressed-tensors-w4a16-zero-points": QuantizedFormat(
        _compressed("pack-quantized", {**_GROUPS, "symmetric": False}),
        _int(4, BLOCK, is_packed=True, is_symmetric=False),
        is_reference=False,
    ),
    "compressed-tensors-w8a8": QuantizedFormat(
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {**_TOKENS, "type": "int"}),
        _int(8, None, is_packed=False),
        is_reference=False,
    ),
    "compressed-tensors-fp8": QuantizedFormat(
        _compressed(
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, {**_TOKENS, "type": "float"}
        ),
        _fp8(1, None, "weight_scale"),
        is_reference=False,
    ),
    "compressed-tensors-fp8-static": QuantizedFormat(
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
        _fp8(None, None, "weight_scale", (1,), input_scale=torch.tensor([0.01])),
        is_reference=False,
    ),
    "compressed-tensors-fp8-blocks": QuantizedFormat(
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "dynamic": True},
        ),
        _fp8(BLOCK, BLOCK, "weight_scale"),
        is_reference=False,
    ),
}
"""The formats that are served, by name."""
