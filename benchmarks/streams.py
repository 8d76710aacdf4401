"""Measures what streamed tokens cost the interpreters of a decode service and of a gateway, whose model costs nothing.

    client ──gRPC──▶ decode service: preset tokens instead of forwards          at 256 and 1,024 streams
    client ──HTTP──▶ gateway ──gRPC──▶ decode service

All requests run at once, and each step has a token for every one of them, so the engine is as fast as its edges let it
be. Tokens are counted where the client reads them, and a thread's time is what the system says it had of a core. Output
that a client has not read is merged, so there are fewer messages than tokens. The service and its edge processes have
one core, and the gateway and the client share the other one. Prompts are computed here, by a tiny model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from baton import AsyncClient
from baton.errors import Unavailable
from baton.events import Delta
from baton.free_ports import HeldPorts
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from benchmarks.benchmark_run import BenchmarkRun
from common.rpc.aio import run

NUM_STREAMS = (256, 1024)
NUM_EDGES = (0, 1, 2)
NUM_CONNECTIONS = 8
NEW_TOKENS = 8000
_LETTERS = (68, 94)
_PROMPT = list(range(68, 71))
_PAUSE_S, _SETTLE_S, _BOUND_S = 0.3, 2.0, 120.0
_TEXT = re.compile(rb'"text":\s?"([a-z]*)"')
_CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def serve(arguments: Sequence[str]) -> int:
    """Runs a decode service whose steps have preset tokens, with these arguments."""
    import torch

    from benchmarks.schedule_rig import PresetWorker
    from common.config.settings import DecodeSettings
    from common.device.stream import Stream
    from common.kv.pool import KvPool
    from common.service.process import Serve, run_service
    from decode_service.forward import forward_side
    from decode_service.forward.forward_batch import ForwardBatch
    from decode_service.forward.worker import WorkerOutput
    from decode_service.speculate.spec_info import NO_DRAFTS

    class Worker(PresetWorker):
        """Waits before each step in which rows are missing, so that requests can come in."""

        def __init__(self, *, stream: Stream, pool: KvPool) -> None:
            super().__init__(max_rows=pool.rows.max_rows, spec_info=NO_DRAFTS, stream=stream)
            self._max_rows = pool.rows.max_rows
            self._tokens = torch.randint(*_LETTERS, self._tokens.shape)

        def forward(self, batch: ForwardBatch, **given: Any) -> WorkerOutput:
            if batch.batch_size < self._max_rows:
                self._stream.enqueue(partial(time.sleep, _PAUSE_S), given["scope"])
            return super().forward(batch, **given)

    def preset(*, stream: Stream, pool: KvPool, **_: object) -> PresetWorker:
        return Worker(stream=stream, pool=pool)

    def import_serve() -> Serve[DecodeSettings]:
        from decode_service.main import serve

        return serve

    with mock.patch.object(forward_side, "Worker", preset):
        return run_service("decode_service", DecodeSettings, import_serve, arguments)


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one run: tokens per second of all streams, messages per second that the client read, and the
    seconds of a core that each named thread took for a token.
    """

    tokens_per_s: float
    messages_per_s: float
    seconds_per_token: dict[str, float]


