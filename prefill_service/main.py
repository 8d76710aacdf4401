"""Puts the prefill service together.

gRPC server ─▶ PrefillServicer ─post─▶ EngineThread(PrefillEngine) ─deliver─▶ PrefillServicer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from common.config.fast_paths import FastPath
from common.config.settings import PrefillSettings
from common.draft.head import DraftHead
from common.errors import EngineLost, EngineStalled, StartupError
from common.host.descriptors import max_connections
from common.kv.pool_size import SPLIT_BYTES, MemoryBeside, PoolSize, forward_bytes, room_beside_pool, row_bytes
from common.kv.shared_pool import SharedPool
from common.model.attention import MAX_SPLIT_BYTES
from common.service.engine_thread import EngineThread
from common.service.runtime import Runtime
from common.service.service_main import Process
from common.service.serving import ServerLimits, server_credentials, server_tokens, termination_signals
from common.service.timeline_rpc import TimelineServicer
from common.service.watchdog import Watchdog
from common.telemetry.engine_metrics import EngineMetrics
from common.telemetry.handoff_metrics import HandoffMetrics
from common.telemetry.step_stats import OnStep
from common.wire.framed_payload import FramedPayload
from prefill_service.edge.row_checks import ModelLimits
from prefill_service.edge.server import PREFILL_SERVICE, PrefillServer
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from prefill_service.handoff.lent_memory import LentMemory
from prefill_service.messages import Command, Drain, Event, FrameReady, SegmentBytesSent
from prefill_service.schedule.scheduler import PrefillEngine

_ENGINE_STOP_TIMEOUT_S = 10.0
_CLOSE_GRACE_S = 1.0
_DRAIN_POLL_S = 0.05

_log = structlog.get_logger(__name__)


async def serve(settings: PrefillSettings, process: Process) -> None:
    """Serve until SIGTERM or SIGINT; then finish the calls there are, within the grace period.

    Raises EngineLost when the engine died or hangs: every call has then been failed.
    """
    check_chunks(settings, process.runtime.draft)
    size = process.runtime.size_pool(settings, memory_beside_pool(settings, process.runtime))
    lent = await LentMemory.opened(
        settings.kv_transport,
        groups=process.runtime.fingerprint.layer_groups,
        num_slots=size.max_kv_tokens,
        is_on_host=process.runtime.device.torch_device.type == "cpu",
    )
    try:
        await _serve(settings, process, size, lent)
    finally:
        await lent.close()


async def _serve(settings: PrefillSettings, process: Process, size: PoolSize, lent: LentMemory) -> None:
    runtime = process.runtime
    engine_metrics, handoff_metrics = EngineMetrics(process.registry), HandoffMetrics(process.registry)

    def deliver(events: Sequence[Event]) -> None:
        handoff_metrics.on_frames(event.frame for event in events if isinstance(event, FrameReady))
        servicer.deliver(events)

    def on_death(error: BaseException) -> None:
        servicer.engine_died(error)

    def returned() -> Sequence[SegmentBytesSent]:
        return thread.take(SegmentBytesSent)

    engine = _engine(
        settings, process, size, lent.pool, on_step=engine_metrics.on_step, deliver=deliver, returned=returned
    )
    thread: EngineThread[Command] = EngineThread(
        engine=engine,
        deliver=deliver,
        on_death=on_death,
        name="prefill-engine",
        enter=runtime.device.enter_thread,
        timeline=runtime.timeline,
    )
    servicer = PrefillServicer(
        engine=thread,
        fingerprint=runtime.fingerprint,
        model_limits=ModelLimits(vocab_size=runtime.model.vocab_size, max_context_tokens=size.max_context_tokens),
        instance_id=process.instance_id,
        limits=HandoffLimits(stall_timeout_s=settings.stall_timeout_s),
        tracer=process.tracer,
        timeline=runtime.timeline,
        shared_pool=lent.pool,
        nixl_offer=lent.nixl_offer,
    )
    server = PrefillServer(
        servicer=servicer,
        credentials=server_credentials(settings.tls_cert, settings.tls_key, settings.tls_ca),
        checks_certificates=settings.tls_ca is not None,
        tokens=server_tokens(settings),
        limits=ServerLimits(max_streams=settings.max_streams, max_connections=max_connections()),
        timeline=TimelineServicer(timeline=runtime.timeline, service=PREFILL_SERVICE, instance_id=process.instance_id),
    )
    engine_metrics.watch(
        lambda: thread.load,
        is_ready=lambda: server.is_ready,
        is_fused=lambda: runtime.model.runs_program,
        forward_counts=runtime.forward_counts,
    )
    watchdog = Watchdog(
        engine=thread,
        device=runtime.device,
        num_layers_begun=lambda: runtime.model.num_layers_begun,
        stall_timeout_s=settings.engine_stall_timeout_s,
    )
    with termination_signals() as terminated:
        thread.start()
        if settings.kv_transport == "nixl" and (settings.tls_cert or settings.auth_token_file):
            _log.warning("kv_in_plain_text", kv_transport=settings.kv_transport)
        lent.follow(lambda: servicer.num_calls > 0)
        port = await server.start(settings.listen)
        _log.info("serving", port=port)
        readiness = asyncio.create_task(
            server.follow(
                lambda: watchdog.is_well and not terminated.is_set(),
                on_ready=lambda: runtime.start_beside(engine.pool.populate),
            ),
            name="readiness",
        )

        def on_lost(error: EngineLost) -> None:
            servicer.fail_calls(error)
            terminated.set()

        watching = asyncio.create_task(watchdog.follow(on_lost), name="watchdog")
        await terminated.wait()
        _log.info("draining", num_calls=servicer.num_calls)
        thread.post(Drain())
        await server.set_ready(False)  # at once: decode services must not wait for the next look
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_period_s if watchdog.lost is None else _CLOSE_GRACE_S):
                while servicer.num_calls and thread.is_alive:  # noqa: ASYNC110 - either may change first
                    await asyncio.sleep(_DRAIN_POLL_S)
        readiness.cancel()
        await server.stop(_CLOSE_GRACE_S)
        watching.cancel()
        if watchdog.lost is not None:
            raise watchdog.lost
        if not await asyncio.to_thread(thread.stop, _ENGINE_STOP_TIMEOUT_S if watchdog.is_well else 0.0):
            raise EngineStalled("the engine did not stop")


def _engine(
    settings: PrefillSettings,
    process: Process,
    size: PoolSize,
    shared_pool: SharedPool | None,
    on_step: OnStep,
    deliver: Callable[[Sequence[Event]], None] | None = None,
    returned: Callable[[], Sequence[SegmentBytesSent]] = tuple,
) -> PrefillEngine:
    runtime = process.runtime
    with room_beside_pool():
        return PrefillEngine(
            model=runtime.model,
            draft=runtime.draft,
            draft_topk=settings.draft_topk,
            device=runtime.device,
            draw_kernels=runtime.draw_kernels,
            max_rows=size.max_rows,
            max_kv_tokens=size.max_kv_tokens,
            max_context_tokens=size.max_context_tokens,
            chunk_tokens=settings.chunk_tokens,
            max_batch_tokens=settings.max_batch_tokens,
            send_budget_bytes=settings.send_budget_bytes,
            max_segment_bytes=settings.max_segment_bytes,
            max_queued_rows=settings.max_queued_rows,
            early_sending=settings.uses(FastPath.EARLY_SENDING),
            overlap=settings.uses(FastPath.OVERLAP),
            on_step=on_step,
            deliver=deliver,
            returned=returned,
            timeline=runtime.timeline,
            debug_checks=settings.debug_checks,
            shared_pool=shared_pool,
            new_payload=FramedPayload.new if settings.uses(FastPath.FRAMED_PAYLOADS) else None,
        )


def memory_beside_pool(settings: PrefillSettings, runtime: Runtime) -> MemoryBeside:
    """With two forwards under way: of one the activations, of both the states that a head wants."""
    model, num_tokens = runtime.model, settings.max_batch_tokens
    is_host = model.torch_device.type == "cpu"
    parts = min(num_tokens * model.hidden_size * SPLIT_BYTES, MAX_SPLIT_BYTES)
    on_gpu = parts + settings.send_budget_bytes  # what is sent is gathered there, then copied out
    num_states = 0 if runtime.draft is None else runtime.draft.capture.num_states
    captured_bytes = num_states * model.hidden_size * model.dtype.itemsize
    each_row = row_bytes(vocab_size=model.vocab_size, num_tokens=runtime.context_tokens)

    def peak_bytes(num_rows: int) -> int:
        forward = forward_bytes(
            num_tokens=num_tokens,
            num_logits=min(num_rows, num_tokens),
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
        )
        return (num_rows + 1) * each_row + forward + 2 * num_tokens * captured_bytes + (0 if is_host else on_gpu)

    return MemoryBeside(row_bytes=each_row, peak_bytes=peak_bytes)


def check_chunks(settings: PrefillSettings, draft: DraftHead | None) -> None:
    """A prompt's last chunk has a token for every layer of the head."""
    num_layers = draft.layer_group.num_layers if draft else 1
    if settings.chunk_tokens < num_layers:
        raise StartupError(f"chunk_tokens: {settings.chunk_tokens}, but the draft head has {num_layers} layers")
