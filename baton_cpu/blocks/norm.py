"""RMS normalisation for CPUs in one kernel, where the module of transformers runs eight PyTorch operators."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from baton_cpu.compiler.jit import Kernel
from baton_cpu.compiler.kernel_cache import compiled
from baton_cpu.compiler.numbers import number_format, read, rounded_as_torch
from common.model.blocks import NORMS
from common.model.replace import replace_modules


class CpuRMSNorm(nn.Module):
    """Replaces `norm`, an RMS norm of transformers: it computes the same with the same roundings. Mean and root are
    taken in float32; the normalised number is rounded to the dtype of the weight before it is multiplied by it.
    """

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
    """Replaces every norm of `model` whose class is one of NORMS by a CpuRMSNorm. `model` is on a CPU. Returns how many
    were replaced.
    """
    return replace_modules(model, lambda module: CpuRMSNorm(module) if type(module) in NORMS else None)


@cache
def _compiled(dtype: torch.dtype) -> Kernel:
    token = np.zeros((1, 1), number_format(dtype).numpy_dtype)
    return compiled(_normalise, (token, token[0], 1.0, token.copy()), name=f"norm-{dtype}")


def _normalise(x, weight, epsilon, output):
    """RMS-normalises each row of `x` into `output`. `epsilon` is added to the mean of a row's squares. Arrays of one
    dtype: x, output [T, width]; weight [width].
    """
    for t in range(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            number = read(x[t, i])
            total += number * number
        factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + np.float32(epsilon))
        for i in range(x.shape[1]):
            normalised = read(rounded_as_torch(read(x[t, i]) * factor, output))
            output[t, i] = rounded_as_torch(read(weight[i]) * normalised, output)
