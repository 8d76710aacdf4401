"""The settings of a training run, and its learning rates: warm-up, constant, linear decay. Only the decay depends on
the run's length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError

_FLOOR = 0.02


@dataclass(frozen=True, slots=True)
class Schedule:
    """The phases of the learning rate, measured in answer tokens."""

    warmup_tokens: int
    decay_start: int
    max_tokens: int

    def factor(self, num_tokens: int) -> float:
        """Returns the factor for the learning rates of a training step after which `num_tokens` answer tokens have been
        seen.
        """
        if num_tokens < self.warmup_tokens:
            return num_tokens / self.warmup_tokens
        if num_tokens <= self.decay_start or self.decay_start == self.max_tokens:
            return 1.0
        left = max(0.0, (self.max_tokens - num_tokens) / (self.max_tokens - self.decay_start))
        return _FLOOR + (1 - _FLOOR) * left


DEVICES = ("cpu", "cuda")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The settings of a training run. Its constructor raises ConfigError, naming a setting that is out of range.

    `max_tokens`, `warmup_tokens` and `eval_tokens` count answer tokens only. `layers` are the target's layers whose
    input the head reads; None means the EAGLE-3 format's default. `batch_tokens` limits the size of a training step:
    its number of conversations times the longest one's length. `dtype` is the type of the computation; weights are
    float32.
    """

    layers: tuple[int, ...] | None = None
    ttt_steps: int = 3
    draft_vocab: int = 8192
    batch_tokens: int = 2048
    muon_lr: float = 0.02
    lr: float = 6e-4
    max_tokens: int = 5_000_000
    warmup_tokens: int = 50_000
    decay_fraction: float = 0.3
    seed: int = 0
    num_held_out: int = 120
    eval_tokens: int = 250_000
    checkpoint_minutes: float = 5.0
    device: str = "cpu"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("ttt_steps", "draft_vocab", "batch_tokens", "max_tokens", "num_held_out", "eval_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(self.warmup_tokens >= 0, "warmup_tokens", self.warmup_tokens, "0 or more")
        for name in ("muon_lr", "lr", "checkpoint_minutes"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        _require(0 <= self.decay_fraction <= 1, "decay_fraction", self.decay_fraction, "from 0 to 1")
        _require(self.seed >= 0, "seed", self.seed, "0 or more")
        _require(self.device in DEVICES, "device", self.device, " or ".join(DEVICES))
        _require(self.dtype in DTYPES, "dtype", self.dtype, " or ".join(DTYPES))

    @property
    def schedule(self) -> Schedule:
        decay_start = round(self.max_tokens * (1 - self.decay_fraction))
        return Schedule(min(self.warmup_tokens, decay_start), decay_start, self.max_tokens)

    def identity(self) -> dict[str, Any]:
        """Returns the settings that must be equal for a run to continue from a checkpoint.

        run.py adds the layers, the data and the models; checkpoint.py compares the decay of the learning rate.
        """
        return {name: value for name, value in dataclasses.asdict(self).items() if name in _IDENTITY}


_IDENTITY = frozenset(
    {
        "ttt_steps",
        "draft_vocab",
        "batch_tokens",
        "muon_lr",
        "lr",
        "warmup_tokens",
        "seed",
        "num_held_out",
    }
)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name}: {value!r} is not {allowed}")