def edge_pids(service: int) -> list[int]:
    children = Path(f"/proc/{service}/task/{service}/children").read_text().split()
    return [int(pid) for pid in children if b"edge.processes" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def thread_seconds(process: int) -> dict[str, float]:
    """Returns the processor time that each thread of the process had, by the thread's name. The first is "main"."""
    seconds: dict[str, float] = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            name, _, fields = task.joinpath("stat").read_text().partition("(")[2].rpartition(")")
            user, system = fields.split()[11:13]
            key = "main" if int(task.name) == process else name
            seconds[key] = seconds.get(key, 0.0) + (int(user) + int(system)) * _CLOCK_TICK_S
    return seconds


@contextlib.contextmanager
def running(command: Sequence[str], *, core: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        os.sched_setaffinity(process.pid, {core})
        yield process
    finally:
        process.kill()
        process.wait(30)


class Streams:
    """Open streams, which count the messages and tokens that they read. The text of a token is one letter."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.num_messages = self.num_tokens = 0
        self.num_open = 0

    def counts(self) -> tuple[int, int]:
        return self.num_messages, self.num_tokens

    async def over_grpc(self, client: AsyncClient) -> None:
        stream = client.generate(token_ids=_PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True)
        is_open = False
        async for event in stream:
            if isinstance(event, Delta):
                self.num_messages += 1
                self.num_tokens += len(event.token_ids)
                self.num_open += not is_open
                is_open = True

    async def over_http(self, port: int) -> None:
        body = json.dumps(
            {"model": self.model, "prompt": _PROMPT, "max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        is_open = False
        try:
            while data := await reader.read(1 << 16):
                assert is_open or data.startswith(b"HTTP/1.1 200"), data[:300]
                self.num_open += not is_open
                is_open = True
                self.num_messages += data.count(b"data: ")
                self.num_tokens += sum(map(len, _TEXT.findall(data)))
        finally:
            writer.close()


async def _is_ready(client: AsyncClient) -> bool:
    with contextlib.suppress(Unavailable):
        return await client.health(READY_SERVICE["decode"]) is HealthStatus.SERVING
    return False


async def measure(
    num_streams: int,
    model: str,
    address: str,
    service: subprocess.Popen[bytes],
    seconds: float,
    gateway: tuple[int, subprocess.Popen[bytes]] | None,
) -> Measured:
    streams = Streams(model)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(address)) for _ in range(NUM_CONNECTIONS)]
        async with asyncio.timeout(_BOUND_S):
            for client in clients:
                while not await _is_ready(client):  # noqa: ASYNC110 - it can only be looked at
                    await asyncio.sleep(0.1)
        each_client = itertools.cycle(clients)
        opened = [
            asyncio.create_task(
                streams.over_grpc(next(each_client)) if gateway is None else streams.over_http(gateway[0])
            )
            for _ in range(num_streams)
        ]
        try:
            async with asyncio.timeout(_BOUND_S):
                while streams.num_open < num_streams:
                    await asyncio.sleep(0.1)
                    for each in opened:
                        if each.done():
                            each.result()
                            raise RuntimeError("a stream ended before all were open: raise NEW_TOKENS")
            await asyncio.sleep(_SETTLE_S)
            processes = {"decode": [service.pid], "edge": edge_pids(service.pid)}
            if gateway is not None:
                processes["gateway"] = [gateway[1].pid]
            before, begun = seconds_of(processes), streams.counts()
            began_s = time.perf_counter()
            await asyncio.sleep(seconds)
            ended_s = time.perf_counter()
            after, ended = seconds_of(processes), streams.counts()
            assert not any(each.done() for each in opened), "streams ended while they were measured"
        finally:
            for each in opened:
                each.cancel()
            await asyncio.gather(*opened, return_exceptions=True)
    num_messages, num_tokens = (later - earlier for earlier, later in zip(begun, ended, strict=True))
    return Measured(
        num_tokens / (ended_s - began_s),
        num_messages / (ended_s - began_s),
        {name: (taken_s - before.get(name, 0.0)) / num_tokens for name, taken_s in after.items()},
    )


def seconds_of(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Returns the processor time of each kind of process and thread, such as "edge, main"."""
    seconds: dict[str, float] = defaultdict(float)
    for kind, pids in processes.items():
        for pid in pids:
            for name, taken_s in thread_seconds(pid).items():
                seconds[f"{kind}, {name}"] += taken_s
    return seconds


def run_one(directory: Path, model: Path, num_edges: int, num_streams: int, over: str, seconds: float) -> Measured:
    held = HeldPorts(2)
    decode_port, http_port = held.numbers
    address = f"127.0.0.1:{decode_port}"
    decode = [
        *(sys.executable, "-m", "benchmarks.streams", "--serve", f"--model={model}"),
        *(f"--listen={address}", "--prefill=127.0.0.1:1", "--prefill-fallback"),
        *(f"--max-rows={num_streams}", f"--max-kv-tokens={num_streams * (NEW_TOKENS + 16)}"),
        *("--max-streams=2048", "--num-threads=1", "--dtype=float32", f"--edge-processes={num_edges}"),
        "--disabled-fast-paths=fused_forwards,prefaulted_pool",
    ]
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(running(decode, core=0, log=directory / "decode.log"))
        gateway = None
        if over == "HTTP":
            command = [
                *(sys.executable, "-m", "gateway", f"--listen=127.0.0.1:{http_port}"),
                *(f"--decode={address}", "--max-open-requests=2048"),
            ]
            gateway = http_port, stack.enter_context(running(command, core=1, log=directory / "gateway.log"))
        return run(measure(num_streams, str(model), address, service, seconds, gateway))


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--edges", type=int, nargs="*", default=NUM_EDGES, help="numbers of edge processes")
    parser.add_argument("--streams", type=int, nargs="*", default=NUM_STREAMS)
    parser.add_argument("--over", nargs="*", default=("gRPC", "HTTP"), choices=("gRPC", "HTTP"))
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    from tests.support.models import save_tiny_model

    benchmark = BenchmarkRun.of("streams")  # counts this process's cores, so before it keeps to one
    os.sched_setaffinity(0, {1})
    lines = benchmark.heading(
        "Streams of a decode service",
        "a model that computes nothing; the service on one core, gateway and client on the other; µs of a core for each"
        " token.",
    )
    lines += [
        "",
        "| edge processes | streams | over | tokens/s | messages/s | decode: main | decode: engine | edges | gateway |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_model(Path(directory) / "m", "llama", max_position_embeddings=8192)
        for num_edges, num_streams, over in itertools.product(args.edges, args.streams, args.over):
            measured = run_one(Path(directory), model, num_edges, num_streams, over, args.seconds)
            costs = [
                measured.seconds_per_token.get(name)
                for name in ("decode, main", "decode, python", "edge, main", "gateway, main")
            ]
            lines.append(
                f"| {num_edges} | {num_streams} | {over} | {measured.tokens_per_s:,.0f} "
                f"| {measured.messages_per_s:,.0f} | "
                + " | ".join("" if each is None else f"{each * 1e6:.1f}" for each in costs)
                + " |"
            )
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(table)
    if not args.no_save:
        benchmark.save("streams", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
