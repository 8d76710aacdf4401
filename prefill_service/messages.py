"""What the prefill service's edge and its engine exchange: frozen, picklable values."""

from __future__ import annotations

from dataclasses import dataclass

from common.wire.handoff import Frame, HandoffRow


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A Handoff call whose fingerprint agreed. The engine answers each row with PrebuiltBatch or RowFailed.

    RowStarted and ChunkComputed are told of `traced_rows` only.
    """

    call_id: str
    rows: tuple[HandoffRow, ...]
    traced_rows: frozenset[int] = frozenset()
    shares_memory: bool = False  # the receiver can read this service's KV pool


@dataclass(frozen=True, slots=True)
class CancelCallRows:
    call_id: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseCall:
    """The call's stream is gone. Nothing of it may be left; no further frame is emitted."""

    call_id: str


@dataclass(frozen=True, slots=True)
class SegmentBytesSent:
    """The transport took `num_bytes` of this call's segment payloads: that much of the send budget is free again."""

    call_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentsReturned:
    """Nobody reads these segments, which were lent, any more."""

    call_id: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new calls (RowFailed DRAINING, retryable); finish what is there."""


Command = OpenCall | CancelCallRows | CloseCall | SegmentBytesSent | SegmentsReturned | Drain


@dataclass(frozen=True, slots=True)
class FrameReady:
    """A frame to write to the call. Frames of one call are emitted, and must be written, in this order."""

    call_id: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class CallDone:
    """Every row of the call has ended: the transport ends the call after the frames before this."""

    call_id: str


@dataclass(frozen=True, slots=True)
class RowStarted:
    """A traced row holds what its prompt needs: it is computed from now on. `at_s` is by the engine's clock."""

    call_id: str
    row: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Tokens [`token_start`, `token_stop`) of a traced row, in a forward of `num_batch_rows` rows.

    From when the forward could begin, which is the end of the one before it, to when its end was seen, by the engine's
    clock.
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
