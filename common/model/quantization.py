"""Quantised checkpoints: which are served, and which tensors they have to hold.

A quantised weight is stored in parts: its numbers in few bits, and scales to multiply them by. transformers multiplies
them out while it loads the model, so the loaded model has plain weights in the served dtype, and everything computes
with it as with any other model. Activations are not quantised, whatever the checkpoint says about them.

`read_quantization` reads the config. `Quantization.dense` checks the parts of every quantised weight, and returns the
tensors of the model that they make, which model_files.py then checks as it checks any model's tensors.

A checkpoint may also say that KV is kept in FP8. `Quantization.kv_scales` reads the scales of each layer for that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Protocol

from common.attention.fp8_kv import KvScale
from common.errors import UnsupportedModel
from common.model.stored_tensor import WEIGHT_DTYPES, StoredTensor
from common.peer_text import peer_text

QUANTIZATION = "quantization_config"
_FP8, _INT8, _PACKED = "F8_E4M3", "I8", "I32"
_SCALE_DTYPES = (*WEIGHT_DTYPES, "F8_E8M0")
_BITS_OF_PACKED = 32
_MXFP4_BLOCK = 32
_KV_SCALE = re.compile(r"\blayers\.(\d+)\..*\b([kv])_scale$")
_KV_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
"""The scheme of KV that is served: FP8, with a scale for all keys and one for all values of a layer."""
_LIBRARIES = {
    "aqlm": "aqlm",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "eetq": "kernels",
    "fbgemm_fp8": "fbgemm-gpu",
    "gptq": "gptqmodel",
    "hqq": "hqq",
    "modelopt": "nvidia-modelopt",
    "quanto": "optimum-quanto",
    "quark": "amd-quark",
    "torchao": "torchao",
}
"""The libraries that quantisation methods need and that Baton does not use, by `quant_method`."""


@dataclass(frozen=True, slots=True)
class _ScaleBlock:
    """A tile: the rows and columns of a weight that share one scale. None means all."""

    rows: int | None
    columns: int | None

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns how many tiles lie along the rows and columns of a weight of this shape."""
        rows, columns = shape
        return math.ceil(rows / (self.rows or rows)), math.ceil(columns / (self.columns or columns))


