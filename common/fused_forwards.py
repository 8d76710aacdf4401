"""Fused forwards beside a service that serves already: compiled in a process of its own, then taken into use."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import structlog
import torch

from common.errors import StartupError
from common.model.target import TargetModel
from common.model_cache import default_cache_dir, make_once, run_python, silent

_CLOSE_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


def start_fusing(model: TargetModel, *, num_threads: int, max_tokens: int) -> threading.Thread | None:
    """Let `model` run its forwards of up to `max_tokens` tokens by one kernel, on `num_threads` threads, as soon as
    that is compiled and seen to agree. None where it has no program. What goes wrong is logged, and the model goes on
    as it was.
    """
    if model.decoder is None:
        _log.info("fused_forward_unavailable", reason="the model's class, dtype or sizes are not known to it")
        return None
    thread = threading.Thread(target=_fuse_logged, args=(model, num_threads, max_tokens), name="fusing", daemon=True)
    thread.start()
    return thread


def fuse(model: TargetModel, *, num_threads: int, max_tokens: int) -> float:
    """The same at once. Returns how far the two were apart, relative to the logits. Raises StartupError."""
    from common.model.fused.start import difference, kernels_key, load_kernels, new_forward, tolerance

    assert model.decoder is not None
    dtype = model.dtype
    name = str(dtype).removeprefix("torch.")
    directory = default_cache_dir() / "kernels" / f"{kernels_key()}-{name}"

    def compile_kernels(scratch: Path, out: Path) -> None:
        _log.info("compiling_kernels", dtype=name)
        error = run_python(["-m", "common.model.fused.compile", name, str(out), str(os.getpid())])
        if error is not None:
            raise StartupError(f"kernels could not be compiled: {error}")
        if next(out.rglob("*.nbc"), None) is None:
            raise StartupError("compiled kernels were not kept")

    load_kernels(make_once(directory, compile_kernels, silent), dtype)
    forward = new_forward(model.decoder, model.capture, num_threads=num_threads, max_tokens=max_tokens)
    try:
        apart = difference(model, forward)
        if not apart <= tolerance(dtype):
            raise StartupError(f"fused forwards differ from the model's by {apart:.3g} of the logits")
    except BaseException:
        forward.close(_CLOSE_TIMEOUT_S)
        raise
    model.run_program(forward)
    return apart


def _fuse_logged(model: TargetModel, num_threads: int, max_tokens: int) -> None:
    begin_s = time.monotonic()
    torch.set_num_threads(1)  # of this thread: it only compares a few tokens
    try:
        apart = fuse(model, num_threads=num_threads, max_tokens=max_tokens)
    except Exception as error:
        _log.warning("fused_forward_failed", error=str(error))
        model.decoder = None  # and its weights
        return
    _log.info("fused_forward_ready", seconds=round(time.monotonic() - begin_s, 1), difference=round(apart, 5))
