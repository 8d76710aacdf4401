"""The one place where an engine's events leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from common.telemetry.timeline import Track

EventT = TypeVar("EventT")


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
