"""Computes the status page's figures: parses services' metrics, keeps the samples of a time window, and computes
quantiles and how much counters grew.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from gateway.status.snapshot import AcceptanceFigures, PoolFigures, Quantiles, ServiceFigures

PREFIX = "baton_"
_MONOTONIC = ("counter", "histogram")

Labels = tuple[tuple[str, str], ...]
"""Pairs of a label's name and value, sorted."""
Series = tuple[str, Labels]
"""Identifies a time series: the sample's name and its labels."""
DECODE_PHASES = ("queue", "prefill", "transfer", "first_decode", "inter_token")
PREFILL_PHASES = ("queue", "prefill")
PHASES: Mapping[str, Sequence[str]] = {"decode": DECODE_PHASES, "prefill": PREFILL_PHASES, "": ()}
_STATES = ("free", "reserved", "transferring", "running", "quarantined", "cached")


def role_of(exposition: Exposition) -> str:
    """Returns whether an exposition is of a "decode" or a "prefill" service: only a decode service counts delivered
    tokens.
    """
    return "decode" if exposition.has("baton_output_tokens_total") else "prefill"


def figures_of(role: str, increase: Increase, span_s: float) -> ServiceFigures:
    """Computes a service's figures from the increase of its counters in `span_s` seconds. Rates over 0 s are None."""
    steps, step_s = increase.histogram("baton_batch_size"), increase.histogram("baton_step_seconds")
    is_decode = role == "decode"
    # A prefill service computes prompts in its steps. A decode service counts the prompts of finished requests.
    prompt_tokens = "baton_prompt_tokens_total" if is_decode else "baton_step_tokens_sum"
    return ServiceFigures(
        requests_per_s=_rate(increase.total("baton_requests_total"), span_s),
        outcomes=outcomes_of(increase),
        output_tokens_per_s=_rate(increase.total("baton_output_tokens_total"), span_s) if is_decode else None,
        prompt_tokens_per_s=_rate(increase.total(prompt_tokens), span_s),
        handoff_bytes_per_s=_rate(increase.total("baton_handoff_bytes_total"), span_s),
        handoff_held_bytes_per_s=_rate(increase.total("baton_handoff_held_bytes_total"), span_s) if is_decode else None,
        cached_share=cached_share_of(increase),
        evicted_tokens_per_s=_rate(increase.total("baton_evicted_tokens_total"), span_s),
        steps_per_s=_rate(increase.total("baton_steps_total"), span_s),
        batch_size_mean=steps.mean,
        step_mean_s=step_s.mean,
        num_row_retries=round(increase.total("baton_row_retries_total")),
        num_retractions=round(increase.total("baton_retractions_total")),
        phases={phase: quantiles_of(phase, [increase]) for phase in PHASES[role]},
        acceptance=acceptance_of(increase),
    )


def outcomes_of(increase: Increase) -> dict[str, int]:
    counts = increase.by_label("baton_requests_total", "outcome")
    return {outcome: round(count) for outcome, count in sorted(counts.items())}


def quantiles_of(phase: str, increases: Sequence[Increase]) -> Quantiles:
    """Returns the median and the 99th percentile of a phase's duration, over the services of all `increases`."""
    merged: Histogram = merge([increase.histogram(f"baton_{phase}_seconds") for increase in increases])
    return Quantiles(merged.quantile(0.5), merged.quantile(0.99), round(merged.count))


def acceptance_of(increase: Increase) -> AcceptanceFigures | None:
    """Returns how many drafted tokens were accepted, as counts and shares, or None if none were drafted."""
    drafted, accepted = increase.total("baton_drafted_tokens_total"), increase.total("baton_accepted_tokens_total")
    accept_length = increase.histogram("baton_accept_length").mean
    if not drafted and accept_length is None:
        return None
    drafted_at = increase.by_label("baton_drafted_at_total", "position")
    accepted_at = increase.by_label("baton_accepted_at_total", "position")
    positions = sorted((position for position in drafted_at if position.isdecimal()), key=int)
    return AcceptanceFigures(
        drafted=round(drafted),
        accepted=round(accepted),
        acceptance=_ratio(accepted, drafted),
        accept_length=accept_length,
        by_position=tuple(_ratio(accepted_at.get(each, 0.0), drafted_at[each]) for each in positions),
    )


def cached_share_of(increase: Increase) -> float | None:
    """Returns the part of the rows' tokens whose KV was cached, or None if no row got its slots."""
    return _ratio(increase.total("baton_cached_tokens_total"), increase.total("baton_row_tokens_total"))


def pool_of(name: str, exposition: Exposition) -> PoolFigures:
    """Reads the metric `name`: how many rows, or slots, of a KV pool are in each state. Absent states count as 0."""
    return PoolFigures(*(round(exposition.gauge(name, state=state) or 0.0) for state in _STATES))


def _rate(count: float, span_s: float) -> float | None:
    return count / span_s if span_s > 0 else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class Exposition:
    """The metrics that a service exposed at one moment, by series.

    `counters` only grow while the process lives; they include the buckets, sums and counts of histograms.
    """

    counters: Mapping[Series, float]
    gauges: Mapping[Series, float]

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.gauges.get(series(name, **labels))

    def has(self, name: str) -> bool:
        return any(name == each for each, _ in (*self.counters, *self.gauges))


def series(name: str, **labels: str) -> Series:
    return name, tuple(sorted(labels.items()))


