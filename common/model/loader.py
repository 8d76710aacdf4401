"""Loads a TargetModel from a model directory, and checks that it can be served."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

import torch
from torch import nn

from common.attention.backend import ATTENTION_NAME, AttentionBackend, AttentionOfGroups
from common.attention.choice import AttentionEngine, AttentionKind, new_attention, overlaps_kernels
from common.attention.fp8_kv import Fp8Attention, KvScale
from common.errors import UnsupportedModel
from common.kv.layer_group import KV_FP8, TARGET_GROUP, LayerGroupSpec, WindowLayers
from common.model.cutting import add_up, cut_model
from common.model.forward_probe import check_forwards
from common.model.forward_program import NewProgram
from common.model.generation_config import end_token_ids, read_end_tokens
from common.model.gpu_experts import use_recordable_experts
from common.model.model_files import (
    ModelFiles,
    OnBytes,
    check_finite,
    check_vocabulary,
    kv_scales,
    load_causal_lm,
    model_faults,
    read_config,
    read_model_files,
    read_tokenizer,
    read_versions,
    refuse_broken_links,
)
from common.model.part import Heads, Part
from common.model.rotation import fix_rotation
from common.model.target import TargetModel, TargetShape
from common.model.traits import PROBE_NAME, LayerShape, check_config, computes_rotation, probe_attention

KvDtype = Literal["auto", "unquantized", "fp8_e4m3"]
""""auto": FP8 if the checkpoint has scales for it, else the model's dtype. "unquantized": the model's dtype.

"fp8_e4m3": FP8, with the checkpoint's scales, or 1 if it has none.
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelEngine(AttentionEngine, Protocol):
    """The part of a compiled engine for CPUs that models use. It can be pickled, because all ranks get it."""

    def keep_kernels(self, directory: Path | None) -> None:
        """Sets the directory where this process stores compiled kernels and looks them up from now on.

        None, the initial state, stores nothing: each process compiles its own.
        """

    def optimize_modules(self, model: nn.Module) -> None:
        """Replaces the parts of `model` that the engine knows by faster modules that compute the same."""

    def new_decoder(self, model: nn.Module) -> NewProgram | None:
        """Returns the function that compiles `model`. Only `optimize_modules` may change its modules afterwards.

        Returns None if the engine does not support the model's class, dtype or sizes.
        """


class LoadArguments(TypedDict):
    """Arguments of `load_target` that are the same for all ranks."""

    device: str
    dtype: str
    kv_dtype: KvDtype
    max_context_tokens: int | None
    attention: AttentionKind
    cpu_engine: ModelEngine | None
    optimizes_modules: bool


def load_target(
    directory: Path,
    *,
    device: str,
    dtype: str,
    kv_dtype: KvDtype = "auto",
    max_context_tokens: int | None = None,
    attention: AttentionKind = "kernels",
    cpu_engine: ModelEngine | None = None,
    fuses: bool = False,
    optimizes_modules: bool = True,
    on_progress: OnBytes = lambda num_done, num_total: None,
    part: Part | None = None,
) -> TargetModel:
    """Loads the model in `directory`, with weights in `dtype` (a key of DTYPES), on `device`. `attention` is the kind
    of its attention backend (see choice.py). With KV in FP8 the model is not fused. `on_progress` is told how much of
    the weights is read.

    The longest sequence that will be computed has `max_context_tokens` tokens, but at most what the model allows; None
    means that. Loading also fixes the rotation of a model whose rope follows a length (see rotation.py).

    With `part` only this part of the model is kept. All ranks must then load at the same time, because they check the
    model together.

    On a CPU `cpu_engine` makes the model fast; without it PyTorch's operators compute. If the model's class is known:
    `fuses` prepares it, on a CPU, to be compiled into one program; `optimizes_modules` replaces its modules by fewer
    and faster ones. Raises UnsupportedModel, naming the trait, for a model that is not served (see traits.py).
    """
    refuse_broken_links(directory)
    versions = read_versions(directory)
    end_tokens = read_end_tokens(directory)
    config, rotation = _served_config(directory, max_context_tokens)
    vocab_size = _size(config, "vocab_size", directory.name)
    tokenizer = read_tokenizer(directory)
    eos_token_ids = end_token_ids(directory, end_tokens, tokenizer, vocab_size=vocab_size)
    if tokenizer is not None:
        check_vocabulary(directory, tokenizer, vocab_size)
    files = read_model_files(directory, versions)
    scales = None if kv_dtype == "unquantized" else kv_scales(files, config)
    home = device if part is None else "cpu"  # a GPU need not have room for the whole model
    model = load_causal_lm(files, config, DTYPES[dtype], attention=PROBE_NAME, device=home, on_progress=on_progress)
    return target_of(
        model,
        files=files,
        name=directory.name,
        device=device,
        dtype=dtype,
        kv_dtype=KV_FP8 if kv_dtype == "fp8_e4m3" or scales is not None else dtype,
        kv_scales=scales,
        max_context_tokens=max_context_tokens,
        rotation=rotation,
        eos_token_ids=eos_token_ids,
        attention=attention,
        cpu_engine=cpu_engine,
        fuses=fuses,
        optimizes_modules=optimizes_modules,
        part=part,
    )


