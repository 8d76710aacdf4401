"""Cuts a model for one of several ranks: attention by heads, MLPs and experts by columns, the output by vocabulary.

The results of a cut attention or MLP are partial sums, which the ranks add up. Embeddings, norms and routers are not
cut: every rank has them. Modules that are not known here stay whole. If that is wrong, the check at load (see
forward_probe.py) finds it: it compares what the ranks compute together with the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UnsupportedModel
from common.model.part import Heads, Part

_ROW_UNIT_BYTES = 16
"""PyTorch's grouped product, which computes experts, requires rows of a multiple of this many bytes."""


_KNOWN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


def cut_model(model: Any, part: Part, *, name: str) -> list[str]:
    """Keeps the part of `model` that a rank computes. Returns the names of the modules whose outputs are partial sums.

    Raises UnsupportedModel if the model cannot be cut into so many parts. `name` is the model's name, for errors.
    """
    partial: dict[str, None] = {}
    num_attentions = 0
    for path, module in list(model.named_modules()):
        try:
            is_attention = _cut_attention(module, part)
            if is_attention or _cut_mlp(module, part) or _cut_experts(module, part):
                partial[_in_layer(path)] = None
        except ValueError as error:
            raise UnsupportedModel(f"{name}: {path} cannot be cut for tensor_parallel: {error}") from error
        num_attentions += is_attention
    if num_attentions != model.config.num_hidden_layers:
        raise UnsupportedModel(
            f"{name}: {type(model).__name__} cannot be cut for tensor_parallel: its attention has other projections"
            f" than {', '.join(_KNOWN)}"
        )
    head = model.get_output_embeddings()
    model.set_output_embeddings(CutHead(head, part))
    return list(partial)


def add_up(model: nn.Module, partial: Sequence[str], part: Part) -> None:
    """Makes the ranks add up the outputs of the modules named in `partial`, which may have been replaced since they
    were cut. If a fused layer computes them, its attribute `sum_up` is set instead.
    """

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        states = output if isinstance(output, Tensor) else output[0]
        summed = states.contiguous()
        part.collective.sum_up(summed)
        return summed if isinstance(output, Tensor) else (summed, *output[1:])

    for path in partial:
        layer: Any = model.get_submodule(path.rpartition(".")[0])
        if hasattr(layer, "sum_up"):
            layer.sum_up = part.collective.sum_up
        else:
            model.get_submodule(path).register_forward_hook(add)


class CutHead(nn.Module):
    """The output layer of a rank, which computes the logits of its part of the vocabulary and joins them with the other
    ranks'.

    The first rank keeps the whole layer too, for draft heads.
    """

    def __init__(self, head: nn.Linear, part: Part) -> None:
        super().__init__()
        self._part = part
        self._widths = part.widths(head.out_features)
        self._whole = head if part.rank == 0 else None
        self._own = nn.Linear(head.in_features, 1, bias=head.bias is not None, device="meta")
        self._own.weight, self._own.bias = head.weight, head.bias
        _keep_outputs(self._own, part.columns(head.out_features))

    @property
    def whole_layer(self) -> nn.Module:
        assert self._whole is not None, "other ranks than the first have no whole layer"
        return self._whole

    def forward(self, hidden: Tensor) -> Tensor:
        return self._part.collective.joined(self._own(hidden), self._widths)


def _in_layer(path: str) -> str:
    """Returns the path of the decoder layer's child that is, or contains, the module `path`."""
    names = path.split(".")
    number = next((place for place, each in enumerate(names) if each.isdecimal()), None)
    if number is None:
        raise ValueError("it is in no layer")
    return ".".join(names[: number + 2])


