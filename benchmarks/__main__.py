"""Runs the benchmarks of `make bench`, one after the other, each as a process of its own.

    python -m benchmarks [--peer PROGRAM] [--no-save]

If a benchmark fails or misses a bound, the later ones run nevertheless, and all save their results. The exit status is
then 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys

from benchmarks.peer import add_peer_argument

BESIDE_A_PEER = ("serving", "speculation", "prefill")
OTHERS = (
    "ttft",
    "prefix_reuse",
    "routing",
    "handoff",
    "overlap",
    "abort_storm",
    "step_costs",
    "schedule_side",
    "timeline_overhead",
    "starts",
)
ON_ONE_CORE = ("schedule_side",)
"""Benchmarks that are pinned to one core, so that their only thread keeps its caches."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_peer_argument(parser)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    missed = [name for name in (*BESIDE_A_PEER, *OTHERS) if run(name, args) != 0]
    print(f"\n{len(BESIDE_A_PEER) + len(OTHERS)} benchmarks, missed a bound or failed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


def run(name: str, args: argparse.Namespace) -> int:
    """Runs the benchmark `name` and returns its exit status."""
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    if name in BESIDE_A_PEER and args.peer:
        command += ["--peer", args.peer]
    if args.no_save:
        command.append("--no-save")
    if name in ON_ONE_CORE:
        command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]
    print(f"\n$ {shlex.join(command)}", flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
