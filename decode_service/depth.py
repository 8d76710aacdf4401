"""How deep each step drafts: as deep as its drafts pay for themselves.

A step that drafts d levels for B rows commits 1 + a1 + … + ad tokens a row, where ai is how often draft i is accepted,
and takes draft(d, B) + verify(B * nodes) + extend seconds, and those for which the stream then waits for the next step,
which cannot be prepared before verify has ended. All of these are measured while serving; the depth with the
most tokens a second is taken, 0 (decoding without drafts) included, and now and then another to see what it would take:
one that was not measured yet, or a neighbour.

At depth 0 the head is left behind (draft_backlog.py) and catches up now and then: a step is charged its part of that.
To begin drafting again takes a step of depth 0 that leaves a seed, with the head catching up: drafts must pay for that
too, and where only a probe wants it, it is put off until it takes a two-hundredth of the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from statistics import fmean, median
from typing import Protocol

from common.telemetry.step_stats import SpeculationStats
from decode_service.spec_info import SpecInfo

_FIRST_ACCEPTANCE = 0.7
_ACCEPTANCE_WEIGHT = 0.02  # of one row's step, and of each that went by without such a draft, up to
_MAX_STALE_STEPS = 16
_NUM_TIMES = 8
_FIRST_PROBE_INTERVAL = 2
_PROBE_INTERVAL = 128  # in steps, in the long run
_LONGEST_PROBE_INTERVAL = 1024  # where the head would have to catch up first
_BEGIN_SHARE = 0.005  # of the time, for that
_BEGIN_STEPS = 64  # with drafts, in which they are to pay for having begun
_MARGIN = 1.02  # what drafts are to bring at least: times measured are off by as much
_CLASSES_PER_DOUBLING = 4


class Depth(Protocol):
    """How deep the next step is to draft."""

    def choose(self, *, num_rows: int, num_wanted: int) -> SpecInfo:
        """For `num_rows` rows, of which `num_wanted` may be drafted for. May be asked more than once a step."""

    def launched(self, spec_info: SpecInfo) -> None:
        """The step was launched, with what was chosen or with less."""

    def observe(self, spec_info: SpecInfo, *, num_rows: int, stats: SpeculationStats) -> None:
        """Its outcome."""


class FixedDepth:
    """A Depth: always the same, unless nobody wants drafts."""

    def __init__(self, spec_info: SpecInfo) -> None:
        self._spec_info = spec_info

    def choose(self, *, num_rows: int, num_wanted: int) -> SpecInfo:
        return self._spec_info if num_wanted else self._spec_info.at_depth(0)

    def launched(self, spec_info: SpecInfo) -> None:
        pass

    def observe(self, spec_info: SpecInfo, *, num_rows: int, stats: SpeculationStats) -> None:
        pass


class AdaptiveDepth:
    """A Depth between 0 and `deepest`'s. It depends on nothing but what it is told."""

    def __init__(self, deepest: SpecInfo) -> None:
        self._levels = [deepest.at_depth(depth) for depth in range(deepest.num_steps + 1)]
        self._acceptance = [_FIRST_ACCEPTANCE] * deepest.num_steps
        self._stale_steps = [1] * deepest.num_steps
        self._verify_s = _Curve()  # by tokens
        self._extend_s = _Curve()  # behind drafts, by tokens
        self._catch_up_s = _Curve(num_times=deepest.max_draft_lag, figure=fmean)  # without drafts, by rows
        self._begin_s_per_row: deque[float] = deque([0.0], maxlen=_NUM_TIMES)  # to leave a seed without drafts
        self._seed_s = _Curve()  # the first level, from seeds, by rows
        self._draft_s = _Curve()  # one further level, by rows
        self._idle_s = {False: _Curve(), True: _Curve()}  # behind steps without and with drafts, by rows
        self._last: tuple[bool, int] | None = None  # of the step before: with drafts, rows
        self._has_seeds = True
        self._interval = _FIRST_PROBE_INTERVAL
        self._until_probe = _FIRST_PROBE_INTERVAL
        self._longest_interval = _PROBE_INTERVAL
        self._probes_deeper = True

    def choose(self, *, num_rows: int, num_wanted: int) -> SpecInfo:
        if not num_wanted:
            return self._levels[0].without_seed()
        best = self._best_depth(num_rows, num_wanted)
        self._longest_interval = _PROBE_INTERVAL if best > 0 else self._interval_between_begins(num_rows)
        wanted = self._probed_depth(best, num_rows) if self._until_probe <= 1 else best
        depth = wanted if self._has_seeds else 0
        if wanted > 0 or self._until_probe == 2:
            return self._levels[depth]
        return self._levels[0].without_seed()

    def launched(self, spec_info: SpecInfo) -> None:
        self._has_seeds = spec_info.leaves_seed
        self._until_probe = min(self._until_probe, self._longest_interval) - 1
        if self._until_probe == 0:
            self._interval = self._until_probe = min(2 * self._interval, self._longest_interval)
            self._probes_deeper = not self._probes_deeper

    def observe(self, spec_info: SpecInfo, *, num_rows: int, stats: SpeculationStats) -> None:
        for level in range(spec_info.num_steps):
            reached = [accept_len for accept_len in stats.accept_lens if accept_len > level]
            if reached:
                rate = sum(accept_len > level + 1 for accept_len in reached) / len(reached)
                weight = 1 - (1 - _ACCEPTANCE_WEIGHT) ** (len(reached) * self._stale_steps[level])
                self._acceptance[level] += weight * (rate - self._acceptance[level])
                self._stale_steps[level] = 0
        self._stale_steps = [min(steps + 1, _MAX_STALE_STEPS) for steps in self._stale_steps]
        if self._verify_s.add(num_rows * spec_info.num_verify_tokens, stats.verify_s):
            self._interval = self._until_probe = _FIRST_PROBE_INTERVAL
        if spec_info.num_steps:
            self._extend_s.add(num_rows * spec_info.max_accept_len, stats.extend_s)
        elif spec_info.leaves_seed:
            self._begin_s_per_row.append(stats.extend_s / num_rows)
        else:
            self._catch_up_s.add(num_rows, stats.extend_s)
        if spec_info.num_steps == 1:
            self._seed_s.add(num_rows, stats.draft_s)
        elif spec_info.num_steps > 1:
            further_s = max(0.0, stats.draft_s - self._seed_s.at(num_rows))
            self._draft_s.add(num_rows, further_s / (spec_info.num_steps - 1))
        if self._last is not None and stats.idle_s is not None:
            had_drafts, had_rows = self._last
            self._idle_s[had_drafts].add(had_rows, stats.idle_s)
        self._last = (spec_info.has_drafts, num_rows)

    def _interval_between_begins(self, num_rows: int) -> int:
        """In steps; in the middle of what beginning took, so that one slow time decides nothing."""
        step_s = self._verify_s.at(num_rows)
        begin_s = self._begin_s(num_rows)
        if begin_s >= _LONGEST_PROBE_INTERVAL * _BEGIN_SHARE * step_s:
            return _LONGEST_PROBE_INTERVAL
        return max(_PROBE_INTERVAL, round(begin_s / (_BEGIN_SHARE * step_s)))

    def _begin_s(self, num_rows: int) -> float:
        return num_rows * median(self._begin_s_per_row)

    def _tokens_per_s(self, depth: int, num_rows: int, num_wanted: int) -> float:
        """Expected of the whole batch, from what was measured."""
        num_accepted, is_reached = 0.0, 1.0
        for rate in self._acceptance[:depth]:
            is_reached *= rate
            num_accepted += is_reached
        level = self._levels[depth]
        step_s = self._verify_s.at(num_rows * level.num_verify_tokens)
        if depth:
            step_s += self._seed_s.at(num_rows) + (depth - 1) * self._draft_s.at(num_rows)
            step_s += self._extend_s.at(num_rows * level.max_accept_len)
            if not self._has_seeds:
                step_s += self._begin_s(num_rows) / _BEGIN_STEPS
        else:
            step_s += self._catch_up_s.at(num_rows)
        step_s += self._idle_s[depth > 0].at(num_rows)
        return (num_rows + num_wanted * num_accepted) / step_s

    def _best_depth(self, num_rows: int, num_wanted: int) -> int:
        depths = range(len(self._levels))
        if not self._verify_s.is_known:
            return depths[-1]
        without, *rates = (self._tokens_per_s(depth, num_rows, num_wanted) for depth in depths)
        best = max(rates)
        return 1 + rates.index(best) if best > _MARGIN * without else 0

    def _probed_depth(self, best: int, num_rows: int) -> int:
        if not self._verify_s.is_known:
            return best
        for depth, level in enumerate(self._levels):
            if not self._verify_s.has(num_rows * level.num_verify_tokens):
                return depth
        neighbours = [depth for depth in (best - 1, best + 1) if 0 <= depth < len(self._levels)]
        return neighbours[-1] if self._probes_deeper else neighbours[0]


