"""Implements the interface of `graph.py` with CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from common.device.graph import Graph, GraphRecorder, GraphWork


class CudaGraph(Graph):
    """One CUDA graph, whose memory comes from `pool`, a handle of torch's graph memory pools."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        """Records `work` and returns its outputs. Waits for the device, so call it only at start-up.

        Other threads may use the device meanwhile, on other streams.
        """
        stream = torch.cuda.current_stream()  # the stream of the piece that runs this
        graph = torch.cuda.graph(self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with torch.inference_mode(), _without_collection(), graph:
            return work()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphRecorder(GraphRecorder):
    """Makes CUDA graphs that share one memory pool.

    Outputs are kept as long as their graph. The next recorded graph reuses the memory of intermediate results.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._pool: Any = None

    def new_graph(self) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self._pool)

    def held_bytes(self) -> int:
        with torch.cuda.device(self._torch_device):
            torch.cuda.empty_cache()  # cached unused memory would be counted as held by graphs
        return torch.cuda.memory_reserved(self._torch_device)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disables Python's garbage collector inside this context: freeing a dead CUDA graph would break a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
