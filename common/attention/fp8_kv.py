"""KV in FP8: keys and values are rounded to 8 bits (e4m3) when they are written to the pool.

A pool in FP8 holds the bits of its numbers, as uint8, because few operators support FP8. The value of a number is the
number times a scale of its layer. Every query reads rounded KV, even its own token's. So it does not matter which
tokens are computed in the same forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.attention.backend import AttentionBackend, AttentionPlan, ForwardInput, KernelShape, LayerAttention

FP8_BITS = torch.uint8
"""The dtype of a pool, keys and values that hold FP8 bits."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class KvScale:
    """The scales of one layer's keys and values: positive numbers, by which they are divided before rounding."""

    key: float = 1.0
    value: float = 1.0


def to_fp8(numbers: Tensor, scale: float = 1.0) -> Tensor:
    """Divides `numbers` by `scale`, and rounds them to the nearest in FP8. Returns their bits, in the same shape.

    Numbers that are too large become the largest FP8 number. Infinity becomes NaN, and NaN stays NaN.
    """
    scaled = numbers if scale == 1.0 else numbers.float() / scale
    finite_or_nan = scaled.clamp(-_LARGEST, _LARGEST) + (scaled - scaled)
    return finite_or_nan.to(torch.float8_e4m3fn).view(FP8_BITS)


def widened(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a pool's keys or values converted from FP8 to `dtype`; others unchanged."""
    return numbers.view(torch.float8_e4m3fn).to(dtype) if numbers.dtype == FP8_BITS else numbers


class Fp8Attention(AttentionBackend):
    """Attention of a model whose KV may be in FP8: it rounds new keys and values, and takes the scales into account.

    `backend` attends over the pool. `scales` has one for each layer; without it all scales are 1.
    """

    def __init__(self, backend: AttentionBackend, scales: Sequence[KvScale] | None = None) -> None:
        self._backend = backend
        self._scales = scales

    @property
    def follows_lengths(self) -> bool:
        return self._backend.follows_lengths

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        return self._backend.kernel_shapes(with_masks=with_masks)

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        plan = self._backend.plan(batch)
        return _Fp8Plan(plan, self._scales) if batch.kv.dtype == FP8_BITS else plan


class _Fp8Plan(AttentionPlan):
    def __init__(self, plan: AttentionPlan, scales: Sequence[KvScale] | None) -> None:
        self._plan = plan
        self._scales = scales

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        scale = KvScale() if self._scales is None else self._scales[layer]
        scaled = replace(how, scaling=how.scaling * scale.key)
        output = self._plan.attend(layer, query, to_fp8(key, scale.key), to_fp8(value, scale.value), scaled)
        return output if scale.value == 1.0 else output * scale.value
