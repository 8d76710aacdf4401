"""Assembles the decode service from its parts.

gRPC server ─▶ InferenceServicer ─▶ AllLiveRequests ─post─▶ EngineInbox ─▶ DecodeEngine ─deliver─▶ EventRouter
                                        ▲                    ▲                                    │  │
                                        └──────────── requests' events ───────────────────────────┘  │
                                                  reports ───┴──── GrpcTransport ◀── handoffs ───────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import structlog
from torch import Tensor

from common.addresses import is_loopback
from common.config.fast_paths import FastPath
from common.config.settings import DecodeSettings
from common.device.stream import PieceFailed
from common.draft.head import DraftHead
from common.engine import Outbox
from common.errors import StartupError
from common.kv.pool import CopyKv
from common.kv.pool_size import MemoryBeside, PoolSize, room_beside_pool
from common.model.generation_config import read_sampling_defaults
from common.model.model_files import GENERATION_CONFIG
from common.rpc.bearer_tokens import authorization, read_tokens
from common.rpc.grpc_options import Metadata
from common.rpc.name_lookup import look_up
from common.rpc.tls import channel_credentials
from common.service.engine_thread import EngineInbox, EngineThread
from common.service.life import ServiceLife
from common.service.process import Process
from common.service.runtime import Runtime, StepMemory, config_of, memory_beside
from common.service.server import FrontServer
from common.telemetry.metrics import EngineMetrics, GrammarMetrics, MaskMetrics, SpeculationMetrics
from common.telemetry.stats import OnStep, StepStats
from common.text.grammar_compiler import GrammarCompiler, GrammarTrials
from common.text.grammars import Grammars
from common.text.tokenizer import TextTokenizer
from decode_service.edge.assembly import EdgePlan, model_info, opened_edge
from decode_service.edge.decode_edge import DecodeEdge, EventRouter
from decode_service.edge.live_requests import MAX_PROMPT_LOGPROB_BYTES, AllLiveRequests
from decode_service.edge.matchers import MatchersHere, Replay
from decode_service.edge.processes.edges import EdgeProcesses
from decode_service.edge.replicas import ReplicaBoard
from decode_service.edge.request_checks import ModelLimits, tenant_key
from decode_service.edge.text.text_threads import MAX_WAITING_BYTES, TextThreads
from decode_service.forward.forward_side import recorded_bytes
from decode_service.handoff.grpc_replica import PrefillAccess
from decode_service.handoff.grpc_transport import GrpcTransport
from decode_service.handoff.transport import HandoffTimeouts, Post, TransportReport
from decode_service.messages import Command, Event
from decode_service.schedule.config import DecodeConfig
from decode_service.schedule.scheduler import DecodeEngine
from decode_service.schedule.waiting_queue import OTHERS
from decode_service.speculate.depth import AdaptiveDepth, FixedDepth
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo, num_drafted

_EDGE_BYTES = 1 << 29
_NUM_CONNECTIONS = 2  # connections to each prefill replica; calls take turns on them
_DEFAULT_CHAIN = 4

_log = structlog.get_logger(__name__)


async def serve(settings: DecodeSettings, process: Process) -> None:
    """Serves until the process says that this service leaves. Raises the errors of `ServiceLife.run`."""
    async with assembled(settings, process) as life:
        await life.run(process.switch.leaves, process.on_serving)


def check(settings: DecodeSettings, runtime: Runtime) -> None:
    """Raises StartupError if `serve` could not serve with these settings, as far as can be known beforehand."""
    if runtime.draft is not None:
        speculation_of(settings, runtime.draft)
    if settings.prefill_tls:
        channel_credentials(settings.prefill_tls_ca, settings.tls_cert, settings.tls_key)
    if settings.prefill_token_file is not None:
        read_tokens("prefill_token_file", settings.prefill_token_file)


@asynccontextmanager
async def assembled(settings: DecodeSettings, process: Process) -> AsyncIterator[ServiceLife]:
    """Assembles the service and yields its life. Raises StartupError.

    Each part is built after those it needs. The engine sends events to the edge, so the edge is built before the
    engine. The edge needs only the engine's inbox, which is built first.
    """
    runtime = process.runtime
    tokenizer = TextTokenizer.from_directory(runtime.directory)
    if runtime.draft is None:
        _log.info("no_draft_head", model=settings.model)
    metrics = EngineMetrics(process.registry)
    config = engine_config(settings, runtime.draft)
    size = runtime.size_pool(
        settings,
        memory_beside_pool(settings, runtime, config),
        num_in_flight=config.tokens_in_flight,
        tokens_ahead=config.tokens_ahead,
    )
    inbox: EngineInbox[Command] = EngineInbox()
    replicas = ReplicaBoard(serves_alone=settings.prefill_fallback)

    def post_report(report: TransportReport) -> None:
        replicas.on_report(report)
        inbox.post(report)

    transport = _transport(settings, process, post_report)
    sampling_defaults = {} if settings.generation_config == "none" else read_sampling_defaults(runtime.directory)
    if sampling_defaults:
        _log.info("sampling_defaults", source=GENERATION_CONFIG, **sampling_defaults)
    limits = ModelLimits(
        vocab_size=runtime.model.vocab_size,
        max_context_tokens=size.max_context_tokens,
        eos_token_ids=runtime.model.eos_token_ids,
        sampling_defaults=sampling_defaults,
        best_priority=settings.best_priority,
        opens_objects=settings.open_objects,
    )
    async with AsyncExitStack() as stack:
        compiler = await stack.enter_async_context(_grammar_compiler(process, tokenizer, limits))
        num_edges = settings.edge_processes
        plan = EdgePlan(
            settings=settings,
            instance_id=process.instance_id,
            directory=runtime.directory,
            limits=limits,
            model_info=model_info(settings, runtime, size, tokenizer, sampling_defaults=sampling_defaults),
            max_live=size.max_rows + settings.max_queued_requests // max(num_edges, 1),
            max_prompt_logprob_bytes=MAX_PROMPT_LOGPROB_BYTES // max(num_edges, 1),
            shares_port=num_edges > 0,
        )

        def new_matchers(replay: Replay) -> MatchersHere:
            return MatchersHere(new_matcher=compiler.matcher, replay=replay, vocab_size=limits.vocab_size)

        live_requests: AllLiveRequests
        server: FrontServer
        if num_edges:
            threads = TextThreads(timeline=None, max_bytes=MAX_WAITING_BYTES)
            stack.callback(threads.shut_down)
            edges = await stack.enter_async_context(
                EdgeProcesses(
                    plan,
                    num=num_edges,
                    engine=inbox,
                    matchers=new_matchers(threads.replay),
                    replicas=replicas,
                    roles=process.switch,
                    timeline=runtime.timeline,
                    registry=process.registry,
                    stall_timeout_s=settings.engine_stall_timeout_s,
                )
            )
            live_requests, server = edges, edges
        else:
            edge = await stack.enter_async_context(
                opened_edge(
                    plan,
                    engine=inbox,
                    new_matchers=new_matchers,
                    replicas=replicas,
                    roles=process.switch,
                    tokenizer=tokenizer,
                    registry=process.registry,
                    tracer=process.tracer,
                    timeline=runtime.timeline,
                )
            )
            live_requests, server = edge.live_requests, edge.server
        router = EventRouter(
            loop=asyncio.get_running_loop(), live_requests=live_requests, transport=transport, replicas=replicas
        )
        outbox = Outbox(router.deliver, runtime.timeline)
        engine = new_engine(settings, process, config, size, outbox=outbox, on_step=_on_step(metrics, process))
        if (recorded := engine.recorded) is not None:
            _log.info(
                "forwards_recorded",
                num_graphs=recorded.num_graphs,
                num_bytes=recorded.num_bytes,
                seconds=round(recorded.seconds, 3),
            )
        yield ServiceLife(
            settings=settings,
            runtime=runtime,
            metrics=metrics,
            thread=EngineThread(
                inbox=inbox,
                engine=engine,
                on_death=router.on_death,
                name="decode-engine",
                enter=runtime.device.enter_thread,
                timeline=runtime.timeline,
            ),
            edge=DecodeEdge(engine=inbox, live_requests=live_requests, replicas=replicas, transport=transport),
            server=server,
            populate=engine.pool.populate,
        )


@asynccontextmanager
async def _grammar_compiler(
    process: Process, tokenizer: TextTokenizer, limits: ModelLimits
) -> AsyncIterator[GrammarCompiler]:
    metrics = GrammarMetrics(process.registry)
    grammars = Grammars(
        lambda: tokenizer,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        on_found=metrics.on_found,
        on_compiled=metrics.on_compiled,
    )
    async with (
        GrammarTrials(grammars.vocabulary) as trials,
        GrammarCompiler(grammars, trials.try_out) as compiler,
    ):
        yield compiler


def _on_step(metrics: EngineMetrics, process: Process) -> OnStep:
    observers = [metrics.on_step, MaskMetrics(process.registry).on_step]
    if process.runtime.draft is not None:
        observers.append(SpeculationMetrics(process.registry).on_step)

    def on_step(stats: StepStats) -> None:
        for observe in observers:
            observe(stats)

    return on_step


def client_weights(settings: DecodeSettings) -> dict[str, float]:
    """Returns `tenant_weights`, by the engine's names for clients."""
    pairs = [text.rpartition("=") for text in settings.tenant_weights]
    return {OTHERS if name == OTHERS else tenant_key(name): float(weight) for name, _, weight in pairs}


