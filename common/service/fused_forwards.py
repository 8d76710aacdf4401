"""Fused forwards beside a service that serves already: compiled in a process of its own, then taken into use."""

from __future__ import annotations

import time
from functools import partial

import structlog

from common.cpu_engine import CpuEngine
from common.draft.paged_head import PagedHead
from common.errors import StartupError
from common.model.target import TargetModel
from common.service.work_beside import Check, Stopped, Work

_NICENESS = 15  # of compiling beside serving

_log = structlog.get_logger(__name__)


def new_fusing(
    engine: CpuEngine, model: TargetModel, draft: PagedHead | None, *, num_threads: int, max_tokens: int
) -> Work | None:
    """The work that has `engine` fuse the forwards of `model`, and of `draft`, as `CpuEngine.fuse` says. What goes
    wrong in it is logged, and both go on as they were. None where the model cannot be written down as a program.
    """
    if model.new_decoder is None:
        if draft is not None:
            draft.new_programs = None
        _log.info("fused_forward_unavailable", reason="the model's class, dtype or sizes are not known to it")
        return None
    return partial(_fuse_logged, engine, model, draft, num_threads, max_tokens)


def _fuse_logged(
    engine: CpuEngine, model: TargetModel, draft: PagedHead | None, num_threads: int, max_tokens: int, check: Check
) -> None:
    begin_s = time.monotonic()
    try:
        apart = engine.fuse(
            model, draft, num_threads=num_threads, max_tokens=max_tokens, niceness=_NICENESS, check=check, log=_log
        )
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
