"""How deep each step drafts: as deep as its drafts pay for themselves.

A step that drafts d levels for B rows commits 1 + a1 + … + ad tokens a row, where ai is how often draft i is accepted.
What it takes is measured while serving (step_times.py): drafting, verifying, the head's reading behind it, and how
long the stream then waits for the next step, which cannot be prepared before verify has ended. The depth with the most
tokens a second is taken, 0 (decoding without drafts) included, and now and then another to see what it would take: one
that was not measured yet, or a neighbour.

At depth 0 the head is left behind (draft_backlog.py) and catches up now and then: a step is charged its part of that.
A probe comes behind a step without drafts, by which it is measured, and so is the depth that was taken until then.
To begin drafting again takes a step of depth 0 that leaves a seed, with the head catching up: drafts must pay for that
too. Where only a probe wants it, it is put off until the probe takes less than 0.75% of the time since the last one,
which is soon where the head has to catch up anyway for want of room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.telemetry.step_stats import SpeculationStats
from decode_service.speculate.spec_info import SpecInfo
from decode_service.speculate.step_times import StepTimes

_FIRST_ACCEPTANCE = 0.7
_ACCEPTANCE_WEIGHT = 0.02  # of one row's step, and of each that went by without such a draft, up to
_MAX_STALE_STEPS = 16
_NEW_PROBE_INTERVAL = 2  # in steps at least, where much is to be measured; more with each in a row
_LONGEST_NEW_PROBE_INTERVAL = 16
_PROBE_INTERVAL = 64  # at least, of any other
_PROBE_SHARE = 0.0075  # of the time, in the long run
_LONGEST_PROBE_INTERVAL = 1024  # in steps
_BEGIN_STEPS = 64  # with drafts, in which they are to pay for having begun
_HOPELESS = 0.8  # of the best depth's tokens/s, from what is known of other numbers of rows
_MARGIN = 1.02  # what drafts are to bring at least: times measured are off by as much


class Depth(Protocol):
    """How deep the next step is to draft."""

    @property
    def levels(self) -> Sequence[SpecInfo]:
        """Every depth that may be chosen, seed or none."""

    def choose(self, *, draft_lag: NDArray[np.int64], num_wanted: int) -> SpecInfo:
        """For B rows, of which `num_wanted` may have drafts. `draft_lag` [B] counts tokens that the head has not read.

        May be asked more than once a step.
        """

    def launched(self, spec_info: SpecInfo) -> None:
        """The step was launched as chosen, or with less."""

    def observe(self, spec_info: SpecInfo, *, draft_lag: NDArray[np.int64], stats: SpeculationStats) -> None:
        """The step's outcome; `draft_lag` [B] as it was before."""


