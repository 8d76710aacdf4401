"""The compiled inference engine for CPUs, `baton_cpu`. Only this module imports it, and services pass it on.

The folders `attention`, `model`, `draft` and `ranks` each declare what they call of the engine. CpuEngine has all of
it. If `baton_cpu` or numba is not installed, models run on PyTorch's operators: slower, and with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from common.draft.paged_head import HeadEngine, PagedHead
from common.kv.pool import CopyKv
from common.model.loader import ModelEngine
from common.model.target import TargetModel
from common.ranks.messages import RankEngine

_OPTIONAL = ("baton_cpu", "llvmlite", "numba")


class CpuEngine(HeadEngine, ModelEngine, RankEngine, Protocol):
    """The compiled engine, for models whose tensors are on the CPU."""

    def keep_kernels(self, directory: Path | None, log: Any = ...) -> None:
        """Does what `ModelEngine.keep_kernels` says. `log`, a structlog logger, is told of files that cannot be read or
        written.
        """

    def fuse(
        self,
        model: TargetModel,
        draft: PagedHead | None,
        *,
        num_threads: int,
        max_tokens: int,
        niceness: int,
        check: Callable[[], None],
        log: Any,
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

    def kv_copy(self) -> CopyKv:
        """Returns a function that copies KV. Large copies bypass the CPU's caches, so that they evict nothing there.

        It compiles the function, which takes a second.
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
    return engine.CompiledEngine()
