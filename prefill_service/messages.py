"""What the prefill service's edge and its engine exchange: frozen, picklable values."""

from __future__ import annotations

from dataclasses import dataclass

from common.wire.handoff import Frame, HandoffRow


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A Handoff call whose fingerprint agreed. The engine answers each row with PrebuiltBatch or RowFailed."""

    call_id: str
    rows: tuple[HandoffRow, ...]


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
class Drain:
    """Refuse new calls (RowFailed DRAINING, retryable); finish what is there."""


Command = OpenCall | CancelCallRows | CloseCall | SegmentBytesSent | Drain


@dataclass(frozen=True, slots=True)
class FrameReady:
    """A frame to write to the call. Frames of one call are emitted, and must be written, in this order."""

    call_id: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class CallDone:
    """Every row of the call has ended: the transport ends the call after the frames before this."""

    call_id: str


Event = FrameReady | CallDone
