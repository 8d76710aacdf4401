"""Estimates, from measured steps, how long a step takes. With drafts that is a multiple of the time without drafts.

The machine's speed drifts: others use it, prompts are computed on it and contexts grow. So a step with drafts is
compared with an adjacent step without drafts that has about as many rows, and the ratio is kept. Absolute times are
used where a rough figure suffices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median_high

from common.telemetry.stats import SpeculationStats
from decode_service.speculate.spec_info import MAX_UNREAD, SpecInfo, Unread

_NUM_TIMES = 8
_NUM_ENOUGH = 3
_CLASSES_PER_DOUBLING = 2


@dataclass(frozen=True, slots=True)
class _TimedStep:
    depth: int
    num_rows: int
    seconds: float
    is_first: bool


class StepTimes:
    """Measured times of decode steps, by depth and number of rows, and estimates from them."""

    def __init__(self, *, num_levels: int) -> None:
        self._plain_s = _SizeCurve(min)  # seconds without drafts, by number of rows
        # Seconds per token that the head reads after steps without drafts, by number of such tokens
        self._read_s_per_token = _SizeCurve(min)
        # One curve per depth from 1: time with drafts over time without, by number of rows
        self._quotients = [_SizeCurve(median_high) for _ in range(num_levels)]
        # Pairs from steps without drafts: the head's seconds, and those of all else
        self._parts_s: deque[tuple[float, float]] = deque()
        self._head_share = 0.0  # the head's seconds over those of all else, from those pairs
        self._met: set[tuple[int, int]] = set()  # pairs (depth, class of row counts) of measured steps
        self._reads_met: set[int] = set()
        self._before: _TimedStep | None = None
        self._latest: _TimedStep | None = None

    @property
    def is_known(self) -> bool:
        """Whether the time of a step without drafts is known for some number of rows."""
        return self._plain_s.is_known

    def has(self, depth: int, num_rows: int) -> bool:
        """Returns whether `depth` was measured often enough for an estimate, with about `num_rows` rows."""
        return (self._quotients[depth - 1] if depth else self._plain_s).num_values(num_rows) >= _NUM_ENOUGH

    def has_all(self, depth: int, num_rows: int) -> bool:
        """Returns whether `depth`, at least 1, has as many measurements as are ever kept, for about `num_rows` rows."""
        return self._quotients[depth - 1].num_values(num_rows) == _NUM_TIMES

    def steps_s(self, num_rows: int) -> list[float]:
        """Returns, for each depth from 0 on, the estimated seconds from the start of a step to the start of the next.

        They are infinite for a depth that was never measured.
        """
        plain_s = self._plain_s.at(num_rows)
        drafting_s = [plain_s * curve.at(num_rows) if curve.is_known else math.inf for curve in self._quotients]
        return [plain_s * (1 + self._head_share), *drafting_s]

    def read_s(self, num_tokens: int) -> float:
        """Returns the estimated seconds in which the head reads `num_tokens` tokens after steps without drafts."""
        return num_tokens * self._read_s_per_token.at(num_tokens)

    def add(self, spec_info: SpecInfo, *, unread: Unread, stats: SpeculationStats) -> None:
        """Adds the times of one step, which `stats` has. `spec_info` says how deep the step drafted.

        `unread` are its rows' tokens that the drafter had not read before the step. A step in which the head did not
        run, because all drafts were forced, is too fast for its depth. It counts only until the depth has as many
        measurements as are kept.
        """
        if stats.verify_s <= 0:  # the clock is too coarse: this step cannot be measured or compared
            self._before = self._latest = None
            return
        num_rows, depth = len(unread.num_tokens), spec_info.num_steps
        if _skips_head(spec_info, num_rows, stats) and self.has_all(depth, num_rows):
            self._finish(idle_s=stats.idle_s or 0.0)
            self._before = self._latest = None
            return
        seconds = stats.draft_s + stats.verify_s
        if depth:
            seconds += stats.extend_s
        is_first = (depth, _class_of(num_rows)) not in self._met
        self._met.add((depth, _class_of(num_rows)))
        if not depth:
            num_read = unread.num_read if unread.are_read(spec_info) else 0
            if num_read and _class_of(num_read) in self._reads_met:
                self._read_s_per_token.add(num_read, stats.extend_s / num_read)
            elif num_read:
                self._reads_met.add(_class_of(num_read))
            if not is_first:
                self._plain_s.add(num_rows, stats.verify_s)
                if not spec_info.leaves_seed or unread.must_be_read:
                    self._parts_s.append((stats.extend_s, stats.verify_s))
                    if len(self._parts_s) > _whole_cycles(unread.max_tokens):
                        self._parts_s.popleft()
                    all_else_s = sum(all_else for _, all_else in self._parts_s)
                    self._head_share = sum(head for head, _ in self._parts_s) / all_else_s
        self._finish(idle_s=stats.idle_s or 0.0)
        self._latest = _TimedStep(depth, num_rows, seconds, is_first)

    def _finish(self, *, idle_s: float) -> None:
        """Adds `idle_s`, the seconds for which the forward stream was idle after the latest step, to that step's time.

        If only one of this step and the one before it drafted, the quotient of their times becomes a measurement for
        the depth of the one that drafted. Steps with very different numbers of rows are not compared, nor is a step
        that was the first of its depth with about so many rows.
        """
        before, step = self._before, self._latest
        if step is None:
            return
        self._before = step = replace(step, seconds=step.seconds + idle_s)
        if before is None or before.is_first or step.is_first or _class_of(before.num_rows) != _class_of(step.num_rows):
            return
        if (before.depth == 0) != (step.depth == 0):
            plain, drafting = (step, before) if before.depth else (before, step)
            if plain.seconds > 0:
                quotient = max(1.0, drafting.seconds / plain.seconds)
                self._quotients[drafting.depth - 1].add(drafting.num_rows, quotient)


def _skips_head(spec_info: SpecInfo, num_rows: int, stats: SpeculationStats) -> bool:
    """Returns whether the head would have drafted a chain, level by level, and did not run because all was forced."""
    runs = spec_info.topk == 1 and spec_info.num_steps > 1 and spec_info.reads_drafts
    return runs and stats.num_forced == (spec_info.num_steps,) * num_rows


def _whole_cycles(max_unread: int) -> int:
    """Returns how many pairs are kept: at least MAX_UNREAD, and a multiple of `max_unread`, so that each share of the
    head is that of whole cycles, from one time that it must catch up to the next.
    """
    return max_unread * math.ceil(MAX_UNREAD / max_unread)


class _SizeCurve:
    """A measured figure as a function of a size, such as the number of rows.

    Similar sizes form a class: sizes from 1 to 2, 2 to 4 and so on are two classes each. `figure` reduces the last few
    values of a class to one, such as their least. Older values are dropped, because contexts grow and text changes.
    """

    def __init__(self, figure: Callable[[Sequence[float]], float]) -> None:
        self._figure = figure
        self._values: dict[int, deque[float]] = {}
        self._figures: dict[int, float] = {}  # the reduced value of each class
        self._found: dict[int, float] = {}  # interpolated values by size, until a value is added

    @property
    def is_known(self) -> bool:
        return bool(self._values)

    def num_values(self, size: int) -> int:
        return len(self._values.get(_class_of(size), ()))

    def add(self, size: int, value: float) -> None:
        place = _class_of(size)
        values = self._values.setdefault(place, deque(maxlen=_NUM_TIMES))
        values.append(value)
        self._figures[place] = self._figure(values)
        self._found.clear()

    def at(self, size: int) -> float:
        """Returns the figure at `size`, interpolated between the classes seen.

        Outside them it is the figure of the nearest class. It is 0 if there is none.
        """
        if (found := self._found.get(size)) is None:
            found = self._found[size] = self._between(size)
        return found

    def _between(self, size: int) -> float:
        place = _class_of(size)
        below = max((seen for seen in self._figures if seen <= place), default=None)
        above = min((seen for seen in self._figures if seen >= place), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            return 0.0 if nearest is None else self._figures[nearest]
        least, most = self._figures[below], self._figures[above]
        if below == above:
            return least
        share = (size - _size_of(below)) / (_size_of(above) - _size_of(below))
        return least + share * (most - least)


@lru_cache(maxsize=4096)
def _class_of(size: int) -> int:
    return round(_CLASSES_PER_DOUBLING * math.log2(size))


def _size_of(place: int) -> float:
    return float(2 ** (place / _CLASSES_PER_DOUBLING))
