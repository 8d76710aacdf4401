"""The document /status.json, whose keys are these fields. docs/status.md explains them.

None means unknown: nothing was observed, or there are not yet two samples to compare.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantiles:
    """`num_observed` counts the window's observations."""

    p50_s: float | None
    p99_s: float | None
    num_observed: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Members by state."""

    free: int
    reserved: int
    transferring: int
    running: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`drafted` and `accepted` count drafts of finished requests.

    `accept_length` is the mean number of tokens that a drafting step committed for a row. `by_position` is the share of
    accepted drafts that were one, two, ... tokens ahead.
    """

    drafted: int
    accepted: int
    acceptance: float | None
    accept_length: float | None
    by_position: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures over the window. `outcomes`, `num_row_retries` and `num_retractions` are counts; `phases` is by name."""

    requests_per_s: float | None
    outcomes: dict[str, int]
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    handoff_bytes_per_s: float | None
    steps_per_s: float | None
    batch_size_mean: float | None
    step_mean_s: float | None
    num_row_retries: int
    num_retractions: int
    phases: dict[str, Quantiles]
    acceptance: Acceptance | None


@dataclass(frozen=True, slots=True)
class Service:
    """One metrics endpoint. `role` is "decode", "prefill", or "" before its first answer; `is_ready` is its health.

    `reason` says why it is not reachable. Present states are None then, and `figures` keep what the window still has.
    """

    target: str
    address: str
    role: str
    is_reachable: bool
    is_ready: bool
    reason: str
    rows: Pool | None
    kv_slots: Pool | None
    num_queued: int | None
    num_running: int | None
    unsent_kv_bytes: int | None
    figures: Figures


@dataclass(frozen=True, slots=True)
class Replica:
    """A prefill replica as one decode service sees it."""

    address: str
    is_ready: bool
    num_rows: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode service, asked over gRPC, and its prefill replicas."""

    target: str
    address: str
    is_reachable: bool
    reason: str
    instance_id: str
    num_queued: int | None
    num_running: int | None
    prefill_replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """Output tokens per second of all services, between two rounds; the later one was `age_s` before the last."""

    age_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    """All services together. Requests, tokens, phases and acceptance come from decode services, the two
    `prefill_replica` phases from prefill services.
    """

    requests_per_s: float | None
    outcomes: dict[str, int]
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    handoff_sent_bytes_per_s: float | None
    handoff_received_bytes_per_s: float | None
    unsent_kv_bytes: int
    num_queued: int
    num_running: int
    num_row_retries: int
    num_retractions: int
    phases: dict[str, Quantiles]
    acceptance: Acceptance | None
    token_rates: tuple[Rate, ...]


@dataclass(frozen=True, slots=True)
class Outdated:
    """A target whose name cannot be looked up now, and why. Addresses found before are still sampled."""

    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The last whole round, taken `age_s` ago, or None before the first. `window_s` is the time that the samples span.

    `num_left_out` counts addresses that are found and not sampled.
    """

    interval_s: float
    age_s: float | None
    window_s: float
    num_left_out: int
    outdated: tuple[Outdated, ...]
    pair: Pair
    services: tuple[Service, ...]
    decode: tuple[Decode, ...]
