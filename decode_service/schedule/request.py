"""The engine's record of one request, from admission to its terminal event, and the report of a row that a request
loses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np

from common.errors import BatonError
from common.grammar.matcher import Matcher
from common.kv.pool import CacheKey, RowLease
from common.priority import DEFAULT_AGEING, Ageing
from common.prompts.awaited_kv import AwaitedKv
from common.sampling.params import ResolvedSampling
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.stats import SpeculationCounts, Timings
from decode_service.messages import Finished, FinishReason, Phase, Submit

_KV_ON_ITS_WAY = frozenset((Phase.PREFILL, Phase.RECEIVING, Phase.TRANSFER))


class RowTokens(Protocol):
    """Gives the tokens that a running request has produced since it entered its pool row."""

    def new_tokens(self, row: int) -> list[int]:
        """Returns the output tokens that the request in pool row `row` has gained since it entered that row."""


Sharer: TypeAlias = tuple[str, str]
"""Who shares rows and slots: a client, and the tenant for whom it asks, or ""."""


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one live request. Only `Lives` writes `phase`, `lease` and `seconds`.

    `due_s` is when the request is due, by the engine's clock (see common/priority.py).

    `past_ids` are the prompt and the output up to the last time the request entered a pool row; `running_in` has the
    output since then. `arrival` orders requests by age: the smaller number is the older request.

    `cache_salt` names the namespace of the prefix cache that the caller asked for. If it is None, or once `avoid_cache`
    was called, the request neither uses cached KV nor leaves any. `began_cached` says whether its present attempt began
    with KV that this service or the replica had cached. `num_cached_tokens` counts the prompt's tokens whose KV earlier
    requests had left when this one came. It is None until `found_cached` sets it, and 0 for a request that brings
    output along: such a request would find what an earlier call for the same output left.

    `num_scored` counts the first tokens of the prompt whose log-probabilities the edge has. The very first token, which
    has none, counts too. `is_scored` is True until a request that asks for log-probabilities of its prompt has all of
    them.

    `replica` is the address at which its prompt is computed, "" if that is here; `num_uncomputed_tokens` counts the
    tokens that the replica of the last handoff was expected to compute. `awaited` is KV of its first tokens that is on
    its way for another request, and for which this one waits in the queue. If the output is constrained, `matcher` has
    accepted all output so far. `withheld` maps drafts of the last step with masks to the failure of the matcher's copy
    that followed them: no token was allowed after these drafts.
    """

    request_id: str
    arrival: int
    past_ids: list[int]
    prompt_len: int
    sampling: ResolvedSampling
    arrived_s: float
    due_s: float
    since_s: float
    priority: int = 0
    choice_index: int = 0
    deadline_s: float = math.inf
    traceparent: str = ""
    wants_drafts: bool = True
    is_traced: bool = False
    client: str = ""
    tenant: str = ""
    cache_salt: str | None = None
    avoids_cache: bool = False
    phase: Phase = Phase.QUEUE
    lease: RowLease | None = None
    num_attempts: int = 0
    num_failures: int = 0
    num_retractions: int = 0
    kv_bytes: int = 0
    num_cached_tokens: int | None = None
    num_scored: int = 1
    began_cached: bool = False
    awaited: AwaitedKv[Request] | None = None
    replica: str = ""
    avoid_replica: str = ""
    num_uncomputed_tokens: int = 0
    not_before_s: float = 0.0
    refused_since_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    running_in: RowTokens | None = None
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    end_ids: frozenset[int] = field(default_factory=frozenset)
    matcher: Matcher | None = None
    withheld: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    _past_key: CacheKey | None = None  # of `past_ids`

    @classmethod
    def of(cls, submit: Submit, *, arrival: int, now_s: float, ageing: Ageing = DEFAULT_AGEING) -> Request:
        return cls(
            request_id=submit.request_id,
            arrival=arrival,
            past_ids=list(submit.token_ids),
            prompt_len=submit.prompt_len,
            sampling=submit.sampling,
            arrived_s=now_s,
            due_s=ageing.due_s(submit.priority, now_s),
            since_s=now_s,
            priority=submit.priority,
            choice_index=submit.choice_index,
            deadline_s=submit.deadline_s,
            traceparent=submit.traceparent,
            wants_drafts=submit.wants_drafts,
            is_traced=submit.is_traced,
            client=submit.client,
            tenant=submit.tenant,
            cache_salt=submit.cache_salt,
            num_cached_tokens=None if len(submit.token_ids) == submit.prompt_len else 0,
            end_ids=frozenset(submit.sampling.end_token_ids),
            matcher=submit.matcher,
        )

    @property
    def sharer(self) -> Sharer:
        return self.client, self.tenant

    @property
    def turn(self) -> tuple[float, int]:
        """Orders requests: the smaller turn is served first and gives way last. Requests of one priority are in order
        of their arrival.
        """
        return self.due_s, self.arrival

    @property
    def token_ids(self) -> list[int]:
        """The prompt and all output so far. It may be read in every phase of the request."""
        return [*self.past_ids, *new_ids] if (new_ids := self._new_ids) else self.past_ids

    @property
    def _new_ids(self) -> list[int]:
        """The output tokens since the request entered its row."""
        if self.running_in is None or self.lease is None:
            return []
        return self.running_in.new_tokens(self.lease.row)

    @property
    def namespace(self) -> str | None:
        """The request's namespace in both services' prefix caches, or None if it uses no cache."""
        return None if self.avoids_cache else self.cache_salt

    def avoid_cache(self) -> None:
        """Makes the request use no cache of either service from now on, because cached KV that it began with may be
        damaged.
        """
        self.avoids_cache = True

    @property
    def cache_key(self) -> CacheKey | None:
        """The request's tokens so far and its namespace in the prefix cache, or None if it uses no cache."""
        if (namespace := self.namespace) is None:
            return None
        if self._past_key is None:
            self._past_key = CacheKey(np.array(self.past_ids, np.int64), namespace)
        if not (new_ids := self._new_ids):
            return self._past_key
        return CacheKey(np.concatenate([self._past_key.token_ids, np.array(new_ids, np.int64)]), namespace)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the request's prompt have still to come. If so, the whole prompt is computed,
        even tokens whose KV is cached.
        """
        return self.sampling.num_prompt_logprobs is not None and self.num_scored < self.prompt_len

    @property
    def usable_key(self) -> CacheKey | None:
        """The key of the cached KV that the request's computation may begin with, or None if it may use none."""
        return None if self.is_scored else self.cache_key

    @property
    def attempt_sampling(self) -> ResolvedSampling:
        """The sampling parameters of an attempt that begins now. They ask for the prompt's log-probabilities only if
        some have still to come.
        """
        if self.is_scored or self.sampling.num_prompt_logprobs is None:
            return self.sampling
        return replace(self.sampling, num_prompt_logprobs=None)

    def take_scores(self, logprobs: PromptLogprobs) -> PromptLogprobs | None:
        """Takes log-probabilities of the prompt. Returns those that no earlier attempt brought, or None if there are
        none.
        """
        assert logprobs.start <= self.num_scored, f"{self.request_id}: log-probabilities are missing"
        if logprobs.stop <= self.num_scored:
            return None
        new = logprobs.part(self.num_scored, logprobs.stop)
        self.num_scored = logprobs.stop
        return new

    @property
    def needs_kv(self) -> bool:
        """Whether the prompt's KV is used after prefill. It is not if `max_tokens` is 0."""
        return self.sampling.max_tokens > 0

    def num_unsent(self, group_name: str) -> int:
        """Returns the number of the request's first tokens whose KV of a layer group the replica does not send."""
        if not self.needs_kv:
            return len(self.token_ids)
        return 0 if self.lease is None else self.lease.num_held.get(group_name, self.lease.num_cached)

    def leave_row(self) -> None:
        """Adds the output since the request entered its row to `past_ids`. Call it when the request leaves that row."""
        key, new_ids = self.cache_key, self._new_ids
        self.past_ids.extend(new_ids)
        self._past_key, self.running_in = key, None

    @property
    def brings_kv(self) -> bool:
        """Whether KV of the request's prompt is on its way: from a replica, or computed here."""
        if self.phase is Phase.LOCAL_PREFILL:
            return True
        return self.needs_kv and self.phase in _KV_ON_ITS_WAY

    @property
    def brings_it_in_chunks(self) -> bool:
        return self.phase is Phase.LOCAL_PREFILL

    @property
    def num_kept_tokens(self) -> int:
        """How many of the request's first tokens have their KV in the prefix cache, as far as its row knows."""
        return 0 if self.lease is None else self.lease.num_kept

    def found_cached(self, num_tokens: int) -> None:
        """Records for how many tokens the present attempt used cached KV. The client sees the first number recorded.

        If an earlier attempt was lost or retracted before its number came, the replica may have found KV that the
        earlier attempt left. Then at most as many tokens count as this service had cached, because it caches no partly
        received KV.
        """
        assert self.lease is not None, f"{self.request_id} holds no row"
        self.began_cached = num_tokens > 0 or self.lease.num_cached > 0
        if self.num_cached_tokens is not None:
            return
        if self.num_failures or self.num_retractions:
            num_tokens = min(num_tokens, self.lease.num_cached)
        self.num_cached_tokens = num_tokens

    @property
    def has_decoded(self) -> bool:
        """Whether at least one decode step of this request has ended, in its current row or an earlier one."""
        return "decode_s" in self.seconds or self.phase is Phase.DECODE

    @property
    def has_ended(self) -> bool:
        return self.phase in (Phase.DELIVERY, Phase.ENDED)

    def spend(self, seconds: str, *, until_s: float) -> None:
        """Adds the time from the last call (at first: from the arrival) until `until_s`, by the engine's clock, to the
        field of Timings that `seconds` names. If the name is empty, that time counts nowhere.
        """
        if seconds:
            self.seconds[seconds] = self.seconds.get(seconds, 0.0) + until_s - self.since_s
        self.since_s = until_s

    @property
    def num_output(self) -> int:
        return len(self.past_ids) + len(self._new_ids) - self.prompt_len

    def ending(self) -> tuple[FinishReason, int | None] | None:
        """Returns why the output ends at its last token, and the stop token's id or None if no stop token ended it.
        Returns None if the output goes on.
        """
        last = (self._new_ids or self.past_ids)[-1]
        if self.num_output and last in self.end_ids:
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
        """Builds the terminal event of this request for an output of `num_output` tokens."""
        return Finished(
            request_id=self.request_id,
            reason=reason,
            num_prompt_tokens=self.prompt_len,
            num_completion_tokens=num_output,
            timings=self.timings(),
            speculation=self.speculation if self.speculation.num_verify_steps else None,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
        )

    def timings(self) -> Timings:
        return Timings(
            **self.seconds,
            kv_bytes=self.kv_bytes,
            num_handoff_attempts=self.num_attempts,
            num_retractions=self.num_retractions,
            num_cached_tokens=self.num_cached_tokens or 0,
        )


@dataclass(frozen=True, slots=True)
class LostRow:
    """A row that its request loses, because its handoff, a chunk that is computed here, or a decode step failed.

    If `is_retryable`, the request is computed anew in another row: at once if it was not refused before and another
    replica is ready, else `retry_after_s` seconds from now at the earliest. Otherwise it fails with `error`. `replica`
    is the one that the row was handed to, which the retry avoids; it is empty for a row that was lost here.
    `is_refusal` means that this replica refused the row because it was full or draining.
    """

    req: Request
    error: BatonError
    is_retryable: bool
    replica: str = ""
    retry_after_s: float = 0.0
    is_refusal: bool = False
