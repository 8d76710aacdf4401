"""Chooses the attention backend of a model's layers, and the kernels that draw tokens."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from common.attention.backend import AttentionBackend
from common.attention.torch_attention import TorchAttention
from common.errors import StartupError
from common.sampling.state import DrawKernels

AttentionKind = Literal["kernels", "torch"]
""""kernels": kernels made for the device, which read the paged pool in place, and on a GPU also draw tokens.

"torch": PyTorch's operators, the reference, which run anywhere. A CPU without a compiled engine uses them for either.
"""


class AttentionEngine(Protocol):
    """The part of a compiled engine for CPUs that attention uses."""

    def new_attention(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        first_kv_head: int,
        head_dim: int,
        dtype: torch.dtype,
        fp8_kv: bool,
    ) -> AttentionBackend:
        """Returns the attention backend for layers of a model on a CPU. The arguments mean what they mean for
        `new_attention` below. It compiles kernels, which takes seconds.
        """


def shared_bytes_of(torch_device: torch.device) -> int:
    """Returns the most shared memory, in bytes, that one program on this CUDA device may use."""
    properties: Any = torch.cuda.get_device_properties(torch_device)  # PyTorch's type stub lacks this attribute
    return int(properties.shared_memory_per_block_optin)


def overlaps_kernels(torch_device: torch.device) -> bool:
    """Returns whether this CUDA device can start a kernel before the previous one ends."""
    return torch.cuda.get_device_capability(torch_device) >= (9, 0)


def new_attention(
    kind: AttentionKind,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    torch_device: torch.device,
    first_kv_head: int = 0,
    fp8_kv: bool = False,
    cpu_engine: AttentionEngine | None = None,
    shared_bytes: Callable[[torch.device], int] = shared_bytes_of,
    overlaps: Callable[[torch.device], bool] = overlaps_kernels,
) -> AttentionBackend:
    """Returns a backend for layers with `num_heads` query heads over `num_kv_heads` key and value heads of `head_dim`.

    It takes pools of `dtype`, and with `fp8_kv` also pools in FP8. On a CPU a pool may have more KV heads: the layer's
    begin at `first_kv_head`. There kernels come from `cpu_engine`; without it PyTorch's operators compute.

    `shared_bytes` and `overlaps` are called to ask for properties of a CUDA device; a test may replace them.
    Raises StartupError if the backend cannot serve these heads, or cannot be compiled.
    """
    if kind == "torch" or (torch_device.type == "cpu" and cpu_engine is None):
        return TorchAttention(range(first_kv_head, first_kv_head + num_kv_heads))
    if cpu_engine is not None:
        return cpu_engine.new_attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            first_kv_head=first_kv_head,
            head_dim=head_dim,
            dtype=dtype,
            fp8_kv=fp8_kv,
        )
    _check_compiler()
    from common.attention.triton_attention import HeadShape, TritonAttention

    heads = HeadShape(num_heads, num_kv_heads, head_dim, dtype)
    return TritonAttention(heads, shared_bytes=shared_bytes(torch_device), overlaps=overlaps(torch_device))


def new_draw_kernels(kind: AttentionKind, *, torch_device: torch.device) -> DrawKernels | None:
    """Returns the kernels that draw tokens, or None if PyTorch's operators draw: on a CPU, and for the kind "torch".

    Raises StartupError if kernels cannot be compiled.
    """
    if kind == "torch" or torch_device.type == "cpu":
        return None
    _check_compiler()
    from common.sampling.triton_draws import TritonDraws

    return TritonDraws()


def _check_compiler() -> None:
    """Raises StartupError if Triton cannot compile kernels on this machine."""
    if (missing := _missing_for_kernels()) is not None:
        raise StartupError(f"attention: kernels for CUDA need {missing}; torch needs nothing")


def _missing_for_kernels() -> str | None:
    """Returns what Triton needs and this machine lacks, as text for an error message, or None if it lacks nothing."""
    if torch.version.hip is not None:
        return "a device of NVIDIA's, and this PyTorch is built for AMD's"
    if importlib.util.find_spec("triton") is None:
        return "triton, which is not installed"
    import triton

    wanted = triton.knobs.build.cc  # the compiler that the environment variable CC names
    if any(map(shutil.which, (wanted,) if wanted else ("gcc", "clang"))):
        return None
    missing = f"CC names {wanted}, which is not there" if wanted else "there is neither gcc nor clang"
    return f"a C compiler, and {missing}"
