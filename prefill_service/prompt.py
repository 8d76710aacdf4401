"""The prefill engine's record of one row of a Handoff call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from common.grammar.matcher import Matcher
from common.kv.pool import CacheKey, RowLease
from common.prompts.awaited_kv import AwaitedKv
from common.sampling.params import ResolvedSampling
from common.sampling.state import RowStart
from common.wire.handoff import HandoffRow


class PromptPhase(Enum):
    QUEUED = auto()  # holds nothing
    COMPUTING = auto()  # chunks are left to launch, or the last one is in flight
    SENDING = auto()  # the decode service has its PrebuiltBatch entry; its KV is still being sent, or is lent
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Prompt:
    """The engine's record of one prompt, which is the row with index `index` in the OpenCall of `call_id`.

    `due_s` is when the prompt is due by its priority, which waiting makes `best_level` at best (common/priority.py).
    `tag` is the place of its first token among those of one level, in tokens (`PromptLives.in_turn`). A prompt for
    whose KV another one waits has that one's, where they are better.

    `num_launched_tokens` counts the tokens of `row.token_ids` that were given to a forward or found in the prefix
    cache. `num_kept_tokens` counts those whose KV was found in the cache or left there; while the prompt is queued,
    those that were in the cache when it arrived. `awaited` is the KV of its first tokens that it waits for, because
    another prompt computes it now. If its output is constrained, it is queued until it has its `matcher`, which has
    accepted the output in `row.token_ids`.
    """

    call_id: str
    index: int
    row: HandoffRow
    arrived_s: float
    due_s: float
    best_level: int
    is_traced: bool = False
    phase: PromptPhase = PromptPhase.QUEUED
    lease: RowLease | None = None
    num_launched_tokens: int = 0
    num_kept_tokens: int = 0
    awaited: AwaitedKv | None = None
    matcher: Matcher | None = None
    started_s: float = 0.0
    tag: int = 0
    deadline_s: float = field(init=False)  # by the engine's clock
    token_ids: NDArray[np.int64] = field(init=False)  # those of `row`
    cache_key: CacheKey | None = field(init=False)  # None if the prompt uses no cache

    def __post_init__(self) -> None:
        self.token_ids = np.array(self.row.token_ids, np.int64)
        self.deadline_s = self.arrived_s + self.row.time_left_ms / 1000 if self.row.time_left_ms else math.inf
        self.cache_key = None if self.row.cache_salt is None else CacheKey(self.token_ids, self.row.cache_salt)

    @property
    def client(self) -> str:
        return self.row.client

    @property
    def next_tag(self) -> int:
        """The tag of the prompt's next token to compute."""
        return self.tag if self.lease is None else self.tag + self.num_launched_tokens - self.lease.num_cached

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted. If so, all of it is computed, even tokens whose KV is
        cached.
        """
        return self.sampling.num_prompt_logprobs is not None

    @property
    def usable_key(self) -> CacheKey | None:
        """The key of the cached KV with which the prompt may begin, or None if it must begin with none."""
        return None if self.is_scored else self.cache_key

    @property
    def brings_kv(self) -> bool:
        return self.phase is PromptPhase.COMPUTING

    @property
    def brings_it_in_chunks(self) -> bool:
        return True

    @property
    def num_held(self) -> int:
        """How many of the prompt's first tokens have their KV in the decode service already, so that it is not sent."""
        return self.row.num_held

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_launched_tokens

    @property
    def num_uncomputed(self) -> int:
        """How many of the prompt's tokens are not computed yet. A queued prompt is expected to find KV that is cached
        or that it waits for.
        """
        num_awaited = 0 if self.awaited is None else self.awaited.num_tokens
        return self.num_tokens - max(self.num_kept_tokens, num_awaited)

    @property
    def prompt_len(self) -> int:
        return self.row.prompt_len

    @property
    def sampling(self) -> ResolvedSampling:
        return self.row.sampling

    @property
    def row_start(self) -> RowStart:
        assert self.lease is not None
        row = self.row
        return RowStart(self.lease.row, row.sampling, row.choice_index, row.token_ids, row.prompt_len)
