"""What an engine holds, as an immutable snapshot for GetLoad, metrics and the choice of the least loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Members of one pool by state. The states add up to `total`."""

    total: int
    free: int
    reserved: int = 0
    transferring: int = 0
    running: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """`num_steps` counts passes of the loop that launched or finished a forward."""

    rows: PoolCounts
    slots: PoolCounts
    num_queued: int
    num_running: int
    num_steps: int
    unsent_bytes: int = 0
    num_row_retries: int = 0
    num_retractions: int = 0
