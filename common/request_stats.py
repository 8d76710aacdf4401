"""What a request cost: the decode service reports it and clients read it.

The wire has messages with the same fields (`Timings` and `SpeculationCounts` in inference.proto). A field added here
and there reaches the log, the client's events and everything that prints them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds per phase by the decode engine's clock, over every attempt and retraction, and what the request cost."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    first_decode_s: float = 0.0
    decode_s: float = 0.0
    kv_bytes: int = 0
    num_handoff_attempts: int = 0
    num_retractions: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Drafts verified and accepted in a request's verify steps. A draft that the request's end cuts off counts as
    refused.

    `drafted_at[i]` counts steps that drafted i + 1 tokens ahead, `accepted_at[i]` those that accepted so many. The
    seconds are the device's, for the whole batches that the request was in.
    """

    num_verify_steps: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    extend_s: float = 0.0
