"""A service's work beside serving: what makes it faster, but need not have happened before it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from common.host.cores import set_own_num_threads

Check = Callable[[], None]
Work = Callable[[Check], None]
"""To call what it is given between its parts, which raises Stopped when the service ends. Whatever else it raises is
logged, and the next one begins.
"""

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
