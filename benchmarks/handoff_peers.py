"""The processes that `benchmarks.handoff` reads from: a prefill service without a model, and a bare stream.

Each is a process of its own that sends its port through a pipe and serves until the pipe closes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import cast

import grpc
import structlog
import torch

from common.config.settings import SWITCH_INTERVAL_S, KvTransport
from common.device.factory import open_device
from common.engine_thread import EngineThread
from common.host_memory import keep_freed_memory
from common.kv.layer_group import LayerGroupSpec
from common.model.attention import ForwardInput
from common.model.attention_torch import TorchAttention
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput
from common.wire.fingerprint import Fingerprint
from common.wire.framed_payload import FramedPayload
from common.wire.grpc_options import MAX_SEGMENT_BYTES, server_options
from prefill_service.edge.row_checks import ModelLimits
from prefill_service.edge.server import PrefillServer
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from prefill_service.lent_memory import LentMemory
from prefill_service.messages import Command, Event
from prefill_service.scheduler import PrefillEngine

BARE_STREAM = "/benchmark.Bare/Stream"
VOCAB_SIZE = 128
_START_TIMEOUT_S = 60.0

Serve = Callable[[Connection], Coroutine[None, None, None]]
"""Sends its port and serves until the pipe closes, or it is cancelled; leaves nothing behind either way."""


@dataclass(frozen=True, slots=True)
class HandoffShape:
    """The KV that is handed over, in prompts of `prompt_tokens`; at most `num_prompts` at a time."""

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
            config_digest="", target_weights_digest="", tokenizer_digest="", layer_groups=(self.layer_group,)
        )


class NothingModel:
    """Has the attributes of TargetModel that engines use. Its KV is what the pool holds, its logits are zeros."""

    eos_token_ids: tuple[int, ...] = ()
    hidden_size = 1
    dtype = torch.float32
    torch_device = torch.device("cpu")
    vocab_size = VOCAB_SIZE
    attention = TorchAttention()

    def __init__(self, shape: HandoffShape) -> None:
        self.layer_group = shape.layer_group
        self.max_context_tokens = shape.max_context_tokens

    def prepare(self, batch: ForwardInput) -> Callable[[], TargetOutput]:
        return partial(self.forward, batch)

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        for tell in (on_layer_kv or {}).values():
            tell()
        num_rows = batch.input_ids.shape[0] if batch.logits_rows is None else len(batch.logits_rows)
        return TargetOutput(torch.zeros(num_rows, VOCAB_SIZE), None)


@contextmanager
def prefill_peer(shape: HandoffShape) -> Iterator[str]:
    """Yields the address of a prefill service: its own engine, sender, edge and gRPC server."""
    with _process(partial(_serve_prefill, shape)) as address:
        yield address


@contextmanager
def bare_peer(num_bytes: int) -> Iterator[str]:
    """Yields the address of a server whose one method, asked for `bare_request`, streams that: `num_bytes`, again and
    again. As many as a prompt's KV come out of memory as that does; a message sent over and over comes out of a cache.
    """
    with _process(partial(_serve_bare, num_bytes)) as address:
        yield address


def bare_request(*, message_bytes: int, num_messages: int) -> bytes:
    return f"{message_bytes} {num_messages}".encode()


@contextmanager
def _process(serve: Serve) -> Iterator[str]:
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_run, args=(serve, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_TIMEOUT_S):
            raise TimeoutError("a process of the benchmark did not start")
        yield f"127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join(10.0)
        process.kill()


def _run(serve: Serve, pipe: Connection) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with suppress(KeyboardInterrupt):  # the benchmark's own process says so
        asyncio.run(serve(pipe))


async def _until_closed(pipe: Connection) -> None:
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), closed.set)
    await closed.wait()


async def _serve_prefill(shape: HandoffShape, pipe: Connection) -> None:
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        lent = await LentMemory.opened(
            shape.kv_transport, groups=[shape.layer_group], num_slots=shape.num_slots, is_on_host=True
        )
        stack.push_async_callback(lent.close)
        engine = _prefill_engine(shape, lent)

        def deliver(events: Sequence[Event]) -> None:
            servicer.deliver(events)

        def on_death(error: BaseException) -> None:
            servicer.engine_died(error)

        thread: EngineThread[Command] = EngineThread(
            engine=engine,
            deliver=deliver,
            on_death=on_death,
            name="prefill-engine",
        )
        servicer = PrefillServicer(
            engine=thread,
            fingerprint=shape.fingerprint,
            model_limits=ModelLimits(vocab_size=VOCAB_SIZE, max_context_tokens=shape.max_context_tokens),
            instance_id="benchmark",
            limits=HandoffLimits(),
            shared_pool=lent.pool,
            nixl_offer=lent.nixl_offer,
        )
        server = PrefillServer(servicer=servicer)
        thread.start()
        stack.callback(thread.stop, 10.0)
        lent.follow(lambda: servicer.num_calls > 0)
        port = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop, 0)
        await server.set_ready(True)
        pipe.send(port)
        await _until_closed(pipe)


def _prefill_engine(shape: HandoffShape, lent: LentMemory) -> PrefillEngine:
    engine = PrefillEngine(
        model=cast(TargetModel, NothingModel(shape)),
        device=open_device("cpu", num_threads=1),
        max_rows=shape.num_prompts,
        max_kv_tokens=shape.num_slots,
        max_context_tokens=shape.max_context_tokens,
        max_segment_bytes=MAX_SEGMENT_BYTES,
        shared_pool=lent.pool,
        new_payload=FramedPayload.new,
    )
    for buffer in engine.pool.buffers.values():
        buffer.view(torch.uint8).random_()
    return engine


async def _serve_bare(num_bytes: int, pipe: Connection) -> None:
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy()

    @cache
    def messages(message_bytes: int) -> list[bytes]:
        return [content[start : start + message_bytes].tobytes() for start in range(0, num_bytes, message_bytes)]

    async def stream(request: bytes, _context: object) -> AsyncIterator[bytes]:
        message_bytes, num_messages = map(int, request.split())
        for message in itertools.islice(itertools.cycle(messages(message_bytes)), num_messages):
            yield message

    server = grpc.aio.server(options=server_options())
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark.Bare", {"Stream": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        pipe.send(port)
        await _until_closed(pipe)
    finally:
        await server.stop(0)
