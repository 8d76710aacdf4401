"""What the edge must hear, until it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.telemetry.timeline import Track
from decode_service.messages import Event

Deliver = Callable[[Sequence[Event]], None]


class Outbox:
    """Only the engine thread calls it. Without `deliver` everything is kept until it is taken."""

    def __init__(self, deliver: Deliver | None, track: Track) -> None:
        self._deliver = deliver
        self._track = track
        self._events: list[Event] = []

    def post(self, event: Event) -> None:
        self._events.append(event)

    def hand_over(self) -> None:
        """To be called before a wait, so that nobody else waits with it, and where the engine ends; and not before: the
        edge's thread, once it has something to do, keeps the engine's from the interpreter, while a forward is still to
        be launched.
        """
        if self._deliver is not None and self._events:
            with self._track.span("deliver", events=len(self._events)):
                self._deliver(self._taken())

    def take(self, *, is_handed_over_soon: bool) -> Sequence[Event]:
        """Of a step that ends."""
        return () if is_handed_over_soon and self._deliver is not None else self._taken()

    def _taken(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return events
