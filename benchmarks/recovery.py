"""Measures how long it takes until requests are served again after services were killed (-9) and restarted under load.

python -m benchmarks.recovery
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.client import Client
from baton.events import Completion
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE, ServiceProcess
from benchmarks.benchmark_run import BenchmarkRun
from tests.e2e.load import Workload, load
from tests.support.models import save_tiny_model
from tests.support.running_pair import BOUND_S, RECONNECT_AT_ONCE, RunningPair, running_pair, wait_until

WORKLOAD = Workload(prompt_tokens=100, new_tokens=60)
LIMIT_S = 60.0
"""The time limit in seconds, from the kill until a request that began after it is served.

Most of that time is the start of a process.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """The services to kill, and those to restart after that, in this order and without a pause between them.

    The names are those that LocalPair gives its services, such as "prefill-0".
    """

    killed: tuple[str, ...]
    restarted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recovery:
    """The results of one case. Times are in seconds.

    "First served" is the first request that was begun after the kill and was served.
    `first_served_after_ready_s` is negative if it was served before all restarted services were ready.
    """

    ready_after_kill_s: float
    first_served_after_kill_s: float
    first_served_after_ready_s: float
    num_served: int
    num_failed: int


ONE_EACH = (
    Case(("prefill-0",), ("prefill-0",)),
    Case(("decode-0",), ("decode-0",)),
    Case(("decode-0", "prefill-0"), ("prefill-0", "decode-0")),
    Case(("prefill-0", "decode-0"), ("decode-0", "prefill-0")),
)
ONE_OF_TWO = (
    Case(("prefill-0",), ("prefill-0",)),
    Case(("decode-0",), ("decode-0",)),
)


def recover(pair: RunningPair, case: Case, client: Client, undisturbed: Sequence[Completion]) -> Recovery:
    services = {service.name: service for service in pair.processes.services}
    with load(client, WORKLOAD, undisturbed) as outcomes:
        outcomes.wait_for_more()
        for name in case.killed:
            services[name].kill()
            assert services[name].wait(BOUND_S)
        killed_s = time.monotonic()
        for name in case.restarted:
            services[name].start()
        wait_until(_all_serve([services[name] for name in case.restarted]))
        ready_s = time.monotonic()
        first_served_s = outcomes.first_served_after(killed_s, begun_after=True)
        outcomes.wait_for_more()
    wait_until(pair.holds_nothing)
    return Recovery(
        ready_after_kill_s=ready_s - killed_s,
        first_served_after_kill_s=first_served_s,
        first_served_after_ready_s=killed_s + first_served_s - ready_s,
        num_served=outcomes.num_served,
        num_failed=len(outcomes.errors),
    )


def _all_serve(services: Sequence[ServiceProcess]) -> Callable[[], bool]:
    def serve() -> bool:
        for service in services:
            with Client(service.address, channel_overrides=RECONNECT_AT_ONCE) as client:
                if client.health(READY_SERVICE[service.role]) is not HealthStatus.SERVING:
                    return False
        return True

    return serve


def measure(model: Path, num_each: int, cases: Sequence[Case], num_rounds: int, problems: list[str]) -> list[str]:
    rows = []
    with running_pair(model, num_prefill=num_each, num_decode=num_each, shared_args=("--max-kv-tokens=8192",)) as pair:
        undisturbed = WORKLOAD.undisturbed(pair.client)
        address = ",".join(pair.processes.decode_addresses)
        with Client(address, resume=True, channel_overrides=RECONNECT_AT_ONCE) as client:
            for case in cases:
                rounds = [recover(pair, case, client, undisturbed) for _ in range(num_rounds)]
                rows.append(_row(f"{num_each} + {num_each}", case, rounds))
                if any(each.num_failed or each.first_served_after_kill_s > LIMIT_S for each in rounds):
                    problems.append(f"requests failed, or it took longer than {LIMIT_S:g} s: {rows[-1]}")
                print(rows[-1], flush=True)
    return rows


def _row(services: str, case: Case, rounds: Sequence[Recovery]) -> str:
    seconds = (
        statistics.median(getattr(each, name) for each in rounds)
        for name in ("ready_after_kill_s", "first_served_after_kill_s", "first_served_after_ready_s")
    )
    cells = (
        services,
        " then ".join(case.killed),
        " then ".join(case.restarted),
        *(f"{value:.2f}" for value in seconds),
        str(sum(each.num_served for each in rounds)),
        str(sum(each.num_failed for each in rounds)),
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_model(Path(directory), "llama")
        problems: list[str] = []
        rows = [
            *measure(model, 1, ONE_EACH, args.rounds, problems),
            *measure(model, 2, ONE_OF_TWO, args.rounds, problems),
        ]
    run = BenchmarkRun.of("recovery")
    table = "\n".join(
        [
            *run.heading(
                "Recovery from kill -9",
                "a tiny model (a restart's time is that of imports), 6 requests at a time with `resume=True`, "
                f"{args.rounds} rounds, medians in seconds. Every request served was what it is undisturbed; both "
                "services held nothing at the end.",
            ),
            "",
            "| prefill + decode | killed | restarted | kill to ready | kill to first served | ready to first served | "
            "served | failed |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(table)
    if not args.no_save:
        run.save("recovery", table)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
