"""Ranks of a CPU that share one pool: KV and tables lie in memory that all map, and a message has the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import GraphRecorder
from common.host.shared_tensors import SharedTensors, TensorPlace
from common.kv.kv_shard import WHOLE, KvShard
from common.kv.window_slots import WindowKv
from common.ranks.messages import Forward, SentWindow, ToFollower
from common.ranks.pool_of_ranks import PoolOfRanks, ToRanks

_COLUMNS = [field.name for field in fields(ForwardInput) if field.name not in ("req_to_token", "kv", "windows")]


class OnePool(PoolOfRanks):
    """The first rank's side. `tensors` has the shared memory. Forwards of CPUs are not recorded."""

    def __init__(self, tensors: SharedTensors) -> None:
        self._tensors = tensors

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._tensors.zeros(shape, dtype)

    def kv(self, shape: Sequence[int], dtype: torch.dtype, heads: Sequence[range]) -> Sequence[KvShard]:
        return (KvShard(WHOLE, self.zeros(shape, dtype)),)

    def share(self, memory: Tensor, file: int) -> None:
        self._tensors.note(memory, os.dup(file))

    def begin(self, batch: ForwardInput, ranks: ToRanks) -> None:
        ranks.send(self._message(batch))

    def recorder(self, recorder: GraphRecorder, ranks: ToRanks) -> GraphRecorder:
        return recorder

    def take_unsent(self) -> Sequence[Sequence[ToFollower]]:
        return ()

    def let_go(self) -> None:
        pass

    def _message(self, batch: ForwardInput) -> Forward:
        place_of = self._tensors.place_of
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
    """Returns the forward of a message. `at` returns the tensor at a place."""
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
