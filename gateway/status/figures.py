"""Computes the figures of the status page from the counters of services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.status.series import Exposition, Histogram, Increase, merge
from gateway.status.snapshot import AcceptanceFigures, PoolFigures, Quantiles, ServiceFigures

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
