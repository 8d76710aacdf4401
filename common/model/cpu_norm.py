"""RMS normalisation on CPUs in one pass over the tokens; transformers' own takes eight."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from common.model.cpu_kernel import Kernel, jit, number_format


class CpuRMSNorm(nn.Module):
    """Computes what `norm` does, with its roundings: mean and root in float32, weight in the model's dtype."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        weight = norm.get_parameter("weight").detach()
        self._numbers = number_format(weight.dtype)
        self._weight = self._numbers.array(weight)
        self._epsilon = float(norm.variance_epsilon)  # type: ignore[arg-type]
        self._kernel = _compiled(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        output = torch.empty(x.shape, dtype=x.dtype)
        width = x.shape[-1]
        array = self._numbers.array
        self._kernel(array(x).reshape(-1, width), self._weight, self._epsilon, array(output).reshape(-1, width))
        return output


def replace_norms(model: nn.Module) -> int:
    """Replace, in a model on a CPU, every RMS norm that CpuRMSNorm agrees with. Returns how many."""
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and _agrees(child):
                setattr(parent, name, CpuRMSNorm(child))
                num_replaced += 1
    return num_replaced


def _agrees(norm: nn.Module) -> bool:
    """Names promise nothing: some models add one to the weight, or round elsewhere."""
    if not hasattr(norm, "variance_epsilon") or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return False
    weight = norm.get_parameter("weight")
    x = torch.randn((2, weight.shape[0]), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    tolerance = max(2 * torch.finfo(weight.dtype).eps, 1e-5)
    return torch.allclose(CpuRMSNorm(norm)(x).float(), norm(x).float(), rtol=tolerance, atol=0.0)


@cache
def _compiled(dtype: torch.dtype) -> Kernel:
    numbers = number_format(dtype)
    read, write = numbers.read, numbers.write

    @jit
    def normalise(x, weight, epsilon, output):  # type: ignore[no-untyped-def]
        """Shapes: x, output [T, width]; weight [width]."""
        for t in range(x.shape[0]):
            total = np.float32(0)
            for i in range(x.shape[1]):
                number = read(x[t, i])
                total += number * number
            factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + np.float32(epsilon))
            for i in range(x.shape[1]):
                normalised = read(write(read(x[t, i]) * factor))
                output[t, i] = write(read(weight[i]) * normalised)

    token = np.zeros((1, 1), numbers.numpy_dtype)
    normalise(token, token[0], 1.0, token.copy())
    return normalise
