"""The happened-before relation of a run, as vector clocks of its transitions (the single steps of its processes)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from tests.interleavings.footprint import Footprint, Transition, Unit


class Clocks:
    """Vector clocks of a run's transitions, one entry per process.

    A transition happens after those that made it possible: the one before it in its process, a wait, an event seen
    done, or the enqueueing of its work. With `joins_conflicts` it also happens after each earlier transition that
    touches the same memory, unless both only read it. Memory units for which `counts(unit)` is False are ignored.
    """

    def __init__(self, *, joins_conflicts: bool, counts: Callable[[Unit], bool] = lambda unit: True) -> None:
        self._joins_conflicts = joins_conflicts
        self._counts = counts
        self._trace: list[tuple[Transition, dict[str, int]]] = []
        self._last: dict[str, int] = {}
        self._readers: dict[Unit, list[int]] = {}
        self._writers: dict[Unit, int] = {}

    def add(self, transition: Transition) -> list[int]:
        """Appends a transition. Returns the indices of earlier transitions that conflict with it and are not ordered
        before it by anything in between.
        """
        place = len(self._trace)
        clock: dict[str, int] = {}
        before = self._last.get(transition.process)
        for cause in (*transition.after, *(() if before is None else (before,))):
            _join(clock, self._trace[cause][1])
        reads = [unit for unit in transition.footprint.reads if self._counts(unit)]
        writes = [unit for unit in transition.footprint.writes if self._counts(unit)]
        races = []
        for other in sorted(self._conflicts(reads, writes), reverse=True):
            if clock.get(self._trace[other][0].process, -1) < other:
                races.append(other)
                if self._joins_conflicts:
                    _join(clock, self._trace[other][1])
        clock[transition.process] = place
        self._trace.append((transition, clock))
        self._last[transition.process] = place
        for unit in reads:
            self._readers.setdefault(unit, []).append(place)
        for unit in writes:
            self._writers[unit] = place
            self._readers[unit] = []
        return races

    def _conflicts(self, reads: Sequence[Unit], writes: Sequence[Unit]) -> set[int]:
        found: set[int] = set()
        for unit in reads:
            if unit in self._writers:
                found.add(self._writers[unit])
        for unit in writes:
            if unit in self._writers:
                found.add(self._writers[unit])
            found.update(self._readers.get(unit, ()))
        return found

    @property
    def digest(self) -> int:
        """A 64-bit digest of the run, the same in every process. Orders without an observable difference have the same
        digest. One poll of an event more or less counts as observable.
        """
        number: list[int] = []
        count: dict[str, int] = {}
        for transition, _ in self._trace:
            count[transition.process] = count.get(transition.process, 0) + 1
            number.append(count[transition.process])
        clocks: dict[str, list[str]] = {}
        for transition, clock in self._trace:
            seen = sorted((process, number[place]) for process, place in clock.items())
            clocks.setdefault(transition.process, []).append(str(seen))
        text = "\n".join(f"{process} {clocks[process]}" for process in sorted(clocks))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def both_touch(first: Footprint, second: Footprint) -> set[Unit]:
    """Returns the memory units that both transitions touch and at least one of them writes."""
    return (first.writes & (second.reads | second.writes)) | (first.reads & second.writes)


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for process, place in other.items():
        if place > clock.get(process, -1):
            clock[process] = place
