"""Describes the machine that a benchmark runs on, and provides the demo model's weights."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from common.host.cores import num_cores

_LOOPS = 1500
_BEST_SHARE = 100  # the fastest 1 in this many runs of the loop shows the core's own speed


class CoreSpeed:
    """Estimates the current speed of this thread's core by timing a fixed loop again and again.

    A virtual machine on the same physical core can take up to half of its speed, and no clock of this machine shows
    that.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def sample(self) -> None:
        """Times the loop once; takes about 100 µs."""
        begun_s, total = time.perf_counter(), 0
        for number in range(_LOOPS):
            total += number
        self._seconds.append(time.perf_counter() - begun_s)

    @property
    def best_s(self) -> float:
        ordered = sorted(self._seconds)
        return ordered[len(ordered) // _BEST_SHARE]

    @property
    def median_s(self) -> float:
        return statistics.median(self._seconds)


def describe_machine() -> str:
    """Returns the processor, cores, GPU and torch version, without the machine's name."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown processor",
    )
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {num_cores()} cores{gpu}, torch {torch.__version__}"


def demo_model_dir() -> Path:
    from common.checkpoints.demo_model import (
        ensure_demo_model,  # imported here, because its libraries are missing where only a GPU is measured
    )

    return ensure_demo_model(lambda stage, num_done, num_total: None)
