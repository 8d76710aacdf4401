"""The messages that the first rank sends to the other ranks: what to load, which memory to use, what to compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from common.host.shared_tensors import TensorPlace
from common.model.loader import LoadArguments
from common.model.part import Collective


class RankEngine(Protocol):
    """The part of a compiled engine for CPUs that ranks use. It can be pickled, because all ranks get it."""

    def collective_bytes(self, num_ranks: int) -> int:
        """Returns the size of the memory that `new_collective` takes."""

    def new_collective(self, memory: Tensor, *, rank: int, num_ranks: int) -> Collective:
        """Returns this rank's access to the others. `memory` [collective_bytes(num_ranks)] uint8 is shared by all
        ranks, is zeros at first, and starts at a multiple of 64 bytes.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The first message to a rank: the model's directory, arguments of `load_target`, the rank and its threads' number.

    Compiled kernels are kept in `kernels_dir`, if any. `tf32` is what `allow_tf32` takes. `collective_bytes` is the
    size of the collective's memory, with which the first shared file (see NewFile) begins. `engine` connects ranks that
    share one pool. Without it each has KV of its own, and they find each other at `store_port`.
    """

    engine: RankEngine | None
    directory: Path
    arguments: LoadArguments
    rank: int
    num_ranks: int
    num_threads: int
    kernels_dir: Path | None
    tf32: bool
    collective_bytes: int
    store_port: int | None


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file of shared tensors, whose descriptor follows. Files are numbered in the order of these messages."""


@dataclass(frozen=True, slots=True)
class NewKv:
    """The rank's shard of a layer group's KV: a place in shared memory, or a tensor on the rank's GPU. Shards are
    numbered in the order of these messages.
    """

    kv: TensorPlace | Tensor


@dataclass(frozen=True, slots=True)
class NoMorePool:
    """The pool is gone, and with it every file but the first, and every shard. The next file has number 1 again.

    A rank that has let go of them answers with `number`, which tells the answer from those to earlier messages.
    """

    number: int


@dataclass(frozen=True, slots=True)
class SentWindow:
    """A WindowKv in shared memory."""

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


@dataclass(frozen=True, slots=True)
class AnnouncedForward:
    """A ForwardInput whose tensors follow in a broadcast (see own_kv.py).

    `shapes` are these tensors' shapes, by name, in their order. `columns` are its other columns. `kv` and `windows` are
    numbers of shards, and each window's layers. With `graph` the forward is recorded under that number.
    """

    shapes: dict[str, tuple[int, ...]]
    columns: dict[str, Any]
    kv: int
    windows: tuple[tuple[int, tuple[int, ...]], ...]
    graph: int | None


@dataclass(frozen=True, slots=True)
class ReplayForward:
    """Replays the forward that was recorded under this number. Its tensors follow in the same broadcast as then."""

    graph: int


ToFollower = NewFile | NewKv | NoMorePool | Forward | AnnouncedForward | ReplayForward
