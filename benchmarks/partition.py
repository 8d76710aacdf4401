"""Measures what happens when the network between the decode and the prefill service is cut for a while under load.

    sudo python -m benchmarks.partition

The services run in two network namespaces joined by a virtual cable.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.client import Client
from baton.events import Completion
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE, ServiceProcess
from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.namespaces import FAR_ADDRESS, Cable
from tests.e2e.load import Workload, load
from tests.support.models import save_tiny_model
from tests.support.running_pair import BOUND_S, COMMON_ARGS, HANDS_ALL_OVER, RECONNECT_AT_ONCE, is_empty, wait_until

WORKLOAD = Workload(prompt_tokens=300, new_tokens=12)
NUM_THREADS = 8
DECODE, PREFILL, METRICS = "127.0.0.1:50051", f"{FAR_ADDRESS}:50052", "127.0.0.1:9090"
LOOK_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Partition:
    """The results of one cut. All times are in seconds.

    `not_ready_s` and `prefill_empty_s` are the times from the start of the cut until the decode service was not ready,
    and until the prefill service held no rows and no KV; infinite if that did not happen during the cut. The times
    named `after_mend` count from the end of the cut. `longest_request_s` is a duration.
    """

    not_ready_s: float
    prefill_empty_s: float
    ready_after_mend_s: float
    first_served_after_mend_s: float
    longest_request_s: float
    num_served: int
    errors: Counter[str]


@contextmanager
def services(cable: Cable, model: Path, directory: Path) -> Iterator[Client]:
    """Runs a decode service at this end of the cable and a prefill service at the other.

    The KV of a prompt is sent in many segments. Yields a client of the decode service.
    """
    shared = (*COMMON_ARGS, f"--model={model}", "--dtype=float32", "--max-rows=32", "--max-kv-tokens=8192")
    prefill = ServiceProcess(
        name="prefill",
        role="prefill",
        address=PREFILL,
        arguments=(
            *("-m", "prefill_service", f"--listen={PREFILL}", f"--metrics-listen={METRICS}", *shared),
            *("--kv-transport=grpc", "--max-segment-bytes=65536", "--send-budget-bytes=262144", "--chunk-tokens=64"),
        ),
        log_file=directory / "prefill.log",
    )
    decode = ServiceProcess(
        name="decode",
        role="decode",
        address=DECODE,
        arguments=(
            *("-m", "decode_service", f"--listen={DECODE}", f"--prefill={PREFILL}", *shared),
            *("--receive-budget-bytes=1", HANDS_ALL_OVER),
        ),
        log_file=directory / "decode.log",
    )
    try:
        cable.at_far_end(prefill.start)
        decode.start()
        with Client(DECODE, channel_overrides=RECONNECT_AT_ONCE) as client:
            wait_until(lambda: _is_ready(client), about=decode.log_tail)
            yield client
    finally:
        for service in (decode, prefill):
            service.kill()
            service.wait(BOUND_S)


def measure(
    cable: Cable, looker: Client, client: Client, undisturbed: Sequence[Completion], cut_for_s: float
) -> Partition:
    """Cuts the cable for `cut_for_s` seconds while `client` sends requests. `looker` polls the decode service."""

    def prefill_is_empty() -> bool:
        return cable.at_far_end(_prefill_holds_nothing)

    with load(client, WORKLOAD, undisturbed, num_threads=NUM_THREADS) as outcomes:
        wait_until(lambda: looker.load().rows.transferring > 0, about=looker.load)
        cable.cut()
        cut_s = time.monotonic()
        not_ready_s = _seconds_until(lambda: not _is_ready(looker), cut_s, cut_for_s)
        prefill_empty_s = _seconds_until(prefill_is_empty, cut_s, cut_for_s)
        time.sleep(max(0.0, cut_s + cut_for_s - time.monotonic()))
        cable.mend()
        mended_s = time.monotonic()
        ready_s = _seconds_until(lambda: _is_ready(looker), mended_s, BOUND_S)
        first_served_s = outcomes.first_served_after(mended_s)
        outcomes.wait_for_more(2 * NUM_THREADS)
    wait_until(lambda: is_empty(looker.load()) and prefill_is_empty(), about=looker.load)
    return Partition(
        not_ready_s=not_ready_s,
        prefill_empty_s=prefill_empty_s,
        ready_after_mend_s=ready_s,
        first_served_after_mend_s=first_served_s,
        longest_request_s=max(outcomes.durations_s),
        num_served=outcomes.num_served,
        errors=Counter(f"{error.code.name} {error.reason}" for error in outcomes.errors),
    )


def problems_of(each: Partition, cut_for_s: float) -> list[str]:
    """Returns a text for each bound that was missed, and for each error other than UNAVAILABLE."""
    limits = {
        "not_ready_s": 5.0,
        "ready_after_mend_s": 10.0,
        "first_served_after_mend_s": 15.0,
        "longest_request_s": cut_for_s + 20.0,
    }
    late = [
        f"{name}: {getattr(each, name):.1f} is more than {limit:g}"
        for name, limit in limits.items()
        if getattr(each, name) > limit
    ]
    return late + [error for error in each.errors if not error.startswith("UNAVAILABLE")]


def _is_ready(client: Client) -> bool:
    return client.health(READY_SERVICE["decode"]) is HealthStatus.SERVING


def _prefill_holds_nothing() -> bool:
    """Returns whether the prefill service holds no rows and no KV, according to its metrics page.

    During a cut, only its own end of the cable can read that page.
    """
    with urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=BOUND_S) as response:
        metrics = response.read().decode()
    held = re.findall(r'^baton_(?:rows|kv_slots)\{state="(?!free)\w+"\} (\S+)$', metrics, re.MULTILINE)
    return bool(held) and not any(map(float, held))


def _seconds_until(condition: Callable[[], bool], start_s: float, bound_s: float) -> float:
    """Polls `condition` until it is true. Returns the seconds since `start_s`, infinite if it takes longer than
    `bound_s`.
    """
    while time.monotonic() - start_s < bound_s:
        if condition():
            return time.monotonic() - start_s
        time.sleep(LOOK_INTERVAL_S)
    return float("inf")


def _row(name: str, each: Partition) -> str:
    errors = ", ".join(f"{num} {error}" for error, num in sorted(each.errors.items())) or "none"
    seconds = (
        each.not_ready_s,
        each.prefill_empty_s,
        each.longest_request_s,
        each.ready_after_mend_s,
        each.first_served_after_mend_s,
    )
    return f"| {name} | {' | '.join(map(_shown, seconds))} | {each.num_served} | {errors} |"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f}" if math.isfinite(seconds) else "not during the cut"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cut-for-s", type=float, default=10.0)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    cable = Cable()  # must come before any other thread is started
    rows = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = save_tiny_model(directory / "model", "llama", num_hidden_layers=8, num_key_value_heads=4)
        with (
            services(cable, model, directory) as client,
            Client(DECODE, resume=True, channel_overrides=RECONNECT_AT_ONCE) as resuming,
        ):
            undisturbed = WORKLOAD.undisturbed(client)
            for label, asking in (("no", client), ("yes", resuming)):
                partition = measure(cable, client, asking, undisturbed, args.cut_for_s)
                problems += problems_of(partition, args.cut_for_s)
                rows.append(_row(label, partition))
                print(rows[-1], flush=True)
    run = BenchmarkRun.of("partition")
    table = "\n".join(
        [
            *run.heading(
                f"Partition between decode and prefill for {args.cut_for_s:g} s",
                f"a tiny model with 4 KiB of KV a token, one service of each kind, {NUM_THREADS} requests at a time, "
                "default time-outs. Two network namespaces, everything between them dropped in both directions. Every "
                "request served was what it is undisturbed; both services held nothing at the end.",
            ),
            "",
            "| `resume` | cut to decode not ready | cut to prefill empty | longest request | mended to ready | "
            "mended to first served | served | errors |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(table)
    if not args.no_save:
        run.save("partition", table)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
