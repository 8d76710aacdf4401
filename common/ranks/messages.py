"""The messages that the first rank sends to the other ranks: what to load, which memory to map, what to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.host.shared_tensors import TensorPlace
from common.kv.window_slots import WindowKv
from common.model.loader import LoadArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The first message: the model's directory, arguments of `load_target`, the rank and the number of its threads.

    Compiled kernels are kept in `kernels_dir`, if any. `collective_bytes` is the size of the collective's memory, with
    which the first file begins.
    """

    directory: Path
    arguments: LoadArguments
    rank: int
    num_ranks: int
    num_threads: int
    kernels_dir: Path | None
    collective_bytes: int


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file of shared tensors, whose descriptor follows. Files are numbered in the order of these messages."""


@dataclass(frozen=True, slots=True)
class NoMorePool:
    """The pool is gone, and with it every file but the first. The next file has number 1 again."""


@dataclass(frozen=True, slots=True)
class SentWindow:
    """A WindowKv."""

    kv: TensorPlace
    req_to_token: TensorPlace
    slot_of: TensorPlace
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """A ForwardInput: `columns` are its small tensors and numbers, by name. The pool's tensors are in shared memory."""

    columns: dict[str, Any]
    req_to_token: TensorPlace
    kv: TensorPlace
    windows: tuple[SentWindow, ...]


_COLUMNS = [field.name for field in fields(ForwardInput) if field.name not in ("req_to_token", "kv", "windows")]


def sent(batch: ForwardInput, place_of: Callable[[Tensor], TensorPlace]) -> Forward:
    """Returns the message of a forward. `place_of` finds a tensor in shared memory."""
    columns = {name: getattr(batch, name) for name in _COLUMNS}
    return Forward(
        {name: each.numpy() if isinstance(each, Tensor) else each for name, each in columns.items()},
        place_of(batch.req_to_token),
        place_of(batch.kv),
        tuple(
            SentWindow(
                place_of(window.kv), place_of(window.req_to_token), place_of(window.slot_of), tuple(window.layers)
            )
            for window in batch.windows
        ),
    )


def received(message: Forward, at: Callable[[TensorPlace], Tensor]) -> ForwardInput:
    """Returns the forward of a message. `at` maps a tensor of shared memory."""
    columns: dict[str, Any] = {
        name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in message.columns.items()
    }
    return ForwardInput(
        **columns,
        req_to_token=at(message.req_to_token),
        kv=at(message.kv),
        windows=tuple(
            WindowKv(at(window.kv), at(window.req_to_token), at(window.slot_of), window.layers)
            for window in message.windows
        ),
    )
