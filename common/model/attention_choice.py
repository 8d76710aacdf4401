"""Which attention backend serves a model's layers."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any, Literal

import torch

from common.errors import StartupError
from common.model.attention import AttentionBackend
from common.model.attention_torch import TorchAttention

AttentionKind = Literal["kernels", "torch"]
"""Kernels that read the paged pool in place, made for the device; or PyTorch's operators, the reference anywhere."""


def shared_bytes_of(torch_device: torch.device) -> int:
    """Of a CUDA device: the most shared memory that one program may have."""
    properties: Any = torch.cuda.get_device_properties(torch_device)  # its type lacks this one
    return int(properties.shared_memory_per_block_optin)


def new_attention(
    kind: AttentionKind,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    torch_device: torch.device,
    shared_bytes: Callable[[torch.device], int] = shared_bytes_of,
) -> AttentionBackend:
    """For layers that all have `num_heads` query heads over `num_kv_heads` of `head_dim`. Raises StartupError."""
    if kind == "torch":
        return TorchAttention()
    if torch_device.type == "cpu":
        from common.model.attention_cpu import PagedCpuAttention  # the compiler behind it is of no use elsewhere

        return PagedCpuAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    if importlib.util.find_spec("triton") is None:
        raise StartupError("attention: kernels for CUDA need triton, which is not installed; torch needs nothing")
    import triton

    wanted = triton.knobs.build.cc  # of the environment's CC
    if not any(map(shutil.which, (wanted,) if wanted else ("gcc", "clang"))):
        missing = f"CC names {wanted}, which is not there" if wanted else "there is neither gcc nor clang"
        raise StartupError(f"attention: kernels for CUDA need a C compiler, and {missing}; torch needs none")
    from common.model.attention_triton import HeadShape, TritonAttention

    heads = HeadShape(num_heads, num_kv_heads, head_dim, dtype)
    return TritonAttention(heads, shared_bytes=shared_bytes(torch_device))
