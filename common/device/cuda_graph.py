"""CUDA graphs behind the contract of graph.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.device.graph import Graph, GraphRecorder, GraphWork


class CudaGraph(Graph):
    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        """Waits for the device, as start-up may. Other threads may use it meanwhile, on other streams."""
        stream = torch.cuda.current_stream()  # the piece's stream, and so its device's
        graph = torch.cuda.graph(self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with torch.inference_mode(), graph:
            return work()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphRecorder(GraphRecorder):
    """Outputs are kept as long as their graph; the next recorded graph reuses the memory between."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._pool: Any = None

    def new_graph(self) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self._pool)

    def held_bytes(self) -> int:
        with torch.cuda.device(self._torch_device):
            torch.cuda.empty_cache()  # unused memory would hide what graphs take
        return torch.cuda.memory_reserved(self._torch_device)
