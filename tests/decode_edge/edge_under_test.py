"""The decode edge as clients reach it: a real server on loopback, in front of a scripted engine and transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from baton.v1 import inference_pb2, inference_pb2_grpc
from common.grammar.grammar import Grammar, GrammarKind
from common.sampling.params import TokenLogprobs
from common.service.server import ServerLimits, ServiceServer
from common.telemetry.metrics import RequestMetrics
from common.telemetry.timeline import Timeline
from common.telemetry.tracing import NO_TRACER
from common.text.grammar_compiler import GrammarCompiler
from common.text.grammars import Grammars
from common.text.tokenizer import TextTokenizer
from decode_service.edge.decode_edge import DecodeEdge, EventRouter
from decode_service.edge.inference import INFERENCE_SERVICE, InferenceServicer, Served
from decode_service.edge.live_requests import MAX_PROMPT_LOGPROB_BYTES, LiveRequests
from decode_service.edge.matchers import MatchersHere
from decode_service.edge.observer import RequestObserver
from decode_service.edge.replicas import ReplicaBoard
from decode_service.edge.request_checks import ModelLimits
from decode_service.edge.text.prompts import Prompts
from decode_service.messages import FinishReason, Replica, ReplicasChanged, Tokens
from tests.decode_edge.fake_engine import BOUND_S, FakeEngine
from tests.decode_edge.tokenizers_for_tests import byte_level, eos_id, vocab_size

SERVICE = INFERENCE_SERVICE
MAX_LIVE = 3
CONTEXT = 64


@dataclass
class RecordingTransport:
    """A transport that keeps the requests that the engine makes, in `asked`."""

    asked: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name not in ("start", "cancel_rows", "break_call", "landed"):
            raise AttributeError(name)
        return lambda command: self.asked.append((name, command))

    async def close(self) -> None:
        return None


@dataclass
class Edge:
    engine: FakeEngine
    transport: RecordingTransport
    live_requests: LiveRequests
    router: EventRouter
    replicas: ReplicaBoard
    server: ServiceServer
    servicer: InferenceServicer
    channel: grpc.aio.Channel
    address: str
    registry: CollectorRegistry
    tokenizer: TextTokenizer
    log: list[dict[str, Any]]

    @property
    def stub(self) -> inference_pb2_grpc.InferenceAsyncStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    def generate(self, timeout: float | None = None, **fields: Any) -> Any:
        """Starts a Generate call. Its prompt is the token ids (1, 2, 3) unless another is given."""
        if not {"text", "token_ids", "chat"} & set(fields):
            fields["token_ids"] = inference_pb2.TokenIds(ids=[1, 2, 3])
        return self.stub.Generate(inference_pb2.GenerateRequest(**fields), timeout=timeout)

    def deliver(self, *events: Any) -> None:
        """Delivers events as the engine's thread does."""
        self.router.deliver(events)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def running_edge(
    log: list[dict[str, Any]],
    *,
    tokenizer: TextTokenizer | None = None,
    tokens: Sequence[str] = (),
    limits: ServerLimits | None = None,
    tracer: Tracer = NO_TRACER,
    timeline: Timeline | None = None,
    clock: Callable[[], float] = time.monotonic,
    serves_chats: bool = False,
    serves_alone: bool = False,
    tells_tenants_apart: bool = False,
    max_prompt_logprob_bytes: int = MAX_PROMPT_LOGPROB_BYTES,
    client_stall_timeout_s: float = BOUND_S,
    **texts: Any,
) -> AsyncIterator[Edge]:
    """Runs a decode edge in front of a fake engine. `texts` are further arguments of Prompts."""
    tokenizer = tokenizer or byte_level()
    engine, transport, replicas = FakeEngine(), RecordingTransport(), ReplicaBoard(serves_alone=serves_alone)
    registry = CollectorRegistry()
    observer = RequestObserver(
        RequestMetrics(registry, finish_reasons=FinishReason, grammar_kinds=GrammarKind), clock=clock
    )
    live_requests = LiveRequests(
        engine=engine,
        max_live=MAX_LIVE,
        observer=observer,
        timeline=timeline,
        max_prompt_logprob_bytes=max_prompt_logprob_bytes,
    )
    limits_of_model = ModelLimits(
        vocab_size=vocab_size(tokenizer), max_context_tokens=CONTEXT, eos_token_ids=(eos_id(tokenizer),)
    )
    prompts = Prompts(tokenizer=tokenizer, limits=limits_of_model, timeline=timeline, **texts)
    router = EventRouter(
        loop=asyncio.get_running_loop(), live_requests=live_requests, transport=transport, replicas=replicas
    )
    decode_edge = DecodeEdge(engine=engine, live_requests=live_requests, replicas=replicas, transport=transport)
    server = ServiceServer(service_name=SERVICE, tokens=tokens, limits=limits)
    compiler = GrammarCompiler(
        Grammars(lambda: tokenizer, vocab_size=limits_of_model.vocab_size, eos_token_ids=limits_of_model.eos_token_ids),
        believed,
    )
    servicer = InferenceServicer(
        engine=engine,
        live_requests=live_requests,
        prompts=prompts,
        replicas=replicas,
        observer=observer,
        served=Served(
            limits=limits_of_model,
            model_info=inference_pb2.GetModelInfoResponse(model="tiny"),
            instance_id="this process",
            client_stall_timeout_s=client_stall_timeout_s,
            tells_tenants_apart=tells_tenants_apart,
        ),
        matchers=MatchersHere(
            new_matcher=compiler.matcher, replay=prompts.replay, vocab_size=limits_of_model.vocab_size
        ),
        client_of=server.client_of,
        tracer=tracer,
        timeline=timeline,
    )
    replicas.on_report(ReplicasChanged((Replica("127.0.0.1:1", is_ready=True),)))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc_server)
    port = await server.start("127.0.0.1:0")
    follower = asyncio.create_task(
        server.follow(
            lambda: engine.is_alive and decode_edge.is_ready,
            interval_s=0.01,
        )
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(compiler)
        if serves_chats:
            await stack.enter_async_context(prompts)
        else:  # without rendering processes
            stack.push_async_exit(prompts.__aexit__)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        yield Edge(
            engine,
            transport,
            live_requests,
            router,
            replicas,
            server,
            servicer,
            channel,
            f"127.0.0.1:{port}",
            registry,
            tokenizer,
            log,
        )
    follower.cancel()
    await server.stop(0)


async def believed(grammar: Grammar) -> int:
    """Stands in for the trial of a new grammar: accepts the grammar untried, and starts no process."""
    return 0


def tokens_of(request_id: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Tokens:
    """Returns a Tokens event for one request, as the engine's thread delivers it."""
    return Tokens((request_id,), (len(token_ids),), tuple(token_ids), tuple(logprobs))


class AloneContext:
    """The context of a call whose client and network do nothing by themselves, so that only the service can end it."""

    def __init__(self, *, remaining_s: float, reads: bool = True, peer: str = "ipv4:127.0.0.1:1") -> None:
        self._remaining_s = remaining_s
        self._reads = reads
        self._peer = peer
        self.code: grpc.StatusCode | None = None

    def time_remaining(self) -> float:
        return self._remaining_s

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """Sends nothing."""

    async def write(self, message: Any) -> None:
        if not self._reads:
            await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        self.code = code
        raise grpc.aio.AbortError(details)


async def events_of(call: Any) -> list[inference_pb2.GenerateEvent]:
    return [event async for event in call]


async def error_of(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Returns the code, ErrorInfo reason and ErrorInfo metadata of a call, which must fail."""
    try:
        await (events_of(call) if isinstance(call, (grpc.aio.UnaryStreamCall, grpc.aio.StreamStreamCall)) else call)
    except grpc.aio.AioRpcError as error:
        status = await rpc_status.aio.from_call(call)
        assert status is not None, f"no rich status: {error}"
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.domain == "baton"
        return error.code(), info.reason, dict(info.metadata)
    raise AssertionError("the call did not fail")


def text_of(events: Sequence[inference_pb2.GenerateEvent]) -> str:
    return "".join(event.delta.text for event in events)


def ids_in(events: Sequence[inference_pb2.GenerateEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.delta.token_ids]
