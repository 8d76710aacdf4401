"""A CPU device that imitates CUDA graphs. A recorded graph calls its work again and copies the outputs into the first
call's memory.

So each replay overwrites the outputs of the previous one, and those of all graphs recorded later: on a GPU these may
share memory with the replay's intermediate results. tests/gpu covers what this imitation cannot show.
"""

from __future__ import annotations

from torch import Tensor

from common.device.cpu import CpuDevice
from common.device.stream import Graph, GraphRecorder, GraphWork


class CalledGraph(Graph):
    def __init__(self, recorded: list[CalledGraph]) -> None:
        """Keeps `recorded`: all graphs of this recorder, in the order in which they were recorded."""
        self.num_replays = 0
        self._recorded = recorded

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        self._work = work
        self._outputs = tuple(output.clone() for output in work())
        self._recorded.append(self)
        return self._outputs

    def replay(self) -> None:
        self.num_replays += 1
        for later in self._recorded[self._recorded.index(self) + 1 :]:
            for output in later._outputs:
                output.fill_(float("nan") if output.is_floating_point() else -1)
        for output, new in zip(self._outputs, self._work(), strict=True):
            output.copy_(new)


class CallRecorder(GraphRecorder):
    def __init__(self) -> None:
        self.graphs: list[CalledGraph] = []

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)

    def new_graph(self) -> Graph:
        return CalledGraph(self.graphs)

    def held_bytes(self) -> int:
        return 0


class RecordingCpuDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.recorder = CallRecorder()

    @property
    def graphs(self) -> GraphRecorder | None:
        return self.recorder
