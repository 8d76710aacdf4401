"""Measures how fast KV moves from a prefill service's pool into a decode engine's, and the machine's best rates.

Two processes have their own engines, servers and connections; only the models compute nothing. Each round measures in
turn:

    the handoff over gRPC
    a gRPC stream between two Python processes, at several message sizes: bare, and with copies and checksums
    the handoff through shared memory
    the handoff through NIXL, with the transport that it chooses and over TCP
    a copy by one thread of much more memory than the caches hold

Each connection is warmed up with the KV of as many prompts as are handed over at a time. Rates are in MB/s of payload.
Ratios are taken within a round. Ratios to a stream refer to the message size with the best median. A stream sends the
same buffer, as large as one prompt's KV, again and again. The table shows medians and is saved with its date. The exit
status is 1 when a bound is missed.
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

import numpy as np

from benchmarks.bare_stream import MESSAGE_BYTES, StreamRates, at_best_size, stream_rates
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.handoff_peers import DecodePeer, HandoffShape, prefill_peer
from common.host.cores import switch_threads_early
from common.host.memory import keep_freed_memory
from common.kv.layer_group import LayerGroupSpec

SHAPES = {
    "8b": LayerGroupSpec("target", num_layers=32, num_planes=2, num_heads=8, head_dim=128, dtype="bfloat16"),
    "demo": LayerGroupSpec("target", num_layers=30, num_planes=2, num_heads=3, head_dim=64, dtype="bfloat16"),
}
MIN_GRPC_SHARE = 0.6
MIN_SHARED_MEMORY_SHARE = 0.5
COPY_BYTES = 256 << 20


async def handoff_rate(shape: HandoffShape, num_prompts: int) -> float:
    with prefill_peer(shape) as address:
        peer = DecodePeer(shape, address)
        try:
            await peer.open()
            await peer.hand_over(shape.num_prompts)  # warms up the connection and the memory pages
            rate = await peer.hand_over(num_prompts)
        finally:
            await peer.close()
        num_bytes = 0 if shape.kv_transport == "grpc" else (shape.num_prompts + num_prompts) * shape.prompt_bytes
        if peer.lent_bytes != num_bytes:
            raise RuntimeError(f"{peer.lent_bytes} bytes of KV came by {shape.kv_transport}, not {num_bytes}")
        return rate


@contextmanager
def over_tcp() -> Iterator[None]:
    """Makes NIXL use TCP only, in processes that start in this block."""
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
    switch_threads_early()
    shape = HandoffShape(SHAPES[args.shape], args.prompt_tokens, num_prompts=4)
    sharing, nixl = replace(shape, kv_transport="shared_memory"), replace(shape, kv_transport="nixl")
    rates: dict[str, list[float]] = {"gRPC": [], "shared": [], "NIXL": [], "TCP": [], "copy": []}
    streams: list[StreamRates] = []
    for number in range(args.rounds):
        rates["gRPC"].append(asyncio.run(handoff_rate(shape, args.prompts)))
        streams.append(
            asyncio.run(
                stream_rates(
                    args.prompts * shape.prompt_bytes,
                    kept_bytes=shape.prompt_bytes,
                    first_bytes=shape.num_prompts * shape.prompt_bytes,
                    begins_bare=number % 2 == 0,
                )
            )
        )
        rates["shared"].append(asyncio.run(handoff_rate(sharing, args.prompts)))
        rates["NIXL"].append(asyncio.run(handoff_rate(nixl, args.prompts)))
        with over_tcp():
            rates["TCP"].append(asyncio.run(handoff_rate(nixl, args.prompts)))
        rates["copy"].append(copy_rate())
    bare, handling = [each.bare for each in streams], [each.handling for each in streams]
    best_bytes, rates["bare"] = at_best_size(bare)
    best_name = f"of the bare stream of {best_bytes >> 20} MiB"
    grpc_share, shared_share = _share(rates["gRPC"], rates["bare"]), _share(rates["shared"], rates["copy"])
    run = BenchmarkRun.of("handoff")
    rows = [
        (
            "handoff over gRPC",
            rates["gRPC"],
            f"{grpc_share:.0%} {best_name}",
            verdict(grpc_share, MIN_GRPC_SHARE),
        ),
        *(
            (f"bare gRPC stream of {size >> 20} MiB messages", [each[size] for each in bare], "", "")
            for size in MESSAGE_BYTES
        ),
        *(
            (
                f"the same of {size >> 20} MiB, copied and summed on both sides",
                [each[size] for each in handling],
                f"{_share([each[size] for each in handling], rates['bare']):.0%} {best_name}",
                "",
            )
            for size in MESSAGE_BYTES
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
            f"{_share(rates['TCP'], rates['bare']):.0%} {best_name}",
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
        run.save(
            "handoff", table, figures={"bytes_per_s": rates, "bare_bytes_per_s": bare, "handling_bytes_per_s": handling}
        )
    sys.exit(0 if grpc_share >= MIN_GRPC_SHARE and shared_share >= MIN_SHARED_MEMORY_SHARE else 1)


def verdict(share: float, bound: float) -> str:
    return f">= {bound:.0%}: {'met' if share >= bound else 'MISSED'}"


def _share(ours: Sequence[float], best: Sequence[float]) -> float:
    return statistics.median(mine / bound for mine, bound in zip(ours, best, strict=True))


if __name__ == "__main__":
    main()
