"""Assembles the prefill service from its parts.

gRPC server ─▶ PrefillServicer ─post─▶ EngineInbox ─▶ PrefillEngine ─deliver─▶ PrefillServicer
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import structlog

from common.config.settings import PrefillSettings
from common.draft.head import DraftHead
from common.engine import Outbox
from common.errors import StartupError
from common.host.descriptors import max_connections
from common.kv.pool_size import MemoryBeside, PoolSize, room_beside_pool
from common.kv.shared_pool import SharedPool
from common.service.engine_thread import EngineInbox, EngineThread
from common.service.life import ServiceLife
from common.service.process import Process
from common.service.runtime import Runtime, StepMemory, config_of, memory_beside
from common.service.server import ServerLimits, open_server
from common.telemetry.metrics import EngineMetrics, GrammarMetrics
from common.telemetry.stats import OnStep
from common.text.grammar_compiler import GrammarCompiler, GrammarTrials
from common.text.grammars import Grammars
from common.text.tokenizer import TextTokenizer
from common.wire.framing import FramePayload
from prefill_service.edge.call import ReplicaLimits
from prefill_service.edge.observer import HandoffMetrics
from prefill_service.edge.prefill_edge import PREFILL_SERVICE, PrefillEdge, add_prefill_servicer
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from prefill_service.handoff.lent_memory import LentMemory
from prefill_service.messages import BytesSent, Command, Event, FrameReady
from prefill_service.schedule.config import PrefillConfig
from prefill_service.schedule.scheduler import PrefillEngine

_log = structlog.get_logger(__name__)


async def serve(settings: PrefillSettings, process: Process) -> None:
    """Serves until the process says that this service leaves. Raises the errors of `ServiceLife.run`."""
    async with assembled(settings, process) as life:
        await life.run(process.switch.leaves, process.on_serving)


def check(settings: PrefillSettings, runtime: Runtime) -> None:
    """Raises StartupError if `serve` would refuse these settings. It checks only `chunk_tokens`."""
    check_chunks(settings, runtime.draft)


@asynccontextmanager
async def assembled(settings: PrefillSettings, process: Process) -> AsyncIterator[ServiceLife]:
    """Assembles the service and yields its life. Raises StartupError.

    Each part is built after those it needs. The edge needs only the engine's inbox, which is built first. So the edge
    exists before the engine, which sends events to it.
    """
    runtime = process.runtime
    check_chunks(settings, runtime.draft)
    config = engine_config(settings)
    size = runtime.size_pool(
        settings, memory_beside_pool(settings, runtime, config), num_in_flight=config.tokens_in_flight
    )
    async with AsyncExitStack() as outlives_the_engine:
        lent = await LentMemory.opened(
            settings.kv_transport,
            groups=runtime.fingerprint.layer_groups,
            num_slots=size.max_kv_tokens,
            num_window_slots=size.max_window_tokens,
            is_on_host=runtime.device.torch_device.type == "cpu",
        )
        outlives_the_engine.push_async_callback(lent.close)
        metrics, handoff_metrics = EngineMetrics(process.registry), HandoffMetrics(process.registry)
        inbox: EngineInbox[Command] = EngineInbox()
        grammar_metrics = GrammarMetrics(process.registry)
        grammars = Grammars(
            partial(TextTokenizer.from_directory, runtime.directory),
            vocab_size=runtime.model.vocab_size,
            eos_token_ids=runtime.model.eos_token_ids,
            on_found=grammar_metrics.on_found,
            on_compiled=grammar_metrics.on_compiled,
        )
        trials = await outlives_the_engine.enter_async_context(GrammarTrials(grammars.vocabulary))
        compiler = await outlives_the_engine.enter_async_context(GrammarCompiler(grammars, trials.try_out))
        servicer = PrefillServicer(
            engine=inbox,
            fingerprint=runtime.fingerprint,
            model_limits=ReplicaLimits(
                vocab_size=runtime.model.vocab_size,
                max_context_tokens=size.max_context_tokens,
                max_cached_tokens=size.max_kv_tokens if config.prefix_cache else 0,
            ),
            instance_id=process.instance_id,
            limits=HandoffLimits(stall_timeout_s=settings.stall_timeout_s),
            tracer=process.tracer,
            timeline=runtime.timeline,
            lent=lent,
            new_matcher=compiler.matcher,
        )

        def deliver(events: Sequence[Event]) -> None:
            handoff_metrics.on_frames(event.frame for event in events if isinstance(event, FrameReady))
            servicer.deliver(events)

        engine = new_engine(
            config,
            process,
            size,
            lent.pool,
            outbox=Outbox(deliver, runtime.timeline),
            returned=partial(inbox.take, BytesSent),
            on_step=metrics.on_step,
        )
        thread = EngineThread(
            inbox=inbox,
            engine=engine,
            on_death=servicer.engine_died,
            name="prefill-engine",
            enter=runtime.device.enter_thread,
            timeline=runtime.timeline,
        )
        limits = ServerLimits(max_streams=settings.max_streams, max_connections=max_connections())
        server = open_server(
            settings,
            service_name=PREFILL_SERVICE,
            instance_id=process.instance_id,
            limits=limits,
            timeline=runtime.timeline,
            roles=process.switch,
        )
        add_prefill_servicer(servicer, server)
        if settings.kv_transport == "nixl" and (settings.tls_cert or settings.auth_token_file):
            _log.warning("kv_in_plain_text", kv_transport=settings.kv_transport)
        yield ServiceLife(
            settings=settings,
            runtime=runtime,
            metrics=metrics,
            thread=thread,
            edge=PrefillEdge(engine=inbox, servicer=servicer, lent=lent),
            server=server,
            populate=engine.pool.populate,
        )


def engine_config(settings: PrefillSettings) -> PrefillConfig:
    """Returns the engine's options, as the settings say."""
    return replace(config_of(PrefillConfig, settings), max_batch_tokens=settings.most_batch_tokens)


