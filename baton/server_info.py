"""What servers say about themselves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class HealthStatus(Enum):
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNKNOWN_SERVICE = "unknown_service"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`layer_groups` maps each group of KV layers to its bytes per token.

    `digest` covers the model's configuration, weights and tokenizer; both services compare it.
    """

    model: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    version: str
    digest: str
    layer_groups: dict[str, int]


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Members of one pool by state; the states add up to `total`."""

    total: int
    free: int
    reserved: int
    transferring: int
    running: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class PrefillReplica:
    """`reason` says in words why it is not ready; `error_reason` is the reason of a request's error."""

    address: str
    is_ready: bool
    num_rows: int
    reason: str
    error_reason: str = ""


@dataclass(frozen=True, slots=True)
class InferenceLoad:
    """What a decode service holds."""

    instance_id: str
    rows: PoolLoad
    slots: PoolLoad
    num_queued: int
    num_running: int
    num_steps: int
    prefill_replicas: tuple[PrefillReplica, ...]
    num_row_retries: int
    num_retractions: int


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What a prefill service holds."""

    instance_id: str
    rows: PoolLoad
    slots: PoolLoad
    num_queued: int
    num_computing: int
    num_steps: int
    unsent_bytes: int
