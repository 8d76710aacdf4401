"""KV of a layer group that is cut by heads, because each rank of the model has memory of its own.

values of a token   [ head 0 | head 1 | head 2 | head 3 ]
shards              [ rank 0          | rank 1          ]     each in its rank's memory, with the same slots
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.host.untouched_memory import untouched_zeros

WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class KvShard:
    """The KV of some heads of a layer group.

    `kv` [layers, planes, slots + 1, heads, head_dim] has the KV of these `heads`. Shards may have heads in common.
    """

    heads: slice
    kv: Tensor


class NoRoomForShard(Exception):
    """A shard of `num_bytes` cannot be allocated on `torch_device`. The message says why."""

    def __init__(self, reason: str, num_bytes: int, torch_device: torch.device) -> None:
        super().__init__(reason)
        self.num_bytes = num_bytes
        self.torch_device = torch_device


class PoolTensors(Protocol):
    """Makes the tensors of a KV pool that forwards use. Those of this process are on `torch_device`."""

    torch_device: torch.device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a table of zeros."""

    def kv(self, group_name: str, shape: Sequence[int], dtype: torch.dtype) -> Sequence[KvShard]:
        """Returns zeros for the KV of a layer group. `shape` is that of `KvShard.kv` with all the group's heads.

        The first shard is the one that this process's forwards use. Raises OSError, OverflowError or
        torch.OutOfMemoryError if there is not enough memory, and NoRoomForShard if one shard of several has none.
        """


class OneDevice(PoolTensors):
    """Makes a pool of one shard on one device."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.torch_device.type != "cpu" or not math.prod(shape):  # there may be no layer that attends all tokens
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        return untouched_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def kv(self, group_name: str, shape: Sequence[int], dtype: torch.dtype) -> Sequence[KvShard]:
        return (KvShard(WHOLE, self.zeros(shape, dtype)),)
