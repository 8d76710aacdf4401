"""The messages between the decode service's edge (its gRPC side) and its engine: frozen, picklable values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from common.drain import Drain
from common.errors import BatonError
from common.grammar.matcher import Matcher
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.stats import SpeculationCounts, Timings
from common.wire.handoff import Frame, HandoffRow

# ---- edge to engine -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Submits a validated request. `token_ids` past `prompt_len` are output that an earlier stream delivered.

    `deadline_s` is a time of `time.monotonic`, infinite if there is no deadline. PhaseBegan events of the request are
    posted only if `is_traced`. Clients share rows and slots: `client` names the one that asks, and `tenant` for whom it
    asks. `cache_salt` names the namespace of the prefix cache that the request uses; "" is the common one. With None
    the request neither uses nor leaves cached KV. `priority` decides when it is served (see common/priority.py).
    `matcher` follows the output of a request whose sampling is constrained; it has accepted the output that the request
    brought along, and belongs to the engine from now on.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: ResolvedSampling
    choice_index: int = 0
    deadline_s: float = math.inf
    traceparent: str = ""
    wants_drafts: bool = True
    is_traced: bool = False
    client: str = ""
    tenant: str = ""
    priority: int = 0
    cache_salt: str | None = None
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Aborts a request whose client left or whose deadline passed.

    No event of the request follows. An unknown id is ignored.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class FinishAtStop:
    """Finishes a request whose output contains a stop string.

    `num_output_tokens` is the number of output tokens up to the one that completed the stop string.
    """

    request_id: str
    num_output_tokens: int
    stop_string: str


@dataclass(frozen=True, slots=True)
class Replica:
    """The state of a prefill replica, as its GetLoad reports it.

    `num_uncomputed_tokens` counts the tokens of all its rows that it has still to compute. The replica takes no row
    longer than `max_context_tokens`; None means that it reports no limit. `error` says why a replica that is not ready
    cannot serve. A FingerprintMismatch (its model or configuration differs) stays until a new process serves at the
    address.

    `instance_id` names the process that serves, if it is ready. That process keeps the KV of up to `max_cached_tokens`
    tokens for later rows (0: of none). Since its start it has evicted `num_evicted_tokens` tokens to make room for
    other rows. `num_free_slots` counts the slots that hold neither a row's KV nor cached KV.
    """

    address: str
    is_ready: bool
    num_uncomputed_tokens: int = 0
    error: BatonError | None = None
    max_context_tokens: int | None = None
    instance_id: str = ""
    max_cached_tokens: int = 0
    num_evicted_tokens: int = 0
    num_free_slots: int = 0

    def takes(self, num_tokens: int) -> bool:
        return self.max_context_tokens is None or num_tokens <= self.max_context_tokens


@dataclass(frozen=True, slots=True)
class ReplicasChanged:
    """Reports the states of all known replicas.

    `others_may_come` is True if a DNS name is among the configured addresses, because it may gain replicas.
    """

    replicas: tuple[Replica, ...]
    others_may_come: bool = False


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """Reports a frame of a live call. Frames come in the order the replica sent them.

    A frame that cannot be decoded is never reported: it ends the call.
    """

    call_id: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Reports that no frame of this call follows. `error` is None if the replica ended the call after its last row."""

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
    """The state of a request, from its admission to its end. schedule/life.py says what it holds in each phase.

    The values are the names of the phases' spans in traces.
    """

    QUEUE = "queue"  # it waits for a row, slots and a replica
    PREFILL = "prefill"  # a replica has it and computes
    LOCAL_PREFILL = "local_prefill"  # this service computes its prompt itself
    RECEIVING = "receiving"  # as PREFILL, and some of the request's KV has come
    TRANSFER = "transfer"  # the replica has computed the whole prompt, and KV is still coming
    BOOTSTRAP = "bootstrap"  # all of the request's KV is in the pool; it is not in the batch yet
    FIRST_DECODE = "first_decode"  # in the batch; none of its decode steps has ended
    DECODE = "decode"
    RETRACTING = "retracting"  # out of the batch; a step in flight still carries its row
    DELIVERY = "delivery"  # finished: the edge delivers the rest of the output
    ENDED = "ended"  # failed, or aborted


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """Reports that a traced request entered `phase` at `at_s`, a time of the engine's clock.

    `replica` and `attempt` are set for PREFILL, and `num_held_tokens` for PREFILL and LOCAL_PREFILL: of how many first
    tokens the decode engine has the KV already. If the request went back to QUEUE because its handoff, local prefill or
    decode step failed, `lost` says why. If it was retracted (other requests needed its row or slots), `was_retracted`
    is True.
    """

    request_id: str
    phase: Phase
    at_s: float
    replica: str = ""
    attempt: int = 0
    num_held_tokens: int = 0
    lost: str = ""
    was_retracted: bool = False


@dataclass(frozen=True, slots=True)
class RowTaken:
    """Reports that a waiting request got a row."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens of several requests, as columns: `request_ids[i]` gets the next `num_tokens[i]` of `token_ids`.

    `logprobs` has one entry per token, None for requests that want none. It is empty if no request wants any.
    """

    request_ids: tuple[str, ...]
    num_tokens: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()

    def each(self) -> Iterator[tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]]:
        """Yields each request's id, its new tokens, and their log-probabilities: one per token, or an empty tuple."""
        stop = 0
        for request_id, num_tokens in zip(self.request_ids, self.num_tokens, strict=True):
            start, stop = stop, stop + num_tokens
            logprobs = tuple(entry for entry in self.logprobs[start:stop] if entry is not None)
            yield request_id, self.token_ids[start:stop], logprobs


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Reports the log-probabilities of the next tokens of a request's prompt, from position 1 on.

    A request that asks for them gets each once, before its first token.
    """

    request_id: str
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class Finished:
    """Reports that the request ended well. The counts exclude tokens past a stop string's match.

    `num_completion_tokens` includes the output tokens that a resumed request brought along.
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
    """Reports that the request failed with `error`."""

    request_id: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class StartHandoff:
    """Tells the transport to open a Handoff call to `replica` with these rows. Frames and exactly one CallEnded answer
    it.
    """

    call_id: str
    replica: str
    rows: tuple[HandoffRow, ...]


@dataclass(frozen=True, slots=True)
class CancelHandoffRows:
    """Tells the transport that these rows are no longer wanted. The engine drops their frames that still arrive."""

    call_id: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BreakCall:
    """Tells the transport to cancel a call whose replica broke the protocol. CallEnded still follows."""

    call_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentsLanded:
    """Reports that segments of this call are copied or dropped: `num_bytes` go back to the receive budget.

    `shared` are the numbers of those segments that the replica had lent from its pool. The replica gets them back, and
    frees a row's slots when all of the row's segments are back.
    """

    call_id: str
    num_bytes: int
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DegradedChanged:
    """Reports that the engine begins to compute prompts of any length itself, or no longer does.

    `reason` says at the beginning why each replica is not ready.
    """

    is_degraded: bool
    reason: str = ""


RequestEvent = PhaseBegan | RowTaken | PromptScored | Tokens | Finished | Failed
Event = RequestEvent | StartHandoff | CancelHandoffRows | BreakCall | SegmentsLanded | DegradedChanged
