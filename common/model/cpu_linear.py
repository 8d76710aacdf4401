"""Linear layers for CPUs: weights reordered once into the layout oneDNN's kernels read, instead of at every call.

The figures behind this are in docs/models.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_with = torch.ops.mkldnn._linear_pointwise.binary


class PackedLinear(nn.Module):
    """Computes what `linear` does, from a reordered copy of its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        parameters = dict(linear.named_parameters(recurse=False))
        self.in_features = linear.in_features
        self.dtype = linear.weight.dtype
        self._packed: Tensor = _reorder(parameters["weight"].detach())
        self._bias = parameters["bias"].detach() if "bias" in parameters else None

    def forward(self, x: Tensor) -> Tensor:
        return self.then("none", x)

    def then(self, activation: str, x: Tensor) -> Tensor:
        """`activation` of the output; named as oneDNN does."""
        output: Tensor = _linear(x, self._packed, self._bias, activation, [], "")
        return output

    def times(self, other: Tensor, x: Tensor) -> Tensor:
        """The output, multiplied by `other` of its shape."""
        output: Tensor = _linear_with(x, other, self._packed, self._bias, "mul")
        return output


class PackedGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) in three kernels; activation and product are part of the first two."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up.times(self.gate.then("swish", x), x))  # type: ignore[no-any-return]


def fuse_gated_mlps(model: nn.Module) -> int:
    """Replace every block of packed linear layers that computes what PackedGatedMLP does. Returns how many."""
    num_fused = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _gated_mlp(child)
            if fused is not None and _agree(fused, child):
                setattr(parent, name, fused)
                num_fused += 1
    return num_fused


def _gated_mlp(block: nn.Module) -> PackedGatedMLP | None:
    parts = [getattr(block, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    linears = [part for part in parts if isinstance(part, PackedLinear)]
    return PackedGatedMLP(*linears) if len(linears) == len(parts) else None


def _agree(fused: PackedGatedMLP, block: nn.Module) -> bool:
    """Names promise nothing: the block may have another activation, or more to it."""
    gate = fused.gate
    x = torch.randn((2, gate.in_features), generator=torch.Generator().manual_seed(0)).to(gate.dtype)
    expected = block(x).float()
    tolerance = 8 * torch.finfo(gate.dtype).eps * expected.abs().max()
    return bool((fused(x).float() - expected).abs().max() <= tolerance)


def pack_linears(model: nn.Module) -> int:
    """Replace every plain nn.Linear of `model`, on a CPU, by a PackedLinear. Returns how many were replaced.

    A replaced layer's own weight is freed at once, unless the model also uses it elsewhere (a tied embedding). Where
    oneDNN has no kernel for the weight's dtype on this CPU, that layer stays as it is.
    """
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or not _can_pack(child.weight):
                continue
            setattr(parent, name, PackedLinear(child))
            num_packed += 1
    return num_packed


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    try:
        _reorder(weight.detach()[:1])
    except RuntimeError:  # its way of saying that this CPU lacks the dtype's instructions
        return False
    return True
