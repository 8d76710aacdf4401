"""The interface of this package: the functions of `common.cpu_engine.CpuEngine`.

`common.cpu_engine` imports only this module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from baton_cpu.attention import PagedCpuAttention
from baton_cpu.blocks.decoder_blocks import fuse_blocks
from baton_cpu.blocks.head_kernels import CpuKernels
from baton_cpu.blocks.linear import pack_linears
from baton_cpu.blocks.norm import replace_norms
from baton_cpu.collective import SharedCollective, collective_bytes
from baton_cpu.compiler.kernel_cache import keep_kernels
from baton_cpu.kv_copy import copy_blocks, copy_kv
from baton_cpu.program.decoder import can_fuse, decoder_of
from baton_cpu.program.eagle3_head import programs_of
from baton_cpu.program.fusing import fuse
from common.attention.backend import AttentionBackend
from common.draft.checkpoint import Checkpoint
from common.draft.kernels import Kernels
from common.draft.spec import Eagle3Spec
from common.host.memory import return_freed_memory
from common.model.forward_program import NewProgram
from common.model.part import Collective
from common.model.target import TargetModel

__all__ = [
    "collective_bytes",
    "fuse",
    "head_kernels",
    "keep_kernels",
    "kv_copy",
    "new_attention",
    "new_collective",
    "new_decoder",
    "new_head_programs",
    "optimize_modules",
]


def new_attention(
    *, num_heads: int, num_kv_heads: int, first_kv_head: int, head_dim: int, dtype: torch.dtype, fp8_kv: bool
) -> AttentionBackend:
    return PagedCpuAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        first_kv_head=first_kv_head,
        head_dim=head_dim,
        dtype=dtype,
        fp8_kv=fp8_kv,
    )


def new_collective(memory: Tensor, *, rank: int, num_ranks: int) -> Collective:
    return SharedCollective(memory, rank=rank, num_ranks=num_ranks)


@torch.inference_mode()
def optimize_modules(model: nn.Module) -> None:
    fuse_blocks(model)
    replace_norms(model)
    pack_linears(model)
    return_freed_memory()


def new_decoder(model: nn.Module) -> NewProgram | None:
    return decoder_of(model) if can_fuse(model) else None


def head_kernels() -> Kernels:
    return CpuKernels()


def new_head_programs(checkpoint: Checkpoint, spec: Eagle3Spec, target: TargetModel) -> NewProgram | None:
    return programs_of(checkpoint, spec, target)


def kv_copy() -> Callable[[Tensor, Tensor], object]:
    copy_blocks()  # compiles the kernel now, not at the first copy
    return copy_kv
