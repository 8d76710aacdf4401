"""The two services that `benchmarks.handoff` measures, without models.

The prefill service runs in a process of its own, the decode engine in this one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks.peer_process import peer_process, until_closed
from common.attention.backend import ForwardInput
from common.attention.torch_attention import TorchAttention
from common.config.settings import DecodeSettings, KvTransport
from common.engine import Outbox
from common.kv.layer_group import LayerGroupSpec
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput, TargetShape
from common.rpc.grpc_options import MAX_SEGMENT_BYTES
from common.sampling.params import ResolvedSampling
from common.service.engine_thread import EngineInbox, EngineThread
from common.service.server import ServiceServer
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from common.wire.fingerprint import Fingerprint
from common.wire.framing import FramePayload
from common.wire.handoff import KvSegment
from decode_service import messages as decode
from decode_service.handoff.grpc_transport import GrpcTransport
from decode_service.handoff.transport import HandoffTimeouts
from prefill_service.edge.call import ReplicaLimits
from prefill_service.edge.prefill_edge import PREFILL_SERVICE, add_prefill_servicer
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from prefill_service.handoff.lent_memory import LentMemory
from prefill_service.messages import Command, Event
from prefill_service.schedule.scheduler import PrefillEngine
from tests.support.engines import new_decode_engine, new_prefill_engine
from tests.support.no_matchers import no_matchers

_VOCAB_SIZE = 128
_BOUND_S = 120.0


@dataclass(frozen=True, slots=True)
class HandoffShape:
    """The size of a handoff: prompts of `prompt_tokens` tokens, of which at most `num_prompts` are handed over at a
    time.
    """

    layer_group: LayerGroupSpec
    prompt_tokens: int
    num_prompts: int
    kv_transport: KvTransport = "grpc"

    @property
    def num_slots(self) -> int:
        return self.num_prompts * self.prompt_tokens

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_tokens * self.layer_group.token_bytes

    @property
    def max_context_tokens(self) -> int:
        return self.prompt_tokens + 8

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            protocol_version=PROTOCOL_VERSION,
            config_digest="",
            target_weights_digest="",
            tokenizer_digest="",
            dtype="float32",
            layer_groups=(self.layer_group,),
        )


class NothingModel(TargetModel):
    """A model that computes nothing. Its KV is whatever the pool contains, and its logits are zeros."""

    def __init__(self, shape: HandoffShape) -> None:
        super().__init__(
            model=torch.nn.Module(),
            backend=TorchAttention(),
            shape=TargetShape(
                layer_group=shape.layer_group,
                kv_heads=[[range(shape.layer_group.num_heads)] * shape.layer_group.num_layers],
                hidden_size=1,
                vocab_size=_VOCAB_SIZE,
                max_context_tokens=shape.max_context_tokens,
                eos_token_ids=(),
                dtype=torch.float32,
                torch_device=torch.device("cpu"),
            ),
        )

    def prepare(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> Callable[[], TargetOutput]:
        def compute() -> TargetOutput:
            for tell in (on_layer_kv or {}).values():
                tell()
            num_rows = batch.input_ids.shape[0] if batch.logits_rows is None else len(batch.logits_rows)
            return TargetOutput(torch.zeros(num_rows, _VOCAB_SIZE), None)

        return compute


@contextmanager
def prefill_peer(shape: HandoffShape) -> Iterator[str]:
    """Runs a prefill service in another process, with its own engine, sender and gRPC server. Yields its address."""
    with peer_process(partial(_serve_prefill, shape)) as address:
        yield address


async def _serve_prefill(shape: HandoffShape, pipe: Connection) -> None:
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        lent = await LentMemory.opened(
            shape.kv_transport,
            groups=[shape.layer_group],
            num_slots=shape.num_slots,
            num_window_slots=0,
            is_on_host=True,
        )
        stack.push_async_callback(lent.close)
        inbox: EngineInbox[Command] = EngineInbox()
        servicer = PrefillServicer(
            engine=inbox,
            fingerprint=shape.fingerprint,
            model_limits=ReplicaLimits(vocab_size=_VOCAB_SIZE, max_context_tokens=shape.max_context_tokens),
            instance_id="benchmark",
            limits=HandoffLimits(),
            new_matcher=no_matchers,
            lent=lent,
        )
        thread = EngineThread(
            inbox=inbox,
            engine=_prefill_engine(shape, lent, Outbox(servicer.deliver)),
            on_death=servicer.engine_died,
            name="prefill-engine",
        )
        server = ServiceServer(service_name=PREFILL_SERVICE)
        add_prefill_servicer(servicer, server)
        thread.start()
        stack.callback(thread.stop, 10.0)
        lent.follow(lambda: servicer.num_calls > 0)
        port = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop, 0)
        await server.set_ready(True)
        pipe.send(port)
        await until_closed(pipe)


def _prefill_engine(shape: HandoffShape, lent: LentMemory, outbox: Outbox[Event]) -> PrefillEngine:
    engine = new_prefill_engine(
        NothingModel(shape),
        outbox=outbox,
        max_rows=shape.num_prompts,
        max_kv_tokens=shape.num_slots,
        max_context_tokens=shape.max_context_tokens,
        max_segment_bytes=MAX_SEGMENT_BYTES,
        shared_pool=lent.pool,
        new_framed_kv=FramePayload,
        debug_checks=False,
    )
    for buffer in engine.pool.buffers.values():
        buffer.view(torch.uint8).random_()
    return engine


class DecodePeer:
    """A decode engine in this process. Each request generates a single token, so all its time is the handoff."""

    def __init__(self, shape: HandoffShape, address: str) -> None:
        self._shape = shape
        self._loop = asyncio.get_running_loop()
        self._left = 0
        self._ended = asyncio.Event()
        self._ready = asyncio.Event()
        self._error: BaseException | None = None
        self.lent_bytes = 0
        """The bytes of KV that came through shared memory or NIXL, not in gRPC frames."""
        engine = new_decode_engine(
            NothingModel(shape),
            outbox=Outbox(self._deliver),
            max_rows=shape.num_prompts,
            max_kv_tokens=shape.num_slots,
            max_context_tokens=shape.max_context_tokens,
            debug_checks=False,
        )
        for buffer in engine.pool.buffers.values():
            buffer.view(torch.uint8).random_()  # makes the kernel allocate the pages
        self._inbox: EngineInbox[decode.Command] = EngineInbox()
        self._thread = EngineThread(
            inbox=self._inbox,
            engine=engine,
            on_death=self._on_death,
            name="decode-engine",
        )
        self._transport = GrpcTransport(
            post=self._post,
            addresses=[address],
            fingerprint=shape.fingerprint,
            vocab_size=_VOCAB_SIZE,
            receive_budget_bytes=DecodeSettings.model_fields["receive_budget_bytes"].default,
            timeouts=HandoffTimeouts(),
        )

    async def open(self) -> None:
        self._thread.start()
        await self._transport.open()
        await self._until(self._ready)

    async def hand_over(self, num_prompts: int) -> float:
        """Hands over `num_prompts` prompts at once. Returns bytes per second until the last request has its first
        token.
        """
        self._left = num_prompts
        self._ended.clear()
        prompt = tuple(place % _VOCAB_SIZE for place in range(self._shape.prompt_tokens))
        begun_s = time.perf_counter()
        for number in range(num_prompts):
            sampling = ResolvedSampling(seed=0, max_tokens=1, temperature=0.0)
            self._inbox.post(decode.Submit(f"{begun_s} {number}", prompt, len(prompt), sampling))
        await self._until(self._ended)
        return num_prompts * self._shape.prompt_bytes / (time.perf_counter() - begun_s)

    async def close(self) -> None:
        await self._transport.close()
        self._thread.stop(10.0)

    async def _until(self, event: asyncio.Event) -> None:
        """Waits for the event. Raises at once if a request or the engine fails."""
        await asyncio.wait_for(event.wait(), _BOUND_S)
        if self._error is not None:
            raise self._error

    def _post(self, report: decode.Command) -> None:
        if isinstance(report, decode.ReplicasChanged) and report.replicas[0].is_ready:
            self._ready.set()
        if (
            isinstance(report, decode.FrameArrived)
            and isinstance(report.frame, KvSegment)
            and report.frame.shared is not None
        ):
            self.lent_bytes += report.frame.num_bytes
        self._inbox.post(report)

    def _deliver(self, events: Sequence[decode.Event]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, tuple(events))

    def _dispatch(self, events: Sequence[decode.Event]) -> None:
        for event in events:
            match event:
                case decode.StartHandoff():
                    self._transport.start(event)
                case decode.SegmentsLanded():
                    self._transport.landed(event)
                case decode.Finished():
                    self._left -= 1
                case decode.Failed(_, error):
                    self._fail(error)
        if not self._left:
            self._ended.set()

    def _on_death(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()
        self._ended.set()
