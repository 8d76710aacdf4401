"""The interface of this package: what attention, models, draft heads, ranks and services call of an engine for CPUs."""

from __future__ import annotations

import torch
from torch import nn

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
from common.host.memory import return_freed_memory
from common.kv.pool import CopyKv
from common.model.forward_program import NewProgram


class CompiledEngine:
    """The compiled engine. It has no state, so processes can send it to each other. Implements `CpuEngine`."""

    new_attention = PagedCpuAttention
    head_kernels = CpuKernels
    new_head_programs = staticmethod(programs_of)
    collective_bytes = staticmethod(collective_bytes)
    new_collective = SharedCollective
    keep_kernels = staticmethod(keep_kernels)
    fuse = staticmethod(fuse)

    @torch.inference_mode()
    def optimize_modules(self, model: nn.Module) -> None:
        fuse_blocks(model)
        replace_norms(model)
        pack_linears(model)
        return_freed_memory()

    def new_decoder(self, model: nn.Module) -> NewProgram | None:
        return decoder_of(model) if can_fuse(model) else None

    def kv_copy(self) -> CopyKv:
        copy_blocks()  # compiles the kernel now, not at the first copy
        return copy_kv
