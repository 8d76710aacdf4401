"""The messages between the prefill service's edge (its gRPC side) and its engine: frozen, picklable values."""

from __future__ import annotations

from dataclasses import dataclass

from common.drain import Drain
from common.grammar.matcher import Matcher
from common.wire.handoff import Frame, HandoffRow, RowFailed


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Opens a Handoff call with this service's fingerprint. The engine answers each row with PrebuiltBatch or
    RowFailed. RowFailed may also follow PrebuiltBatch, if KV cannot be sent.

    RowStarted and ChunkComputed are posted only for `traced_rows`. With `shares_memory` the receiver can read the pool.
    A row whose sampling is constrained waits for its GiveMatcher, or ends with FailRow.
    """

    call_id: str
    rows: tuple[HandoffRow, ...]
    traced_rows: frozenset[int] = frozenset()
    shares_memory: bool = False  # the receiver can read this service's KV pool


@dataclass(frozen=True, slots=True)
class GiveMatcher:
    """Gives the engine the matcher of a row whose sampling is constrained. `row` is the row's index in the OpenCall.

    The matcher has accepted the output tokens that the row brings. It belongs to the engine from now on.
    """

    call_id: str
    row: int
    matcher: Matcher


@dataclass(frozen=True, slots=True)
class FailRow:
    """Fails a row for which no matcher could be made. `failed.row` is its index in the rows of the OpenCall."""

    call_id: str
    failed: RowFailed


@dataclass(frozen=True, slots=True)
class CancelCallRows:
    """Cancels rows of a Handoff call, given by their index in the rows of its OpenCall."""

    call_id: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseCall:
    """Closes a call whose gRPC stream is gone. The engine drops its rows and emits no further frame for it."""

    call_id: str


@dataclass(frozen=True, slots=True)
class BytesSent:
    """Reports that `num_bytes` of this call's KV and log-probabilities no longer wait: the transport took them, or
    their row was cancelled.

    The send budget has that much room again.
    """

    call_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentsReturned:
    """Reports that the receiver no longer reads these lent segments. `numbers` are the numbers of their tickets."""

    call_id: str
    numbers: tuple[int, ...]


Command = OpenCall | GiveMatcher | FailRow | CancelCallRows | CloseCall | BytesSent | SegmentsReturned | Drain


@dataclass(frozen=True, slots=True)
class FrameReady:
    """A frame to write to the call. Frames of one call must be written in the order in which they are emitted.

    The frame's row numbers are indices in the rows of the call's OpenCall.
    """

    call_id: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class CallDone:
    """Reports that every row of the call has ended. The edge writes the frames that came before, then ends the call."""

    call_id: str


@dataclass(frozen=True, slots=True)
class RowStarted:
    """Reports that a traced row was given a pool row and slots, and that its prompt is computed from now on.

    `row` is its index in the rows of the OpenCall. `at_s` is a time of the engine's clock.
    """

    call_id: str
    row: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Reports that tokens [`token_start`, `token_stop`) of a traced row were computed in a forward of `num_batch_rows`
    rows.

    `row` is its index in the rows of the OpenCall. `start_s` and `end_s` are times of the engine's clock. `start_s` is
    when the forward could begin: at its launch, or at the end of the forward before it if that came later. `end_s` is
    when the engine noticed the forward's end.
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
