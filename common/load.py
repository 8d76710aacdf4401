"""A snapshot of an engine's load, for GetLoad, for metrics, and for choosing the least loaded replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The number of rows or slots in a pool by state. The states add up to `total`."""

    total: int
    free: int
    reserved: int = 0
    transferring: int = 0
    running: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load at one time. `num_steps` counts the steps that launched or finished a forward."""

    rows: PoolCounts
    slots: PoolCounts
    num_queued: int
    num_running: int
    num_steps: int
    unsent_bytes: int = 0
    num_row_retries: int = 0
    num_retractions: int = 0