def _cut_attention(module: Any, part: Part) -> bool:
    if not hasattr(module, "o_proj") or not (hasattr(module, "q_proj") or hasattr(module, "qkv_proj")):
        return False
    if others := [
        name for name, child in module.named_children() if isinstance(child, nn.Linear) and name not in _KNOWN
    ]:
        raise ValueError(f"its {others[0]} is not known")
    head_dim: int = module.head_dim
    if hasattr(module, "q_proj"):
        num_heads, num_kv_heads = (module.get_submodule(each).out_features // head_dim for each in ("q_proj", "k_proj"))
    else:
        num_heads, num_kv_heads = module.config.num_attention_heads, module.config.num_key_value_heads
    heads = part.heads(num_heads, num_kv_heads)
    for norm in ("q_norm", "k_norm"):
        weight = getattr(getattr(module, norm, None), "weight", None)
        if weight is not None and weight.numel() != head_dim:
            raise ValueError(f"{norm} is over all heads")
    queries, keys = (_numbers(each, head_dim) for each in (heads.queries, heads.kv))
    if hasattr(module, "q_proj"):
        _keep_outputs(module.q_proj, queries)
        for each in ("k_proj", "v_proj"):
            if getattr(module, each, None) is not None:
                _keep_outputs(module.get_submodule(each), keys)
    else:
        starts = [0, num_heads * head_dim, (num_heads + num_kv_heads) * head_dim]
        rows = [start + place for start, of in zip(starts, (queries, keys, keys), strict=True) for place in of]
        _keep_outputs(module.qkv_proj, rows)
        _tell_heads(module, heads)
    keep_inputs(module.o_proj, queries, part)
    if getattr(module, "sinks", None) is not None:
        module.sinks = _kept(module.sinks, heads.queries, 0)
    return True


def _tell_heads(module: Any, heads: Heads) -> None:
    """Sets the numbers of heads by which Phi-3's attention splits its joined projection."""
    module.config = copy.copy(module.config)
    module.config.num_attention_heads = len(heads.queries)
    module.num_key_value_heads = len(heads.kv)


def _cut_mlp(module: Any, part: Part) -> bool:
    if not isinstance(getattr(module, "down_proj", None), nn.Linear):
        return False
    total = module.down_proj.in_features
    columns = _some(part.columns(total))
    if hasattr(module, "gate_up_proj"):
        _keep_outputs(module.gate_up_proj, [*columns, *(total + column for column in columns)])
    for each in ("gate_proj", "up_proj"):
        if hasattr(module, each):
            _keep_outputs(module.get_submodule(each), columns)
    keep_inputs(module.down_proj, columns, part)
    return True


def _cut_experts(module: Any, part: Part) -> bool:
    down = getattr(module, "down_proj", None)
    if not isinstance(down, nn.Parameter) or down.dim() != 3:
        return False
    inputs, outputs = (1, 2) if module.is_transposed else (2, 1)
    total = down.shape[inputs]
    columns = _some(part.columns(total))
    if len(columns) * down.itemsize % _ROW_UNIT_BYTES:
        raise ValueError(f"its {total} columns make no {part.num_ranks} parts of whole {_ROW_UNIT_BYTES} bytes")
    module.down_proj = _kept(down, columns, inputs)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    both: Sequence[int] = columns
    if module.has_gate and module.is_concatenated:
        both = [*columns, *(total + column for column in columns)]
    elif module.has_gate:
        both = [place for column in columns for place in (2 * column, 2 * column + 1)]
    setattr(module, first, _kept(getattr(module, first), both, outputs))
    if module.has_bias:
        setattr(module, f"{first}_bias", _kept(getattr(module, f"{first}_bias"), both, 1))
        if part.rank != 0:
            module.down_proj_bias.data.zero_()
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError("it has a norm over an expert's whole output")
    return True


def _some(columns: range) -> range:
    if not columns:
        raise ValueError("it has fewer columns than there are ranks")
    return columns


def _numbers(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _keep_outputs(layer: Any, rows: Sequence[int]) -> None:
    layer.weight = _kept(layer.weight, rows, 0)
    if layer.bias is not None:
        layer.bias = _kept(layer.bias, rows, 0)
    layer.out_features = len(rows)


def keep_inputs(layer: Any, columns: Sequence[int], part: Part) -> None:
    """Keeps only the input `columns`. Only the first rank keeps the bias, so that the sum has it once."""
    layer.weight = _kept(layer.weight, columns, 1)
    if layer.bias is not None and part.rank != 0:
        layer.bias = None
    layer.in_features = len(columns)


def _kept(weight: Tensor, places: Sequence[int], dim: int) -> nn.Parameter:
    index = torch.tensor(list(places), dtype=torch.int64, device=weight.device)
    return nn.Parameter(weight.detach().index_select(dim, index), requires_grad=False)