def engine_config(settings: DecodeSettings, draft: DraftHead | None) -> DecodeConfig:
    """Returns the engine's options from the settings. Raises the errors of `speculation_of`."""
    return replace(
        config_of(DecodeConfig, settings),
        spec_info=NO_DRAFTS if draft is None else speculation_of(settings, draft),
        new_depth=AdaptiveDepth if settings.adaptive_depth and draft is not None else FixedDepth,
        least_chunk_tokens=1 if draft is None else draft.layer_group.num_layers,
        local_prefill_tokens=settings.max_short_prompt,
        replays_forwards=settings.uses(FastPath.CUDA_GRAPHS),
        client_weights=client_weights(settings),
    )


def new_engine(
    settings: DecodeSettings,
    process: Process,
    config: DecodeConfig,
    size: PoolSize,
    *,
    outbox: Outbox[Event],
    on_step: OnStep,
) -> DecodeEngine:
    try:
        with room_beside_pool():
            return DecodeEngine(
                config,
                size,
                process.runtime.parts,
                outbox=outbox,
                copy_kv=_copy_kv(settings, process.runtime),
                on_step=on_step,
            )
    except PieceFailed as error:  # so far only warm-up and recording have run
        message = "the model's forwards cannot be recorded, and run as they are with it among disabled_fast_paths"
        raise StartupError(f"{FastPath.CUDA_GRAPHS}: {message}: {error}") from error


