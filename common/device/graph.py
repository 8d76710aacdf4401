"""Work of a device recorded once and replayed whole: one launch in place of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

GraphWork = Callable[[], tuple[Tensor, ...]]
"""Does the same on the same memory whenever it is called, and copies nothing from the host."""


class Graph(Protocol):
    """Used on one stream, inside its pieces, once the work was run there as it is, and all it needs is compiled."""

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        """Record `work`, and return its outputs: memory that every replay writes anew.

        No later graph is given it. But one recorded before may have computed in it, and does so again when it is
        replayed. So outputs are good until their own graph, or one recorded before it, is replayed.
        """

    def replay(self) -> None:
        """Do the recorded work again, on what is now in the memory it reads."""


class GraphRecorder(Protocol):
    """Makes graphs that are replayed one after the other, on one stream, and share the memory between their outputs."""

    def new_graph(self) -> Graph: ...

    def held_bytes(self) -> int:
        """What this process holds of the device's memory, for graphs and all else, once it gave back what lies unused.
        Waits for the device.
        """
