"""Ranks that each have KV of their own, as GPUs do: the first rank gives them shards and broadcasts forwards' tensors.

    rank 0   message: shapes, lengths ─▶ broadcast: ids, positions, slots ─▶ forward on cuda:0, KV of heads 0..k
    rank 1   ─────── message ──────────▶ ──────── receives ────────────────▶ forward on cuda:1, KV of heads k..

The message says what comes; the broadcast, on the stream, has what only the first rank's GPU knows, such as the tokens
that the step before drew. Rank 0 also allocates every shard and moves KV in and out of it. That is safe: its stream's
work before a broadcast comes before all ranks' forwards, and work after a forward's last sum comes after them.

On CPUs ranks share one pool instead. Only tests give them KV of their own, to show that all this is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import DeviceLost, Graph, GraphRecorder, GraphWork
from common.host.shared_tensors import SharedTensors
from common.kv.kv_shard import KvShard, NoRoomForShard
from common.kv.window_slots import WindowKv
from common.ranks.messages import AnnouncedForward, NewKv, ReplayForward, ToFollower
from common.ranks.pool_of_ranks import PoolOfRanks, ToRanks
from common.ranks.process_group import GroupCollective

_NUMBERS = ("prefix_lens", "extend_lens", "max_seq_len")
_TENSORS = [
    field.name
    for field in fields(ForwardInput)
    if field.name not in (*_NUMBERS, "req_to_token", "req_pool_indices", "kv", "windows")
]
_SENT_AS = torch.int32
TABLE_ENTRY_BYTES = 16
"""Bytes that the first rank needs for each table entry that it broadcasts: the entry as int64, and twice as int32."""
_WIDTH_UNIT = 16
"""Tables are cut to a multiple of this many slots: kernels are compiled again for other widths."""


class OwnKv(PoolOfRanks):
    """The first rank's side. Rank r computes on `devices[r]`. `tensors` has shared memory, for KV on a CPU."""

    def __init__(self, tensors: SharedTensors, collective: GroupCollective, devices: Sequence[torch.device]) -> None:
        self._tensors = tensors
        self._collective = collective
        self._devices = devices
        self._shards: list[list[Tensor]] = []  # of each layer group, by rank
        self._num_sent = 0
        self._num_graphs = 0
        self._graph: int | None = None  # the graph that is being recorded
        self._shared_graphs: set[int] = set()  # graphs of which the other ranks have a part
        self._is_replaying = False

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self._devices[0])

    def kv(self, shape: Sequence[int], dtype: torch.dtype, heads: Sequence[range]) -> Sequence[KvShard]:
        """Returns a shard for each rank, with its `heads`. Raises NoRoomForShard."""
        made = [
            KvShard(slice(own.start, own.stop), self._zeros_on(device, (*shape[:-2], len(own), shape[-1]), dtype))
            for device, own in zip(self._devices, heads, strict=True)
        ]
        self._shards.append([shard.kv for shard in made])
        return made

    def _zeros_on(self, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        try:
            if device.type == "cpu":
                return self._tensors.zeros(shape, dtype)
            zeros = torch.zeros(tuple(shape), dtype=dtype, device=device)
        except (OSError, torch.OutOfMemoryError) as error:
            raise NoRoomForShard(str(error), math.prod(shape) * dtype.itemsize, device) from error
        torch.cuda.synchronize(device)  # the rank that gets it knows nothing of this process's streams
        return zeros

    def share(self, memory: Tensor, file: int) -> None:
        raise AssertionError("KV that ranks have of their own is not lent")

    def let_go(self) -> None:
        self._shards.clear()
        self._num_sent = 0
        self._shared_graphs.clear()
        if self._devices[0].type == "cuda":
            torch.cuda.ipc_collect()

    def take_unsent(self) -> Sequence[Sequence[ToFollower]]:
        unsent, self._num_sent = self._shards[self._num_sent :], len(self._shards)
        return [[self._new_kv(shards[rank]) for shards in unsent] for rank in range(1, len(self._devices))]

    def _new_kv(self, kv: Tensor) -> NewKv:
        return NewKv(self._tensors.place_of(kv) if kv.device.type == "cpu" else kv)

    def begin(self, batch: ForwardInput, ranks: ToRanks) -> None:
        tensors = _tensors_of(batch)
        if not self._is_replaying:
            ranks.send(self._announced(batch, tensors))
            if self._graph is not None:
                assert self._graph not in self._shared_graphs, "a graph has one forward"
                self._shared_graphs.add(self._graph)
        # All values side by side, as int32: no token, position or slot is larger.
        self._collective.broadcast(torch.cat([each.reshape(-1).to(_SENT_AS) for each in tensors.values()]))

    def _announced(self, batch: ForwardInput, tensors: dict[str, Tensor]) -> AnnouncedForward:
        return AnnouncedForward(
            {name: tuple(each.shape) for name, each in tensors.items()},
            {name: getattr(batch, name) for name in _NUMBERS},
            self._number_of(batch.kv),
            tuple((self._number_of(window.kv), tuple(window.layers)) for window in batch.windows),
            self._graph,
        )

    def recorder(self, recorder: GraphRecorder, ranks: ToRanks) -> GraphRecorder:
        return _RecorderOfRanks(recorder, self, ranks)

    def new_graph_number(self) -> int:
        self._num_graphs += 1
        return self._num_graphs

    @contextmanager
    def recording(self, graph: int) -> Iterator[None]:
        """If a forward begins inside this context, the other ranks record it under the number `graph`."""
        self._graph = graph
        try:
            yield
        finally:
            self._graph = None

    @contextmanager
    def replaying(self, graph: int, ranks: ToRanks) -> Iterator[None]:
        """Tells `ranks` to replay their part of `graph`, if they recorded one. Inside this context `begin` then sends
        no message.

        Raises DeviceLost if a rank has ended, or if the code inside fails: the others have begun, and wait for it.
        """
        if graph not in self._shared_graphs:
            yield
            return
        self._collective.note_replay()
        try:
            ranks.send(ReplayForward(graph))
            self._is_replaying = True
            yield
        except Exception as error:
            raise DeviceLost(ranks.give_up(error)) from error
        finally:
            self._is_replaying = False

    def _number_of(self, kv: Tensor) -> int:
        return next(number for number, shards in enumerate(self._shards) if shards[0] is kv)


class _RecorderOfRanks(GraphRecorder):
    def __init__(self, recorder: GraphRecorder, pool: OwnKv, ranks: ToRanks) -> None:
        self._recorder = recorder
        self._pool = pool
        self._ranks = ranks

    def new_graph(self) -> Graph:
        return _GraphOfRanks(self._recorder.new_graph(), self._pool, self._ranks)

    def held_bytes(self) -> int:
        return self._recorder.held_bytes()


class _GraphOfRanks(Graph):
    """A graph of this rank's work. If it contains a forward of the target, the other ranks record their part of the
    forward.
    """

    def __init__(self, graph: Graph, pool: OwnKv, ranks: ToRanks) -> None:
        self._graph = graph
        self._pool = pool
        self._ranks = ranks
        self._number = pool.new_graph_number()

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        with self._pool.recording(self._number):
            return self._graph.record(work)

    def replay(self) -> None:
        with self._pool.replaying(self._number, self._ranks):
            self._graph.replay()


class ReceivedForwards:
    """Another rank's side: its shards, and the forwards that it receives."""

    def __init__(self, collective: GroupCollective, torch_device: torch.device) -> None:
        self._collective = collective
        self._torch_device = torch_device
        self._shards: list[Tensor] = []

    def add(self, kv: Tensor) -> None:
        self._shards.append(kv)

    def let_go(self) -> None:
        self._shards.clear()

    def note_replay(self) -> None:
        self._collective.note_replay()

    def receive(self, message: AnnouncedForward) -> ForwardInput:
        """Returns the forward of a message, with the tensors of the broadcast that follows it. Raises MemberLost."""
        num_values = sum(torch.Size(size).numel() for size in message.shapes.values())
        packed = torch.empty(num_values, dtype=_SENT_AS, device=self._torch_device)
        self._collective.broadcast(packed)
        parts = packed.long().split([torch.Size(size).numel() for size in message.shapes.values()])
        tensors = {name: part.view(size) for part, (name, size) in zip(parts, message.shapes.items(), strict=True)}
        columns: dict[str, Any] = {name: tensors.get(name) for name in _TENSORS}
        if columns["tree_mask"] is not None:
            columns["tree_mask"] = columns["tree_mask"].bool()
        kv, table = self._shards[message.kv], tensors["req_to_token"]
        return ForwardInput(
            **columns,
            **message.columns,
            req_to_token=table,
            req_pool_indices=torch.arange(len(table), device=self._torch_device),
            kv=kv,
            windows=tuple(
                WindowKv(
                    self._shards[number],
                    tensors[f"window {place} req_to_token"],
                    self._slots_at(columns["out_cache_loc"], tensors[f"window {place} slots"], kv.shape[2]),
                    layers,
                )
                for place, (number, layers) in enumerate(message.windows)
            ),
        )

    def _slots_at(self, out_cache_loc: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        """Returns a table [num_slots] that has each of `slots` [T] at its place in `out_cache_loc` [T]."""
        table = torch.zeros(num_slots, dtype=torch.int64, device=self._torch_device)
        return table.index_copy_(0, out_cache_loc, slots)


def _tensors_of(batch: ForwardInput) -> dict[str, Tensor]:
    """Returns the tensors of a forward. Instead of the pool's tables these are the rows and slots that it uses."""
    rows = batch.req_pool_indices
    width = min(batch.req_to_token.shape[1], -(-batch.max_seq_len // _WIDTH_UNIT) * _WIDTH_UNIT)

    def of_rows(table: Tensor) -> Tensor:
        return table[:, :width].index_select(0, rows)

    tensors = {name: each for name in _TENSORS if (each := getattr(batch, name)) is not None}
    tensors["req_to_token"] = of_rows(batch.req_to_token)
    for place, window in enumerate(batch.windows):
        tensors[f"window {place} req_to_token"] = of_rows(window.req_to_token)
        tensors[f"window {place} slots"] = window.slot_of[batch.out_cache_loc]
    return tensors
