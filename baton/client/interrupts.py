"""A decorator that keeps the exception of Ctrl-C out of gRPC's code."""

from __future__ import annotations

import _thread
import functools
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_LOOK_S = 0.2
"""How often a waiting main thread looks for interrupts: one that came just before its wait began does not end it."""
P = ParamSpec("P")
R = TypeVar("R")


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that runs `function` on another thread if the main thread calls it. The main thread waits for
    the result. Where no thread can start, `function` runs on the main thread.

    Python raises KeyboardInterrupt between any two instructions of the main thread. Between taking a lock and entering
    the block that gives it back, the lock stays taken, and the later calls of a gRPC channel would wait forever. A call
    that is interrupted goes on, on its thread.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        # The queue and the thread are written in C, so an interrupt leaves no lock of theirs taken.
        outcomes: queue.SimpleQueue[tuple[R, None] | tuple[None, BaseException]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcomes.put((function(*args, **kwargs), None))
            except BaseException as error:
                outcomes.put((None, error))

        try:
            _thread.start_new_thread(run, ())
        except RuntimeError:  # no thread can start: there are too many, or the interpreter ends
            return function(*args, **kwargs)
        while True:
            try:
                result, error = outcomes.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                pass
        if error is None:
            return result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    return call
