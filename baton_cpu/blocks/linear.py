"""Linear layers for CPUs. Weights are reordered once into the layout that oneDNN's kernels read, not at every call.

The measurements are in benchmarks/measurements.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.model.replace import replace_modules

_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_with = torch.ops.mkldnn._linear_pointwise.binary


class PackedLinear(nn.Module):
    """A linear layer that computes what `linear` does, from a copy of its weight in the layout that oneDNN's kernels
    read.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        parameters = dict(linear.named_parameters(recurse=False))
        self._packed: Tensor = _reorder(parameters["weight"].detach())
        self.bias = parameters["bias"].detach() if "bias" in parameters else None

    @property
    def out_features(self) -> int:
        return self._packed.shape[0]

    @property
    def weight(self) -> Tensor:
        """A copy of the weight in its original layout, for models that read the weight as well as call the layer."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self._packed, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """Returns SiLU of the layer's output for `x` [..., inputs]."""
        return linear_silu(x, self._packed, self.bias)

    def times(self, other: Tensor, x: Tensor) -> Tensor:
        """Returns the layer's output for `x` [..., inputs], multiplied elementwise by `other`, which has the output's
        shape.
        """
        return linear_times(x, other, self._packed, self.bias)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns what a linear layer computes, by oneDNN's kernel. `weight` is plain or packed."""
    output: Tensor = _linear(x, weight, bias, "none", [], "")
    return output


def linear_silu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns SiLU of what a linear layer computes. `weight` is plain or packed."""
    output: Tensor = _linear(x, weight, bias, "swish", [], "")
    return output


def linear_times(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns what a linear layer computes, multiplied elementwise by `other`. `weight` is plain or packed."""
    output: Tensor = _linear_with(x, other, weight, bias, "mul")
    return output


def pack_linears(model: nn.Module) -> int:
    """Replaces every plain nn.Linear of `model`, which is on a CPU, by a PackedLinear. Returns how many were replaced.

    A replaced layer's own weight is freed, unless the model also uses it elsewhere (a tied embedding). A layer stays as
    it is where oneDNN has no kernel for its weight's dtype on this CPU.
    """
    return replace_modules(model, _packed)


def _packed(module: nn.Module) -> PackedLinear | None:
    return PackedLinear(module) if type(module) is nn.Linear and can_pack(module.weight) else None


def can_pack(weight: Tensor) -> bool:
    """Returns whether `weight` is on a CPU and oneDNN has a kernel for its dtype there."""
    if weight.device.type != "cpu":
        return False
    try:
        _reorder(weight.detach()[:1])
    except RuntimeError:  # oneDNN raises it where the CPU lacks the dtype's instructions
        return False
    return True
