"""The interface to `baton_cpu`, the compiled inference engine for CPUs. Only this module imports it.

If it or numba is not installed, models run on PyTorch's operators: slower, and with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # these modules import this one
    from common.attention.backend import AttentionBackend
    from common.draft.checkpoint import Checkpoint
    from common.draft.kernels import Kernels
    from common.draft.paged_head import PagedHead
    from common.draft.spec import Eagle3Spec
    from common.model.forward_program import NewProgram
    from common.model.part import Collective
    from common.model.target import TargetModel

_OPTIONAL = ("baton_cpu", "llvmlite", "numba")


class CpuEngine(Protocol):
    """The compiled engine, for models whose tensors are on the CPU."""

    def keep_kernels(self, directory: Path | None, log: Any = ...) -> None:
        """Sets the directory where compiled kernels are stored and looked up from now on.

        None, the initial state, stores nothing: each process compiles its own. `log`, a structlog
        logger, is told of files that cannot be read or written.
        """

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
        """Returns the attention backend for layers with `num_heads` query heads over `num_kv_heads` KV heads of
        `head_dim`. It takes pools of `dtype`, and with `fp8_kv` also pools in FP8. A pool may have more heads, if the
        layers' begin at `first_kv_head`.

        It compiles kernels, which takes seconds.
        """

    def collective_bytes(self, num_ranks: int) -> int:
        """Returns the size of the memory that `new_collective` takes."""

    def new_collective(self, memory: Tensor, *, rank: int, num_ranks: int) -> Collective:
        """Returns this rank's access to the others. `memory` [collective_bytes(num_ranks)] uint8 is shared by all
        ranks, is zeros at first, and starts at a multiple of 64 bytes.
        """

    def optimize_modules(self, model: nn.Module) -> None:
        """Replaces the parts of `model` that the engine knows by faster modules that compute the same."""

    def new_decoder(self, model: nn.Module) -> NewProgram | None:
        """Returns the function that compiles `model`. Only `optimize_modules` may change its modules afterwards.

        Nothing is compiled yet: `fuse` calls the function (see NewProgram).

        Returns None if the engine does not support the model's class, dtype or sizes.
        """

    def head_kernels(self) -> Kernels:
        """Returns the kernels that the layers of draft heads use."""

    def new_head_programs(self, checkpoint: Checkpoint, spec: Eagle3Spec, target: TargetModel) -> NewProgram | None:
        """Returns the function that compiles the draft head in `checkpoint`, whose tensors fit `spec` and `target`.

        Nothing is compiled yet: `fuse` calls the function (see NewProgram).

        Returns None if the engine does not support the head's dtype, sizes or variant.
        """

    def fuse(
        self,
        model: TargetModel,
        draft: PagedHead | None = None,
        *,
        num_threads: int,
        max_tokens: int,
        niceness: int = 0,
        check: Callable[[], None] = lambda: None,
        log: Any = ...,
    ) -> float:
        """Makes `model`, and `draft` if it has programs, run forwards of up to `max_tokens` tokens as one compiled
        program.

        The program uses `num_threads` threads. Call this once, because it releases what it needs for the compilation.
        Returns the largest difference between the program's logits and the model's, relative to their size. `niceness`
        applies to the compiling process. `check` is called between parts of the work, and may raise. `log`, a structlog
        logger, receives the progress.

        Raises StartupError if kernels cannot be compiled or the program differs too much, OSError if memory is short.
        After an error the model runs as before.
        """

    def kv_copy(self) -> Callable[[Tensor, Tensor], object]:
        """Returns a function that copies KV [layers, planes, tokens, ...] from its second argument to its first.

        Both have the same shape and dtype. Large copies bypass the CPU's caches. Calling `kv_copy` compiles the
        function, which takes a second.
        """


def cpu_engine(torch_device: torch.device) -> CpuEngine | None:
    """Returns the compiled engine, or None if `torch_device` is no CPU, or if the engine or numba is not installed."""
    if torch_device.type != "cpu":
        return None
    try:
        from baton_cpu import engine
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        return None
    return engine
