"""Ranks that are threads of this process, for code that only one thread may run at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from baton_cpu.collective import SharedCollective, collective_bytes
from common.host.untouched_memory import untouched_zeros


class InTurns(SharedCollective):
    """A collective whose rank has `turn`, except while it waits for the others."""

    def __init__(self, memory: Tensor, *, rank: int, num_ranks: int, turn: threading.Lock) -> None:
        super().__init__(memory, rank=rank, num_ranks=num_ranks)
        self._turn = turn

    @classmethod
    def ranks(cls, num_ranks: int) -> tuple[threading.Lock, list[InTurns]]:
        """Returns the turn, which each rank's thread must take first, and the collective of each rank."""
        memory, turn = untouched_zeros(collective_bytes(num_ranks)), threading.Lock()
        return turn, [cls(memory, rank=rank, num_ranks=num_ranks, turn=turn) for rank in range(num_ranks)]

    def sum_up(self, values: Tensor) -> None:
        with self._others():
            super().sum_up(values)

    def joined(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        with self._others():
            return super().joined(part, widths)

    @contextmanager
    def _others(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
