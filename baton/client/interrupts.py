"""A decorator that keeps the exception of Ctrl-C out of gRPC's code."""

from __future__ import annotations

import _thread
import functools
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_LOOK_S = 0.2
"""Seconds between looks for interrupts: one just before the main thread's wait does not end the wait."""
P = ParamSpec("P")
R = TypeVar("R")


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that runs `function` on another thread if the main thread calls it. The main thread waits for
    the result. Where no thread can start, `function` runs on the main thread.

    Python raises KeyboardInterrupt between any two instructions of the main thread. If it does so between taking a lock
    and entering the block that releases it, later calls of the gRPC channel wait forever. An interrupted call goes on,
    on its thread.
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