class FixedDepth:
    """A Depth: always the same, unless nobody wants drafts."""

    def __init__(self, spec_info: SpecInfo) -> None:
        self._spec_info = spec_info

    @property
    def levels(self) -> Sequence[SpecInfo]:
        return (self._spec_info.at_depth(0), self._spec_info)

    def choose(self, *, draft_lag: NDArray[np.int64], num_wanted: int) -> SpecInfo:
        return self._spec_info if num_wanted else self._spec_info.at_depth(0)

    def launched(self, spec_info: SpecInfo) -> None:
        pass

    def observe(self, spec_info: SpecInfo, *, draft_lag: NDArray[np.int64], stats: SpeculationStats) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a step is expected to commit and take."""

    num_tokens: float
    seconds: float
    tokens_per_s: float

    @classmethod
    def of(cls, num_tokens: float, seconds: float) -> _Expected:
        return cls(num_tokens, seconds, num_tokens / seconds)

    def loss_s(self, best: _Expected) -> float:
        """How much sooner `best` would have committed as many tokens."""
        return self.seconds - self.num_tokens / best.tokens_per_s


class AdaptiveDepth:
    """A Depth between 0 and `deepest`'s. It depends only on what it is told."""

    def __init__(self, deepest: SpecInfo) -> None:
        self._levels = [deepest.at_depth(depth) for depth in range(deepest.num_steps + 1)]
        self._acceptance = [_FIRST_ACCEPTANCE] * deepest.num_steps
        self._stale_steps = [1] * deepest.num_steps
        self._times = StepTimes(num_levels=deepest.num_steps, max_draft_lag=deepest.max_draft_lag)
        self._has_seeds = True
        self._is_plain = False  # the step launched last
        self._probe_is_new: bool | None = None  # None: what was chosen last is no probe
        self._num_since_probe = 0
        self._num_new = 0  # probes of what was not measured well, in a row
        self._num_probes = 0

    @property
    def levels(self) -> Sequence[SpecInfo]:
        return self._levels

    def choose(self, *, draft_lag: NDArray[np.int64], num_wanted: int) -> SpecInfo:
        self._probe_is_new = None
        if not num_wanted:
            return self._levels[0].without_seed()
        if not self._times.is_known:
            return self._levels[0]
        num_rows = len(draft_lag)
        begin_s = self._begin_s(draft_lag)
        steps = self._expected(num_rows, num_wanted, begin_s)
        best = self._best_depth(steps)
        probed, is_new = self._probed_depth(best, num_rows, steps)
        probe_s = steps[probed].loss_s(steps[best])
        if probed > 0:
            probe_s += steps[0].loss_s(steps[best]) if best > 0 else begin_s
        if self._is_due(is_new=is_new, probe_s=probe_s, step_s=steps[best].seconds):
            if probed > 0 and not (self._is_plain and self._has_seeds):
                return self._levels[0]
            self._probe_is_new = is_new
            return self._levels[probed]
        if best > 0:
            return self._levels[best if self._has_seeds else 0]
        return self._levels[0].without_seed()

    def launched(self, spec_info: SpecInfo) -> None:
        self._has_seeds = spec_info.leaves_seed
        self._is_plain = not spec_info.has_drafts
        self._num_since_probe += 1
        if self._probe_is_new is not None:
            self._num_since_probe = 0
            self._num_new = self._num_new + 1 if self._probe_is_new else 0
            self._num_probes += 1

    def observe(self, spec_info: SpecInfo, *, draft_lag: NDArray[np.int64], stats: SpeculationStats) -> None:
        num_rows = Counter(stats.accept_lens)
        for level in range(spec_info.num_steps):
            num_reached = sum(num for accept_len, num in num_rows.items() if accept_len > level)
            if num_reached:
                rate = 1 - num_rows[level + 1] / num_reached
                weight = 1 - (1 - _ACCEPTANCE_WEIGHT) ** (num_reached * self._stale_steps[level])
                self._acceptance[level] += weight * (rate - self._acceptance[level])
                self._stale_steps[level] = 0
        self._stale_steps = [min(steps + 1, _MAX_STALE_STEPS) for steps in self._stale_steps]
        self._times.add(spec_info, draft_lag=draft_lag, stats=stats)

    def _begin_s(self, draft_lag: NDArray[np.int64]) -> float:
        """Seconds for leaving a seed for the next step; 0 if there is one, or if the head reads anyway."""
        if self._has_seeds or self._levels[0].must_catch_up(draft_lag):
            return 0.0
        return self._times.read_s(int(draft_lag.sum()) + len(draft_lag))

    def _is_due(self, *, is_new: bool, probe_s: float, step_s: float) -> bool:
        """Whether to probe, once there is a seed; `probe_s` is the time lost by that."""
        num_steps = self._num_since_probe
        if is_new:
            return num_steps >= min(_NEW_PROBE_INTERVAL + self._num_new, _LONGEST_NEW_PROBE_INTERVAL)
        can_afford = probe_s <= _PROBE_SHARE * num_steps * step_s
        return (num_steps >= _PROBE_INTERVAL and can_afford) or num_steps >= _LONGEST_PROBE_INTERVAL

    def _expected(self, num_rows: int, num_wanted: int, begin_s: float) -> list[_Expected]:
        """Expectations for the whole batch, by depth."""
        plain_s, *drafting_s = self._times.steps_s(num_rows)
        steps = [_Expected.of(num_rows, plain_s)]
        num_accepted, is_reached = 0.0, 1.0
        for rate, step_s in zip(self._acceptance, drafting_s, strict=True):
            is_reached *= rate
            num_accepted += is_reached
            steps.append(_Expected.of(num_rows + num_wanted * num_accepted, step_s + begin_s / _BEGIN_STEPS))
        return steps

    def _best_depth(self, steps: Sequence[_Expected]) -> int:
        without, *rates = (step.tokens_per_s for step in steps)
        best = max(rates)
        return 1 + rates.index(best) if best > _MARGIN * without else 0

    def _probed_depth(self, best: int, num_rows: int, steps: Sequence[_Expected]) -> tuple[int, bool]:
        """The depth to try for so many rows, and whether it, or the best, still needs measuring. One that might be the
        best comes first.

        Otherwise neighbours of the best take turns. At depth 0 one probe in four goes deeper, because a depth 1 that
        does not pay says nothing about deeper ones.
        """
        for depth, step in enumerate(steps[1:], start=1):
            is_hopeless = 0 < step.tokens_per_s < _HOPELESS * steps[best].tokens_per_s
            if not self._times.has(depth, num_rows) and not is_hopeless:
                return depth, True
        turn, deeper = self._num_probes, range(2, len(steps))
        if best == 0:
            return (deeper[turn // 4 % len(deeper)] if deeper and turn % 4 == 3 else 1), False
        others = [depth for depth in (best - 1, best + 1) if 0 < depth < len(steps)] or [0]
        return others[turn % len(others)], not self._times.has_all(best, num_rows)


def depth_of(spec_info: SpecInfo | None, *, adapts: bool) -> Depth | None:
    """None if nothing is drafted."""
    if spec_info is None:
        return None
    return AdaptiveDepth(spec_info) if adapts else FixedDepth(spec_info)
