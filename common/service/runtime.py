"""Loads everything that a service needs before it can serve, such as model and device, as its settings say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars

from common.attention.backend import MAX_SPLIT_BYTES
from common.attention.choice import new_draw_kernels
from common.checkpoints.cache import kernels_cache_dir
from common.checkpoints.digest import LoadedDraft, compute_fingerprint
from common.checkpoints.source import resolve_draft, resolve_model
from common.config.fast_paths import FastPath
from common.config.settings import ServiceSettings
from common.device.factory import allow_tf32, open_device
from common.device.stream import Device
from common.draft.load import load_draft
from common.draft.paged_head import PagedHead
from common.engine import EngineConfig, EngineParts
from common.errors import StartupError
from common.host.cores import num_compute_threads
from common.kv.layer_group import LayerGroupSpec, num_kept_before
from common.kv.pool_size import (
    INDEX_BYTES,
    SPLIT_BYTES,
    MemoryBeside,
    PoolBytes,
    PoolLimits,
    PoolSize,
    forward_bytes,
    row_bytes,
    size_pool,
)
from common.kv.window_slots import row_slots
from common.model.loader import LoadArguments, load_target
from common.model.model_files import model_faults
from common.model.target import TargetModel
from common.priority import Ageing
from common.ranks.leader import Ranks, load_together, lost_ranks_named, open_ranks
from common.ranks.own_kv import TABLE_ENTRY_BYTES
from common.sampling.state import DrawKernels
from common.service.cpu_engine import CpuEngine, cpu_engine
from common.service.work_beside import Check, Work, WorkBeside, new_fusing, populating
from common.telemetry.stats import ForwardCounts
from common.telemetry.timeline import Timeline
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from common.wire.fingerprint import Fingerprint

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

_FUSED_SHARE_OF_CORES = 1.0
"""The share of the cores that a fused forward uses, in both services.

