"""The handoff's values: what the decode engine and a prefill replica exchange, on whichever transport.

Frozen and picklable. A row is named by its index in its call's PrefillBatch; a retry is a new call. The codec maps them
to `baton.v1` messages one to one; the in-process handoff passes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import RowFailure
from common.kv.shared_kv import RemoteKv, SharedKv
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.telemetry.timeline import FLOW

MAX_CALL_ROWS = 1024
MAX_ROW_TOKENS = 1 << 20

Payload = bytes | NDArray[np.uint8]
WriteKv = Callable[[NDArray[np.uint8]], None]


class FramedKv(Protocol):
    """KV in the memory of the frame that it is to leave in, which only a codec reads."""

    @property
    def crc32c(self) -> int: ...

    def __len__(self) -> int:
        """In bytes."""

    def followed_by(self, rest: bytes) -> bytes:
        """The frame."""


NewFramedKv = Callable[[int, WriteKv], FramedKv]
"""Makes one of so many bytes, which the second argument writes into the array that it is given."""


@dataclass(frozen=True, slots=True)
class HandoffRow:
    """One prompt to prefill. `token_ids` past `prompt_len` are output from before a retraction or a resume."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: ResolvedSampling
    choice_index: int = 0
    deadline_unix_ms: int = 0
    traceparent: str = ""
    num_held_tokens: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The replica took the call. Always the call's first frame."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class KvSegment:
    """KV of one row: tokens [token_start, token_start + num_tokens) of layers [layer_start, layer_start + num_layers).

    `payload` is [layers, planes, tokens, heads, head_dim] in the group's dtype, little-endian, contiguous,
    at most MAX_SEGMENT_BYTES: flat bytes, which nobody writes any more. With `framed` it is empty, and the KV lies
    there until it leaves. With `shared` it is empty, and the KV lies in the sender's pool: it counts when it was still
    current after it was read, and its slots stay the row's until the segment is released. A transport fetches what is
    remote: an engine never sees it.
    """

    row: int
    layer_group: str
    layer_start: int
    num_layers: int
    token_start: int
    num_tokens: int
    payload: Payload = b""
    shared: SharedKv | RemoteKv | None = None
    framed: FramedKv | None = None

    @property
    def num_bytes(self) -> int:
        if self.shared is not None:
            return self.shared.num_bytes
        return len(self.payload if self.framed is None else self.framed)


@dataclass(frozen=True, slots=True)
class PrebuiltBatch:
    """Finished rows as columns: entry i of each column belongs to rows[i]. May arrive before a row's last segment.

    Shapes: rows, seq_lens, first_token_ids [B] int64; bytes_sent: [B] int64 for each layer group; seed columns [B, ...]
    (empty without speculation); queue_s, compute_s [B] float64. `first_token_logprobs`: one entry per row, None where
    the request asked for none.
    """

    rows: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    first_token_ids: NDArray[np.int64]
    bytes_sent: dict[str, NDArray[np.int64]]
    queue_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    first_token_logprobs: tuple[TokenLogprobs | None, ...]
    seed_columns: dict[str, NDArray[np.generic]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowFailed:
    row: int
    reason: RowFailure
    retryable: bool
    retry_after_ms: int = 0
    message: str = ""


def segment_flow(request_id: str, attempt: int, layer_group: str, layer_start: int, token_start: int) -> int:
    """The number of a segment on the timelines of both services; below 2**48."""
    name = "\0".join((request_id, str(attempt), layer_group, str(layer_start), str(token_start)))
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest())


Frame = Accepted | KvSegment | PrebuiltBatch | RowFailed


def frame_figures(frame: Frame, row_of: Callable[[int], HandoffRow]) -> dict[str, int]:
    """What a timeline says of a frame beside its bytes. `row_of` knows the rows by the frame's numbers."""
    match frame:
        case KvSegment():
            row = row_of(frame.row)
            flow = segment_flow(row.request_id, row.attempt, frame.layer_group, frame.layer_start, frame.token_start)
            return {"row": frame.row, "tokens": frame.num_tokens, FLOW: flow}
        case PrebuiltBatch():
            return {"rows": len(frame.rows)}
        case _:
            return {}
