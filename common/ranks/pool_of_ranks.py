"""The first rank's side of the memory that ranks compute on, and of how they are told of forwards.

There are two kinds: one pool that all ranks map (one_pool.py), and separate KV for each rank (own_kv.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import GraphRecorder
from common.kv.kv_shard import KvShard
from common.ranks.messages import ToFollower


class ToRanks(Protocol):
    """The other ranks, as receivers of messages."""

    def send(self, message: ToFollower) -> None:
        """Sends a message to all. Raises MemberLost if a rank has ended."""

    def give_up(self, error: BaseException) -> str:
        """Counts all ranks as lost, because this one has failed. Returns which failed first, and how."""


class PoolOfRanks(Protocol):
    """The tensors of a pool, as `Followers` makes them, and the forwards on them."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def kv(self, shape: Sequence[int], dtype: torch.dtype, heads: Sequence[range]) -> Sequence[KvShard]: ...

    def share(self, memory: Tensor, file: int) -> None: ...

    def begin(self, batch: ForwardInput, ranks: ToRanks) -> None:
        """Tells the ranks to compute this forward. Raises MemberLost if one has ended."""

    def recorder(self, recorder: GraphRecorder, ranks: ToRanks) -> GraphRecorder:
        """Returns a recorder of this rank's work, which makes the ranks record and replay their part of it."""

    def take_unsent(self) -> Sequence[Sequence[ToFollower]]:
        """Returns, and forgets, the messages that each of the other ranks must get before the next message."""

    def let_go(self) -> None:
        """Forgets the tensors, once no rank uses them any more."""
