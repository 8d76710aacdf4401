"""A service's work beside serving: what makes it faster, but need not have happened before it serves.

First the KV pool is populated, then forwards are fused: compiled in a process of their own, and taken into use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import structlog

from common.cpu_engine import CpuEngine
from common.draft.paged_head import PagedHead
from common.errors import StartupError
from common.host.cores import set_own_num_threads
from common.model.target import TargetModel

Check = Callable[[], None]
Work = Callable[[Check], None]
"""To call what it is given between its parts, which raises Stopped when the service ends. Whatever else it raises is
logged, and the next one begins.
"""

_NICENESS = 15  # of compiling beside serving

_log = structlog.get_logger(__name__)


class Stopped(Exception):
    """The service ends."""


class WorkBeside:
    """The thread beside serving; before, it would take cores and the interpreter's lock from what serving waits for.

    It is to be stopped before the process ends: the interpreter's end breaks the operator that a thread is in, and with
    it the process.
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *works: Work) -> None:
        """One after the other. To be called once."""
        assert self._thread is None, "is started once"
        self._thread = threading.Thread(target=self._run, args=works, name="work-beside", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End it, where it has not come to its end, between two parts of a work. False when it did not end within
        `timeout_s`.
        """
        self._stopping.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, *works: Work) -> None:
        set_own_num_threads(1)
        for work in works:
            try:
                self._check()
                work(self._check)
            except Stopped:
                return
            except Exception:
                _log.error("work_beside_failed", exc_info=True)

    def _check(self) -> None:
        if self._stopping.is_set():
            raise Stopped


def populating(populate: Work) -> Work:
    """`populate`, which goes without where the system cannot: then each page comes when it is used."""
    return partial(_populate_logged, populate)


def _populate_logged(populate: Work, check: Check) -> None:
    try:
        populate(check)
    except OSError as error:
        _log.warning("kv_pool_not_populated", error=str(error))


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
