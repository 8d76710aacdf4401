"""The values that a decode engine and a prefill replica exchange in a handoff, on any transport.

They are frozen and can be pickled. A row is identified by its index in the PrefillBatch of its call; a retry is a new
call. The codec converts each value to one `baton.v1` message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import RowFailure
from common.grammar.grammar import GrammarKind, TokenRules
from common.kv.shared_kv import RemoteKv, SharedKv
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.timeline import FLOW

MAX_CALL_ROWS = 1024
MAX_CALL_BYTES = 8 << 20
"""The most bytes of a call's rows together, by `HandoffRow.most_bytes`, unless it has only one row."""
MAX_CALL_FIELDS = 64 << 10
"""The most protobuf fields of a call's rows together, by `HandoffRow.most_fields`, unless it has only one row."""
MAX_ROW_TOKENS = 1 << 20
MAX_CACHE_SALT_CHARS = 128
MAX_CLIENT_CHARS = 256

_MOST_OTHER_BYTES = 4 << 10  # ids, names of the client and the namespace, reasoning markers, numbers
_MOST_OTHER_FIELDS = 64  # a row with its sampling has about 25, and a few for each layer group

Payload = bytes | NDArray[np.uint8]
WriteKv = Callable[[NDArray[np.uint8]], None]
"""Writes a segment's KV into the array that it is given."""


class FramedKv(Protocol):
    """KV that was written directly into the memory of the frame that will send it. Only the codec reads it."""

    @property
    def crc32c(self) -> int: ...

    def __len__(self) -> int:
        """Returns the number of bytes of KV."""

    def followed_by(self, rest: bytes) -> bytes:
        """Returns the whole frame: the KV followed by `rest`."""


NewFramedKv = Callable[[int, WriteKv], FramedKv]
"""Makes a FramedKv. The arguments are its number of bytes, and a function that writes the KV into an array."""