class _Curve:
    """Seconds as a function of a size: of sizes within a fifth of each other a figure of the last few times.

    By default the least, because whatever else runs on the machine only ever adds; of the last few, because contexts
    grow. The first of each such class of sizes does not count: kernels are chosen and memory is found then.
    """

    def __init__(self, *, num_times: int = _NUM_TIMES, figure: Callable[[Collection[float]], float] = min) -> None:
        self._num_times = num_times
        self._figure = figure
        self._times: dict[int, deque[float]] = {}

    @property
    def is_known(self) -> bool:
        return any(self._times.values())

    def has(self, size: int) -> bool:
        return bool(self._times.get(_class_of(size)))

    def add(self, size: int, seconds: float) -> bool:
        """Whether such a size was not known yet."""
        place = _class_of(size)
        if place not in self._times:
            self._times[place] = deque(maxlen=self._num_times)
            return True
        times = self._times[place]
        times.append(seconds)
        return len(times) == 1

    def at(self, size: int) -> float:
        """Between sizes that were seen on a line; below them what the smallest took; beyond them in proportion.

        0 when nothing was seen.
        """
        place = _class_of(size)
        if self.has(size):
            return self._figure(self._times[place])
        below = max((seen for seen, times in self._times.items() if times and seen < place), default=None)
        above = min((seen for seen, times in self._times.items() if times and seen > place), default=None)
        if below is None:
            return 0.0 if above is None else self._figure(self._times[above])
        if above is None:
            return self._figure(self._times[below]) * size / _size_of(below)
        share = (size - _size_of(below)) / (_size_of(above) - _size_of(below))
        least, most = (self._figure(self._times[seen]) for seen in (below, above))
        return least + share * (most - least)


def _class_of(size: int) -> int:
    return round(_CLASSES_PER_DOUBLING * math.log2(size))


def _size_of(place: int) -> float:
    return float(2 ** (place / _CLASSES_PER_DOUBLING))