def target_of(
    model: Any,
    *,
    name: str,
    files: ModelFiles | None = None,
    device: str,
    dtype: str,
    kv_dtype: str | None = None,
    kv_scales: tuple[KvScale, ...] | None = None,
    max_context_tokens: int | None = None,
    rotation: str = "",
    eos_token_ids: tuple[int, ...] = (),
    attention: AttentionKind = "kernels",
    cpu_engine: ModelEngine | None = None,
    fuses: bool = False,
    optimizes_modules: bool = True,
    part: Part | None = None,
) -> TargetModel:
    """Turns a loaded causal language model into a target. `model` is changed, and can only be used through the target.

    `files` are the files that it was loaded from, and `eos_token_ids` the ids that end its output. `dtype` (a key of
    DTYPES) is the type of its weights, `kv_dtype` that of its KV, by default the same, and `rotation` what
    `fix_rotation` returned for its config. The other arguments mean what they mean for `load_target`. The target is
    checked with a short prompt before it is returned (see forward_probe.py). Raises UnsupportedModel, naming the trait,
    if the model cannot be served.
    """
    torch_device, config = torch.device(device), model.config
    sizes = {key: _size(config, key, name) for key in ("hidden_size", "vocab_size", "max_position_embeddings")}
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{name}: an architecture that cannot select logits is not supported")
    home = torch_device if part is None else torch.device("cpu")
    model = model.to(home).eval().requires_grad_(False)
    check_finite(model, name=name)
    shapes, unsplit, far = probe_attention(model, name=name, torch_device=home)
    unsplit, far = unsplit.on(torch_device), [each.on(torch_device) for each in far]
    model.set_attn_implementation(ATTENTION_NAME)
    partial = [] if part is None else cut_model(model, part, name=name)
    model.to(torch_device)
    layers_of, kv_dtype = _layers_of(shapes), kv_dtype or dtype
    ranks = range(1 if part is None else part.num_ranks)

    def heads_of(rank: int, num_heads: int, num_kv_heads: int) -> Heads:
        if part is None:
            return Heads(range(num_heads), range(num_kv_heads))
        return replace(part, rank=rank).heads(num_heads, num_kv_heads)

    @cache
    def backend_of(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionBackend:
        heads = heads_of(0 if part is None else part.rank, num_heads, num_kv_heads)
        return new_attention(
            attention,
            num_heads=len(heads.queries),
            num_kv_heads=len(heads.kv),
            first_kv_head=0 if part is not None and part.has_own_kv else heads.kv.start,
            head_dim=head_dim,
            dtype=DTYPES[dtype],
            torch_device=torch_device,
            fp8_kv=kv_dtype == KV_FP8,
            cpu_engine=cpu_engine,
        )

    full, *of_windows = (backend_of(shape.num_heads, shape.num_kv_heads, shape.head_dim) for shape in layers_of)
    backend: AttentionBackend = AttentionOfGroups(full, of_windows) if of_windows else full
    if kv_dtype == KV_FP8:
        backend = Fp8Attention(backend, kv_scales)
    new_decoder = None
    if cpu_engine is not None:
        new_decoder = cpu_engine.new_decoder(model) if fuses and kv_dtype == dtype and part is None else None
        if optimizes_modules:
            cpu_engine.optimize_modules(model)
    elif torch_device.type != "cpu":
        use_recordable_experts(model, torch_device)
        if optimizes_modules and attention == "kernels":
            _use_gpu_kernels(model, torch_device)
    if part is not None:
        add_up(model, partial, part)
    group, *window_groups = (_layer_group(shape, len(layers), kv_dtype) for shape, layers in layers_of.items())
    window_layers = list(layers_of.values())[1:]
    context = sizes["max_position_embeddings"]
    target = TargetModel(
        model=model,
        backend=backend,
        shape=TargetShape(
            layer_group=group,
            windows=tuple(map(WindowLayers, window_groups, window_layers)),
            kv_heads=[[heads_of(rank, each.num_heads, each.num_kv_heads).kv for rank in ranks] for each in layers_of],
            hidden_size=sizes["hidden_size"],
            vocab_size=sizes["vocab_size"],
            max_context_tokens=min(context, max_context_tokens or context),
            rotation=rotation,
            num_positions=None if computes_rotation(model) else context,
            eos_token_ids=eos_token_ids,
            dtype=DTYPES[dtype],
            torch_device=torch_device,
        ),
        new_decoder=new_decoder,
        files=files,
        part=part,
    )
    check_forwards(target, unsplit, far, name=name)
    return target


def _layers_of(shapes: Sequence[LayerShape]) -> dict[LayerShape, tuple[int, ...]]:
    """Returns the layers of each shape. The shape that attends all tokens comes first, even if no layer has it."""
    full = next((shape for shape in shapes if shape.window is None), replace(shapes[0], window=None))
    return {
        shape: tuple(layer for layer, each in enumerate(shapes) if each == shape)
        for shape in dict.fromkeys((full, *shapes))
    }


def _layer_group(shape: LayerShape, num_layers: int, kv_dtype: str) -> LayerGroupSpec:
    return LayerGroupSpec(
        name=TARGET_GROUP if shape.window is None else f"{TARGET_GROUP}_{shape.window}",
        num_layers=num_layers,
        num_planes=2,
        num_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=kv_dtype,
        window=shape.window,
    )


def _size(config: Any, key: str, name: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int):
        raise UnsupportedModel(f"{name}: an architecture whose configuration has no {key} is not supported")
    return value


def _use_gpu_kernels(model: nn.Module, torch_device: torch.device) -> None:
    from common.model.gpu_layers import fuse_layers  # Triton is installed only where attention has kernels
    from common.model.layers_triton import LayerKernels

    fuse_layers(model, LayerKernels(overlaps=overlaps_kernels(torch_device)))


def load_model(directory: Path, *, dtype: torch.dtype, attention: str) -> tuple[ModelFiles, Any]:
    """Loads a causal language model from `directory` on the CPU. Returns the description of its files, and the model.

    `attention` names an implementation that transformers knows. Raises UnsupportedModel if the config has an
    unsupported trait, or if files are missing, damaged or contradict each other.
    """
    refuse_broken_links(directory)
    versions = read_versions(directory)
    config, _ = _served_config(directory, None)
    files = read_model_files(directory, versions)
    return files, load_causal_lm(files, config, dtype, attention=attention)


def _served_config(directory: Path, max_context_tokens: int | None) -> tuple[Any, str]:
    """Returns the config with which the model in `directory` is built, and the name of the rotation that the served
    context chose: "" if it does not depend on the context (see rotation.py).
    """
    config = read_config(directory)
    with model_faults(f"{directory.name}/config.json"):
        check_config(config, name=directory.name)
        return config, fix_rotation(config, max_context_tokens=max_context_tokens)
