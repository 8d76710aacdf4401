"""The seam to `baton_cpu`, the compiled inference engine for CPUs, and the one place that imports it.

Where it is not installed, or numba is not, models run on PyTorch's operators: slower, and with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # these modules ask for the engine
    from common.attention.backend import AttentionBackend
    from common.draft.checkpoint import Checkpoint
    from common.draft.kernels import Kernels
    from common.draft.paged_head import PagedHead
    from common.draft.spec import Eagle3Spec
    from common.model.forward_program import NewProgram
    from common.model.target import TargetModel

_OPTIONAL = ("baton_cpu", "llvmlite", "numba")


class Log(Protocol):
    """A structlog logger. The engine has no logging library of its own."""

    def info(self, event: str, *values: object, **fields: object) -> object: ...

    def warning(self, event: str, *values: object, **fields: object) -> object: ...


class _NoLog:
    def info(self, event: str, *values: object, **fields: object) -> None: ...

    def warning(self, event: str, *values: object, **fields: object) -> None: ...


NO_LOG: Log = _NoLog()


class CpuEngine(Protocol):
    """What the compiled engine does for models whose tensors are on the CPU."""

    def keep_kernels(self, directory: Path | None, log: Log = NO_LOG) -> None:
        """Keep in `directory` the kernels that are compiled from now on, and take them from there. None, as at first:
        each process compiles its own. `log` is told of what cannot be read or written.
        """

    def new_attention(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> AttentionBackend:
        """For layers that all have `num_heads` query heads over `num_kv_heads` of `head_dim`. Compiles: seconds."""

    def optimize_modules(self, model: nn.Module) -> None:
        """Put faster modules in place of the parts of `model` that are known. They compute the same."""

    def new_decoder(self, model: nn.Module) -> NewProgram | None:
        """Writes `model` down as it is now, whatever becomes of its modules. None where its class, dtype or sizes are
        not known.
        """

    def head_kernels(self) -> Kernels:
        """What the layers of draft heads are made of."""

    def new_head_programs(self, checkpoint: Checkpoint, spec: Eagle3Spec, target: TargetModel) -> NewProgram | None:
        """Writes down the head in `checkpoint`, whose tensors fit `spec` and `target`. None where its dtype, sizes or
        variant are not known.
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
        log: Log = NO_LOG,
    ) -> float:
        """Have `model` run forwards of up to `max_tokens` tokens as one program on `num_threads` threads, and `draft`
        with it where it has programs. To be called once; what wrote them down is let go of.

        Returns the largest difference between the program's logits and the model's, relative to their size. `niceness`
        is that of the process that compiles. `check` is called between the parts of the work, and may raise;
        `log` is told of them. Raises
        StartupError where kernels cannot be compiled or the program differs too much, OSError where memory is short;
        the model then goes on as it was.
        """

    def kv_copy(self) -> Callable[[Tensor, Tensor], object]:
        """Copies KV [layers, planes, tokens, ...] from its second argument to its first, of one shape and dtype; large
        ones go past the caches. Compiles: a second.
        """


def cpu_engine(torch_device: torch.device) -> CpuEngine | None:
    """None for other devices, and where the engine or the compiler that it needs is not installed."""
    if torch_device.type != "cpu":
        return None
    try:
        from baton_cpu import engine
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        return None
    return engine
