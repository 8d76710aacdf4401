"""Device work that is recorded once and replayed as a whole, with one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

GraphWork = Callable[[], tuple[Tensor, ...]]
"""A function whose device work can be recorded. Returns the output tensors.

It must do the same work on the same memory in each call, and copy nothing from the host.
"""


class Graph(Protocol):
    """Device work recorded once and replayed as a whole.

    Record and replay it inside pieces (units of work) of one stream, and only after the same work has run there once
    without recording, so that everything it needs is compiled.
    """

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        """Records `work` and returns its outputs, which every replay overwrites.

        Later graphs do not use the outputs' memory, but earlier graphs may. So outputs are valid until this graph, or
        one recorded before it, is replayed.
        """

    def replay(self) -> None:
        """Does the recorded work again, with the present contents of its input memory."""


class GraphRecorder(Protocol):
    """Makes graphs that are replayed one after the other on one stream.

    The graphs share the memory of their intermediate results.
    """

    def new_graph(self) -> Graph: ...

    def held_bytes(self) -> int:
        """Releases unused device memory, and returns how many bytes this process still holds. Waits for the device."""
