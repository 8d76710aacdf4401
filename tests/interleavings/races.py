"""Finds races: accesses to shared memory that nothing orders. They may be right by luck in the order that was run, and
wrong in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.interleavings.clocks import Clocks, both_touch
from tests.interleavings.footprint import Transition, Unit


def is_of_shared_buffer(unit: Unit) -> bool:
    return isinstance(unit, tuple) and len(unit) == 2 and isinstance(unit[0], str)


def check_no_races(trace: Sequence[Transition], *, counts: Callable[[Unit], bool] = is_of_shared_buffer) -> None:
    """Raises AssertionError if two transitions touch the same unit of memory, one of them writes it, and neither is
    ordered before the other.

    They can be ordered by their process, by a wait of a stream or the host, or by an event that was seen done. `counts`
    selects the units that are checked.
    """
    clocks = Clocks(joins_conflicts=False, counts=counts)
    for transition in trace:
        for place in sorted(clocks.add(transition)):
            first = trace[place]
            unit = min(filter(counts, both_touch(first.footprint, transition.footprint)), key=str)
            raise AssertionError(
                f"a race for {unit}: {first.process} ({first.name}) and {transition.process} ({transition.name})"
            )
