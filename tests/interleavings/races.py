"""Accesses to shared memory that nothing orders: right by luck in the order that was run, and wrong in another."""

from __future__ import annotations

from collections.abc import Sequence

from tests.interleavings.explored_device import Transition
from tests.interleavings.footprint import Unit


def check_no_races(trace: Sequence[Transition]) -> None:
    """Of two accesses to a part of a shared buffer, one of them writing, one must have come first: by its process's
    order, because a stream or the host waited for it, or because an event was seen done. AssertionError otherwise.
    """
    clocks: list[dict[str, int]] = []
    last: dict[str, int] = {}
    writer: dict[Unit, int] = {}
    readers: dict[Unit, list[int]] = {}
    for place, transition in enumerate(trace):
        process, footprint = transition.process, transition.footprint
        clock: dict[str, int] = {}
        for cause in (*transition.after, *((last[process],) if process in last else ())):
            for other, seen in clocks[cause].items():
                clock[other] = max(seen, clock.get(other, -1))

        def follows(earlier: int, clock: dict[str, int] = clock, process: str = process) -> bool:
            of = trace[earlier].process
            return of == process or clock.get(of, -1) >= earlier

        for unit in filter(_is_of_shared_buffer, footprint.reads | footprint.writes):
            before = [writer[unit]] if unit in writer else []
            if unit in footprint.writes:
                before += readers.get(unit, [])
            for earlier in before:
                first = trace[earlier]
                assert follows(earlier), (
                    f"a race for {unit}: {first.process} ({first.name}) and {process} ({transition.name})"
                )
        clock[process] = place
        clocks.append(clock)
        last[process] = place
        for unit in filter(_is_of_shared_buffer, footprint.reads):
            readers.setdefault(unit, []).append(place)
        for unit in filter(_is_of_shared_buffer, footprint.writes):
            writer[unit], readers[unit] = place, []


def _is_of_shared_buffer(unit: Unit) -> bool:
    return isinstance(unit, tuple) and len(unit) == 2 and isinstance(unit[0], str)
