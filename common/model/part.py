"""The part of a model that one of several ranks computes, and how ranks add up their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

_UNIT = 16
"""Widths are cut at multiples of this where they can be: kernels want aligned rows."""


class MemberLost(Exception):
    """Another rank is lost, so that this one cannot go on."""


class Collective(Protocol):
    """Adds and joins the tensors of all ranks of a model. Each rank has an object of this kind, and all ranks call the
    same methods, with tensors of the same shapes, in the same order.

    `sum_up` and `joined` raise MemberLost once this rank's object is given up.
    """

    def sum_up(self, values: Tensor) -> None:
        """Replaces `values`, which are contiguous, by the sum of all ranks' values. All ranks get the same sum."""

    def joined(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns the `part` [..., widths[rank]] of all ranks side by side, [..., sum(widths)]."""

    def give_up(self) -> None:
        """Makes every later call of this rank's object raise MemberLost. Any thread may call this.

        Which other calls end depends on the class. SharedCollective: all ranks' present and later calls.
        GroupCollective: in this process only, the first call, which waits for all ranks, and on a GPU calls in flight
        before the first broadcast. Other calls end with the lost rank's process.
        """

    def counts(self) -> list[int]:
        """Returns each rank's progress, as numbers that grow. Any thread may call this."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that the rank with number `rank`, of `num_ranks`, computes. `collective` connects them.

    With `has_own_kv` each rank has a KV pool of its own heads. Otherwise all ranks share one, with all heads.
    """

    rank: int
    num_ranks: int
    collective: Collective
    has_own_kv: bool = False

    def widths(self, total: int) -> list[int]:
        """Returns each rank's share of the width `total`, as equal as possible. A later rank never has more than an
        earlier one. If `total` is too small, some have 0.
        """
        unit = _UNIT if total % _UNIT == 0 and total // _UNIT >= self.num_ranks else 1
        num_units, num_left = divmod(total // unit, self.num_ranks)
        return [unit * (num_units + (rank < num_left)) for rank in range(self.num_ranks)]

    def columns(self, total: int) -> range:
        """Returns the columns of a matrix of `total` columns that this rank has."""
        stops = list(accumulate(self.widths(total), initial=0))
        return range(stops[self.rank], stops[self.rank + 1])

    def heads(self, num_heads: int, num_kv_heads: int) -> Heads:
        """Returns the heads that this rank attends with. A rank has whole KV heads. If there are fewer KV heads than
        ranks, it shares one with other ranks.

        Raises ValueError if there are too few query heads.
        """
        num_shared = num_heads // num_kv_heads
        if num_kv_heads >= self.num_ranks:
            kv_heads = _cut(num_kv_heads, self.num_ranks, self.rank)
            return Heads(range(kv_heads.start * num_shared, kv_heads.stop * num_shared), kv_heads)
        kv_head = next(head for head in range(num_kv_heads) if self.rank in _cut(self.num_ranks, num_kv_heads, head))
        ranks = _cut(self.num_ranks, num_kv_heads, kv_head)
        if len(ranks) > num_shared:
            raise ValueError(f"{self.num_ranks} ranks, and {num_kv_heads} KV heads with {num_shared} query heads each")
        queries = _cut(num_shared, len(ranks), self.rank - ranks.start)
        first = kv_head * num_shared
        return Heads(range(first + queries.start, first + queries.stop), range(kv_head, kv_head + 1))


@dataclass(frozen=True, slots=True)
class Heads:
    """The query heads and the KV heads of a rank."""

    queries: range
    kv: range


def _cut(total: int, num_parts: int, part: int) -> range:
    """Returns one of `num_parts` parts of range(total), as equal as possible."""
    size, num_left = divmod(total, num_parts)
    start = part * size + min(part, num_left)
    return range(start, start + size + (part < num_left))
