"""Every setting of both services, with its default and its range. docs/configuration.md explains them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.config.fields import (
    Address,
    DeviceName,
    OptionalAddress,
    Positive,
    RequestBytes,
    Seconds,
    SegmentBytes,
    Targets,
)
from common.config.process_settings import ProcessSettings
from common.wire.grpc_options import MAX_SEGMENT_BYTES

KvTransport = Literal["auto", "grpc", "shared_memory", "nixl"]

SWITCH_INTERVAL_S = 0.0005
MAX_DRAFT_TOKENS = 15
MAX_DRAFT_TOPK = 8

DEMO_MODEL = "demo"
NO_DRAFT = "none"


class ServiceSettings(ProcessSettings):
    """What both services have."""

    share_of_cores: ClassVar[float]
    """What `num_threads = 0` takes of a CPU's cores."""

    @property
    def max_fused_tokens(self) -> int:
        """Of a forward that one kernel computes."""
        raise NotImplementedError

    @property
    def fuses_forwards(self) -> bool:
        """Whether one kernel may compute a whole forward; it attends by itself."""
        return self.fused_forward and self.attention == "kernels"

    @property
    def device_key(self) -> str:
        """The same for two names of one device."""
        return "cuda:0" if self.device == "cuda" else self.device

    metrics_listen: OptionalAddress = ""
    metrics_token_file: Path | None = None
    model: str = DEMO_MODEL
    draft: Annotated[str, Field(validate_default=True)] = ""
    """Resolved: the head that is used, or "" without one."""
    draft_topk: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOPK)] = 1
    device: DeviceName = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    attention: Literal["kernels", "torch"] = "kernels"
    tf32: bool = False
    num_threads: Annotated[int, Field(ge=0)] = 0
    fused_forward: bool = True
    optimized_modules: bool = True
    keep_kernels: bool = True
    populate_pool: bool = True
    keep_freed_memory: bool = True
    forwards_first: bool = True
    switch_interval_s: Annotated[float, Field(gt=0, le=0.1)] = SWITCH_INTERVAL_S
    max_rows: Positive | None = None
    max_kv_tokens: Positive | None = None
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_context_tokens: Positive | None = None
    engine_stall_timeout_s: Seconds = 60.0
    overlap: bool = True
    debug_checks: bool = False
    tls_ca: Path | None = None
    auth_token_file: Path | None = None
    max_streams: Positive = 1024

    @field_validator("draft")
    @classmethod
    def _resolve_draft(cls, draft: str, info: ValidationInfo) -> str:
        """Where none is named, the demo model has the head that comes with Baton, any other model none."""
        if draft == NO_DRAFT:
            return ""
        return draft or (DEMO_MODEL if info.data.get("model") == DEMO_MODEL else "")

    @model_validator(mode="after")
    def _check_draft(self) -> Self:
        if self.draft_topk > 1 and not self.draft:
            raise ValueError("draft_topk needs draft")
        return self


class PrefillSettings(ServiceSettings):
    share_of_cores = 0.5
    listen: Address = "127.0.0.1:50052"
    chunk_tokens: Positive = 512
    max_batch_tokens: Positive = 2048
    send_budget_bytes: Positive = 64 << 20
    max_segment_bytes: SegmentBytes = MAX_SEGMENT_BYTES
    kv_transport: KvTransport = "auto"
    max_queued_rows: Positive = 1024
    early_sending: bool = True
    framed_payloads: bool = True
    stall_timeout_s: Seconds = 30.0

    @property
    def max_fused_tokens(self) -> int:
        return self.max_batch_tokens

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        if self.max_batch_tokens < self.chunk_tokens:
            raise ValueError("max_batch_tokens must be at least chunk_tokens")
        return self


class DecodeSettings(ServiceSettings):
    share_of_cores = 1.0
    listen: Address = "127.0.0.1:50051"
    prefill: Targets = ("127.0.0.1:50052",)
    num_draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None = None
    num_draft_steps: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None = None
    adaptive_depth: bool = True
    cuda_graphs: bool = True
    nontemporal_copies: bool = True
    receive_budget_bytes: Positive = 128 << 20
    connections_per_prefill: Annotated[int, Field(ge=1, le=16)] = 2
    max_queued_requests: Annotated[int, Field(ge=0)] = 256
    max_handoff_attempts: Positive = 3
    prefill_timeout_s: Seconds = 10.0
    handoff_progress_timeout_s: Seconds = 30.0
    client_stall_timeout_s: Seconds = 60.0
    prefill_tls: bool = False
    prefill_tls_ca: Path | None = None
    prefill_token_file: Path | None = None
    max_request_bytes: RequestBytes = 4 << 20

    @property
    def max_fused_tokens(self) -> int:
        return 512

    @model_validator(mode="after")
    def _check_prefill(self) -> Self:
        for name in ("num_draft_tokens", "num_draft_steps"):
            if getattr(self, name) is not None and not self.draft:
                raise ValueError(f"{name} needs draft")
        if not self.prefill:
            raise ValueError("prefill names no address")
        if len(set(self.prefill)) != len(self.prefill):
            raise ValueError("prefill names an address twice")
        return self
