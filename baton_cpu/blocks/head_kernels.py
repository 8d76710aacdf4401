"""The operations that draft heads are made of, on CPUs. They use the same kernels as the target's layers."""

from __future__ import annotations

from torch import Tensor, nn

from baton_cpu.blocks.linear import PackedLinear, can_pack
from baton_cpu.blocks.norm import CpuRMSNorm
from baton_cpu.blocks.rotation import rotated
from common.draft.kernels import Op, Rotation, TorchKernels, rms_norm


class CpuKernels:
    """Implements `common.draft.kernels.Kernels` with kernels for CPUs. Linear layers stay PyTorch's own where oneDNN
    has no kernel for the weights' dtype on this CPU.
    """

    def __init__(self) -> None:
        self._torch = TorchKernels()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Op:
        return _packed(weight, bias) if can_pack(weight) else self._torch.linear(weight, bias)

    def norm(self, weight: Tensor, epsilon: float) -> Op:
        return CpuRMSNorm(rms_norm(weight, epsilon))

    def gated_mlp(self, gate: Tensor, up: Tensor, down: Tensor) -> Op:
        if not can_pack(gate):
            return self._torch.gated_mlp(gate, up, down)
        packed_gate, packed_up, packed_down = _packed(gate), _packed(up), _packed(down)
        return lambda x: packed_down(packed_up.times(packed_gate.silu(x), x))

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotated(x, rotation)


def _packed(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return PackedLinear(layer)
