"""What the decode service's edge and its engine exchange: frozen, picklable values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from common.errors import BatonError
from common.request_stats import SpeculationCounts, Timings
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.wire.handoff import Frame, HandoffRow

# ---- edge to engine -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A validated request. `token_ids` past `prompt_len` are output that an earlier stream delivered.

    PhaseBegan is posted only with `is_traced`. `client` identifies whom the request belongs to, as far as clients are
    told apart.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: ResolvedSampling
    choice_index: int = 0
    deadline_unix_ms: int = 0
    traceparent: str = ""
    wants_drafts: bool = True
    is_traced: bool = False
    client: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """The client left or its deadline passed. No event of this request follows; an unknown id is ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FinishAtStop:
    """The edge matched a stop string that output token number `num_output_tokens` (counted from 1) completed."""

    request_id: str
    num_output_tokens: int
    stop_string: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new requests; finish those admitted."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A prefill replica as the transport sees it. `num_outstanding` counts its queued and computing rows (GetLoad).

    It takes no row longer than `max_context_tokens`; None if it does not say. `error` says why a replica that is not
    ready cannot serve. A FingerprintMismatch lasts as long as the replica.
    """

    address: str
    is_ready: bool
    num_outstanding: int = 0
    error: BatonError | None = None
    max_context_tokens: int | None = None

    def takes(self, num_tokens: int) -> bool:
        return self.max_context_tokens is None or num_tokens <= self.max_context_tokens


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """All present replicas. `others_may_come`: they were found behind a name, which may gain others."""

    replicas: tuple[Replica, ...]
    others_may_come: bool = False


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A frame of a live call, in the order the replica sent it. Codec errors never come here: they break the call."""

    call_id: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class CallEnded:
    """No frame of this call follows. `error` is None when the replica ended it after its last row."""

    call_id: str
    error: BatonError | None


Command = Submit | Abort | FinishAtStop | Drain | ReplicasChanged | FrameArrived | CallEnded


# ---- engine to edge -------------------------------------------------------------------------------------------------


class FinishReason(Enum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


class Phase(Enum):
    """Where a request is between its admission and its end; schedule/life.py says what it holds there.

    The values name the spans of traced requests.
    """

    QUEUE = "queue"  # it waits for a row, slots and a replica
    PREFILL = "prefill"  # a replica has it and computes
    RECEIVING = "receiving"  # the same, and some of its KV has come
    TRANSFER = "transfer"  # the replica has computed all, and KV is still coming
    BOOTSTRAP = "bootstrap"  # all of its KV is in the pool; it is not in the batch yet
    FIRST_DECODE = "first_decode"  # in the batch; no decode step of it has ended
    DECODE = "decode"
    RETRACTING = "retracting"  # out of the batch; a step in flight still carries its row
    DELIVERY = "delivery"  # finished: the edge delivers what is left
    ENDED = "ended"  # failed, or aborted


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """A traced request is in `phase` since `at_s`, by the engine's clock.

    `replica` and `attempt` are PREFILL's. `lost`: why the handoff before a QUEUE was lost; `was_retracted`: its slots
    went to an older request.
    """

    request_id: str
    phase: Phase
    at_s: float
    replica: str = ""
    attempt: int = 0
    lost: str = ""
    was_retracted: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens of some requests, as columns: the next `num_tokens[i]` of `token_ids` are of `request_ids[i]`.

    `logprobs` has one entry per token, None of requests that want none; it is empty where nobody wants any.
    """

    request_ids: tuple[str, ...]
    num_tokens: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()

    def each(self) -> Iterator[tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]]:
        """Request by request: its id, its tokens, and a log-probability for each token or none at all."""
        stop = 0
        for request_id, num_tokens in zip(self.request_ids, self.num_tokens, strict=True):
            start, stop = stop, stop + num_tokens
            logprobs = tuple(entry for entry in self.logprobs[start:stop] if entry is not None)
            yield request_id, self.token_ids[start:stop], logprobs


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended well. Counts exclude tokens past a stop string's match.

    `num_completion_tokens` counts the tokens a resumed request brought as output too.
    """

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    timings: Timings
    speculation: SpeculationCounts | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class StartHandoff:
    """Open a Handoff call to `replica` with these rows. Answered by frames and exactly one CallEnded."""

    call_id: str
    replica: str
    rows: tuple[HandoffRow, ...]


@dataclass(frozen=True, slots=True)
class CancelHandoffRows:
    """These rows are no longer wanted; frames of theirs that still arrive are dropped by the engine."""

    call_id: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BreakCall:
    """The replica broke the protocol: cancel the call. CallEnded still follows."""

    call_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentsLanded:
    """`num_bytes` of this call's segments have left host memory, so that much of the receive budget is free again.

    `shared` numbers the segments that lay in the replica's pool; the replica frees a row's slots with the last of them.
    """

    call_id: str
    num_bytes: int
    shared: tuple[int, ...] = ()


Event = PhaseBegan | Tokens | Finished | Failed | StartHandoff | CancelHandoffRows | BreakCall | SegmentsLanded
