"""The model, the load and the tokens that servers report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from common.telemetry.stats import PoolCounts


class HealthStatus(Enum):
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNKNOWN_SERVICE = "unknown_service"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model.

    `layer_groups` maps the name of each group of KV layers to its KV bytes per token. `digest` covers the model's
    configuration, weights and tokenizer. `output_format` names the form in which the model writes tool calls, and
    reasoning if it `has_reasoning`. Both are derived from the chat template. `sampling_defaults` holds the sampling
    options that the model's generation config sets, by name; they apply where a request does not set them.
    `chat_template_variables` are the variables that `chat_template_kwargs` may set. `special_tokens` are the texts of
    special tokens by their roles, such as "eos_token".
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
    output_format: str
    has_reasoning: bool
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    chat_template_variables: tuple[str, ...] = ()
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a text. `pieces` are the tokens as the vocabulary spells them; empty if they were not asked for."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrefillReplica:
    """A prefill replica as a decode service sees it.

    If it is not ready, `reason` says why in words, and `error_reason` is the error reason that requests get.
    `num_known_tokens` is the number of tokens whose KV the decode service expects to be in the replica's cache.
    """

    address: str
    is_ready: bool
    num_rows: int
    reason: str
    error_reason: str = ""
    num_known_tokens: int = 0


@dataclass(frozen=True, slots=True)
class InferenceLoad:
    """The load of a decode service.

    It `is_degraded` while it computes prompts itself because no prefill replica is ready.
    """

    instance_id: str
    rows: PoolCounts
    slots: PoolCounts
    num_queued: int
    num_running: int
    num_steps: int
    prefill_replicas: tuple[PrefillReplica, ...]
    num_row_retries: int
    num_retractions: int
    is_degraded: bool = False


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """The load of a prefill service.

    `num_uncomputed_tokens` counts the tokens of queued and running prompts that are still to be computed.
    `num_computed_tokens` counts the tokens that it has computed since it started; None if not reported.
    """

    instance_id: str
    rows: PoolCounts
    slots: PoolCounts
    num_queued: int
    num_computing: int
    num_steps: int
    unsent_bytes: int
    num_uncomputed_tokens: int = 0
    num_computed_tokens: int | None = None