def new_engine(
    config: PrefillConfig,
    process: Process,
    size: PoolSize,
    shared_pool: SharedPool | None,
    *,
    outbox: Outbox[Event],
    returned: Callable[[], Sequence[BytesSent]],
    on_step: OnStep,
) -> PrefillEngine:
    with room_beside_pool():
        return PrefillEngine(
            config,
            size,
            process.runtime.parts,
            outbox=outbox,
            returned=returned,
            shared_pool=shared_pool,
            new_framed_kv=FramePayload,
            on_step=on_step,
        )


def memory_beside_pool(settings: PrefillSettings, runtime: Runtime, config: PrefillConfig) -> MemoryBeside:
    """Returns the memory that must stay free beside the KV pool, as a function of the number of rows.

    The memory is for the activations of one forward, for the hidden states that a draft head needs from all forwards
    in flight, and for segments that wait to be sent.
    """
    model, num_tokens = runtime.model, config.max_batch_tokens
    num_states = 0 if runtime.draft is None else runtime.draft.capture.num_states
    captured_bytes = num_states * model.hidden_size * model.dtype.itemsize

    def step(num_rows: int) -> StepMemory:
        return StepMemory(
            num_tokens=num_tokens,
            num_logits=min(num_rows, num_tokens),
            kept_bytes=config.max_in_flight * num_tokens * captured_bytes,
        )

    return memory_beside(runtime, step, staged_bytes=settings.send_budget_bytes)


def check_chunks(settings: PrefillSettings, draft: DraftHead | None) -> None:
    """Raises StartupError if `chunk_tokens` is too small.

    A prompt's last chunk needs a token for each layer of the draft head.
    """
    num_layers = draft.layer_group.num_layers if draft else 1
    if settings.chunk_tokens < num_layers:
        raise StartupError(f"chunk_tokens: {settings.chunk_tokens}, but the draft head has {num_layers} layers")
