"""The messages between the prefill service's edge (its gRPC side) and its engine: frozen, picklable values."""

from __future__ import annotations

from dataclasses import dataclass

from common.wire.handoff import Frame, HandoffRow


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Opens a Handoff call whose fingerprint agrees. The engine answers each row with PrebuiltBatch or RowFailed.

    RowStarted and ChunkComputed are posted only for `traced_rows`.
    """

    call_id: str
    rows: tuple[HandoffRow, ...]
    traced_rows: frozenset[int] = frozenset()
    shares_memory: bool = False  # the receiver can read this service's KV pool


@dataclass(frozen=True, slots=True)
class CancelCallRows:
    """Cancels rows of a call."""

    call_id: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseCall:
    """Closes a call whose stream is gone. The engine drops everything of it and emits no further frame."""

    call_id: str


@dataclass(frozen=True, slots=True)
class SegmentBytesSent:
    """Reports that the transport took `num_bytes` of this call's segments: the send budget has that much room again."""

    call_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentsReturned:
    """Reports that these lent segments are not read any more."""

    call_id: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Makes the engine refuse new calls (RowFailed DRAINING, retryable) and finish the others."""


Command = OpenCall | CancelCallRows | CloseCall | SegmentBytesSent | SegmentsReturned | Drain


@dataclass(frozen=True, slots=True)
class FrameReady:
    """A frame to write to the call. Frames of one call must be written in the order in which they are emitted."""

    call_id: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class CallDone:
    """Reports that every row of the call has ended. The transport ends the call after the frames before this."""

    call_id: str


@dataclass(frozen=True, slots=True)
class RowStarted:
    """Reports that a traced row has its pool row and slots, so that its prompt is computed now.

    `at_s` is a time of the engine's clock.
    """

    call_id: str
    row: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Reports that tokens [`token_start`, `token_stop`) of a traced row were computed in a forward of `num_batch_rows`
    rows.

    `start_s` and `end_s` are times of the engine's clock. `start_s` is when the forward could begin, which is the end
    of the one before it. `end_s` is when the engine noticed the forward's end.
    """

    call_id: str
    row: int
    token_start: int
    token_stop: int
    num_batch_rows: int
    num_batch_tokens: int
    start_s: float
    end_s: float


TracedEvent = RowStarted | ChunkComputed
Event = FrameReady | CallDone | TracedEvent
