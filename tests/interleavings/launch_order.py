"""Tracks order and memory ownership on a device that runs each piece's Python code when it is enqueued, as CUDA does.

    engine's thread   ──make t──enqueue piece(t)──drop t──make u ...        u may have the memory that t had
    schedule stream   ──[ make t ]──────────────────────[ make u ]──▶       what the thread itself asks of the device
    forward stream    ·····························[ piece reads t ]──▶     much later, when the memory holds u

The Python code runs in one order only, and the tokens of that order are right. Other orders that the device could have
taken are found as races: two accesses to the same memory, one of them a write, that no wait and no finished event puts
in order. Freeing memory counts as a write by the stream that allocated it, because that stream may reuse the memory at
once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from common.device.stream import Event
from tests.interleavings.footprint import HOST, Footprint, Memory, Shared, Transition, Unit
from tests.interleavings.races import check_no_races
from tests.support.scripted_device import Observer, ScriptedEvent, ScriptedStream

SCHEDULE = "schedule"


class LaunchOrder(Observer):
    """Tracks one device, whose schedule stream is named SCHEDULE. `check` tells whether all accesses were ordered."""

    def __init__(self) -> None:
        self.trace = [Transition(HOST, "begin", ())]
        self._host = 0  # the host's last poll of an event: everything it knows to be done
        self._passed: dict[str, set[int]] = {}  # per stream: the work waited for since its own last work
        self._last: dict[str, int] = {}
        # By the id of the event, which is kept so that no other object gets its id.
        self._after_event: dict[int, tuple[ScriptedEvent, set[int]]] = {}
        self._running = SCHEDULE
        self._is_schedule_open = False
        self._memory = Memory(self._footprint, lambda: self._running, lets_go=True)
        self._memory.on_made = self._made
        self._memory.on_freed = self._freed
        self._memory.on_host_read = self._host_read

    @contextlib.contextmanager
    def watching(self, buffers: Iterable[Shared]) -> Iterator[None]:
        for buffer in buffers:
            self._memory.name(buffer.tensor, buffer.name, unit_dim=buffer.unit_dim)
        with self._memory.watching():
            yield

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        return self._memory.paused()

    def check(self) -> None:
        """Raises AssertionError if two accesses race."""
        check_no_races(self.trace, counts=lambda unit: True)

    # ---- calls to the streams -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def launching(self, stream: ScriptedStream, name: str) -> Iterator[None]:
        before, self._running = self._running, stream.name
        self._begin(stream.name, name)
        try:
            yield
        finally:
            self._running = before

    def recorded(self, stream: ScriptedStream, event: ScriptedEvent) -> None:
        last = self._last.get(stream.name)
        after = self._passed.get(stream.name, set()) | (set() if last is None else {last})
        self._after_event[id(event)] = (event, after)
        if stream.name == SCHEDULE:
            self._is_schedule_open = False
        elif self._running == stream.name:  # a milestone: what its piece does after it is not covered
            self._begin(stream.name, self.trace[self._last[stream.name]].name)

    def waited(self, stream: ScriptedStream, event: Event) -> None:
        self._passed.setdefault(stream.name, set()).update(self._after(event))
        if stream.name == SCHEDULE:
            self._is_schedule_open = False

    def seen_done(self, event: ScriptedEvent) -> None:
        after = self._after(event) - {self._host}
        if after:
            self._host = self._append(Transition(HOST, "saw an event", (), after={self._host, *after}))
            self._is_schedule_open = False

    def _after(self, event: Event) -> set[int]:
        return self._after_event[id(event)][1] if id(event) in self._after_event else set()

    def _begin(self, process: str, name: str) -> None:
        after = {self._host, *self._passed.pop(process, ())}
        self._last[process] = self._append(Transition(process, name, (), after=after))

    def _append(self, transition: Transition) -> int:
        self.trace.append(transition)
        return len(self.trace) - 1

    # ---- memory accesses ----------------------------------------------------------------------------------------

    def _footprint(self) -> Footprint:
        """Returns the footprint of the code that runs now: a piece, or work that the host gives the schedule stream."""
        if self._running == SCHEDULE and not self._is_schedule_open:
            self._begin(SCHEDULE, "schedule side")
            self._is_schedule_open = True
        return self.trace[self._last[self._running]].footprint

    def _made(self, unit: Unit, is_written: bool) -> None:
        """Notes a tensor that an operation made. If it was only allocated and not written, it belongs to the last work
        of its stream.
        """
        if is_written:
            self._footprint().writes.add(unit)
        elif self._running in self._last:
            self.trace[self._last[self._running]].footprint.writes.add(unit)

    def _freed(self, unit: Unit, maker: str) -> None:
        if maker == self._running:
            self._footprint().writes.add(unit)
            return
        self._append(Transition(maker, "what comes next there", (), Footprint(writes={unit}), {self._host}))

    def _host_read(self, units: Iterable[Unit], writer: str) -> None:
        """Notes a read by Python or numpy. Where a stream wrote the units, the host must have seen an event after the
        write. All other units were written by the host itself.
        """
        if self._running != SCHEDULE or writer == SCHEDULE:
            self._footprint().reads.update(units)
        else:
            read = Transition(HOST, "read by Python", (), Footprint(reads=set(units)), {self._host})
            self._host = self._append(read)
