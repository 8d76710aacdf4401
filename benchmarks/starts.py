"""How long a pair takes from its start to ready, to its first token and to full speed: with nothing kept from before,
with the model converted, with kernels compiled.

python -m benchmarks.starts

The file cache is warm all the same. Writes a dated table into benchmarks/results.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncClient
from baton.full_speed import await_fused
from baton.load_generator import Workload, run_workload
from baton.local_pair import LocalPair
from benchmarks.benchmark_run import BenchmarkRun

MAX_SECOND_READY_S = 10.0
_FULL_SPEED_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the processes were begun."""

    ready_s: float
    first_token_s: float
    full_speed_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    starts: dict[str, Start] = {}
    with tempfile.TemporaryDirectory(prefix="baton-starts-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # of the services
        starts["nothing kept: the model is fetched and converted, kernels are compiled"] = measure()
        shutil.rmtree(Path(cache) / "baton" / "kernels")
        starts["the model kept, kernels are compiled"] = measure()
        starts["everything kept: a second start"] = measure()
    run = BenchmarkRun.of("starts")
    ready_s = list(starts.values())[-1].ready_s
    is_met = ready_s < MAX_SECOND_READY_S
    table = "\n".join(
        [
            *run.heading("Starts", "SmolLM2-135M-Instruct, bfloat16, both services; seconds from the start."),
            "",
            "| | ready | first token of a request sent then | full speed |",
            "|---|---|---|---|",
            *(
                f"| {name} | {start.ready_s:.1f} | {start.first_token_s:.1f} | {start.full_speed_s:.1f} |"
                for name, start in starts.items()
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


def measure() -> Start:
    """Raises TimeoutError when full speed is not reached."""
    begin_s = time.monotonic()
    with LocalPair(dtype="bfloat16", exposes_metrics=True) as pair:
        ready_s = time.monotonic() - begin_s
        asyncio.run(_first_token(pair.decode_addresses[0]))
        first_token_s = time.monotonic() - begin_s
        if not await_fused(pair.metrics_addresses, timeout_s=_FULL_SPEED_TIMEOUT_S):
            raise TimeoutError(f"forwards were not fused within {_FULL_SPEED_TIMEOUT_S} s")
        return Start(ready_s, first_token_s, time.monotonic() - begin_s)


async def _first_token(address: str) -> None:
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size
        (record,) = await run_workload([client], Workload(1, 1, 16, 1), vocab_size=vocab_size)
    assert record.error is None, record.error


if __name__ == "__main__":
    sys.exit(main())