def _copy_kv(settings: DecodeSettings, runtime: Runtime) -> CopyKv:
    """Returns the function that copies received KV: on a CPU one that may bypass the caches."""
    if runtime.cpu_engine is None or not settings.uses(FastPath.NONTEMPORAL_COPIES):
        return Tensor.copy_
    return runtime.cpu_engine.kv_copy()


def memory_beside_pool(settings: DecodeSettings, runtime: Runtime, config: DecodeConfig) -> MemoryBeside:
    """Returns the bytes of memory that must stay free beside the KV pool, as a function of the number of rows.

    It is needed for the forward of a step or of a prompt that is computed here, recorded forwards, inputs that a draft
    head has not read, received segments, and edge processes.
    """
    model, draft = runtime.model, runtime.draft
    state_bytes = 0 if draft is None else draft.capture.num_states * model.hidden_size * model.dtype.itemsize
    records = config.replays_forwards and runtime.device.graphs is not None
    edge_bytes = settings.edge_processes * _EDGE_BYTES if model.torch_device.type == "cpu" else 0

    def step(num_rows: int) -> StepMemory:
        num_tokens = max(num_rows * config.spec_info.num_verify_tokens, config.max_chunk_tokens)
        recorded = recorded_bytes(num_rows, config.spec_infos, vocab_size=model.vocab_size, state_bytes=state_bytes)
        unread = 0 if draft is None else max(config.max_catch_up_tokens, num_rows) * state_bytes
        return StepMemory(
            num_tokens=num_tokens,
            num_logits=num_tokens,
            num_head_tokens=0 if draft is None else config.max_catch_up_tokens,
            kept_bytes=(recorded if records else 0) + unread + edge_bytes,
        )

    return memory_beside(runtime, step, staged_bytes=settings.receive_budget_bytes, tokens_ahead=config.tokens_ahead)


