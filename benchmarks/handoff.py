"""How fast KV moves from a prefill service's pool into a decode engine's, beside what the machine could do at best.

Two processes with their own engines, edges and connections; only the models compute nothing. In turn within each
round: the handoff over gRPC, a bare gRPC stream between two Python processes, with messages of several sizes, the
handoff through shared memory, through NIXL as it chooses and over TCP, and a copy from memory to memory by one thread,
far larger than the caches. Before it is measured, each connection has carried as much as the requests at a time are.
Rates are in MB/s of payload; ratios are taken within a round, those to the bare stream to the size of messages whose
median is best; it streams bytes of as much memory as a prompt's KV. The table shows medians. Writes a table into
benchmarks/results. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import grpc
import numpy as np
import torch

from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.handoff_peers import (
    BARE_STREAM,
    VOCAB_SIZE,
    HandoffShape,
    NothingModel,
    bare_peer,
    bare_request,
    prefill_peer,
)
from common.config.settings import SWITCH_INTERVAL_S, DecodeSettings
from common.device.factory import open_device
from common.engine_thread import EngineThread
from common.host_memory import keep_freed_memory
from common.kv.layer_group import LayerGroupSpec
from common.model.sampling_params import ResolvedSampling
from common.model.target import TargetModel
from common.wire.grpc_options import channel_options
from common.wire.handoff import KvSegment
from decode_service.handoff.grpc_transport import GrpcTransport
from decode_service.handoff.timeouts import HandoffTimeouts
from decode_service.messages import (
    Command,
    Event,
    Failed,
    Finished,
    FrameArrived,
    ReplicasChanged,
    SegmentsLanded,
    StartHandoff,
    Submit,
)
from decode_service.scheduler import DecodeEngine

SHAPES = {
    "8b": LayerGroupSpec("target", num_layers=32, num_planes=2, num_heads=8, head_dim=128, dtype="bfloat16"),
    "demo": LayerGroupSpec("target", num_layers=30, num_planes=2, num_heads=3, head_dim=64, dtype="bfloat16"),
}
MIN_GRPC_SHARE = 0.6
MIN_SHARED_MEMORY_SHARE = 0.5
BARE_MESSAGE_BYTES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
COPY_BYTES = 256 << 20
BOUND_S = 120.0


class DecodePeer:
    """A decode engine in this process, one token a request: whatever it waits for is the handoff."""

    def __init__(self, shape: HandoffShape, address: str) -> None:
        self._shape = shape
        self._loop = asyncio.get_running_loop()
        self._left = 0
        self._ended = asyncio.Event()
        self._ready = asyncio.Event()
        self._error: BaseException | None = None
        self.lent_bytes = 0
        """Of KV that came otherwise than in frames."""
        engine = DecodeEngine(
            model=cast(TargetModel, NothingModel(shape)),
            device=open_device("cpu", num_threads=1),
            max_rows=shape.num_prompts,
            max_kv_tokens=shape.num_slots,
            max_context_tokens=shape.max_context_tokens,
        )
        for buffer in engine.pool.buffers.values():
            buffer.view(torch.uint8).random_()  # its pages are there
        self._thread: EngineThread[Command] = EngineThread(
            engine=engine, deliver=self._deliver, on_death=self._on_death, name="decode-engine"
        )
        self._transport = GrpcTransport(
            post=self._post,
            addresses=[address],
            fingerprint=shape.fingerprint,
            vocab_size=VOCAB_SIZE,
            receive_budget_bytes=DecodeSettings.model_fields["receive_budget_bytes"].default,
            timeouts=HandoffTimeouts(),
        )

    async def open(self) -> None:
        self._thread.start()
        await self._transport.open()
        await self._until(self._ready)

    async def hand_over(self, num_prompts: int) -> float:
        """Bytes a second, from the requests' arrival until the last has its first token."""
        self._left = num_prompts
        self._ended.clear()
        prompt = tuple(place % VOCAB_SIZE for place in range(self._shape.prompt_tokens))
        begun_s = time.perf_counter()
        for number in range(num_prompts):
            sampling = ResolvedSampling(seed=0, max_tokens=1, temperature=0.0)
            self._thread.post(Submit(f"{begun_s} {number}", prompt, len(prompt), sampling))
        await self._until(self._ended)
        return num_prompts * self._shape.prompt_bytes / (time.perf_counter() - begun_s)

    async def close(self) -> None:
        await self._transport.close()
        self._thread.stop(10.0)

    async def _until(self, event: asyncio.Event) -> None:
        """Raises at once what a request, or the engine itself, fails with."""
        await asyncio.wait_for(event.wait(), BOUND_S)
        if self._error is not None:
            raise self._error

    def _post(self, report: Command) -> None:
        if isinstance(report, ReplicasChanged) and report.replicas[0].is_ready:
            self._ready.set()
        if isinstance(report, FrameArrived) and isinstance(report.frame, KvSegment) and report.frame.shared is not None:
            self.lent_bytes += report.frame.num_bytes
        self._thread.post(report)

    def _deliver(self, events: Sequence[Event]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, tuple(events))

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case StartHandoff():
                    self._transport.start(event)
                case SegmentsLanded():
                    self._transport.landed(event)
                case Finished():
                    self._left -= 1
                case Failed(_, error):
                    self._fail(error)
        if not self._left:
            self._ended.set()

    def _on_death(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()
        self._ended.set()


async def handoff_rate(shape: HandoffShape, num_prompts: int) -> float:
    with prefill_peer(shape) as address:
        peer = DecodePeer(shape, address)
        try:
            await peer.open()
            await peer.hand_over(shape.num_prompts)  # connections, and pages that were never touched
            rate = await peer.hand_over(num_prompts)
        finally:
            await peer.close()
        num_bytes = 0 if shape.kv_transport == "grpc" else (shape.num_prompts + num_prompts) * shape.prompt_bytes
        if peer.lent_bytes != num_bytes:
            raise RuntimeError(f"{peer.lent_bytes} bytes of KV came by {shape.kv_transport}, not {num_bytes}")
        return rate


async def bare_rates(shape: HandoffShape, num_prompts: int) -> dict[int, float]:
    """Bytes a second by messages' size, of streams as long as the prompts' KV."""
    rates: dict[int, float] = {}
    with bare_peer(shape.prompt_bytes) as address:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            await asyncio.wait_for(channel.channel_ready(), BOUND_S)
            call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(BARE_STREAM)
            for message_bytes in BARE_MESSAGE_BYTES:
                await bare_rate(call, message_bytes, shape.num_prompts * shape.prompt_bytes)
                rates[message_bytes] = await bare_rate(call, message_bytes, num_prompts * shape.prompt_bytes)
    return rates


async def bare_rate(call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes], message_bytes: int, num_bytes: int) -> float:
    """Of `num_bytes`, in whole messages."""
    begun_s = time.perf_counter()
    request = bare_request(message_bytes=message_bytes, num_messages=-(-num_bytes // message_bytes))
    stream = call(request, timeout=BOUND_S)
    received_bytes = 0
    while isinstance(message := await stream.read(), bytes):
        received_bytes += len(message)
    return received_bytes / (time.perf_counter() - begun_s)


@contextmanager
def over_tcp() -> Iterator[None]:
    """NIXL's processes that start meanwhile have no other way."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = "tcp"
    try:
        yield
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before


def copy_rate() -> float:
    source = np.random.default_rng(0).integers(0, 256, COPY_BYTES, np.uint8)
    target = source.copy()
    begun_s = time.perf_counter()
    for _ in range(4):
        np.copyto(target, source)
    return 4 * COPY_BYTES / (time.perf_counter() - begun_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of an 8-billion Llama's KV, or the demo model's")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    shape = HandoffShape(SHAPES[args.shape], args.prompt_tokens, num_prompts=4)
    sharing, nixl = replace(shape, kv_transport="shared_memory"), replace(shape, kv_transport="nixl")
    rates: dict[str, list[float]] = {"gRPC": [], "shared": [], "NIXL": [], "TCP": [], "copy": []}
    bare: list[dict[int, float]] = []
    for _ in range(args.rounds):
        rates["gRPC"].append(asyncio.run(handoff_rate(shape, args.prompts)))
        bare.append(asyncio.run(bare_rates(shape, args.prompts)))
        rates["shared"].append(asyncio.run(handoff_rate(sharing, args.prompts)))
        rates["NIXL"].append(asyncio.run(handoff_rate(nixl, args.prompts)))
        with over_tcp():
            rates["TCP"].append(asyncio.run(handoff_rate(nixl, args.prompts)))
        rates["copy"].append(copy_rate())
    best_bytes = max(BARE_MESSAGE_BYTES, key=lambda size: statistics.median(each[size] for each in bare))
    rates["bare"] = [each[best_bytes] for each in bare]
    grpc_share, shared_share = _share(rates["gRPC"], rates["bare"]), _share(rates["shared"], rates["copy"])
    run = BenchmarkRun.of("handoff")
    rows = [
        (
            "handoff over gRPC",
            rates["gRPC"],
            f"{grpc_share:.0%} of the bare stream of {best_bytes >> 20} MiB",
            verdict(grpc_share, MIN_GRPC_SHARE),
        ),
        *(
            (f"bare gRPC stream of {size >> 20} MiB messages", [each[size] for each in bare], "", "")
            for size in BARE_MESSAGE_BYTES
        ),
        (
            "handoff through shared memory",
            rates["shared"],
            f"{shared_share:.0%} of the copy",
            verdict(shared_share, MIN_SHARED_MEMORY_SHARE),
        ),
        (
            "handoff through NIXL, which copies between processes",
            rates["NIXL"],
            f"{_share(rates['NIXL'], rates['copy']):.0%} of the copy",
            "",
        ),
        (
            "handoff through NIXL over TCP",
            rates["TCP"],
            f"{_share(rates['TCP'], rates['bare']):.0%} of the same",
            "",
        ),
        ("memory to memory, one thread", rates["copy"], "", ""),
    ]
    lines = [
        *run.heading(
            "KV handoff",
            f"{args.prompts} prompts of {args.prompt_tokens} tokens, {shape.prompt_bytes / 1e6:.0f} MB each, models "
            f"that compute nothing, a process for each service, {args.rounds} rounds.",
        ),
        "",
        "| path | MB/s (median) | share | bound |",
        "|---|---|---|---|",
        *(f"| {path} | {statistics.median(each) / 1e6:.0f} | {share} | {bound} |" for path, each, share, bound in rows),
    ]
    table = "\n".join(lines)
    print(table)
    if not args.no_save:
        run.save("handoff", table, figures={"bytes_per_s": rates, "bare_bytes_per_s": bare})
    sys.exit(0 if grpc_share >= MIN_GRPC_SHARE and shared_share >= MIN_SHARED_MEMORY_SHARE else 1)


def verdict(share: float, bound: float) -> str:
    return f">= {bound:.0%}: {'met' if share >= bound else 'MISSED'}"


def _share(ours: Sequence[float], best: Sequence[float]) -> float:
    return statistics.median(mine / bound for mine, bound in zip(ours, best, strict=True))


if __name__ == "__main__":
    main()
