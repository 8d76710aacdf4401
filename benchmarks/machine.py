"""Describes the machine that a benchmark runs on, and provides models."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

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


def save_experts_model(directory: Path) -> Path:
    """Saves a random Mixtral in `directory`: 8 experts of which a token gets 2, 634 MB in bfloat16. A decode step of
    one token reads a third of that.
    """
    from transformers import MixtralConfig

    from tests.support.models import random_model

    config = MixtralConfig(
        vocab_size=16_384,
        hidden_size=1024,
        intermediate_size=1792,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        dtype="bfloat16",
        **_shared_fields(),
    )
    return _save(directory, random_model(config).to(torch.bfloat16))


def save_sharded_model(directory: Path) -> Path:
    """Saves a random Llama in `directory`: 4.08 GB in bfloat16, in files of at most 1 GB."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=20,
        num_key_value_heads=4,
        **_shared_fields(),
    )
    return _save(directory, AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def _shared_fields() -> dict[str, Any]:
    from tests.support.models import END_ID, PAD_ID, START_ID

    ids = {"pad_token_id": PAD_ID, "bos_token_id": START_ID, "eos_token_id": END_ID}
    return {"max_position_embeddings": 4096, **ids}


def _save(directory: Path, model: Any) -> Path:
    from tests.support.models import make_tokenizer

    model.save_pretrained(str(directory), max_shard_size="1GB")
    make_tokenizer().save_pretrained(str(directory))
    return directory
