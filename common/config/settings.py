"""All settings of every process, with their defaults and ranges. docs/configuration.md explains them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.addresses import is_name
from common.config.fast_paths import FastPath, FastPaths
from common.config.fields import (
    Address,
    Addresses,
    Choices,
    DeviceName,
    Names,
    NonNegativeSeconds,
    OptionalAddress,
    OptionalEndpoint,
    Origins,
    Positive,
    Ratio,
    RequestBytes,
    Seconds,
    SegmentBytes,
    Targets,
    Weights,
)
from common.priority import DEFAULT_AGEING, WORST_PRIORITY
from common.role import Role
from common.rpc.grpc_options import MAX_SEGMENT_BYTES

ENV_PREFIX = "BATON_"
LogFormat = Literal["json", "console"]
MAX_DRAFT_TOKENS = 15
MAX_DRAFT_TOPK = 8
MAX_RANKS = 64
_BATCH_ON_GPU = 2048
_SHORT_PROMPT_ON_CPU = 128
"""Up to this many tokens left to compute, a prompt has its first token earlier if the decode service computes it than
after a handoff, and the longest gaps between running requests' tokens hardly grow (`benchmarks.local_prefill`). The
next turns of several chats that come together stay below it, but not below half of it (`benchmarks.prefix_reuse`).
"""
DEMO_MODEL = "demo"
NO_DRAFT = "none"


class ProcessSettings(BaseSettings):
    """Settings of any process: where it listens, how it logs and traces, and how it ends."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, use_attribute_docstrings=True
    )
    example: ClassVar[str]
    """Example flags with which the service starts, shown by `--help`."""

    config: Path | None = None
    """YAML file that may set any of these keys."""
    listen: Address
    """HOST:PORT to listen on."""
    grace_period_s: NonNegativeSeconds = 30.0
    """How long running requests may take to finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log lines below this level are not written."""
    log_format: LogFormat = "json"
    """Format of the log on stderr: JSON objects, or text for people."""
    tls_cert: Path | None = None
    """PEM file of the server's certificate; with tls_key, the server uses TLS."""
    tls_key: Path | None = None
    """PEM file of the private key of tls_cert."""
    otlp_endpoint: OptionalEndpoint = ""
    """http://HOST:PORT or https://HOST:PORT of an OTLP collector for traces; unset: there is no tracing."""
    trace_sample_ratio: Ratio = 1.0
    """With otlp_endpoint: the share of requests to trace, of those that bring no trace context, 0 to 1."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self


KvTransport = Literal["auto", "grpc", "shared_memory", "nixl"]
OutputFormatName = Literal["auto", "none", "hermes", "llama3", "mistral", "harmony", "json"]


class ServiceSettings(ProcessSettings):
    """Settings that both services share. After validation, `draft` names the draft head in use; "" means none."""

    role: ClassVar[Role]
    """The role that a process with these settings has."""
    share_of_cores: ClassVar[float]
    """The share of a CPU's cores that a forward uses if `num_threads` is 0."""

    @property
    def max_fused_tokens(self) -> int:
        """The largest number of tokens in a forward that one compiled kernel computes as a whole."""
        raise NotImplementedError

    def uses(self, path: FastPath) -> bool:
        """Returns whether this optimisation is switched on."""
        return path not in self.disabled_fast_paths

    @property
    def fuses_forwards(self) -> bool:
        """Whether one kernel may compute a whole forward. This kernel also computes attention, so the setting
        `attention` must allow kernels, and it computes all of it, so there must be one rank.
        """
        return self.uses(FastPath.FUSED_FORWARDS) and self.attention == "kernels" and self.tensor_parallel == 1

    @property
    def device_key(self) -> str:
        """The device's name in one form: "cuda" becomes "cuda:0", which is the same device."""
        return "cuda:0" if self.device == "cuda" else self.device

    other_role: Path | None = None
    """YAML file with the settings of this process as the other kind of service; unset: its role stays as it is."""
    role_token_file: Path | None = None
    """File of tokens, one per line; an order to change the role must then carry one of these."""
    metrics_listen: OptionalAddress = ""
    """HOST:PORT where Prometheus finds /metrics; unset: there are no metrics."""
    metrics_token_file: Path | None = None
    """File of tokens, one per line; requests for metrics must then carry one."""
    model: str = DEMO_MODEL
    """The model: "demo", a directory, a GGUF file or a hub id."""
    draft: Annotated[str, Field(validate_default=True)] = ""
    """Draft head: "demo", a directory, a hub id, or "none"; unset: the demo model's own, else none."""
    draft_topk: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOPK)] = 1
    """Children of each draft node: 1 drafts chains, 2 to 8 draft trees; both services need the same value."""
    device: DeviceName = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number type of weights, and of KV unless kv_dtype says otherwise; both services need the same value."""
    kv_dtype: Literal["auto", "unquantized", "fp8_e4m3"] = "auto"
    """Number type of KV: FP8, or that of dtype ("unquantized"); "auto": FP8 if the model has scales for it."""
    attention: Literal["kernels", "torch"] = "kernels"
    """Kernels made for the device, or PyTorch's operators: the reference, and slower."""
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Ranks: processes that compute each forward together, each a part of the model; with GPUs, each has one."""
    tf32: bool = False
    """On CUDA, lets products of float32 use TF32: faster, and less exact."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of a forward; 0: chosen by the number of cores."""
    max_rows: Positive | None = None
    """Most requests with KV in the pool at a time; unset: chosen by the memory there is."""
    max_kv_tokens: Positive | None = None
    """Most tokens with KV in the pool; unset: chosen by the memory there is."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """If max_kv_tokens is unset: the share of the device's memory to use."""
    max_context_tokens: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of prompt plus output, at least 2, as far as the model allows; unset: what the model allows."""
    engine_stall_timeout_s: Seconds = 60.0
    """If the engine makes no progress for this long, the process ends."""
    disabled_fast_paths: FastPaths = ()
    """Fast paths (optimisations) to switch off, with commas."""
    debug_checks: bool = False
    """Checks the engine's invariants at every step; slow."""
    tls_ca: Path | None = None
    """PEM file of an authority; clients must then present a certificate that it signed."""
    auth_token_file: Path | None = None
    """File of tokens, one per line; every call except health checks must then carry one."""
    priority_step_s: Seconds = DEFAULT_AGEING.step_s
    """For every so many seconds that a request waits, its priority gets better by one."""
    max_streams: Positive = 1024
    """Most open streams of a streaming method; more are refused. On decode at least 5/4 of the most live requests."""

    @field_validator("draft")
    @classmethod
    def _resolve_draft(cls, draft: str, info: ValidationInfo) -> str:
        """Chooses the draft head if none is named: the demo model gets the head that comes with Baton, other models
        none.
        """
        if draft == NO_DRAFT:
            return ""
        return draft or (DEMO_MODEL if info.data.get("model") == DEMO_MODEL else "")

    @model_validator(mode="after")
    def _check_draft(self) -> Self:
        if self.draft_topk > 1 and not self.draft:
            raise ValueError("draft_topk needs draft")
        return self