def parse_exposition(text: str) -> Exposition:
    """Parses Baton's metrics in `text`. Raises ValueError if the format is wrong or no metric is Baton's."""
    counters: dict[Series, float] = {}
    gauges: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        values = counters if family.type in _MONOTONIC else gauges
        for sample in family.samples:
            if not math.isfinite(sample.value) or sample.value < 0:
                raise ValueError(f"{sample.name} is {sample.value}")
            if sample.name.endswith("_bucket") and math.isnan(float(sample.labels.get("le", "nan"))):
                raise ValueError(f"{sample.name} has no bound")
            values[series(sample.name, **sample.labels)] = sample.value
    if not counters and not gauges:
        raise ValueError(f"no metric begins with {PREFIX}")
    return Exposition(counters, gauges)


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative histogram.

    `buckets` are pairs of an upper bound and the number of observations at or below it, ascending; the last bound is
    infinite.
    """

    buckets: tuple[tuple[float, float], ...]
    sum: float

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Estimates a quantile by interpolation within its bucket. `share` is between 0 and 1.

        Returns None if there are no observations.
        The first bucket begins at 0. Values above the last finite bound count as that bound.
        """
        if not self.count:
            return None
        rank = share * self.count
        lower, num_below = 0.0, 0.0
        for upper, num_upto in self.buckets:
            if num_upto >= rank and num_upto > num_below:
                if math.isinf(upper):
                    return lower
                return lower + (upper - lower) * (rank - num_below) / (num_upto - num_below)
            lower, num_below = upper, num_upto
        return lower

    def num_upto(self, bound: float) -> float:
        """Returns the number of observations that are known to be at or below `bound`."""
        return max((count for upper, count in self.buckets if upper <= bound), default=0.0)


def merge(histograms: Sequence[Histogram]) -> Histogram:
    """Returns one histogram with all observations. The histograms may have different bounds.

    The result has the bounds of all of them. Where a histogram lacks a bound, its count at the next lower one is used.
    """
    bounds = sorted({upper for each in histograms for upper, _ in each.buckets})
    return Histogram(
        tuple((bound, sum(each.num_upto(bound) for each in histograms)) for bound in bounds),
        sum(each.sum for each in histograms),
    )


@dataclass(frozen=True, slots=True)
class Increase:
    """The growth of counters between two samples, by name and labels."""

    by_name: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def between(cls, earlier: Exposition, later: Exposition) -> Self:
        """Returns the growth from an earlier to a later exposition of one service.

        If any counter shrank, the service has restarted; then the growth is counted from 0.
        """
        has_restarted = any(later.counters.get(key, 0.0) < value for key, value in earlier.counters.items())
        before = {} if has_restarted else earlier.counters
        by_name: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        for key, value in later.counters.items():
            name, labels = key
            by_name[name][labels] = value - before.get(key, 0.0)
        return cls(dict(by_name))

    @classmethod
    def sum(cls, increases: Iterable[Increase]) -> Self:
        total: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        for increase in increases:
            for name, by_labels in increase.by_name.items():
                of_name = total[name]
                for labels, value in by_labels.items():
                    of_name[labels] += value
        return cls(dict(total))

    def since(self, earlier: Increase) -> Increase:
        """Returns the growth after the end of `earlier`, which must have started at the same sample as this one."""
        nothing: Mapping[Labels, float] = {}
        return Increase(
            {
                name: {
                    labels: value - earlier.by_name.get(name, nothing).get(labels, 0.0) for labels, value in of.items()
                }
                for name, of in self.by_name.items()
            }
        )

    def total(self, name: str) -> float:
        """Returns the growth of `name`, summed over all labels."""
        return sum(self.by_name.get(name, {}).values())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Returns the growth of `name` for each value of `label`. Values without growth are left out."""
        return {
            dict(labels)[label]: value
            for labels, value in self.by_name.get(name, {}).items()
            if value and label in dict(labels)
        }

    def histogram(self, name: str) -> Histogram:
        of_name = self.by_name.get(f"{name}_bucket", {})
        buckets = sorted((float(dict(labels)["le"]), value) for labels, value in of_name.items())
        return Histogram(tuple(buckets), self.total(f"{name}_sum"))


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval between two successive samples.

    `before` is the growth of the counters from the first sample ever taken to the interval's start, and `after` the
    growth from that sample to the interval's end.
    """

    from_s: float
    to_s: float
    before: Increase
    after: Increase

    def rate(self, name: str) -> float:
        return (self.after.total(name) - self.before.total(name)) / (self.to_s - self.from_s)


class SampleWindow:
    """The samples of the last `window_s` seconds, oldest first."""

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._latest: tuple[float, Exposition] | None = None
        self._counted = Increase({})
        self._steps: deque[Interval] = deque()

    @property
    def latest(self) -> Exposition | None:
        return None if self._latest is None else self._latest[1]

    @property
    def steps(self) -> tuple[Interval, ...]:
        return tuple(self._steps)

    @property
    def first_s(self) -> float | None:
        """The time of the oldest sample, or None if there is none."""
        if self._steps:
            return self._steps[0].from_s
        return None if self._latest is None else self._latest[0]

    def add(self, now_s: float, exposition: Exposition) -> None:
        if self._latest is not None:
            at_s, earlier = self._latest
            before = self._counted
            self._counted = Increase.sum([before, Increase.between(earlier, exposition)])
            self._steps.append(Interval(at_s, now_s, before, self._counted))
        self._latest = now_s, exposition

    def forget(self, now_s: float) -> None:
        """Drops samples that are older than the window, but never the latest one."""
        while self._steps and self._steps[0].from_s < now_s - self._window_s:
            self._steps.popleft()

    def increase(self) -> Increase:
        """Returns the growth of counters over the whole window."""
        return self._steps[-1].after.since(self._steps[0].before) if self._steps else Increase({})
