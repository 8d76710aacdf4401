"""Background work of a service: it makes the service faster, but need not be done before the service serves.

First the KV pool is populated: its memory is allocated. Then forwards are fused: a separate process compiles the whole
forward of a model into one program, which the service uses from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import structlog

from common.draft.paged_head import PagedHead
from common.errors import StartupError
from common.host.cores import set_own_num_threads
from common.kv.layer_group import KV_FP8
from common.model.target import TargetModel
from common.service.cpu_engine import CpuEngine

Check = Callable[[], None]
Work = Callable[[Check], None]
"""Background work. It gets a Check and calls it between its parts; the Check raises Stopped when the service ends.

Any other exception that the work raises is logged, and the next work begins.
"""

_NICENESS = 15  # of the process that compiles while the service serves

_log = structlog.get_logger(__name__)


class Stopped(Exception):
    """Raised inside background work to stop it, because the service ends."""


class WorkBeside:
    """Runs background work on one thread. Start it only once the service serves: earlier it would slow down the start.

    Stop it before the process ends. Otherwise the interpreter's shutdown crashes the process while the thread is inside
    an operator.
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._starts = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_started(self) -> bool:
        return self._thread is not None

    def start(self, *works: Work) -> None:
        """Starts the thread, which runs `works` one after the other, unless `stop` was called. Any thread may call it,
        once. If the system gives no thread, it logs that and nothing runs.
        """
        assert self._thread is None, "is started once"
        thread = threading.Thread(target=self._run, args=works, name="work-beside", daemon=True)
        with self._starts:
            if not self._stopping.is_set():
                try:
                    thread.start()
                except RuntimeError:
                    _log.error("work_beside_failed", exc_info=True)
                    return
                self._thread = thread

    def stop(self, timeout_s: float) -> bool:
        """Asks the thread to stop, and waits. Returns False if it did not end within `timeout_s`.

        The thread stops when its work next calls its Check, which then raises Stopped.
        """
        self._stopping.set()
        with self._starts:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

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
    """Wraps `populate`, which allocates the KV pool's memory, so that an OSError is logged and not raised.

    Pages that it did not reach get memory when they are first used.
    """
    return partial(_populate_logged, populate)


def _populate_logged(populate: Work, check: Check) -> None:
    try:
        populate(check)
    except OSError as error:
        _log.warning("kv_pool_not_populated", error=str(error))


def new_fusing(
    engine: CpuEngine, model: TargetModel, draft: PagedHead | None, *, num_threads: int, max_tokens: int
) -> Work | None:
    """Returns the background work that compiles each forward of `model` and `draft` into one program.

    It calls `CpuEngine.fuse`, which explains the other arguments. An error is logged, and the model runs on as before.
    Returns None if the model cannot be compiled.
    """
    if model.new_decoder is None:
        if draft is not None:
            draft.new_programs = None
        is_fp8 = model.layer_group.dtype == KV_FP8
        reason = "KV is in FP8" if is_fp8 else "the model's class, dtype or sizes are not known to it"
        _log.info("fused_forward_unavailable", reason=reason)
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
