"""A launched forward of chunks until it is finished."""

from __future__ import annotations

from dataclasses import dataclass

from common.device.cell import Cell
from common.device.stream import Event
from prefill_service.forward.chunk_batch import ChunkBatch
from prefill_service.forward.worker import Computed


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """Holds what its pieces use until `end`."""

    batch: ChunkBatch
    computed: Cell[Computed]
    end: Event
    launched_s: float
