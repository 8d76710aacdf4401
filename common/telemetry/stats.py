"""What an engine reports: each step, counts of forwards, its load, and the costs of each request.

Uses the standard library only: engines and clients import it. The messages `Timings` and `SpeculationCounts` in
inference.proto have the same fields, and `PoolLoad` in types.proto has those of PoolCounts. A field that is added both
there and here reaches the log, the client's events and every program that prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass(slots=True)
class ForwardCounts:
    """The number of a model's forwards since it got a program (a faster way to compute them).

    `num_fused` were computed by the program. `num_declined` were computed by operators, because the program declined
    them. One thread counts; any thread may read.
    """

    num_fused: int = 0
    num_declined: int = 0

    def count(self, *, is_taken: bool) -> bool:
        """Counts one forward, and returns `is_taken`: whether the program computes it."""
        if is_taken:
            self.num_fused += 1
        else:
            self.num_declined += 1
        return is_taken


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """A step of a service that has a draft head.

    `num_levels` is how many tokens ahead the step drafted: the depth of the draft tree, or 0 if it drafted nothing.
    `accept_lens` has the number of tokens that each drafting row gained. `num_forced` says, for the same rows, of how
    many levels the drafts came from a grammar; it is empty if none did. `draft_s`, `verify_s` and `extend_s` are the
    durations of the step's parts. `idle_s` is how long the forward stream was idle between the previous step and this
    one. It is None if no step was in flight when this one was launched.
    """

    num_levels: int
    accept_lens: tuple[int, ...]
    draft_s: float
    verify_s: float
    extend_s: float
    idle_s: float | None = None
    num_forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MaskStats:
    """A step in which grammars constrain the draws of `num_rows` rows.

    Computing the masks took `mask_s`. The draws of the step came `wait_s` after its forward had ended, because they
    waited for masks.
    """

    num_rows: int
    mask_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """One forward: how many rows it had, how many tokens it computed, and the seconds from its launch to its result.

    `speculation` is None in a prefill service, and without a draft head. `masks` is None in a prefill service, and
    without grammars.
    """

    batch_size: int
    num_tokens: int
    step_s: float
    speculation: SpeculationStats | None = None
    masks: MaskStats | None = None


OnStep = Callable[[StepStats], None]


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


@dataclass(frozen=True, slots=True)
class Timings:
    """A request's seconds per phase, summed over all attempts and retractions, and its other costs.

    Seconds are measured by the decode engine's clock. They are 0 for phases that the request was not in: the KV of a
    prompt that the decode service computed itself was not transferred. `num_cached_tokens` counts the prompt's tokens
    that the first attempt did not compute, because other requests had left their KV in a cache. KV that a lost attempt
    of the request itself has left does not count. For a request that brings output along the number is 0.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    first_decode_s: float = 0.0
    decode_s: float = 0.0
    kv_bytes: int = 0
    num_handoff_attempts: int = 0
    num_retractions: int = 0
    num_cached_tokens: int = 0

    @property
    def handoff_s(self) -> float:
        """The seconds that the request spent in all phases between the queue and the first decode step."""
        return self.prefill_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Draft tokens that were verified and accepted in a request's verify steps.

    A draft token that the request's end cuts off counts as refused. `num_forced_tokens` counts the accepted ones that
    its grammar forced; the draft head guessed the others. `drafted_at[i]` counts
    steps without forced drafts that drafted at least i + 1 tokens ahead, and `accepted_at[i]` those of them that
    accepted at least as many. The seconds are device time of the whole batches that the request was in.
    """

    num_verify_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    extend_s: float = 0.0

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        """Adds the counts of other verify steps of the same request, which may have drafted less or more deeply."""
        return SpeculationCounts(*map(_sum_of, astuple(self), astuple(other)))


def _sum_of(count: Any, more: Any) -> Any:
    """Returns the sum of two numbers, or the sums of two tuples, place by place as far as the longer one goes."""
    return tuple(map(sum, zip_longest(count, more, fillvalue=0))) if isinstance(count, tuple) else count + more