Its threads fetch work items one at a time, so they lose little when others use their cores too.
"""

_STOP_TIMEOUT_S = 10.0
_PROGRESS_INTERVAL_S = 5.0  # at least, between two log lines about weights that are read

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Everything that was loaded for a service: model, draft head, device and the like.

    `directory` is the model's directory. `cpu_engine` is None on a GPU, and where the engine is not installed.
    `draw_kernels` is None if PyTorch's operators draw tokens. `fusing` is the background work that compiles forwards
    into programs, None if there is none. `populates` says whether the KV pool's memory is allocated in the background.
    `ranks` are the other processes that compute the model, None if there are none.

    When the process changes its role, all of it stays but `device` and `beside` (see `in_role`). `beside`
    runs background work of the present role, and ends with it; `beside_roles` runs what goes on while the role changes.
    """

    directory: Path
    model: TargetModel
    draft: PagedHead | None
    device: Device
    cpu_engine: CpuEngine | None
    draw_kernels: DrawKernels | None
    timeline: Timeline
    fingerprint: Fingerprint
    architecture: str
    populates: bool
    fusing: Work | None
    beside: WorkBeside
    beside_roles: WorkBeside
    ranks: Ranks | None

    @property
    def parts(self) -> EngineParts:
        """The values with which an engine computes."""
        return EngineParts(
            model=self.model,
            draft=self.draft,
            device=self.device,
            draw_kernels=self.draw_kernels,
            timeline=self.timeline,
        )

    @property
    def forward_counts(self) -> Mapping[str, ForwardCounts]:
        """How many forwards a compiled program computed, and how many PyTorch's operators computed instead.

        The keys are "target" and, if there is a draft head, "draft".
        """
        counts = {"target": self.model.forward_counts}
        return counts if self.draft is None else {**counts, "draft": self.draft.forward_counts}

    def size_pool(
        self, settings: ServiceSettings, beside: MemoryBeside, *, num_in_flight: int, tokens_ahead: int = 0
    ) -> PoolSize:
        """Returns the number of rows and tokens of the KV pool, and logs them.

        `beside` is the memory that the service needs besides the pool. A row gets slots for `tokens_ahead` more tokens
        than a request may have, and `num_in_flight` is that of KvPool. Raises StartupError if memory is short.
        """
        memory = self.device.memory()
        if memory is not None and self.ranks is not None:
            memory = replace(memory, free_bytes=self.ranks.least_free_bytes(memory.free_bytes))
        groups = self.fingerprint.layer_groups
        windows = [group for group in groups if group.window]
        largest = max((group.window for group in groups if group.window), default=0)
        token_bytes = sum(self._token_bytes(group) for group in groups if not group.window)
        num_kept = num_kept_before(groups)
        limits = PoolLimits(
            max_rows=settings.max_rows,
            max_kv_tokens=settings.max_kv_tokens,
            memory_share=settings.memory_share,
            context_tokens=self.model.max_context_tokens,
            tokens_ahead=tokens_ahead,
        )
        pool = PoolBytes(
            token_bytes=token_bytes + len(windows) * INDEX_BYTES,
            window_token_bytes=sum(map(self._token_bytes, windows)),
            row_window_tokens=row_slots(largest, num_kept_before=num_kept, num_in_flight=num_in_flight)
            if largest
            else 0,
        )
        size = size_pool(limits, pool=pool, beside=beside, memory=memory, torch_device=self.device.torch_device)
        _log.info(
            "pool_sized",
            **asdict(size),
            token_bytes=token_bytes,
            pool_bytes=pool.of(size.max_rows, size.max_kv_tokens),
            bytes_beside=beside.peak_bytes(size.max_rows),
            free_bytes=None if memory is None else memory.free_bytes,
            memory_share=settings.memory_share,
        )
        if size.max_context_tokens < limits.context_tokens:
            _log.warning(
                "pool_shortens_context",
                max_context_tokens=size.max_context_tokens,
                allowed_tokens=limits.context_tokens,
                needed_kv_tokens=limits.context_tokens + tokens_ahead,
            )
        return size

    def _token_bytes(self, group: LayerGroupSpec) -> int:
        """Returns the bytes of a token's KV on this process's device. Other ranks have at most as many on theirs."""
        return group.token_bytes * len(self.model.heads_in_pool(group)) // group.num_heads

    def start_beside(self, populate: Work) -> None:
        """Starts the background work, as far as settings and model allow it. Call it once, when the service serves.

        `populate` comes first, which allocates the KV pool's memory. Then forwards are compiled into programs, unless
        that began in an earlier role.
        """
        self.beside.start(*((populating(populate),) if self.populates else ()), self._start_fusing)

    def _start_fusing(self, _check: Check) -> None:
        if self.fusing is not None and not self.beside_roles.has_started:
            self.beside_roles.start(self.fusing)

    def in_role(self, settings: ServiceSettings) -> Runtime:
        """Returns the runtime for the next role of this process, which `settings` describe. Call `leave_role` first.

        The result has a device of its own, since an engine closes its device's streams, and the role's number of
        threads.
        """
        device = open_device(settings.device, num_threads=_num_stream_threads(settings), timeline=self.timeline)
        return replace(self, device=device, beside=WorkBeside())

    def leave_role(self) -> None:
        """Ends what belongs to one role. Call it when its engine has ended."""
        _stop(self.beside)
        if self.ranks is not None:
            self.ranks.let_go_of_pool()

    def close(self) -> None:
        """Ends the background work. Call it before the process ends, after `leave_role`. It returns at once if there is
        nothing left to end.
        """
        _stop(self.beside_roles)
        if self.ranks is not None:
            self.ranks.close()


def _stop(beside: WorkBeside) -> None:
    if not beside.stop(_STOP_TIMEOUT_S):
        _log.warning("work_beside_did_not_stop", timeout_s=_STOP_TIMEOUT_S)


