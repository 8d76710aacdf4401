"""Measures how long a pair takes from its start until it is ready, until its first token, and until full speed.

    python -m benchmarks.starts

The first start has an empty cache. The second finds the converted model in the cache, the third also the compiled
kernels. The operating system's file cache is always warm. The third start is repeated `--rounds` times and judged by
the median. Writes a dated table into benchmarks/results. The exit status is 1 if that start is not ready in time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncClient
from baton.load_generator import Workload, run_workload
from baton.local_pair import LocalPair
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.full_speed_pair import wait_full_speed

MAX_SECOND_READY_S = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """The times of one start, in seconds since the processes were started."""

    ready_s: float
    first_token_s: float
    full_speed_s: float


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
    run = BenchmarkRun.of("starts")
    ready_s = statistics.median(start.ready_s for start in second)
    is_met = ready_s < MAX_SECOND_READY_S
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
        ]
    )
    print(table)
    if not args.no_save:
        run.save("starts", table)
    return 0 if is_met else 1


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


async def _first_token(address: str) -> None:
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size
        (record,) = await run_workload([client], Workload(1, 1, 16, 1), vocab_size=vocab_size)
    assert record.error is None, record.error


if __name__ == "__main__":
    sys.exit(main())
