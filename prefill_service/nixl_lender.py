"""The prefill service's KV pool in memory that receivers read through NIXL."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

import numpy as np

from baton.v1 import prefill_pb2
from common.kv.layer_group import LayerGroupSpec
from common.kv.lent_pool import LentPool, PoolLayout
from common.nixl_agent import NixlAgent

_SERVING_INTERVAL_S = 0.0005
_IDLE_INTERVAL_S = 0.02
_STOP_TIMEOUT_S = 5.0


class NixlLender:
    """Owns the agent, and the thread that serves reads on networks whose hardware does not."""

    def __init__(self, *, groups: Sequence[LayerGroupSpec], num_slots: int) -> None:
        """Raises NixlError."""
        layout = PoolLayout(groups, num_slots)
        memory = mmap.mmap(-1, layout.num_bytes)
        self.pool = LentPool(memory, layout)
        self._address = np.frombuffer(memory, np.uint8).ctypes.data
        self._memory = memory  # as long as the agent
        self._agent = NixlAgent()
        self._agent.register(self._address, layout.num_bytes)
        self.offer = prefill_pb2.NixlPool(agent_metadata=self._agent.metadata, address=self._address)
        """What a receiver needs to read there."""
        self._is_closing = threading.Event()
        self._is_serving: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._serve, name="nixl", daemon=True)

    def serve(self, is_serving: Callable[[], bool]) -> None:
        """From now on; seldom while not `is_serving`, which any thread may ask: new receivers connect then."""
        self._is_serving = is_serving
        self._thread.start()

    def close(self) -> None:
        """No receiver can read any more."""
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._agent.close()

    def _serve(self) -> None:
        while not self._is_closing.wait(_SERVING_INTERVAL_S if self._is_serving() else _IDLE_INTERVAL_S):
            self._agent.progress()
