"""KV in FP8 for transformers: attention that rounds all keys and values before it reads them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

_LARGEST = 448.0
_numbers = itertools.count()


def rounded(numbers: Tensor, scale: float) -> Tensor:
    """Returns the numbers that are left of `numbers` in FP8 (e4m3) with this scale."""
    return (numbers / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).to(numbers.dtype) * scale


def fp8_attention(scales: Sequence[tuple[float, float]] | None = None) -> str:
    """Returns the name of an attention for transformers that rounds KV with each layer's scales, or with 1."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any) -> Any:
        layer: int = module.layer_idx  # type: ignore[assignment]
        key_scale, value_scale = (1.0, 1.0) if scales is None else scales[layer]
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, rounded(key, key_scale), rounded(value, value_scale), mask, **keywords)

    name = f"fp8_kv_{next(_numbers)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    return name
