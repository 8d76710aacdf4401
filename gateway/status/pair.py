"""Computes the figures of all services together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from gateway.status.figures import (
    DECODE_PHASES,
    PREFILL_PHASES,
    acceptance_of,
    cached_share_of,
    outcomes_of,
    quantiles_of,
)
from gateway.status.increase import Increase
from gateway.status.snapshot import PairStatus, Rate, ServiceFigures, ServiceStatus
from gateway.status.watched_service import WatchedService


def pair_of(watched: Sequence[WatchedService], services: Sequence[ServiceStatus], now_s: float) -> PairStatus:
    """Combines the services' figures. `services` has the result of `view()` for each of `watched`, in the same order.

    A rate is the sum of the services' rates, each over the time for which that service was sampled.
    """
    decode = [each.increase() for each in watched if each.role == "decode"]
    prefill = [each.increase() for each in watched if each.role == "prefill"]
    of_decode = Increase.sum(decode)

    def rate(role: str, figure: Callable[[ServiceFigures], float | None]) -> float | None:
        known = [value for each in services if each.role == role and (value := figure(each.figures)) is not None]
        return sum(known) if known else None

    return PairStatus(
        requests_per_s=rate("decode", lambda figures: figures.requests_per_s),
        outcomes=outcomes_of(of_decode),
        output_tokens_per_s=rate("decode", lambda figures: figures.output_tokens_per_s),
        prompt_tokens_per_s=rate("decode", lambda figures: figures.prompt_tokens_per_s),
        handoff_sent_bytes_per_s=rate("prefill", lambda figures: figures.handoff_bytes_per_s),
        handoff_received_bytes_per_s=rate("decode", lambda figures: figures.handoff_bytes_per_s),
        handoff_held_bytes_per_s=rate("decode", lambda figures: figures.handoff_held_bytes_per_s),
        decode_cached_share=cached_share_of(of_decode),
        prefill_cached_share=cached_share_of(Increase.sum(prefill)),
        unsent_kv_bytes=sum(each.unsent_kv_bytes or 0 for each in services),
        num_queued=sum(each.num_queued or 0 for each in services if each.role == "decode"),
        num_running=sum(each.num_running or 0 for each in services if each.role == "decode"),
        num_row_retries=round(of_decode.total("baton_row_retries_total")),
        num_retractions=round(of_decode.total("baton_retractions_total")),
        phases={phase: quantiles_of(phase, decode) for phase in DECODE_PHASES}
        | {f"prefill_replica_{phase}": quantiles_of(phase, prefill) for phase in PREFILL_PHASES},
        acceptance=acceptance_of(of_decode),
        token_rates=_token_rates(watched, now_s),
    )


def _token_rates(watched: Sequence[WatchedService], now_s: float) -> tuple[Rate, ...]:
    by_round: defaultdict[float, float] = defaultdict(float)
    for step in (step for each in watched if each.role == "decode" for step in each.steps):
        by_round[step.to_s] += step.rate("baton_output_tokens_total")
    return tuple(Rate(now_s - at_s, rate) for at_s, rate in sorted(by_round.items()))
