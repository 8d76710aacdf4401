"""Saves and loads the checkpoints of a training run, and decides from which one a run may continue.

last.pt is the newest. stable.pt is from the moment before the learning rate begins to decay. Until then the learning
rate does not depend on the length of the run, so a run of another length may continue from it.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from common.host.replaced_file import replaced
from training.config import Schedule

LAST, STABLE = "last.pt", "stable.pt"


@dataclass(slots=True)
class RunState:
    """The progress of a run. The next batch is number `group` of epoch number `epoch`.

    `loss_sums` adds up the loss of each draft step over the `num_losses` training steps since the last evaluation.
    """

    num_tokens: int = 0
    num_steps: int = 0
    epoch: int = 0
    group: int = 0
    seconds: float = 0.0
    loss_sums: list[float] = field(default_factory=list)
    num_losses: int = 0


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A saved run. `identity` holds the settings that a run must share to continue from it.

    `head` and `optimizers` are state dictionaries.
    """

    identity: dict[str, Any]
    schedule: Schedule
    state: RunState
    head: dict[str, Any]
    optimizers: list[dict[str, Any]]


def save(path: Path, checkpoint: RunCheckpoint) -> None:
    """Saves a checkpoint. The file is replaced as a whole, so it is never incomplete."""
    stored = {
        "identity": checkpoint.identity,
        "schedule": _fields(checkpoint.schedule),
        "state": _fields(checkpoint.state),
        "head": checkpoint.head,
        "optimizers": checkpoint.optimizers,
    }
    with replaced(path) as unfinished:
        torch.save(stored, unfinished)


def find(directory: Path, identity: dict[str, Any], schedule: Schedule) -> RunCheckpoint | None:
    """Returns the checkpoint in `directory` from which a run continues; None if there is none.

    Raises ConfigError, naming the setting, if the checkpoints are of another run, or if their schedules differ from
    this one and a decay had begun by either schedule when they were saved.
    """
    found = [load(directory / name) for name in (LAST, STABLE) if (directory / name).exists()]
    for checkpoint in found:
        for name, value in identity.items():
            theirs = checkpoint.identity.get(name)
            if theirs != value:
                raise ConfigError(f"{name}: this run has {value}, the checkpoint in {directory} {theirs}")
        before_decay = min(checkpoint.schedule.decay_start, schedule.decay_start)
        if checkpoint.schedule == schedule or checkpoint.state.num_tokens <= before_decay:
            return checkpoint
    if not found:
        return None
    newest = found[0]
    raise ConfigError(
        f"max_tokens: {directory} was trained for {newest.state.num_tokens} tokens of {newest.schedule.max_tokens}; "
        f"a decay from {schedule.decay_start} to {schedule.max_tokens} cannot go on from there, nor from a {STABLE}"
    )


def load(path: Path) -> RunCheckpoint:
    """Loads a checkpoint. Raises ConfigError if the file cannot be read."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return RunCheckpoint(
            stored["identity"],
            Schedule(**stored["schedule"]),
            RunState(**stored["state"]),
            stored["head"],
            stored["optimizers"],
        )
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path}: no checkpoint to read: {error}") from error


def _fields(value: Schedule | RunState) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