class PrefillSettings(ServiceSettings):
    example = "--model demo --listen 127.0.0.1:50052"
    role = Role.PREFILL
    share_of_cores = 0.5
    listen: Address = "127.0.0.1:50052"
    """HOST:PORT to listen on."""
    chunk_tokens: Positive = 512
    """Most tokens of one prompt in a forward."""
    max_batch_tokens: Positive | None = None
    """Most tokens of all prompts together in a forward; unset: chunk_tokens on a CPU, at least 2048 on a GPU."""
    send_budget_bytes: Positive = 64 << 20
    """Most bytes of KV copied out of the pool, and of log-probabilities of prompts, that no receiver has read yet."""
    max_segment_bytes: SegmentBytes = MAX_SEGMENT_BYTES
    """Most bytes of one KV segment, 64 KiB to 8 MiB."""
    kv_transport: KvTransport = "auto"
    """How KV reaches decode services; auto: through shared memory on one host, else over gRPC."""
    max_queued_rows: Positive = 1024
    """Prompts that may wait for a row; more are refused."""
    stall_timeout_s: Seconds = 30.0
    """If a receiver reads nothing for this long, its call is ended."""

    @property
    def most_batch_tokens(self) -> int:
        """The most tokens of a forward. On a CPU one of 2048 may take seconds, for which a prompt that comes waits."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        return self.chunk_tokens if self.device == "cpu" else max(self.chunk_tokens, _BATCH_ON_GPU)

    @property
    def max_fused_tokens(self) -> int:
        return self.most_batch_tokens

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        if self.most_batch_tokens < self.chunk_tokens:
            raise ValueError("max_batch_tokens must be at least chunk_tokens")
        return self


class DecodeSettings(ServiceSettings):
    example = "--model demo --listen 127.0.0.1:50051 --prefill 127.0.0.1:50052"
    role = Role.DECODE
    share_of_cores = 1.0
    listen: Address = "127.0.0.1:50051"
    """HOST:PORT to listen on."""
    prefill: Targets = ("127.0.0.1:50052",)
    """HOST:PORT of each prefill service, with commas; dns:///NAME:PORT or file:///PATH for all behind it."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None = None
    """With draft: draft tokens a verification checks, 1 to 15; unset: 4, or fewer for a head of fewer layers."""
    num_draft_steps: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None = None
    """With draft_topk above 1: levels of the draft tree."""
    adaptive_depth: bool = True
    """Drafts fewer levels, or none, whenever that yields more tokens per second."""
    receive_budget_bytes: Positive = 128 << 20
    """Most bytes of KV that are received and not yet in the pool."""
    max_queued_requests: Annotated[int, Field(ge=0)] = 256
    """Most requests that may wait while max_rows others are served; more are refused."""
    best_priority: Annotated[int, Field(ge=-WORST_PRIORITY, le=0)] = 0
    """Lowest, so best, priority that a request may ask for; below 0, requests may overtake those of others."""
    tenant_weights: Weights = ()
    """NAME=WEIGHT of tenants that share the service, with commas, *=WEIGHT for others; unset: clients share equally."""
    reclaim_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """A client that waits this long takes rows and slots of requests of clients that hold more; 0: never."""
    local_prefill_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens left of a prompt that decode computes itself; 0: none; unset: 128 on a CPU, 0 on a GPU."""
    prefill_fallback: bool = False
    """While no prefill service is ready, computes prompts of any length in the decode service; else they fail."""
    output_format: OutputFormatName = "auto"
    """Form in which the model writes reasoning and tool calls; auto: by its chat template; none: all is text."""
    max_handoff_attempts: Positive = 3
    """Attempts to have a request prefilled before it fails."""
    prefill_timeout_s: Seconds = 10.0
    """How long a request waits for a prefill service to be ready."""
    handoff_progress_timeout_s: Seconds = 30.0
    """If a prefill service sends nothing for this long, the call to it is ended."""
    edge_processes: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes that serve clients for the engine, on one port; 0: the engine's process does."""
    client_stall_timeout_s: Seconds = 60.0
    """A client that reads nothing for this long counts as gone."""
    prefill_tls: bool = False
    """Connects to the prefill services with TLS."""
    prefill_tls_ca: Path | None = None
    """PEM file of the authority that signed the prefill services' certificates; unset: the system's authorities."""
    prefill_token_file: Path | None = None
    """File whose first token is sent to the prefill services."""
    max_request_bytes: RequestBytes = 4 << 20
    """Most bytes of one request, 64 KiB to 16 MiB."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: sampling options that a request leaves open are those of the model's generation_config.json."""
    open_objects: bool = False
    """Objects of JSON schemas that declare properties may have others where schema and request do not say."""

    @property
    def max_fused_tokens(self) -> int:
        return 512

    @property
    def max_short_prompt(self) -> int:
        """The decode service computes a prompt itself if at most this many tokens are left to compute; 0: never."""
        if self.local_prefill_tokens is not None:
            return self.local_prefill_tokens
        return _SHORT_PROMPT_ON_CPU if self.device == "cpu" else 0

    @model_validator(mode="after")
    def _check_prefill(self) -> Self:
        for name in ("num_draft_tokens", "num_draft_steps"):
            if getattr(self, name) is not None and not self.draft:
                raise ValueError(f"{name} needs draft")
        if not self.prefill:
            raise ValueError("prefill names no address")
        if len(set(self.prefill)) != len(self.prefill):
            raise ValueError("prefill names an address twice")
        if set(self.prefill) == {self.listen}:
            raise ValueError("prefill names no service but this one itself: it cannot be both kinds at a time")
        return self


