"""The engine's record of one request, from admission to its terminal event."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from common.kv.pool import RowLease
from common.model.sampling_params import ResolvedSampling
from decode_service.messages import Finished, FinishReason, RequestTimings, SpeculationCounts, Submit


class Phase(Enum):
    WAITING = auto()  # holds nothing
    HANDED_OFF = auto()  # row and slots reserved, a prefill replica works on it
    READY = auto()  # everything landed, not merged yet
    RUNNING = auto()
    RETRACTING = auto()  # out of the batch; a step in flight still carries its row
    ENDED = auto()


@dataclass(slots=True)
class PhaseClock:
    """Adds up the seconds spent in each phase, over every attempt and retraction."""

    since_s: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    first_decode_s: float = 0.0
    decode_s: float = 0.0

    def close(self, phase: str, now_s: float) -> None:
        """Book the time since the last call to `phase`."""
        setattr(self, phase, getattr(self, phase) + now_s - self.since_s)
        self.since_s = now_s


@dataclass(slots=True)
class SpeculationTally:
    """What verification found for one request, over all its steps."""

    num_verify_steps: int = 0
    num_drafted_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    extend_s: float = 0.0

    def add(
        self,
        *,
        num_verify_steps: int,
        num_drafted_tokens: int,
        drafted_at: Sequence[int],
        accepted_at: Sequence[int],
        parts_s: Mapping[str, float],
    ) -> None:
        """What came of steps since the last call. `drafted_at` and `accepted_at` may end with levels never drafted."""
        self.num_verify_steps += num_verify_steps
        self.num_drafted_tokens += num_drafted_tokens
        self.drafted_at = _sum_of(self.drafted_at, drafted_at)
        self.accepted_at = _sum_of(self.accepted_at, accepted_at)
        for part, seconds in parts_s.items():
            setattr(self, part, getattr(self, part) + seconds)

    def counts(self) -> SpeculationCounts | None:
        if not self.num_verify_steps:
            return None
        depth = sum(num > 0 for num in self.drafted_at)
        return SpeculationCounts(
            num_verify_steps=self.num_verify_steps,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=sum(self.accepted_at),
            drafted_at=tuple(self.drafted_at[:depth]),
            accepted_at=tuple(self.accepted_at[:depth]),
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            extend_s=self.extend_s,
        )


def _sum_of(counts: Sequence[int], more: Sequence[int]) -> list[int]:
    return [sum(pair) for pair in itertools.zip_longest(counts, more, fillvalue=0)]


@dataclass(slots=True, eq=False)
class Request:
    """`token_ids` is prompt and output; its length past `prompt_len` is the output so far, but for that of a request
    whose row is in RunningRows. `arrival` orders requests by age.
    """

    request_id: str
    arrival: int
    token_ids: list[int]
    prompt_len: int
    sampling: ResolvedSampling
    clock: PhaseClock
    choice_index: int = 0
    deadline_unix_ms: int = 0
    traceparent: str = ""
    wants_drafts: bool = True
    is_traced: bool = False
    client: str = ""
    phase: Phase = Phase.WAITING
    lease: RowLease | None = None
    num_attempts: int = 0
    num_failures: int = 0
    num_retractions: int = 0
    kv_bytes: int = 0
    avoid_replica: str = ""
    not_before_s: float = 0.0
    refused_since_s: float | None = None
    has_decoded: bool = False
    speculation: SpeculationTally = field(default_factory=SpeculationTally)
    end_ids: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, submit: Submit, *, arrival: int, now_s: float) -> Request:
        return cls(
            request_id=submit.request_id,
            arrival=arrival,
            token_ids=list(submit.token_ids),
            prompt_len=submit.prompt_len,
            sampling=submit.sampling,
            clock=PhaseClock(since_s=now_s),
            choice_index=submit.choice_index,
            deadline_unix_ms=submit.deadline_unix_ms,
            traceparent=submit.traceparent,
            wants_drafts=submit.wants_drafts,
            is_traced=submit.is_traced,
            client=submit.client,
            end_ids=frozenset(submit.sampling.end_token_ids),
        )

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def ending(self) -> tuple[FinishReason, int | None] | None:
        """Why the output ends at its last token, with the stop token's id; None when it goes on."""
        last = self.token_ids[-1]
        if last in self.end_ids:
            if last in self.sampling.eos_token_ids:
                return FinishReason.EOS, None
            return FinishReason.STOP_TOKEN, last
        if self.num_output >= self.sampling.max_tokens:
            return FinishReason.LENGTH, None
        return None

    def finished(
        self,
        reason: FinishReason,
        num_output: int,
        *,
        stop_token_id: int | None = None,
        stop_string: str | None = None,
    ) -> Finished:
        """Its terminal event, of an output that ends after `num_output` tokens."""
        return Finished(
            request_id=self.request_id,
            reason=reason,
            num_prompt_tokens=self.prompt_len,
            num_completion_tokens=num_output,
            timings=self.timings(),
            speculation=self.speculation.counts(),
            stop_token_id=stop_token_id,
            stop_string=stop_string,
        )

    def timings(self) -> RequestTimings:
        return RequestTimings(
            queue_s=self.clock.queue_s,
            prefill_s=self.clock.prefill_s,
            transfer_s=self.clock.transfer_s,
            first_decode_s=self.clock.first_decode_s,
            decode_s=self.clock.decode_s,
            kv_bytes=self.kv_bytes,
            num_handoff_attempts=self.num_attempts,
            num_retractions=self.num_retractions,
        )
