"""Chooses how many levels each step drafts: the depth that commits the most tokens per second.

A step that drafts d levels for B rows commits 1 + a1 + … + ad tokens a row, where ai is how often draft i is accepted.
The time of a step is measured while serving (step_times.py). It includes drafting, verifying, the head's reading of the
committed tokens, and the stream's wait for the next step, which cannot be prepared before verify has ended. The depth
with the most tokens per second is chosen; depth 0 is decoding without drafts. Now and then a step probes another depth
to measure it: one that was not measured yet, or a neighbour of the best.

At depth 0 the draft head does not read each token; it catches up now and then (`DraftBacklog`), and every step is
charged its share of that. Drafting needs a draft seed from the step before. A step of depth 0 leaves one only if the
head catches up in that step, and drafts must pay for that too.

Drafts that a grammar forces are expected to be accepted, so the head is judged by its own drafts alone. Whether to keep
a draft seed, or to begin drafting, depends on how often drafts of both kinds are accepted.

A probe with drafts is followed by a step of depth 0, with which its time is compared. If the best depth drafts, its
next step comes right after that step, and is compared with it too. A depth with too few measurements is probed soon.
Any other probe waits until it costs at most 0.75% of the time since the last probe, or for 1024 steps. If the head must
catch up anyway for want of room, the draft seed is free and the probe is cheaper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.telemetry.stats import SpeculationStats
from decode_service.speculate.spec_info import SpecInfo, Unread
from decode_service.speculate.step_times import StepTimes

_FIRST_ACCEPTANCE = 0.7
# The weight of one draft in an average rate; a draft counts once per step since the last one of its level
_ACCEPTANCE_WEIGHT = 0.02
_MAX_STALE_STEPS = 16
# The least number of steps between probes of unmeasured depths; grows with each such probe in a row
_NEW_PROBE_INTERVAL = 2
_LONGEST_NEW_PROBE_INTERVAL = 16
_PROBE_INTERVAL = 64  # the least number of steps between other probes
_PROBE_SHARE = 0.0075  # the share of time that probes may cost in the long run
_LONGEST_PROBE_INTERVAL = 1024  # in steps; then a probe is due at any cost
_LEAST_FORCED_SHARE = 1e-3  # a smaller share of forced drafts counts as none
_BEGIN_STEPS = 64  # steps with drafts that share the cost of beginning to draft
_HOPELESS = 0.8  # share of the best depth's tokens/s; an unmeasured depth estimated below it is not probed
_MARGIN = 1.02  # drafts must bring this factor at least, because measured times have errors of that size


class Depth(Protocol):
    """The policy that decides how deep the next step drafts."""

    @property
    def spec_infos(self) -> Sequence[SpecInfo]:
        """One SpecInfo for each depth that may be chosen, the deepest last.

        `choose` may also return the first one with `leaves_seed` False.
        """

    def choose(self, *, unread: Unread, num_wanted: int, num_forced: NDArray[np.int64]) -> SpecInfo:
        """Returns the SpecInfo for the next step, which has B rows, of which `num_wanted` want drafts.

        `unread` are the rows' tokens that the drafter has not read. `num_forced` [B] says how many drafts of
        each row its grammar forces: they are expected to be accepted. It is 0 for rows that want no drafts. Only
        `launched` makes a choice final, so `choose` may be called more than once per step.
        """

    def launched(self, spec_info: SpecInfo) -> None:
        """Records that the next step was launched with `spec_info`, whose depth is the chosen one or a smaller one."""

    def observe(self, spec_info: SpecInfo, *, unread: Unread, stats: SpeculationStats) -> None:
        """Records the acceptance and times of an ended step. `unread` are its rows' tokens that the drafter had not
        read before the step.
        """


class FixedDepth:
    """A Depth that chooses the same depth for every step, but drafts nothing for a batch whose rows want no drafts."""

    def __init__(self, spec_info: SpecInfo) -> None:
        self._spec_info = spec_info

    @property
    def spec_infos(self) -> Sequence[SpecInfo]:
        spec_infos = (self._spec_info.at_depth(0), self._spec_info)
        return spec_infos if self._spec_info.has_drafts else spec_infos[1:]

    def choose(self, *, unread: Unread, num_wanted: int, num_forced: NDArray[np.int64]) -> SpecInfo:
        return self._spec_info if num_wanted else self._spec_info.at_depth(0)

    def launched(self, spec_info: SpecInfo) -> None:
        pass

    def observe(self, spec_info: SpecInfo, *, unread: Unread, stats: SpeculationStats) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Expected:
    """The number of tokens a step is expected to commit and the seconds it is expected to take."""

    num_tokens: float
    seconds: float
    tokens_per_s: float

    @classmethod
    def of(cls, num_tokens: float, seconds: float) -> _Expected:
        return cls(num_tokens, seconds, num_tokens / seconds)

    def loss_s(self, best: _Expected) -> float:
        """Returns how many seconds longer this step takes than `best` would take for the same number of tokens."""
        return self.seconds - self.num_tokens / best.tokens_per_s


class AdaptiveDepth:
    """A Depth that chooses, by measured steps, how many levels to draft: 0 to `deepest.num_steps`, which is at least 1.

    It reads no clock: its choices depend only on what it is given.
    """

    def __init__(self, deepest: SpecInfo) -> None:
        self._reads_drafts = deepest.reads_drafts
        self._spec_infos = [deepest.at_depth(depth) for depth in range(deepest.num_steps + 1)]
        self._acceptance = [_FIRST_ACCEPTANCE] * deepest.num_steps  # of the head's drafts
        self._forced_share = [0.0] * deepest.num_steps  # how often a row's draft of the level is forced
        self._are_forced = Counter[int]()  # maps a number of forced drafts to how many rows of the next step have it
        self._stale_steps = [1] * deepest.num_steps
        self._times = StepTimes(num_levels=deepest.num_steps)
        self._has_seeds = True
        self._follows_probe = False  # whether the step launched last was a probe with drafts
        self._probe_is_new: bool | None = None  # None: the last choice was no probe
        self._num_since_probe = 0
        self._num_new = 0  # consecutive probes of depths without enough measurements
        self._num_probes = 0

    @property
    def spec_infos(self) -> Sequence[SpecInfo]:
        return self._spec_infos

    def choose(self, *, unread: Unread, num_wanted: int, num_forced: NDArray[np.int64]) -> SpecInfo:
        self._probe_is_new = None
        self._are_forced = Counter(num_forced[num_forced > 0].tolist())
        self._are_forced[0] = num_wanted - self._are_forced.total()
        if not num_wanted:
            return self._spec_infos[0].without_seed()
        if not self._times.is_known:
            return self._spec_infos[0]
        num_rows = len(unread.num_tokens)
        begin_s = self._begin_s(unread)
        steps = usual_steps = self._expected(num_rows, {0: num_wanted}, self._usual_acceptance, begin_s)
        if self._has_seeds and (len(self._are_forced) > 1 or any(self._forced_share)):
            steps = self._expected(num_rows, self._are_forced, self._acceptance, begin_s)
        best = self._best_depth(steps)
        probed, is_new = self._probed_depth(best, num_rows, steps)
        probe_s = steps[probed].loss_s(steps[best])
        if probed > 0:
            probe_s += steps[0].loss_s(steps[best]) if best > 0 else begin_s
        if self._is_due(is_new=is_new, probe_s=probe_s, step_s=steps[best].seconds):
            if probed > 0 and not self._has_seeds:
                return self._spec_infos[0]
            self._probe_is_new = is_new
            return self._spec_infos[probed]
        if best > 0 and self._has_seeds and not self._follows_probe:
            return self._spec_infos[best]
        if best > 0 or (self._has_seeds and self._best_depth(usual_steps)):
            return self._spec_infos[0]  # drafts that are not made in this step may pay in the next one
        return self._spec_infos[0].without_seed()

    @property
    def _usual_acceptance(self) -> list[float]:
        """How often a draft of each level is accepted, whether a grammar forces it or not."""
        return [share + (1 - share) * rate for share, rate in zip(self._forced_share, self._acceptance, strict=True)]

    def launched(self, spec_info: SpecInfo) -> None:
        for level, share in enumerate(self._forced_share):
            num_forced = sum(num for length, num in self._are_forced.items() if length > level)
            if share or num_forced:
                num_wanted = self._are_forced.total()
                share += _weight(num_wanted) * (num_forced / max(1, num_wanted) - share)
                self._forced_share[level] = share if share >= _LEAST_FORCED_SHARE else 0.0
        self._has_seeds = spec_info.leaves_seed
        self._follows_probe = self._probe_is_new is not None and spec_info.has_drafts
        self._num_since_probe += 1
        if self._probe_is_new is not None:
            self._num_since_probe = 0
            self._num_new = self._num_new + 1 if self._probe_is_new else 0
            self._num_probes += 1

    def observe(self, spec_info: SpecInfo, *, unread: Unread, stats: SpeculationStats) -> None:
        num_forced = stats.num_forced or (0,) * len(stats.accept_lens)
        num_rows = Counter(zip(stats.accept_lens, num_forced, strict=True))
        for level in range(spec_info.num_steps):
            own = {
                row: num
                for row, num in num_rows.items()
                if row[0] > level >= row[1] and (self._reads_drafts or not row[1])
            }
            num_own = sum(own.values())
            if num_own:
                rate = 1 - sum(num for row, num in own.items() if row[0] == level + 1) / num_own
                weight = _weight(num_own * self._stale_steps[level])
                self._acceptance[level] += weight * (rate - self._acceptance[level])
                self._stale_steps[level] = 0
        self._stale_steps = [min(steps + 1, _MAX_STALE_STEPS) for steps in self._stale_steps]
        self._times.add(spec_info, unread=unread, stats=stats)

    def _begin_s(self, unread: Unread) -> float:
        """Returns how many seconds the head needs to catch up, so that the next step has a draft seed.

        It returns 0 if there is a draft seed already, or if the head must catch up anyway.
        """
        return 0.0 if self._has_seeds or unread.must_be_read else self._times.read_s(unread.num_read)

    def _is_due(self, *, is_new: bool, probe_s: float, step_s: float) -> bool:
        """Returns whether a probe is due: a step that is launched to measure its depth.

        Before a probe that drafts, `choose` returns depth 0, unless the last step left a draft seed. `is_new` means
        that measurements are still needed; then cost does not matter. `probe_s` is the time that the probe loses
        against steps of the best depth, which take `step_s` each.
        """
        num_steps = self._num_since_probe
        if is_new:
            return num_steps >= min(_NEW_PROBE_INTERVAL + self._num_new, _LONGEST_NEW_PROBE_INTERVAL)
        can_afford = probe_s <= _PROBE_SHARE * num_steps * step_s
        return (num_steps >= _PROBE_INTERVAL and can_afford) or num_steps >= _LONGEST_PROBE_INTERVAL

    def _expected(
        self, num_rows: int, num_forced: Mapping[int, int], acceptance: Sequence[float], begin_s: float
    ) -> list[_Expected]:
        """Returns the expected tokens and seconds of a step of all `num_rows` rows, for each depth from 0 on.

        Only rows that want drafts commit more than one token: `num_forced` maps a number of forced drafts to how many
        of these rows have as many. The other drafts are accepted with `acceptance`, unless they follow forced ones that
        the head does not read. `begin_s`, the cost of a draft seed, is spread over `_BEGIN_STEPS` drafting steps.
        """
        plain_s, *drafting_s = self._times.steps_s(num_rows)
        steps = [_Expected.of(num_rows, plain_s)]
        num_accepted, are_reached = 0.0, {num: float(rows) for num, rows in num_forced.items()}
        for level, (rate, step_s) in enumerate(zip(acceptance, drafting_s, strict=True)):
            rate_after = rate if self._reads_drafts else 0.0
            are_reached = {
                num: rows if level < num else rows * (rate_after if num else rate) for num, rows in are_reached.items()
            }
            num_accepted += sum(are_reached.values())
            steps.append(_Expected.of(num_rows + num_accepted, step_s + begin_s / _BEGIN_STEPS))
        return steps

    def _best_depth(self, steps: Sequence[_Expected]) -> int:
        without, *rates = (step.tokens_per_s for step in steps)
        best = max(rates)
        return 1 + rates.index(best) if best > _MARGIN * without else 0

    def _probed_depth(self, best: int, num_rows: int, steps: Sequence[_Expected]) -> tuple[int, bool]:
        """Returns the depth to probe for `num_rows` rows, and whether it, or the depth `best`, still needs measuring.

        `steps` has what is expected of a step of each depth, from 0 on. An unmeasured depth that might be the best
        comes first. Otherwise the neighbours of the best take turns. If the best is depth 0, one probe in four goes
        deeper than 1, because a depth 1 that does not pay says nothing about deeper ones.
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


def _weight(num_drafts: int) -> float:
    """Returns the weight of so many new drafts in an average rate."""
    return 1 - (1 - _ACCEPTANCE_WEIGHT) ** num_drafts