@dataclass(frozen=True, slots=True)
class HandoffRow:
    """One sequence to prefill. `token_ids` from `prompt_len` on are output tokens of an earlier run of the request.

    There are such tokens if the decode engine gave up the request's KV (a retraction) or the client resumed the request
    after its stream had broken. `attempt` is the number of the request's handoff, counted from 0. `num_held_tokens` has
    a pair (layer group, n) for each group: the decode engine has the KV of the first n tokens already, and it is not
    sent. n is less than the number of tokens, and the same for all groups, except that it may be 0 for a group with a
    window. If the engine has no KV, there are no pairs. With `max_tokens` 0 the decode engine needs no KV, and n may be
    the number of tokens.

    `cache_salt` names the namespace of the prefix cache that the row uses; "" is the common one. If it is None, the row
    neither uses cached KV nor leaves any. `priority` is the request's priority at the handoff, which waiting may have
    improved. `client` names the client, for fairness. `time_left_ms` is the time left until the request's deadline when
    the row was sent, 0 if there is none: the services' clocks need not agree.
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: ResolvedSampling
    choice_index: int = 0
    time_left_ms: int = 0
    traceparent: str = ""
    num_held_tokens: tuple[tuple[str, int], ...] = ()
    cache_salt: str | None = None
    priority: int = 0
    client: str = ""

    @property
    def most_bytes(self) -> int:
        """About the most bytes of the row's message: three for a token id, four for a character or a bias."""
        sampling, rules = self.sampling, self.sampling.token_rules or TokenRules()
        num_ids = len(self.token_ids) + len(sampling.stop_token_ids) + len(sampling.eos_token_ids)
        num_ids += len(rules.allowed_ids) + sum(len(sequence) + 2 for sequence in rules.forbidden)
        num_chars = 0 if sampling.grammar is None else len(sampling.grammar.text)
        return 3 * num_ids + 7 * len(sampling.logit_bias) + 4 * num_chars + _MOST_OTHER_BYTES

    @property
    def most_fields(self) -> int:
        """The most protobuf fields that the row's message has: two for each forbidden sequence of tokens, one for each
        text of a CHOICE grammar (commas part them, and those within a text are counted too), and a bound of the rest.
        """
        sampling, rules = self.sampling, self.sampling.token_rules or TokenRules()
        num_choices = 0
        if sampling.grammar is not None and sampling.grammar.kind is GrammarKind.CHOICE:
            num_choices = sampling.grammar.text.count(",") + 1
        return _MOST_OTHER_FIELDS + 2 * len(rules.forbidden) + num_choices

    @property
    def num_held(self) -> int:
        """The number of the row's first tokens whose KV is not sent, because the decode engine has it.

        The engine may lack it for a group with a window: see `num_held_of`.
        """
        return max((num_tokens for _, num_tokens in self.num_held_tokens), default=0)

    def num_held_of(self, group_name: str) -> int:
        """Returns the number of the row's first tokens whose KV of a layer group the decode engine has."""
        return dict(self.num_held_tokens).get(group_name, 0)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Says that the prefill replica accepted the call. It is always the first frame of a call."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class KvSegment:
    """KV of one row: tokens [token_start, token_start + num_tokens) of layers [layer_start, layer_start + num_layers).

    The KV is in one of three places:

    - `payload`: [layers, planes, tokens, heads, head_dim] in the group's dtype, little-endian, as flat bytes, at most
      MAX_SEGMENT_BYTES. The planes are K and V. Nobody writes into the payload any more.
    - `framed`: the memory of the frame that will send it.
    - `shared`: the sender's pool, whose slots are kept until the segment is released. A SharedKv is read directly, and
      what was read is valid only if its `is_current` is True afterwards. A RemoteKv must be fetched first: the
      transport does so, and an engine never gets one.
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
    """The results of finished rows, as columns: entry i of each column belongs to the row with index rows[i].

    It may arrive before the last KV segment of a row.

    Shapes: rows, seq_lens, first_token_ids, num_cached_tokens [B] int64; bytes_sent: [B] int64 for each layer group;
    queue_s, compute_s [B] float64. `num_cached_tokens` counts the tokens of each row that the prefill service did not
    compute, because it had their KV cached. `seed_columns` are the draft seeds, by name, each [B, ...]; there are none
    without speculation. `first_token_logprobs` has one entry per row, None if the request asked for none.
    """

    rows: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    first_token_ids: NDArray[np.int64]
    bytes_sent: dict[str, NDArray[np.int64]]
    queue_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    num_cached_tokens: NDArray[np.int64]
    first_token_logprobs: tuple[TokenLogprobs | None, ...]
    seed_columns: dict[str, NDArray[np.generic]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of the next prompt tokens of a row that asks for them.

    A row's first RowLogprobs begins at position 1, because nothing comes before the token at 0. A row's PrebuiltBatch
    entry follows its last RowLogprobs.
    """

    row: int
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class RowFailed:
    """Says that a row of the call has failed, why, and whether to retry it (after `retry_after_ms`)."""

    row: int
    reason: RowFailure
    retryable: bool
    retry_after_ms: int = 0
    message: str = ""


def segment_flow(request_id: str, attempt: int, layer_group: str, layer_start: int, token_start: int) -> int:
    """Returns a number below 2**48 that identifies a segment on the timelines of both services."""
    name = "\0".join((request_id, str(attempt), layer_group, str(layer_start), str(token_start)))
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest())


Frame = Accepted | KvSegment | RowLogprobs | PrebuiltBatch | RowFailed


def unsent_bytes(frame: Frame) -> int:
    """Returns how many bytes of the sender's budget a frame takes until a transport has it: those of KV that is copied
    and not lent, and of log-probabilities.
    """
    match frame:
        case KvSegment(shared=None):
            return frame.num_bytes
        case RowLogprobs():
            return frame.logprobs.num_bytes
        case _:
            return 0


def frame_figures(frame: Frame, row_of: Callable[[int], HandoffRow]) -> dict[str, int]:
    """Returns the numbers, by name, that a timeline shows for a frame besides its size in bytes.

    `row_of` returns the call's row with a given index.
    """
    match frame:
        case KvSegment():
            row = row_of(frame.row)
            flow = segment_flow(row.request_id, row.attempt, frame.layer_group, frame.layer_start, frame.token_start)
            return {"row": frame.row, "tokens": frame.num_tokens, FLOW: flow}
        case PrebuiltBatch():
            return {"rows": len(frame.rows)}
        case RowLogprobs():
            return {"row": frame.row, "tokens": len(frame.logprobs.logprobs)}
        case _:
            return {}