def _transport(settings: DecodeSettings, process: Process, post: Post) -> GrpcTransport:
    credentials = None
    if settings.prefill_tls:
        credentials = channel_credentials(settings.prefill_tls_ca, settings.tls_cert, settings.tls_key)
    metadata: Metadata = ()
    if settings.prefill_token_file is not None:
        metadata = authorization(read_tokens("prefill_token_file", settings.prefill_token_file)[0])
        if credentials is None and not all(map(is_loopback, settings.prefill)):
            _log.warning("tokens_in_plain_text", prefill=settings.prefill)
    return GrpcTransport(
        post=post,
        addresses=settings.prefill,
        fingerprint=process.runtime.fingerprint,
        vocab_size=process.runtime.model.vocab_size,
        receive_budget_bytes=settings.receive_budget_bytes,
        timeouts=HandoffTimeouts.of_progress(settings.handoff_progress_timeout_s),
        access=PrefillAccess(credentials, metadata),
        look_up=look_up,
        timeline=process.runtime.timeline,
        num_channels_per_replica=_NUM_CONNECTIONS if settings.uses(FastPath.PARALLEL_CONNECTIONS) else 1,
    )


def speculation_of(settings: DecodeSettings, head: DraftHead) -> SpecInfo:
    """Returns the speculation that the settings ask for. Raises StartupError, naming the setting, if settings and head
    do not fit together.
    """
    topk, num_layers = settings.draft_topk, head.layer_group.num_layers
    max_steps = num_layers if num_layers > 1 else None
    if topk == 1:
        return _chain(settings, max_steps)
    if settings.num_draft_steps is None or settings.num_draft_tokens is None:
        raise StartupError("draft_topk: a tree needs num_draft_steps and num_draft_tokens")
    most = num_drafted(settings.num_draft_steps, topk)
    if not settings.num_draft_steps <= settings.num_draft_tokens <= most:
        raise StartupError(
            f"num_draft_tokens: {settings.num_draft_tokens} of a tree that has {settings.num_draft_steps} levels and "
            f"{most} drafts"
        )
    return SpecInfo(settings.num_draft_steps, settings.num_draft_tokens, topk)


def _chain(settings: DecodeSettings, max_steps: int | None) -> SpecInfo:
    wanted = settings.num_draft_tokens or settings.num_draft_steps
    if settings.num_draft_steps not in (None, wanted):
        raise StartupError("num_draft_steps: in a chain it is num_draft_tokens, or not set")
    if wanted is None:
        wanted = min(_DEFAULT_CHAIN, max_steps or _DEFAULT_CHAIN)
    if max_steps is not None and wanted > max_steps:
        name = "num_draft_steps" if settings.num_draft_tokens is None else "num_draft_tokens"
        raise StartupError(f"{name}: {wanted}, but the head has {max_steps} layers, each for one draft")
    return replace(SpecInfo.chain(wanted), reads_drafts=max_steps is None)
