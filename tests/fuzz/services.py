"""Both services in this process, with real edges and real engines on a tiny model, connected over loopback."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from structlog.processors import format_exc_info
from structlog.typing import EventDict

from baton.v1 import inference_pb2, inference_pb2_grpc
from common.engine import Outbox
from common.grammar.grammar import GrammarKind
from common.model.target import TargetModel
from common.service.engine_thread import EngineInbox, EngineThread
from common.service.server import ServiceServer
from common.telemetry.metrics import RequestMetrics
from common.text.tokenizer import TextTokenizer
from common.wire.fingerprint import Fingerprint
from decode_service import messages as decode
from decode_service.edge.decode_edge import EventRouter
from decode_service.edge.inference import INFERENCE_SERVICE, InferenceServicer, Served
from decode_service.edge.live_requests import LiveRequests
from decode_service.edge.matchers import MatchersHere
from decode_service.edge.observer import RequestObserver
from decode_service.edge.replicas import ReplicaBoard
from decode_service.edge.request_checks import ModelLimits
from decode_service.edge.text.prompts import Prompts
from decode_service.handoff.grpc_transport import GrpcTransport
from decode_service.handoff.transport import HandoffTimeouts
from prefill_service import messages as prefill
from prefill_service.edge import call
from prefill_service.edge.prefill_edge import PREFILL_SERVICE, add_prefill_servicer
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from tests.fuzz.engine_target import fingerprint_of
from tests.support.engines import new_decode_engine, new_prefill_engine
from tests.support.loading import load_target
from tests.support.loop_thread import LoopThread
from tests.support.models import save_tiny_model
from tests.support.no_matchers import no_matchers

BOUND_S = 20.0
CONTEXT = 24
MAX_ROWS = 4
MAX_KV_TOKENS = 256
HANDOFF_ROWS = 8


class WatchedLoop(LoopThread):
    """An event loop that remembers logged errors, and errors that no code awaits."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        super().__init__(bound_s=BOUND_S, on_fault=lambda context: self.faults.append(str(context)))


class _Errors(logging.Handler):
    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        self._faults.append(self.format(record))


@contextmanager
def loop_under_watch() -> Iterator[WatchedLoop]:
    """Yields a loop that also remembers logged errors. Our code logs them with structlog, and libraries with the
    standard library.
    """
    loop = WatchedLoop()

    def remember(_logger: Any, method: str, line: EventDict) -> EventDict:
        if method in ("error", "critical"):
            loop.faults.append(str(format_exc_info(None, method, line)))
        raise structlog.DropEvent

    handler, processors = _Errors(loop.faults), structlog.get_config()["processors"]
    logging.getLogger().addHandler(handler)
    structlog.configure(processors=[remember])
    try:
        yield loop
    finally:
        structlog.configure(processors=processors)
        logging.getLogger().removeHandler(handler)
        loop.close()


@dataclass(frozen=True)
class Prefill:
    thread: EngineThread[prefill.Command]
    servicer: PrefillServicer
    server: ServiceServer
    fingerprint: Fingerprint
    address: str

    def holds_nothing(self) -> bool:
        return self.servicer.num_calls == 0 and is_empty(self.thread)


@dataclass(frozen=True)
class Decode:
    thread: EngineThread[decode.Command]
    live_requests: LiveRequests
    server: ServiceServer
    transport: GrpcTransport
    prompts: Prompts
    replicas: ReplicaBoard
    address: str

    def holds_nothing(self) -> bool:
        return len(self.live_requests) == 0 and is_empty(self.thread)


def is_empty(thread: EngineThread[Any]) -> bool:
    load = thread.inbox.load
    pools_are_free = load.rows.free == load.rows.total and not load.slots.held
    return pools_are_free and not (load.num_queued or load.num_running or load.unsent_bytes)


