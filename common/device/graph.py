"""Recorded device work that is replayed whole: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

GraphWork = Callable[[], tuple[Tensor, ...]]
"""Does the same on the same memory whenever it is called, and copies nothing from the host."""


class Graph(Protocol):
    """Used on one stream, inside its pieces, once the work was run there as it is, and all it needs is compiled."""

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        """Record `work` and return its outputs, in memory that every replay writes anew.

        No later graph gets that memory. An earlier graph may compute in it when it is replayed. So outputs are valid
        until their own graph, or an earlier one, is replayed.
        """

    def replay(self) -> None:
        """Do the recorded work again, on the present contents of the memory it reads."""


class GraphRecorder(Protocol):
    """Makes graphs that are replayed one after the other on one stream, and that share the memory between their
    outputs.
    """

    def new_graph(self) -> Graph: ...

    def held_bytes(self) -> int:
        """Device memory that this process holds, after it has released what is unused. Waits for the device."""
