"""Functions that all kinds of streams share: run a piece (a unit of work), keep its failure, record its span, close."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from common.device.stream import DeviceLost, DeviceTimeout, Measured, PieceFailed, Scope, Stream, Work
from common.telemetry.timeline import NOT_RECORDED, Track


def piece_name(work: Callable[..., object]) -> str:
    """Returns the name of a function that runs on a stream. If it is a `partial` or a Measured, which wrap another
    function, returns the name of that function.
    """
    while isinstance(work, functools.partial | Measured):
        work = work.func if isinstance(work, functools.partial) else work.work
    return getattr(work, "__name__", type(work).__name__)


def figures_of(work: Callable[..., object]) -> Mapping[str, int]:
    """Returns the figures (numbers by name) that the timeline shows with this work. Only a Measured has any."""
    while isinstance(work, functools.partial):
        work = work.func
    return work.figures if isinstance(work, Measured) else {}


def piece_span(track: Track, work: Work, scope: Scope | None) -> AbstractContextManager[None]:
    """Returns a context manager that records `work` as a span on `track` while the calling thread runs it."""
    if track.ring is None:
        return NOT_RECORDED
    return track.span(piece_name(work), "" if scope is None else scope.name, **figures_of(work))


def run_piece(
    work: Work,
    scope: Scope | None,
    stream_scope: Scope,
    failure_for: Callable[[BaseException], BaseException] = lambda error: error,
) -> None:
    """Runs `work`, unless its `scope` (the group of work that fails together) or its stream has failed already.

    `stream_scope` stands for the whole stream: it fails when the stream does. An exception fails the scope, or the
    stream if there is no scope, with the error that `failure_for` makes of it. Only KeyboardInterrupt is also raised to
    the caller.
    """
    if failure_of(scope, stream_scope) is not None:
        return
    try:
        work()
    except BaseException as error:
        failed = scope or stream_scope
        failure = failure_for(error)
        failure.add_note(f"in piece {piece_name(work)!r} of {failed.name} on stream {stream_scope.name}")
        failed.fail(failure)
        if isinstance(error, KeyboardInterrupt):
            raise


def failure_of(scope: Scope | None, stream_scope: Scope) -> BaseException | None:
    """Returns the error that an event of `scope` carries if the stream reaches it now.

    It is the error of `scope`, else the stream's (that of `stream_scope`), or None if neither has failed. If the stream
    has lost its device, it is always the stream's DeviceLost.
    """
    if scope is not None and scope.error is not None and not isinstance(stream_scope.error, DeviceLost):
        return scope.error
    return stream_scope.error


def event_name(name: str, scope: Scope) -> str:
    """Returns the name of an event for error messages: `name` and the name of its scope, or only that of the scope if
    `name` is empty.
    """
    return f"{name} of {scope.name}" if name else scope.name


def raise_failure(error: BaseException | None, name: str) -> None:
    """Raises PieceFailed with `error` as its cause; does nothing if `error` is None. `name` is the event's name."""
    if error is not None:
        raise PieceFailed(f"{name}: {type(error).__name__}: {error}") from error


def close_all(streams: Iterable[Stream], timeout_s: float) -> None:
    """Closes all streams within `timeout_s` in total, then raises the first DeviceTimeout, if any."""
    deadline_s = time.monotonic() + timeout_s
    late: DeviceTimeout | None = None
    for stream in streams:
        try:
            stream.close(max(0.0, deadline_s - time.monotonic()))
        except DeviceTimeout as error:
            late = late or error
    if late is not None:
        raise late
