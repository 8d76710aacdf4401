"""What all streams share: they run a piece, keep its failure, record its span, and close."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from common.device.errors import DeviceLost, DeviceTimeout, PieceFailed
from common.device.stream import Measured, Scope, Stream, Work
from common.telemetry.timeline import NOT_RECORDED, Track


def piece_name(work: Callable[..., object]) -> str:
    while isinstance(work, functools.partial | Measured):
        work = work.func if isinstance(work, functools.partial) else work.work
    return getattr(work, "__name__", type(work).__name__)


def figures_of(work: Callable[..., object]) -> Mapping[str, int]:
    while isinstance(work, functools.partial):
        work = work.func
    return work.figures if isinstance(work, Measured) else {}


def piece_span(track: Track, work: Work, scope: Scope | None) -> AbstractContextManager[None]:
    """The span of a piece that runs on the calling thread, which `track` belongs to."""
    if track.ring is None:
        return NOT_RECORDED
    return track.span(piece_name(work), "" if scope is None else scope.name, **figures_of(work))


def run_piece(
    work: Work,
    scope: Scope | None,
    stream_scope: Scope,
    failure_for: Callable[[BaseException], BaseException] = lambda error: error,
) -> None:
    """Run `work` unless its scope or its stream has failed; keep what it raises in the scope, or else in the stream,
    as what `failure_for` makes of it.

    KeyboardInterrupt is kept and also goes on to the caller.
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
    """What an event reached now, recorded in `scope`, carries. A stream whose device is lost says so, whatever the
    piece raised that met it first.
    """
    if scope is not None and scope.error is not None and not isinstance(stream_scope.error, DeviceLost):
        return scope.error
    return stream_scope.error


def event_name(name: str, scope: Scope) -> str:
    return f"{name} of {scope.name}" if name else scope.name


def raise_failure(error: BaseException | None, name: str) -> None:
    """Raise PieceFailed from `error`, if there is one."""
    if error is not None:
        raise PieceFailed(f"{name}: {type(error).__name__}: {error}") from error


def close_all(streams: Iterable[Stream], timeout_s: float) -> None:
    """Close all streams within one bound, then raise the first DeviceTimeout, if any."""
    deadline_s = time.monotonic() + timeout_s
    late: DeviceTimeout | None = None
    for stream in streams:
        try:
            stream.close(max(0.0, deadline_s - time.monotonic()))
        except DeviceTimeout as error:
            late = late or error
    if late is not None:
        raise late
