"""The loops of both engines: the one place where their events leave, and how long they wait when idle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from common.device.stream import WakeUp
from common.telemetry.timeline import Track

EventT = TypeVar("EventT")

_IDLE_WAIT_S = 0.5
_QUEUED_WAIT_S = 0.05


class Outbox(Generic[EventT]):
    """Collects events for the edge until they are handed over. Only the engine thread calls it.

    `hand_over` passes them to `deliver`. Without `deliver` every event is kept until `take`.
    """

    def __init__(self, deliver: Callable[[Sequence[EventT]], None] | None, track: Track) -> None:
        self._deliver = deliver
        self._track = track
        self._events: list[EventT] = []

    def post(self, event: EventT) -> None:
        self._events.append(event)

    def post_all(self, events: Iterable[EventT]) -> None:
        self._events += events

    def hand_over(self) -> None:
        """Passes the collected events to `deliver`. The edge's thread then competes for the interpreter."""
        if self._deliver is not None and self._events:
            with self._track.span("deliver", events=len(self._events)):
                self._deliver(self._taken())

    def take(self, *, is_handed_over_soon: bool = False) -> Sequence[EventT]:
        """Removes the collected events and returns them, for the end of a step.

        If `deliver` exists and `is_handed_over_soon` is True, it keeps them for `hand_over` and returns no event.
        """
        return () if is_handed_over_soon and self._deliver is not None else self._taken()

    def _taken(self) -> Sequence[EventT]:
        events, self._events = self._events, []
        return events


def idle_wait_s(*, has_work: bool, awaits_device: bool, has_queued: bool, wake_up: WakeUp) -> float:
    """Returns for how many seconds an engine waits for commands before its next step.

    That is 0 if it has work to launch or to take. If it waits for the device, `wake_up` tells it when, or how often to
    look. Requests that are queued may start, or be overdue, without a command.
    """
    if has_work:
        return 0.0
    if awaits_device:
        return wake_up.wait_s
    return _QUEUED_WAIT_S if has_queued else _IDLE_WAIT_S
