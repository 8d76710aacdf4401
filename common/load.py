"""A snapshot of an engine's load, for GetLoad, for metrics, and for choosing a prefill replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The number of rows or slots in a pool by state. The states add up to `total`.

    `cached` slots hold KV for later rows. A row that needs slots can take them like free ones.
    """

    total: int
    free: int
    reserved: int = 0
    transferring: int = 0
    running: int = 0
    quarantined: int = 0
    cached: int = 0

    @property
    def held(self) -> int:
        """The number of slots (or rows) that are neither free nor cached: those that no new row can get."""
        return self.total - self.free - self.cached


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Counts of the prefix cache's hits and evictions since the engine was created.

    `num_tokens` counts the tokens of all rows when they were reserved, and `num_found` those of them whose KV was
    cached. `num_evicted` counts the cached slots that were given to other rows.
    """

    num_tokens: int = 0
    num_found: int = 0
    num_evicted: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load at one time. `num_steps` counts the steps that launched or finished a forward. `window_slots`
    maps the name of each layer group with a window to the states of its slots.

    On prefill, `num_computed_tokens` counts the tokens of all forwards that have ended, and `num_uncomputed_tokens`
    those of queued and running prompts that are still to be computed.
    On decode, `num_expected_cached` counts the tokens that prefill services were expected to have cached when rows were
    handed to them. `num_known_tokens` maps a prefill service's address to the number of tokens that it is expected to
    have cached now. `held_bytes` is the size of the KV of landed rows that was not sent, because the decode engine had
    it. `is_degraded` is True while a decode engine computes prompts itself because no prefill replica is ready.
    """

    rows: PoolCounts
    slots: PoolCounts
    num_queued: int
    num_running: int
    num_steps: int
    prefixes: PrefixCounts = PrefixCounts()
    window_slots: Mapping[str, PoolCounts] = field(default_factory=dict)
    unsent_bytes: int = 0
    num_row_retries: int = 0
    num_retractions: int = 0
    num_uncomputed_tokens: int = 0
    num_computed_tokens: int = 0
    num_expected_cached: int = 0
    num_known_tokens: Mapping[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    is_degraded: bool = False