def wait_until(holds: Callable[[], bool], about: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < give_up_s, f"not within {BOUND_S} s: {about()}"
        time.sleep(0.0005)


@contextmanager
def tiny_target() -> Iterator[tuple[TargetModel, TextTokenizer]]:
    with tempfile.TemporaryDirectory() as directory:
        save_tiny_model(Path(directory), "llama")
        yield load_target(Path(directory), device="cpu", dtype="float32"), TextTokenizer.from_directory(Path(directory))


async def start_prefill(model: TargetModel) -> Prefill:
    fingerprint = fingerprint_of(model, None)
    inbox: EngineInbox[prefill.Command] = EngineInbox()
    servicer = PrefillServicer(
        engine=inbox,
        fingerprint=fingerprint,
        model_limits=call.ReplicaLimits(vocab_size=model.vocab_size, max_context_tokens=CONTEXT),
        instance_id="fuzz",
        limits=HandoffLimits(max_rows=HANDOFF_ROWS, first_command_timeout_s=BOUND_S),
        new_matcher=no_matchers,
    )
    engine = new_prefill_engine(
        model,
        outbox=Outbox(servicer.deliver),
        max_rows=MAX_ROWS,
        max_kv_tokens=MAX_KV_TOKENS,
        max_context_tokens=CONTEXT,
        chunk_tokens=16,
        max_batch_tokens=64,
        max_queued_rows=HANDOFF_ROWS,
    )
    thread = EngineThread(inbox=inbox, engine=engine, on_death=servicer.engine_died, name="fuzz-prefill")
    server = ServiceServer(service_name=PREFILL_SERVICE)
    add_prefill_servicer(servicer, server)
    thread.start()
    port = await server.start("127.0.0.1:0")
    await server.set_ready(True)
    return Prefill(thread, servicer, server, fingerprint, f"127.0.0.1:{port}")


async def stop_prefill(service: Prefill) -> None:
    await service.server.stop(0)
    await asyncio.to_thread(service.thread.stop, BOUND_S)


async def start_decode(
    model: TargetModel,
    tokenizer: TextTokenizer,
    prefill_address: str,
    timeouts: HandoffTimeouts,
    *,
    prefill_timeout_s: float = BOUND_S,
) -> Decode:
    inbox: EngineInbox[decode.Command] = EngineInbox()
    replicas = ReplicaBoard()

    def post_report(report: Any) -> None:
        replicas.on_report(report)
        inbox.post(report)

    transport = GrpcTransport(
        post=post_report,
        addresses=[prefill_address],
        fingerprint=fingerprint_of(model, None),
        vocab_size=model.vocab_size,
        receive_budget_bytes=1 << 20,
        timeouts=timeouts,
    )
    observer = RequestObserver(
        RequestMetrics(CollectorRegistry(), finish_reasons=decode.FinishReason, grammar_kinds=GrammarKind)
    )
    live_requests = LiveRequests(engine=inbox, max_live=MAX_ROWS, observer=observer)
    router = EventRouter(
        loop=asyncio.get_running_loop(), live_requests=live_requests, transport=transport, replicas=replicas
    )
    engine = new_decode_engine(
        model,
        outbox=Outbox(router.deliver),
        max_rows=MAX_ROWS,
        max_kv_tokens=MAX_KV_TOKENS,
        max_context_tokens=CONTEXT,
        prefill_timeout_s=prefill_timeout_s,
    )
    thread = EngineThread(inbox=inbox, engine=engine, on_death=router.on_death, name="fuzz-decode")
    limits = ModelLimits(vocab_size=model.vocab_size, max_context_tokens=CONTEXT, eos_token_ids=model.eos_token_ids)
    prompts = await Prompts(tokenizer=tokenizer, limits=limits).__aenter__()
    servicer = InferenceServicer(
        engine=inbox,
        live_requests=live_requests,
        prompts=prompts,
        matchers=MatchersHere(new_matcher=no_matchers, replay=prompts.replay, vocab_size=limits.vocab_size),
        replicas=replicas,
        observer=observer,
        served=Served(
            limits=limits,
            model_info=inference_pb2.GetModelInfoResponse(model="tiny"),
            instance_id="fuzz",
            client_stall_timeout_s=BOUND_S,
        ),
    )
    server = ServiceServer(service_name=INFERENCE_SERVICE)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc_server)
    thread.start()
    await transport.open()
    port = await server.start("127.0.0.1:0")
    return Decode(thread, live_requests, server, transport, prompts, replicas, f"127.0.0.1:{port}")


async def stop_decode(service: Decode) -> None:
    await service.server.stop(0)
    await service.transport.close()
    await asyncio.to_thread(service.thread.stop, BOUND_S)
    await service.prompts.__aexit__()
