"""A stream that runs its work at once on the caller's own thread. It is the schedule stream of a CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial

from common.device.errors import PieceFailed, StreamClosed
from common.device.piece import event_name, failure_of, raise_failure, run_piece
from common.device.stream import Event, MilestoneWork, OnMilestone, Scope, Stream, StreamKind, StreamProgress, Work


class InlineEvent(Event):
    """An event that is done from the start, because all work before it has already run."""

    def __init__(self, name: str, error: BaseException | None) -> None:
        self._name = name
        self._error = error
        self._reached_s = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def synchronize(self, timeout_s: float) -> None:
        raise_failure(self._error, self._name)

    @property
    def error(self) -> BaseException | None:
        return self._error

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, InlineEvent), "an event of another stream"
        return self._reached_s - earlier._reached_s


class InlineStream(Stream):
    """A stream without a thread: `enqueue` runs the work before it returns.

    `wait` blocks the caller for at most `wait_timeout_s`, then raises DeviceTimeout.
    """

    def __init__(self, name: str, *, wait_timeout_s: float) -> None:
        self._scope = Scope(name)
        self._wait_timeout_s = wait_timeout_s
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._scope.name

    def progress(self) -> StreamProgress:
        """Returns the stream's progress, which is never busy: nothing is left to run after `enqueue` returns."""
        return StreamProgress(self.name, StreamKind.COMPUTE, is_busy=False, num_done=0, error=self._scope.error)

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        self._check_open()
        run_piece(work, scope, self._scope)

    def enqueue_with_milestones(
        self,
        work: MilestoneWork,
        num_milestones: int,
        scope: Scope | None = None,
        on_milestone: OnMilestone | None = None,
    ) -> Sequence[Event]:
        """Runs `work` at once and returns one event for each milestone (a point inside the work that it reports).

        Calls `on_milestone`, if given, when `work` reports a milestone. If `work` does not report one, its event is
        made after `work` has ended. All events are done when this returns.
        """
        reached: dict[int, Event] = {}

        def reach(number: int) -> None:
            event = reached.setdefault(number, self.record(scope))
            if on_milestone is not None:
                on_milestone(number, event)

        self.enqueue(partial(work, [partial(reach, number) for number in range(num_milestones)]), scope)
        return [reached.get(number) or self.record(scope) for number in range(num_milestones)]

    def record(self, scope: Scope | None = None, name: str = "") -> Event:
        self._check_open()
        return InlineEvent(event_name(name, scope or self._scope), failure_of(scope, self._scope))

    def wait(self, event: Event) -> None:
        self._check_open()
        with contextlib.suppress(PieceFailed):
            event.synchronize(self._wait_timeout_s)

    def close(self, timeout_s: float) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamClosed(f"stream {self.name} is closed")
