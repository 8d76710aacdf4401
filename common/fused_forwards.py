"""Fused forwards beside a service that serves already: compiled in a process of its own, then taken into use."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
import torch

from common.draft.head import HeadProgram
from common.draft.paged_head import PagedHead
from common.errors import StartupError
from common.model.forward_program import ForwardProgram
from common.model.target import TargetModel
from common.model_cache import default_cache_dir, make_once, run_python, silent

_CLOSE_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


def start_fusing(
    model: TargetModel, draft: PagedHead | None, *, num_threads: int, max_tokens: int
) -> threading.Thread | None:
    """Let `model`, and `draft` with it, run their forwards of up to `max_tokens` tokens by one kernel, on `num_threads`
    threads, as soon as that is compiled and seen to agree. None where the model has no program. What goes wrong is
    logged, and both go on as they were.
    """
    if model.decoder is None:
        _log.info("fused_forward_unavailable", reason="the model's class, dtype or sizes are not known to it")
        return None
    arguments = (model, draft, num_threads, max_tokens)
    thread = threading.Thread(target=_fuse_logged, args=arguments, name="fusing", daemon=True)
    thread.start()
    return thread


def fuse(model: TargetModel, draft: PagedHead | None = None, *, num_threads: int, max_tokens: int) -> float:
    """The same at once. Returns how far the two were apart, relative to the logits. Raises StartupError.

    A head without programs goes on as it was.
    """
    from common.model.fused.start import difference, kernels_key, load_kernels, new_forwards, tolerance, with_capture

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
    programs = draft.programs if draft is not None else None
    decoders = [with_capture(model.decoder, model.capture), *((programs.extend, programs.step) if programs else ())]
    forward, *of_head = new_forwards(decoders, num_threads=num_threads, max_tokens=max_tokens)
    try:
        apart = difference(model, forward)
        if not apart <= tolerance(dtype):
            raise StartupError(f"fused forwards differ from the model's by {apart:.3g} of the logits")
        head = _compared_head(draft, of_head, model) if draft is not None and of_head else None
    except BaseException:
        forward.close(_CLOSE_TIMEOUT_S)
        raise
    if draft is not None and head is not None:
        draft.run_program(head)
    model.run_program(forward)
    return apart


def _compared_head(draft: PagedHead, forwards: Sequence[ForwardProgram], model: TargetModel) -> HeadProgram:
    """Raises StartupError when it computes something else than `draft` does."""
    from common.draft.fused_head import FusedHead, difference
    from common.model.fused.start import tolerance

    head = FusedHead(*forwards)
    captured_size = draft.capture.num_states * model.hidden_size
    apart = difference(draft, head, captured_size=captured_size, dtype=model.dtype)
    if not apart <= tolerance(model.dtype):
        raise StartupError(f"fused forwards differ from the draft head's by {apart:.3g} of the logits")
    return head


def _fuse_logged(model: TargetModel, draft: PagedHead | None, num_threads: int, max_tokens: int) -> None:
    begin_s = time.monotonic()
    torch.set_num_threads(1)  # of this thread: it only compares a few tokens
    try:
        apart = fuse(model, draft, num_threads=num_threads, max_tokens=max_tokens)
    except Exception as error:
        _log.warning("fused_forward_failed", error=str(error))
        model.decoder = None  # and its weights
        if draft is not None:
            draft.programs = None
        return
    _log.info(
        "fused_forward_ready",
        seconds=round(time.monotonic() - begin_s, 1),
        difference=round(apart, 5),
        draft_head=draft is not None and draft.programs is not None,
    )
