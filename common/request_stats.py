"""The costs of a request, which the decode service reports and clients read.

The messages `Timings` and `SpeculationCounts` in inference.proto have the same fields. A field that is added both there
and here reaches the log, the client's events and every program that prints them.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    num_verify_steps: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_forced_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    extend_s: float = 0.0
