"""The document /status.json. Its keys are the fields of Snapshot, and `gateway`; docs/status.md explains them.

None means unknown: nothing was observed, or there are not yet two samples to compare.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of a duration. `num_observed` is the number of observations in the window."""

    p50_s: float | None
    p99_s: float | None
    num_observed: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """How many rows, or how many token slots, of a service's KV pool are in each state."""

    free: int
    reserved: int
    transferring: int
    running: int
    quarantined: int
    cached: int


@dataclass(frozen=True, slots=True)
class AcceptanceFigures:
    """How many drafted tokens were accepted. `drafted` and `accepted` count the drafts of finished requests.

    `accept_length` is the mean number of tokens that a step with drafts committed for a row. `by_position` has the
    accepted share of drafts one, two, ... tokens ahead, in steps in which a grammar forced no draft.
    """

    drafted: int
    accepted: int
    acceptance: float | None
    accept_length: float | None
    by_position: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """A service's figures over the window. `outcomes`, `num_row_retries` and `num_retractions` are counts.

    `cached_share` is the part of the rows' tokens whose KV was cached when the rows got their slots, and
    `handoff_held_bytes_per_s` the KV that was not sent because the decode service had it. `phases` maps the name of
    each phase of a request to how long requests spent in it.
    """

    requests_per_s: float | None
    outcomes: dict[str, int]
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    handoff_bytes_per_s: float | None
    handoff_held_bytes_per_s: float | None
    cached_share: float | None
    evicted_tokens_per_s: float | None
    steps_per_s: float | None
    batch_size_mean: float | None
    step_mean_s: float | None
    num_row_retries: int
    num_retractions: int
    phases: dict[str, Quantiles]
    acceptance: AcceptanceFigures | None


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The state and figures of one metrics endpoint.

    `address` is where its metrics are. `grpc_address` is the one by which decode services and `Snapshot.decode` name
    the service, or "" if it has not said. `role` is "decode", "prefill", or "" before the first answer. `is_ready` is
    the service's own report. If the service cannot be reached, `reason` says why, `rows` to `unsent_kv_bytes` are None,
    and `figures` cover the samples that are still in the window.
    """

    target: str
    address: str
    grpc_address: str
    role: str
    is_reachable: bool
    is_ready: bool
    reason: str
    rows: PoolFigures | None
    kv_slots: PoolFigures | None
    num_queued: int | None
    num_running: int | None
    unsent_kv_bytes: int | None
    figures: ServiceFigures


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """A prefill replica as one decode service sees it. Its cache is expected to have the KV of `num_known_tokens`."""

    address: str
    is_ready: bool
    num_rows: int
    num_known_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decode:
    """The state of one decode service, asked over gRPC, with its prefill replicas.

    It `is_degraded` while it computes prompts itself because no replica is ready.
    """

    target: str
    address: str
    is_reachable: bool
    reason: str
    instance_id: str
    num_queued: int | None
    num_running: int | None
    is_degraded: bool
    prefill_replicas: tuple[ReplicaFigures, ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """Output tokens per second of all services between two rounds.

    `age_s` is the time from the later of the two to the newest round.
    """

    age_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PairStatus:
    """The figures of all services together.

    Requests, tokens, phases and acceptance come from decode services, the two `prefill_replica` phases from prefill
    services. The shares of tokens with cached KV are those of all decode and of all prefill services.
    """

    requests_per_s: float | None
    outcomes: dict[str, int]
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    handoff_sent_bytes_per_s: float | None
    handoff_received_bytes_per_s: float | None
    handoff_held_bytes_per_s: float | None
    decode_cached_share: float | None
    prefill_cached_share: float | None
    unsent_kv_bytes: int
    num_queued: int
    num_running: int
    num_row_retries: int
    num_retractions: int
    phases: dict[str, Quantiles]
    acceptance: AcceptanceFigures | None
    token_rates: tuple[Rate, ...]


@dataclass(frozen=True, slots=True)
class Outdated:
    """A target whose name cannot be looked up now, with the reason. Its known addresses are still sampled."""

    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway itself, now. `model_names` is empty until a decode service has said what it serves. `errors` counts
    the requests since the gateway's start that it answered with an error, by HTTP status; 499: the client left. Health
    checks are left out.
    """

    version: str
    model_names: tuple[str, ...]
    errors: dict[str, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The result of the last complete round. `age_s` is its age; None before the end of the first round, during which
    `awaited` are the targets that have not been sampled yet.

    `window_s` is the time that the samples span. `num_left_out` counts known addresses that are not sampled because
    there are too many.
    """

    interval_s: float
    age_s: float | None
    window_s: float
    awaited: tuple[str, ...]
    num_left_out: int
    outdated: tuple[Outdated, ...]
    pair: PairStatus
    services: tuple[ServiceStatus, ...]
    decode: tuple[Decode, ...]