def _num_stream_threads(settings: ServiceSettings) -> int:
    """Returns how many threads of this process each compute stream has."""
    return max(1, num_compute_threads(settings.num_threads, settings.share_of_cores) // settings.tensor_parallel)


def config_of(kind: type[ConfigT], settings: ServiceSettings) -> ConfigT:
    """Returns an engine's options with the values of the settings that have the same names.

    An option named after a fast path says whether it is used. An option without a setting, or whose setting is None,
    has its default.
    """
    options: dict[str, Any] = {str(path): settings.uses(path) for path in FastPath}
    options |= {name: getattr(settings, name) for name in type(settings).model_fields}
    options["ageing"] = Ageing(step_s=settings.priority_step_s)
    names = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in options.items() if name in names and value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The size of the largest step, from which the memory that it needs is computed.

    The model's forward computes `num_tokens` tokens, and logits for `num_logits` of them. A draft head's forward
    computes `num_head_tokens`. `kept_bytes` is the memory that kept hidden states and recorded CUDA graphs take.
    """

    num_tokens: int
    num_logits: int
    num_head_tokens: int = 0
    kept_bytes: int = 0


def memory_beside(
    runtime: Runtime, step: Callable[[int], StepMemory], *, staged_bytes: int, tokens_ahead: int = 0
) -> MemoryBeside:
    """Returns what a service needs besides its pool: the bytes of a row, and the peak for any number of rows.

    `step` returns the largest step for a number of rows.

    On a GPU the peak includes the partial results of attention, and `staged_bytes` for KV in transfer. With ranks that
    have KV of their own it includes the token tables that are sent to them, at full width, as a recorded step sends
    them. A row has slots for `tokens_ahead` more tokens than a request may have.
    """
    model = runtime.model
    num_entries = (model.max_context_tokens + tokens_ahead) * (1 + len(model.windows))
    each_row = row_bytes(vocab_size=model.vocab_size, num_tokens=num_entries)
    sends_tables = runtime.ranks is not None and runtime.ranks.part.has_own_kv
    sent_row_bytes = num_entries * TABLE_ENTRY_BYTES if sends_tables else 0

    def peak_bytes(num_rows: int) -> int:
        memory = step(num_rows)
        forward = forward_bytes(
            num_tokens=max(memory.num_tokens, memory.num_head_tokens),
            num_logits=memory.num_logits,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
        )
        parts = min(memory.num_tokens * model.hidden_size * SPLIT_BYTES, MAX_SPLIT_BYTES)
        on_gpu = 0 if model.torch_device.type == "cpu" else parts + staged_bytes
        return (num_rows + 1) * each_row + num_rows * sent_row_bytes + forward + memory.kept_bytes + on_gpu

    return MemoryBeside(row_bytes=each_row, peak_bytes=peak_bytes)


def open_runtime(settings: ServiceSettings, other: ServiceSettings | None = None) -> Runtime:
    """Loads everything, which takes minutes for a large model. `other` are the settings of the process's other role,
    None if it has none. Raises StartupError.
    """
    _only_log_lines()
    torch.set_num_threads(1)  # more would keep OpenMP threads for as long as this thread lives
    allow_tf32(settings.tf32)
    timeline = Timeline()
    num_threads = _num_stream_threads(settings)
    device = open_device(settings.device, num_threads=num_threads, timeline=timeline)
    draw_kernels = new_draw_kernels(settings.attention, torch_device=device.torch_device)
    _log.info("draw_chosen", draws="operators" if draw_kernels is None else "kernels", device=settings.device)
    engine = cpu_engine(device.torch_device)
    kernels_dir = kernels_cache_dir() if settings.uses(FastPath.KERNEL_CACHE) else None
    if engine is not None:
        engine.keep_kernels(kernels_dir, _log)
    elif device.torch_device.type == "cpu":
        _log.warning("cpu_engine_unavailable", reason="baton_cpu, or numba, is not installed")
    directory = resolve_model(settings.model, _LoggedProgress(), dtype=settings.dtype)
    _log.info("loading_model", model=settings.model, directory=str(directory))
    arguments = LoadArguments(
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        max_context_tokens=settings.max_context_tokens,
        attention=settings.attention,
        cpu_engine=engine,
        optimizes_modules=settings.uses(FastPath.OPTIMIZED_MODULES),
    )
    ranks = None
    if settings.tensor_parallel > 1:
        ranks = open_ranks(
            engine,
            device.torch_device,
            directory,
            arguments,
            num_ranks=settings.tensor_parallel,
            num_threads=num_threads,
            kernels_dir=kernels_dir,
            tf32=settings.tf32,
        )
        _log.info("ranks_started", pids=ranks.pids, num_threads=num_threads)
    with model_faults(settings.model), lost_ranks_named(ranks):
        load = partial(
            load_target,
            directory,
            **arguments,
            fuses=settings.fuses_forwards,
            on_progress=LoggedBytes(),
            part=None if ranks is None else ranks.part,
        )
        if ranks is None:
            model = load()
        else:
            model = load_together(
                load,
                ranks,
                enter_thread=device.enter_thread,
                tell=lambda behind: _log.info("loading_together", waits_for=behind),
            )
    if ranks is not None:
        model.lead(ranks)
    _log.info(
        "model_loaded",
        architecture=model.architecture,
        kv_dtype=model.layer_group.dtype,
        rotation=model.rotation or "the same for all lengths",
    )
    with model_faults(f"draft: {settings.draft}"):
        head, draft = _load_draft(settings, model, engine) if settings.draft else (None, None)
    fingerprint = compute_fingerprint(directory, model, protocol_version=PROTOCOL_VERSION, draft=draft)
    fusing = None
    if settings.fuses_forwards and engine is not None:
        fusing = new_fusing(
            engine,
            model,
            head,
            num_threads=num_compute_threads(settings.num_threads, _FUSED_SHARE_OF_CORES),
            max_tokens=max(each.max_fused_tokens for each in (settings, other) if each is not None),
        )
    return Runtime(
        directory=directory,
        model=model,
        draft=head,
        device=device,
        cpu_engine=engine,
        draw_kernels=draw_kernels,
        timeline=timeline,
        fingerprint=fingerprint,
        architecture=model.architecture,
        populates=settings.uses(FastPath.PREFAULTED_POOL),
        fusing=fusing,
        beside=WorkBeside(),
        beside_roles=WorkBeside(),
        ranks=ranks,
    )


def _only_log_lines() -> None:
    """Routes the log lines of the model libraries to this process's log, and disables progress bars."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    disable_progress_bars()


def _load_draft(
    settings: ServiceSettings, model: TargetModel, engine: CpuEngine | None
) -> tuple[PagedHead, LoadedDraft]:
    directory = resolve_draft(settings.draft, _LoggedProgress())
    _log.info("loading_draft", draft=settings.draft, directory=str(directory))
    try:
        head = load_draft(
            directory,
            target=model,
            device=settings.device,
            dtype=settings.dtype,
            attention=settings.attention,
            cpu_engine=engine,
            fuses=settings.fuses_forwards,
        )
    except StartupError as error:
        fits = f"an EAGLE, EAGLE-3 or MTP head that was made for {settings.model} would fit"
        raise type(error)(f"draft: {error}; {fits}") from error
    num_layers, num_ids = head.layer_group.num_layers, head.token_ids.shape[0]
    if settings.draft_topk > 1 and num_layers > 1:
        raise StartupError(f"draft_topk: {settings.draft} has {num_layers} layers: it drafts chains, not trees")
    if settings.draft_topk > num_ids:
        raise StartupError(f"draft_topk: {settings.draft_topk} of a draft vocabulary of {num_ids}")
    model.capture_hidden(head.capture)
    return head, LoadedDraft(head, settings.draft_topk)


class LoggedBytes:
    """Logs how much of a model's weights is read, at most every few seconds. So a small model is loaded without such a
    line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_s = clock()

    def __call__(self, num_done: int, num_total: int) -> None:
        now_s = self._clock()
        if now_s - self._logged_s >= _PROGRESS_INTERVAL_S:
            self._logged_s = now_s
            _log.info("reading_weights", bytes_done=num_done, bytes_total=num_total)


class _LoggedProgress:
    """A Progress that logs one line when a stage begins, and none for its steps."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, num_done: int, num_total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            _log.info("preparing_model", stage=stage)
