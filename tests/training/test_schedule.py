"""Tests of the learning rate: warm-up, then constant, then decay."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from training.config import Schedule, TrainConfig


def test_the_rate_rises_stays_and_falls_to_two_per_cent() -> None:
    schedule = Schedule(warmup_tokens=100, decay_start=700, max_tokens=1000)
    factors = [schedule.factor(tokens) for tokens in (0, 50, 100, 700, 850, 1000, 1100)]
    assert factors == pytest.approx([0, 0.5, 1, 1, 0.51, 0.02, 0.02])


def test_before_the_decay_it_does_not_depend_on_the_length_of_the_run() -> None:
    short, long = (TrainConfig(max_tokens=tokens).schedule for tokens in (1_000_000, 9_000_000))
    for tokens in range(0, short.decay_start, 10_000):
        assert short.factor(tokens) == long.factor(tokens)


def test_the_decay_takes_its_fraction_of_the_run() -> None:
    assert TrainConfig(max_tokens=1000, decay_fraction=0.25, warmup_tokens=0).schedule == Schedule(0, 750, 1000)
    assert TrainConfig(max_tokens=1000, decay_fraction=0.0, warmup_tokens=0).schedule.factor(1100) == 1
    assert TrainConfig(max_tokens=1000, decay_fraction=1.0).schedule.warmup_tokens == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttt_steps": 0}, "ttt_steps: 0 is not 1 or more"),
        ({"draft_vocab": 0}, "draft_vocab"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"num_held_out": 0}, "num_held_out"),
        ({"eval_tokens": 0}, "eval_tokens"),
        ({"warmup_tokens": -1}, "warmup_tokens"),
        ({"muon_lr": 0.0}, "muon_lr"),
        ({"lr": -1.0}, "lr"),
        ({"checkpoint_minutes": 0.0}, "checkpoint_minutes"),
        ({"decay_fraction": 1.5}, "decay_fraction: 1.5 is not from 0 to 1"),
        ({"seed": -1}, "seed"),
        ({"device": "tpu"}, "device: 'tpu' is not cpu or cuda"),
        ({"dtype": "float16"}, "dtype: 'float16' is not bfloat16 or float32"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        TrainConfig(**changes)
