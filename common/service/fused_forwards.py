"""Fused forwards beside a service that serves already: compiled in a process of its own, then taken into use."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import structlog
import torch

from common.checkpoints.cache import make_once, run_python
from common.draft.head import HeadProgram
from common.draft.paged_head import PagedHead
from common.errors import StartupError
from common.model.forward_program import ForwardProgram, FusedDecoder
from common.model.target import TargetModel
from common.service.work_beside import Check, Stopped, Work

_CLOSE_TIMEOUT_S = 5.0
_NICENESS = 15  # of compiling beside serving
_COMPILE_TIMEOUT_S = 900.0  # it takes some 20 s of a core that it has for itself, at the lowest priority

_log = structlog.get_logger(__name__)


def new_fusing(model: TargetModel, draft: PagedHead | None, *, num_threads: int, max_tokens: int) -> Work | None:
    """What lets `model`, and `draft` with it, run their forwards of up to `max_tokens` tokens by one kernel, on
    `num_threads` threads, as soon as that is compiled and seen to agree. What goes wrong is logged, and both go on as
    they were. None where the model has no program.
    """
    if model.new_decoder is None:
        if draft is not None:
            draft.new_programs = None
        _log.info("fused_forward_unavailable", reason="the model's class, dtype or sizes are not known to it")
        return None
    return partial(_fuse_logged, model, draft, num_threads, max_tokens)


def fuse(
    model: TargetModel,
    draft: PagedHead | None = None,
    *,
    num_threads: int,
    max_tokens: int,
    niceness: int = 0,
    check: Check = lambda: None,
) -> float:
    """The same at once. Returns how far the two were apart, relative to the logits. Raises StartupError.

    To be called once: what neither needs any more is let go of. A head without programs goes on as it was. `niceness`:
    of the process that compiles. `check` is called between its parts and while others work for it, and may raise.
    """
    from baton_cpu.program.start import difference, new_forwards, tolerance

    dtype = model.dtype
    try:
        _load_kernels(dtype, niceness, check)
        decoders = _decoders(model, draft, check)
    finally:
        model.new_decoder = None  # and with it weights that operators have packed for themselves
        if draft is not None:
            draft.new_programs = None
    forward, *of_head = new_forwards(decoders, num_threads=num_threads, max_tokens=max_tokens)
    try:
        apart = difference(model, forward, check=check)
        if not apart <= tolerance(dtype):
            raise StartupError(f"fused forwards differ from the model's by {apart:.3g} of the logits")
        check()
        head = _compared_head(draft, of_head, model) if draft is not None and of_head else None
    except BaseException:
        forward.close(_CLOSE_TIMEOUT_S)
        raise
    if draft is not None and head is not None:
        draft.run_program(head)
    model.run_program(forward)
    return apart


def _decoders(model: TargetModel, draft: PagedHead | None, check: Check) -> list[FusedDecoder]:
    """The target's, then where they are known how the head's for extend and step."""
    from baton_cpu.program.start import with_capture

    assert model.new_decoder is not None
    target = with_capture(model.new_decoder(check), model.capture)
    if draft is None or draft.new_programs is None:
        return [target]
    try:
        programs = draft.new_programs(check)
    except OSError as error:  # no room
        _log.warning("fused_draft_head_failed", error=str(error))
        return [target]
    return [target, programs.extend, programs.step]


def _compared_head(draft: PagedHead, forwards: Sequence[ForwardProgram], model: TargetModel) -> HeadProgram | None:
    """None, logged, when it computes something else than `draft` does, which goes on as it was."""
    from baton_cpu.program.fused_head import FusedHead, difference
    from baton_cpu.program.start import tolerance

    head = FusedHead(*forwards)
    captured_size = draft.capture.num_states * model.hidden_size
    apart = difference(draft, head, captured_size=captured_size, dtype=model.dtype)
    if apart <= tolerance(model.dtype):
        return head
    _log.warning("fused_draft_head_failed", error=f"it differs from the head's layers by {apart:.3g} of the logits")
    return None


def _load_kernels(dtype: torch.dtype, niceness: int, check: Check) -> None:
    """From where this process keeps kernels, once they are there; what is damaged there is made anew, and what cannot
    be kept there is made for this process. Raises StartupError.
    """
    from baton_cpu.compiler.kernel_cache import kernels_dir

    if (kept := kernels_dir()) is not None:
        try:
            return _load_kernels_from(kept, dtype, niceness, check)
        except _NotKept as error:
            _log.warning("kernels_not_kept", directory=str(kept), error=str(error))
    with tempfile.TemporaryDirectory(prefix="baton-kernels-") as directory:
        _load_kernels_from(Path(directory), dtype, niceness, check)


class _NotKept(StartupError):
    """There is no directory for kernels, and none can be made."""


def _load_kernels_from(kept: Path, dtype: torch.dtype, niceness: int, check: Check) -> None:
    from baton_cpu.compiler.kernel_cache import kernels_key
    from baton_cpu.program.start import load_kernels

    name = str(dtype).removeprefix("torch.")
    directory = kept / f"{kernels_key()}-{name}"
    give_up_s = time.monotonic() + _COMPILE_TIMEOUT_S

    def look() -> None:
        check()
        if time.monotonic() > give_up_s:
            raise StartupError(f"kernels were not compiled within {_COMPILE_TIMEOUT_S:g} s")

    def compile_kernels(scratch: Path, out: Path) -> None:
        _log.info("compiling_kernels", dtype=name)
        arguments = ["-m", "baton_cpu.program.compile", name, str(out), str(os.getpid()), str(niceness)]
        error = run_python(arguments, on_wait=look)
        if error is not None:
            raise StartupError(f"kernels could not be compiled: {error}")
        if next(out.rglob("*.nbc"), None) is None:
            raise StartupError("compiled kernels were not kept")

    def load() -> bool:
        try:
            made = make_once(directory, compile_kernels, lambda stage, num_done, num_total: look())
        except OSError as error:
            raise _NotKept(str(error)) from error
        return load_kernels(made, dtype)

    try:
        is_from_cache = load()
    except (StartupError, Stopped):
        raise
    except Exception as error:  # whatever its reader says
        _log.warning("kernels_damaged", error=repr(error))
        shutil.rmtree(directory, ignore_errors=True)
        is_from_cache = load()
    if not is_from_cache:
        _log.warning("kernels_compiled_beside_serving", directory=str(directory))


def _fuse_logged(model: TargetModel, draft: PagedHead | None, num_threads: int, max_tokens: int, check: Check) -> None:
    begin_s = time.monotonic()
    try:
        apart = fuse(model, draft, num_threads=num_threads, max_tokens=max_tokens, niceness=_NICENESS, check=check)
    except Stopped:
        raise
    except Exception as error:
        _log.warning("fused_forward_failed", error=str(error), exc_info=not isinstance(error, StartupError | OSError))
        return
    _log.info(
        "fused_forward_ready",
        seconds=round(time.monotonic() - begin_s, 1),
        difference=round(apart, 5),
        draft_head=draft is not None and draft.runs_program,
    )
