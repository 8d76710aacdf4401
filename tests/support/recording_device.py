"""A CPU device whose work can be recorded: a graph calls the work again and puts what comes out where it was at first.

So outputs are memory that a replay writes anew, as a GPU's are. What this does not show is in tests/gpu.
"""

from __future__ import annotations

from torch import Tensor

from common.device.cpu import CpuDevice
from common.device.graph import Graph, GraphRecorder, GraphWork


class CalledGraph(Graph):
    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        self._work = work
        self._outputs = tuple(output.clone() for output in work())
        return self._outputs

    def replay(self) -> None:
        self.num_replays += 1
        for output, new in zip(self._outputs, self._work(), strict=True):
            output.copy_(new)


class CallRecorder(GraphRecorder):
    def __init__(self) -> None:
        self.graphs: list[CalledGraph] = []

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)

    def new_graph(self) -> Graph:
        self.graphs.append(CalledGraph())
        return self.graphs[-1]

    def held_bytes(self) -> int:
        return 0


class RecordingCpuDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.recorder = CallRecorder()

    @property
    def graphs(self) -> GraphRecorder | None:
        return self.recorder