class Quantization(Protocol):
    """How a checkpoint's weights are quantised."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings with which transformers loads the weights."""

    def loaded(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the stored `tensors` (slices of files) that transformers has to load."""

    def dense(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Returns the model's tensors, made from the stored ones: whole weights take the place of their parts.

        Raises UnsupportedModel, naming the tensor, if a part is missing or does not fit the others.
        """

    def kv_scales(self, tensors: Mapping[str, StoredTensor], *, num_layers: int) -> tuple[KvScale, ...] | None:
        """Reads the scales of each layer's keys and values for KV in FP8. Returns None if the checkpoint has none.

        Raises UnsupportedModel, naming the tensor, if one is missing, or is not a single positive number.
        """


@dataclass(frozen=True, slots=True)
class _OfModules:
    """Quantised weights of modules: each weight has parts of its own.

    `numbers`, `scale`, `zero_point` and `shape` are the last components of the names of a weight's parts; the last two
    are None if there is no such part. `dtype` is the type of the numbers, of `num_bits` each, as safetensors names it.
    `cuts_tiles` says whether a tile may extend past a weight's edge. `unused` are names of tensors for activations,
    which are not read. `has_kv_scales` says whether the checkpoint has scales for KV in FP8.
    """

    settings: Mapping[str, Any]
    numbers: str
    dtype: str
    num_bits: int
    scale: str
    tile: _ScaleBlock
    cuts_tiles: bool
    zero_point: str | None = None
    shape: str | None = None
    unused: tuple[str, ...] = ()
    has_kv_scales: bool = False

    def loaded(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        # Scales are tensors of float32, so that a weight is rounded once, to the served dtype.
        parts = {name: name.rpartition(".")[2] for name in tensors}
        return {
            name: stored[...].float() if parts[name] == self.scale else stored
            for name, stored in tensors.items()
            if parts[name] not in self.unused and not self._is_kv_scale(name)
        }

    def dense(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        modules = sorted(set(self._quantized_modules(tensors)))
        if not modules:
            raise _not_quantised(tensors)
        dense = {name: stored for name, stored in tensors.items() if not self._is_kv_scale(name)}
        for module in modules:
            parts = self._parts(module, tensors)
            shape = self._shape(module, parts)
            self._check_scales(module, parts, shape)
            for part in (*parts, *self.unused):
                dense.pop(f"{module}.{part}", None)
            weight = f"{module}.weight"
            if weight in dense:
                raise _refused(dense[weight], f"{weight} is {module}.{self.numbers} again")
            dense[weight] = replace(parts[self.numbers], shape=shape, dtype="F32")
        return dense

    def kv_scales(self, tensors: Mapping[str, StoredTensor], *, num_layers: int) -> tuple[KvScale, ...] | None:
        if not self.has_kv_scales:
            return None
        scales: dict[tuple[int, str], float] = {}
        for name, stored in tensors.items():
            if not self._is_kv_scale(name):
                continue
            found = _KV_SCALE.search(name)
            assert found is not None
            key = int(found[1]), found[2]
            if key in scales or key[0] >= num_layers:
                raise _refused(stored, f"{name} is one more than the {num_layers} layers have")
            values = stored.read().flatten().float().tolist()
            if len(values) != 1 or not 0 < values[0] < math.inf:
                raise _refused(stored, f"{name} is {values[:4]}, and has to be one positive number")
            scales[key] = values[0]
        for layer in range(num_layers):
            for part in ("k", "v"):
                if (layer, part) not in scales:
                    directory = next(iter(tensors.values())).file.parent
                    raise UnsupportedModel(f"{directory.name}: layer {layer} has no {part}_scale for its KV")
        return tuple(KvScale(scales[layer, "k"], scales[layer, "v"]) for layer in range(num_layers))

    def _is_kv_scale(self, name: str) -> bool:
        return self.has_kv_scales and _KV_SCALE.search(name) is not None

    def _quantized_modules(self, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
        for name, stored in tensors.items():
            module, _, part = name.rpartition(".")
            if part == self.scale or (part == self.numbers and stored.dtype == self.dtype):
                yield module

    def _parts(self, module: str, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Returns the parts of the module's weight by their last names. All are present and have the right types."""
        dtypes: dict[str, tuple[str, ...]] = {self.numbers: (self.dtype,), self.scale: _SCALE_DTYPES}
        if self.zero_point is not None:
            dtypes[self.zero_point] = (self.dtype,)
        if self.shape is not None:
            dtypes[self.shape] = ("I64", "I32")
        parts = {part: tensors[name] for part in dtypes if (name := f"{module}.{part}") in tensors}
        for part, allowed in dtypes.items():
            name = f"{module}.{part}"
            if part not in parts:
                there, stored = next(iter(parts.items()))
                raise _refused(stored, f"{module}.{there} needs a tensor {name}, and there is none")
            if parts[part].dtype not in allowed:
                raise _refused(parts[part], f"{name} is of {parts[part].dtype}, and has to be of {allowed[0]}")
        return parts

    def _shape(self, module: str, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """Returns the shape of the module's weight. Raises UnsupportedModel if its numbers do not have that shape."""
        numbers = parts[self.numbers]
        name = f"{module}.{self.numbers}"
        if len(numbers.shape) != 2:
            raise _refused(numbers, f"{name} is {list(numbers.shape)}, and has to be a matrix")
        rows, columns = numbers.shape
        if self.shape is None:
            return rows, columns
        stored = parts[self.shape]
        shape = stored.read().flatten().tolist()
        fits = len(shape) == 2 and shape[0] == rows and _num_packed(shape[1], self.num_bits) == columns
        if not fits:
            bits = f"of {self.num_bits} bits each"
            raise _refused(stored, f"{module}.{self.shape} is {shape}, and {name}, {bits}, is {[rows, columns]}")
        return rows, shape[1]

    def _check_scales(self, module: str, parts: Mapping[str, StoredTensor], shape: tuple[int, int]) -> None:
        """Raises UnsupportedModel unless there is one scale, and one zero point, for each tile of the weight."""
        grid = self.tile.grid(shape)
        sizes = (self.tile.rows, self.tile.columns)
        is_cut = any(num > 1 and size and length % size for num, size, length in zip(grid, sizes, shape, strict=True))
        if is_cut and not self.cuts_tiles:
            says = f"{module}.{self.numbers} is {list(shape)}, no multiple of the {list(sizes)} that share a scale"
            raise _refused(parts[self.numbers], says)
        expected = {self.scale: grid}
        if self.zero_point is not None:
            is_packed = self.dtype == _PACKED
            expected[self.zero_point] = (_num_packed(grid[0], self.num_bits), grid[1]) if is_packed else grid
        for part, wanted in expected.items():
            stored = parts[part]
            is_single = self.tile == _ScaleBlock(None, None) and math.prod(stored.shape) == 1
            if stored.shape != wanted and not is_single:
                is_and_fits = f"is {list(stored.shape)}, and {list(wanted)} fit a weight of {list(shape)}"
                raise _refused(stored, f"{module}.{part} {is_and_fits}")


@dataclass(frozen=True, slots=True)
class _Mxfp4:
    """Quantised weights of gpt-oss's experts: FP4, with a power-of-two scale for each 32 inputs of an output.

    The weight `name` [experts, inputs, outputs] has two parts of bytes: `name_blocks` [experts, outputs, inputs / 32,
    16], with two numbers in each byte, and `name_scales` [experts, outputs, inputs / 32], with the exponents.
    """

    settings: Mapping[str, Any]

    def loaded(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return dict(tensors)

    def dense(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        dense, parts = dict(tensors), ("_blocks", "_scales")
        weights = sorted({name.removesuffix(part) for name in tensors for part in parts if name.endswith(part)})
        if not weights:
            raise _not_quantised(tensors)
        for weight in weights:
            found = {part: dense.pop(weight + part) for part in parts if weight + part in tensors}
            for part in parts:
                if part not in found:
                    there, stored = next(iter(found.items()))
                    raise _refused(stored, f"{weight}{there} needs a tensor {weight}{part}, and there is none")
                if found[part].dtype != "U8":
                    raise _refused(found[part], f"{weight}{part} is of {found[part].dtype}, and has to be of U8")
            blocks, scales = (found[part] for part in parts)
            if len(blocks.shape) != 4 or blocks.shape[3] != _MXFP4_BLOCK // 2:
                raise _refused(blocks, f"{weight}_blocks is {list(blocks.shape)}, and has to be blocks of 16 bytes")
            if scales.shape != blocks.shape[:3]:
                says = f"{list(scales.shape)}, and {list(blocks.shape[:3])} fit {weight}_blocks"
                raise _refused(scales, f"{weight}_scales is {says}")
            if weight in dense:
                raise _refused(dense[weight], f"{weight} is {weight}_blocks again")
            num_experts, num_outputs, num_blocks, _ = blocks.shape
            dense[weight] = replace(blocks, shape=(num_experts, num_blocks * _MXFP4_BLOCK, num_outputs), dtype="F32")
        return dense

    def kv_scales(self, tensors: Mapping[str, StoredTensor], *, num_layers: int) -> tuple[KvScale, ...] | None:
        return None


def _not_quantised(tensors: Mapping[str, StoredTensor]) -> UnsupportedModel:
    directory = next(iter(tensors.values())).file.parent
    return UnsupportedModel(f"{directory.name}: none of its weights is quantised as {QUANTIZATION} says")


def _refused(stored: StoredTensor, says: str) -> UnsupportedModel:
    return UnsupportedModel(f"{stored.place}: {peer_text(says)}")


def _num_packed(num_numbers: int, num_bits: int) -> int:
    return math.ceil(num_numbers * num_bits / _BITS_OF_PACKED)


def read_quantization(settings: Any, place: str) -> Quantization | None:
    """Reads the `quantization_config` of a model's config. Returns None if it is None.

    `place` names the file and the field, for errors. Raises UnsupportedModel for a format that is not served, and
    whatever the format's library raises for settings that it refuses.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise UnsupportedModel(f"{place} is {peer_text(repr(settings))}, and has to be an object")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        method = "bitsandbytes"
    served = ", ".join(map(repr, _FORMATS))
    if not isinstance(method, str):
        raise UnsupportedModel(f"{place}.quant_method is {peer_text(repr(method))}, and {served} are served")
    if method not in _FORMATS:
        library = _LIBRARIES.get(method)
        why = "" if library is None else f" needs the library {library}, which Baton does not use:"
        raise UnsupportedModel(
            f"{place}.quant_method {peer_text(repr(method))}{why or ' is not served:'} {served} are served, or the"
            " original weights"
        )
    return _FORMATS[method](settings, place)


def _fp8(settings: dict[str, Any], place: str) -> Quantization:
    """Reads settings of FP8 weights with a scale for each block, or one for the whole weight."""
    block = settings.get("weight_block_size", [128, 128])
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise UnsupportedModel(
            f"{place}.weight_block_size is {peer_text(repr(block))}, and has to be two whole numbers or null"
        )
    for key, served in (("fmt", "e4m3"), ("expert_dtype", "fp8"), ("modules_to_convert", None)):
        if settings.get(key, served) != served:
            raise UnsupportedModel(f"{place}.{key} is {peer_text(repr(settings[key]))}, which is not supported")
    return _OfModules(
        settings={**settings, "dequantize": True},
        numbers="weight",
        dtype=_FP8,
        num_bits=8,
        scale="weight_scale_inv",
        tile=_ScaleBlock(*(block or (None, None))),
        cuts_tiles=False,  # transformers takes the block's size from the number of scales
        unused=("activation_scale",),
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _mxfp4(settings: dict[str, Any], place: str) -> Quantization:
    return _Mxfp4({**settings, "dequantize": True})


def _compressed_tensors(settings: dict[str, Any], place: str) -> Quantization:
    """Reads settings of the library compressed-tensors, which has to be installed."""
    if find_spec("compressed_tensors") is None:
        raise UnsupportedModel(
            f"{place}.quant_method 'compressed-tensors' needs the library compressed-tensors, which is not installed:"
            " pip install 'baton-serve[quantized]'"
        )
    from compressed_tensors.quantization import QuantizationConfig

    if settings.get("transform_config"):
        raise UnsupportedModel(f"{place}.transform_config is not supported")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnsupportedModel(f"{place}.sparsity_config: sparse weights are not supported")
    validated = QuantizationConfig.model_validate(settings).model_dump(mode="json")
    groups, kv = validated["config_groups"], validated["kv_cache_scheme"]
    for key, served in () if kv is None else _KV_SCHEME.items():
        if kv[key] != served:
            raise UnsupportedModel(
                f"{place}.kv_cache_scheme.{key} is {peer_text(repr(kv[key]))}, and has to be {served!r}"
            )
    schemes = [
        _scheme(group, settings.get("format"), f"{place}.config_groups.{name}") for name, group in groups.items()
    ]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise UnsupportedModel(f"{place}.config_groups: {len(schemes)} different schemes, and one is supported")
    settings = {**settings, "dequantize": True, "kv_cache_scheme": None}
    return replace(schemes[0], settings=settings, has_kv_scales=kv is not None)


def _scheme(group: dict[str, Any], model_format: Any, place: str) -> _OfModules:
    """Reads the scheme of one group of modules. `model_format` is the format if the group names none."""
    weights: Any = group["weights"]
    stored_as = group["format"] or model_format
    if weights is None:
        raise UnsupportedModel(f"{place}.weights is None, and only weights are taken as quantised")
    if group["output_activations"] is not None:
        raise UnsupportedModel(f"{place}.output_activations is not supported")
    kind, num_bits = weights["type"], weights["num_bits"]
    dtype = {
        ("pack-quantized", "int"): _PACKED,
        ("int-quantized", "int"): _INT8,
        ("naive-quantized", "int"): _INT8,
        ("float-quantized", "float"): _FP8,
        ("naive-quantized", "float"): _FP8,
    }.get((stored_as, kind))
    if dtype is None or num_bits > 8 or (dtype == _FP8 and num_bits != 8):
        raise UnsupportedModel(
            f"{place}: weights of type {kind}, {num_bits} bits and format {peer_text(repr(stored_as))} are not"
            " supported"
        )
    tile = {
        "tensor": _ScaleBlock(None, None),
        "channel": _ScaleBlock(1, None),
        "group": _ScaleBlock(1, weights["group_size"]),
        "block": _ScaleBlock(*(weights.get("block_structure") or (None, None))),
    }.get(weights["strategy"])
    if tile is None or weights["dynamic"]:
        raise UnsupportedModel(f"{place}.weights.strategy {weights['strategy']!r} is not supported")
    is_packed = dtype == _PACKED
    return _OfModules(
        settings={},
        numbers="weight_packed" if is_packed else "weight",
        dtype=dtype,
        num_bits=num_bits,
        scale="weight_scale",
        tile=tile,
        cuts_tiles=weights["strategy"] == "block",
        zero_point=None if weights["symmetric"] else "weight_zero_point",
        shape="weight_shape" if is_packed else None,
        unused=("input_scale", "input_zero_point"),
    )


_FORMATS: dict[str, Callable[[dict[str, Any], str], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