class GatewaySettings(ProcessSettings):
    """The gateway's settings. The gateway forwards requests to the services in `decode`, and its status page shows
    the metrics of `metrics_targets`.
    """

    example = "--listen 127.0.0.1:8000 --decode 127.0.0.1:50051"

    listen: Address = "127.0.0.1:8000"
    """HOST:PORT to listen on."""
    decode: Targets = ("127.0.0.1:50051",)
    """HOST:PORT of each decode service, with commas, or one dns:///NAME:PORT or file:///PATH for all behind it."""
    decode_tls: bool = False
    """Connects to the decode services with TLS."""
    decode_tls_ca: Path | None = None
    """PEM file of the authority that signed the decode services' certificates; unset: the system's authorities."""
    decode_tls_server_name: str | None = None
    """Host name in the decode services' certificates; unset: the address's host."""
    decode_token_file: Path | None = None
    """File whose first token is sent to the decode services."""
    api_key_file: Path | None = None
    """File of keys, one per line; HTTP clients must then send one."""
    cors_origins: Origins = ()
    """Web origins whose pages may call the gateway from a browser, with commas; * for all."""
    allowed_hosts: Names = ()
    """Hosts that requests may name, with commas; * for any. Unset: any, on loopback without keys this machine's."""
    served_model_name: Names = ()
    """Names of the model in the HTTP API, with commas; answers have the first. Unset: what decode calls it."""
    max_request_bytes: RequestBytes = 4 << 20
    """Most bytes of one request, 64 KiB to 16 MiB."""
    max_open_requests: Positive = 512
    """Most open requests at a time, of all clients together."""
    max_choices: Choices = 32
    """Most choices of one request, n for each of its prompts, 1 to 128."""
    request_timeout_s: Seconds | None = None
    """Deadline of a request; unset: none."""
    admission_timeout_s: Seconds = 5.0
    """How long the gateway tries to find a decode service that accepts a request."""
    resume_timeout_s: Seconds = 60.0
    """How long the gateway tries to find a decode service that continues a broken stream."""
    client_stall_timeout_s: Seconds = 30.0
    """A client that reads nothing for this long is dropped."""
    status_page: bool = True
    """Serves the status page at /."""
    status_needs_key: bool = False
    """With api_key_file: the status page and metrics need a key too."""
    metrics_targets: Addresses = ()
    """HOST:PORT of the metrics of each service that the status page shows, with commas."""
    metrics_token_file: Path | None = None
    """File whose first token is sent to metrics_targets."""

    @model_validator(mode="after")
    def _check_decode(self) -> Self:
        if not self.decode:
            raise ValueError("decode names no address")
        if self.status_needs_key and self.api_key_file is None:
            raise ValueError("status_needs_key needs api_key_file")
        if len(self.decode) > 1 and any(map(is_name, self.decode)):
            raise ValueError("decode is one dns:///NAME:PORT or file:///PATH, or any number of HOST:PORT")
        return self
