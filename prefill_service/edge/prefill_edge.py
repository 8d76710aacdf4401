"""What the prefill service's life needs to know of its edge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from common.errors import BatonError
from common.service.engine_thread import EnginePort
from prefill_service.edge.servicer import PrefillServicer
from prefill_service.handoff.lent_memory import LentMemory
from prefill_service.messages import Command, Drain

_DRAIN_POLL_S = 0.05


class PrefillEdge:
    """A ServiceEdge: calls are open towards decode services, and memory is lent to them. Event loop only."""

    def __init__(self, *, engine: EnginePort[Command], servicer: PrefillServicer, lent: LentMemory) -> None:
        self._engine = engine
        self._servicer = servicer
        self._lent = lent
        self._is_draining = False

    async def open(self) -> None:
        self._lent.follow(lambda: self._servicer.num_calls > 0)

    @property
    def is_ready(self) -> bool:
        """It needs nobody else."""
        return not self._is_draining

    @property
    def num_open(self) -> Mapping[str, int]:
        return {"num_calls": self._servicer.num_calls}

    def drain(self) -> None:
        """The engine hears of it at once, and refuses new calls by their rows: those go to another replica."""
        if not self._is_draining:
            self._is_draining = True
            self._engine.post(Drain())

    async def wait_idle(self) -> None:
        while self._servicer.num_calls and self._engine.is_alive:  # noqa: ASYNC110 - either may change first
            await asyncio.sleep(_DRAIN_POLL_S)

    def fail_all(self, error: BatonError) -> None:
        self._servicer.fail_calls(error)

    def end_rest(self) -> None:
        """Left to the server's end: a call that breaks has its rows computed elsewhere."""

    async def close(self) -> None:
        """The engine still writes into the memory that is lent: it outlives the engine."""
