"""Measures how long a start takes, and how much memory a large model takes meanwhile.

    python -m benchmarks.starts

First pairs of the demo model are started, and timed until they are ready, until their first token, and until full
speed. The first start has an empty cache. The second finds the converted model in the cache, the third also the
compiled kernels. The operating system's file cache is always warm. The third start is repeated `--rounds` times and
judged by the median.

Then single services are started with a random model of 4 GB in several files, with the kernels that are kept. The first
start also has to digest the weights. The peak of a process's memory, up to full speed, is judged less its KV pool and
less what it had before it read the model.

Writes a dated table into benchmarks/results. The exit status is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from baton.free_ports import LOOPBACK, HeldPorts
from baton.load_generator import Workload, run_workload
from baton.local_pair import LocalPair
from baton.service_process import ProcessRole, ServiceProcess
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import wait_full_speed
from benchmarks.machine import save_sharded_model

MAX_SECOND_READY_S = 10.0
MAX_PEAK = 1.2
"""The most memory that loading and packing a model may take, in sizes of its weights."""
_POLL_S = 0.02
_LARGE_TIMEOUT_S = 600.0
_LARGE: Sequence[tuple[str, ProcessRole, Sequence[str]]] = (
    ("prefill, weights seen for the first time", "prefill", ()),
    ("prefill", "prefill", ()),
    ("decode", "decode", ("--prefill-fallback",)),  # is ready without a prefill service
)
"""The starts of the large model: a description, the service, and its arguments."""


@dataclass(frozen=True, slots=True)
class Start:
    """The times of one start, in seconds since the processes were started."""

    ready_s: float
    first_token_s: float
    full_speed_s: float


@dataclass(frozen=True, slots=True)
class LargeStart:
    """The times of one service's start with the large model, in seconds, and its memory, in bytes.

    `peak_bytes` is the peak of what is resident, and `anonymous_bytes` of the part that belongs to no file. Before the
    model was read `before_bytes` were resident. The KV pool takes `pool_bytes`.
    """

    ready_s: float
    full_speed_s: float
    before_bytes: int
    peak_bytes: int
    anonymous_bytes: int
    pool_bytes: int

    def peak(self, weights_bytes: int) -> float:
        """Returns how much memory loading and packing took, in sizes of the weights."""
        return (self.peak_bytes - self.before_bytes - self.pool_bytes) / weights_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="starts with everything kept")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    starts: dict[str, list[Start]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-starts-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # the cache directory of the services
        starts["nothing kept: the model is fetched and converted, kernels are compiled"] = [measure()]
        shutil.rmtree(Path(cache) / "baton" / "kernels")
        starts["the model kept, kernels are compiled"] = [measure()]
        second = starts["everything kept: a second start"] = [measure() for _ in range(args.rounds)]
        model = save_sharded_model(Path(cache) / "large")
        weights_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        large = {name: measure_large(model, role, arguments) for name, role, arguments in _LARGE}
    run = BenchmarkRun.of("starts")
    ready_s = statistics.median(start.ready_s for start in second)
    peak = max(start.peak(weights_bytes) for start in large.values())
    is_met, is_peak_met = ready_s < MAX_SECOND_READY_S, peak <= MAX_PEAK
    table = "\n".join(
        [
            *run.heading(
                "Starts",
                "SmolLM2-135M-Instruct, bfloat16, both services; seconds from the start, of several starts the median "
                "and the range.",
            ),
            "",
            "| | ready | first token of a request sent then | full speed |",
            "|---|---|---|---|",
            *(
                f"| {name} | {cell([each.ready_s for each in alike])} "
                f"| {cell([each.first_token_s for each in alike])} | {cell([each.full_speed_s for each in alike])} |"
                for name, alike in starts.items()
            ),
            "",
            f"A second start is ready in {ready_s:.1f} s (< {MAX_SECOND_READY_S:g}: {'met' if is_met else 'MISSED'}). "
            "From ready to full speed requests are served by operators.",
            "",
            f"One service with a random Llama of {weights_bytes / 1e9:.2f} GB in bfloat16, in several files:",
            "",
            "| | ready (s) | full speed (s) | before (GB) | peak (GB) | anonymous (GB) | pool (GB) | peak in weights |",
            "|---|---|---|---|---|---|---|---|",
            *(
                f"| {name} | {start.ready_s:.1f} | {start.full_speed_s:.1f} | {start.before_bytes / 1e9:.2f} "
                f"| {start.peak_bytes / 1e9:.2f} | {start.anonymous_bytes / 1e9:.2f} | {start.pool_bytes / 1e9:.2f} "
                f"| {start.peak(weights_bytes):.2f} |"
                for name, start in large.items()
            ),
            "",
            "The peak is of all resident memory, mapped files included, until the service is at full speed. In sizes "
            "of the weights it is counted less the KV pool and less what was there before the model was read. "
            f"The largest is {peak:.2f} (<= {MAX_PEAK:g}: {'met' if is_peak_met else 'MISSED'}).",
        ]
    )
    print(table)
    if not args.no_save:
        run.save("starts", table)
    return 0 if is_met and is_peak_met else 1


def cell(seconds: Sequence[float]) -> str:
    median = f"{statistics.median(seconds):.1f}"
    return median if len(seconds) == 1 else f"{median} ({min(seconds):.1f} to {max(seconds):.1f})"


def measure() -> Start:
    """Starts a pair of the demo model and measures the start. Raises TimeoutError if it does not reach full speed."""
    begin_s = time.monotonic()
    with LocalPair(dtype="bfloat16", exposes_metrics=True) as pair:
        ready_s = time.monotonic() - begin_s
        asyncio.run(_first_token(pair.decode_addresses[0]))
        first_token_s = time.monotonic() - begin_s
        wait_full_speed(pair.metrics_addresses)
        return Start(ready_s, first_token_s, time.monotonic() - begin_s)


def measure_large(model: Path, role: ProcessRole, arguments: Sequence[str]) -> LargeStart:
    """Starts one service with `model`, and measures time and memory until it is at full speed.

    Raises TimeoutError if it does not get there.
    """
    held = HeldPorts(1)
    address = f"{LOOPBACK}:{held.numbers[0]}"
    common = (
        f"--model={model}",
        "--dtype=bfloat16",
        f"--listen={address}",
        "--log-format=json",
        "--max-kv-tokens=4096",
    )
    with tempfile.TemporaryDirectory(prefix="baton-starts-") as logs:
        service = ServiceProcess(
            role=role,
            name=role,
            address=address,
            arguments=("-m", f"{role}_service", *common, *arguments),
            log_file=Path(logs) / "log",
        )
        begin_s = time.monotonic()
        service.start()
        try:
            return _watched(service, begin_s)
        finally:
            service.terminate()
            if not service.wait(_LARGE_TIMEOUT_S):
                service.kill()


def _watched(service: ServiceProcess, begin_s: float) -> LargeStart:
    """Reads the service's log and memory until it is at full speed."""
    seen: dict[str, dict[str, Any]] = {}
    times_s: dict[str, float] = {}
    before_bytes = anonymous_bytes = 0
    while "fused_forward_ready" not in seen:
        memory = _memory(service.pid)
        service.check()  # now, because a process that has ended has no memory
        if time.monotonic() - begin_s > _LARGE_TIMEOUT_S:
            raise TimeoutError(f"{service.name} did not reach full speed: {service.log_tail()[-500:]}")
        for line in service.log_tail().splitlines():
            try:
                entry: dict[str, Any] = json.loads(line)
            except ValueError:  # it is being written
                continue
            event = "ready" if entry.get("is_ready") else entry["event"]
            if event not in seen:
                seen[event], times_s[event] = entry, time.monotonic() - begin_s
        if "loading_model" not in seen:
            before_bytes = memory["VmRSS"]
        anonymous_bytes = max(anonymous_bytes, memory["RssAnon"])
        time.sleep(_POLL_S)
    return LargeStart(
        ready_s=times_s["ready"],
        full_speed_s=times_s["fused_forward_ready"],
        before_bytes=before_bytes,
        peak_bytes=_memory(service.pid)["VmHWM"],
        anonymous_bytes=anonymous_bytes,
        pool_bytes=seen["pool_sized"]["pool_bytes"],
    )


def _memory(pid: int) -> dict[str, int]:
    """Returns the figures of a process's memory that Linux gives, in bytes."""
    fields = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name.rstrip(":"): int(rest[0]) << 10 for name, *rest in fields if rest and rest[-1] == "kB"}


async def _first_token(address: str) -> None:
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size
        (record,) = await run_workload([client], Workload(1, 1, 16, 1), vocab_size=vocab_size)
    assert record.error is None, record.error


if __name__ == "__main__":
    sys.exit(main())
