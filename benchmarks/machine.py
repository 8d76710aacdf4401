"""Where a benchmark ran, and the weights it ran on."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def describe_machine() -> str:
    """Processor and cores, without the machine's name."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown processor",
    )
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores{gpu}, torch {torch.__version__}"


def demo_model_dir() -> Path:
    from common.demo_model import ensure_demo_model  # where only a GPU is measured, what it needs is not installed

    return ensure_demo_model(lambda stage, num_done, num_total: None)
