"""The prefill engine's record of one row of a Handoff call, a prompt: its phases, what it holds in each of them,
and what moves it to another phase.

QUEUED ─▶ COMPUTING ─▶ SENDING ─▶ ENDED; every phase may also end at once, when the row fails or its call is closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, KeysView, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from common.engine import Lifecycle, PhaseRule, Place
from common.grammar.matcher import Matcher
from common.kv.pool import CacheKey, KvPool, LeaseState, RowLease
from common.priority import Ageing
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

    `due_s` is when the prompt is due by its priority. Waiting improves the priority, at most to `best_level`
    (common/priority.py). Prompts of equal priority are ordered by tags, in tokens (`PromptLives.in_turn`); `tag` is the
    one with which this prompt began. If another prompt waits for this one's KV, this one takes that prompt's place in
    turn where it is better.

    `num_launched_tokens` counts the tokens of `row.token_ids` that were given to a forward or found in the prefix
    cache. `num_kept_tokens` counts those whose KV was found in the cache or added to it; while the prompt is queued,
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
    awaited: AwaitedKv[Prompt] | None = None
    matcher: Matcher | None = None
    started_s: float = 0.0
    tag: int = 0
    request_id: str = field(init=False)
    deadline_s: float = field(init=False)  # by the engine's clock
    token_ids: NDArray[np.int64] = field(init=False)  # those of `row`
    cache_key: CacheKey | None = field(init=False)  # None if the prompt uses no cache

    def __post_init__(self) -> None:
        self.request_id = self.row.request_id
        self.token_ids = np.array(self.row.token_ids, np.int64)
        self.deadline_s = self.arrived_s + self.row.time_left_ms / 1000 if self.row.time_left_ms else math.inf
        self.cache_key = None if self.row.cache_salt is None else CacheKey(self.token_ids, self.row.cache_salt)

    @property
    def client(self) -> str:
        return self.row.client

    @property
    def next_tag(self) -> int:
        """The tag at the next token to compute of a prompt that holds a row."""
        assert self.lease is not None
        return self.tag + self.num_launched_tokens - self.lease.num_cached

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
        """How many of the prompt's tokens must still be computed. Tokens with cached or awaited KV are not counted."""
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


RULES: Mapping[PromptPhase, PhaseRule[PromptPhase]] = {
    PromptPhase.QUEUED: PhaseRule(Place.WAITING, None, (PromptPhase.COMPUTING, PromptPhase.ENDED)),
    PromptPhase.COMPUTING: PhaseRule(Place.COMPUTING, LeaseState.RUNNING, (PromptPhase.SENDING, PromptPhase.ENDED)),
    PromptPhase.SENDING: PhaseRule(Place.HANDOFF, LeaseState.TRANSFERRING, (PromptPhase.ENDED,)),
    PromptPhase.ENDED: PhaseRule(Place.NOWHERE, None, ()),
}


class PromptLives(Lifecycle[Prompt, PromptPhase]):
    """Holds the live prompts of each place, in the order in which they came to it, and moves prompts between phases.

    Only the engine thread calls it. It is the only writer of a prompt's place in turn. `ended` is called when a prompt
    ends, before its row is released. `ageing` says how waiting changes priorities.
    """

    def __init__(self, pool: KvPool, *, ageing: Ageing, ended: Callable[[Prompt], None]) -> None:
        super().__init__(RULES, pool)
        self._ageing = ageing
        self._ended = ended
        self._members: dict[Place, dict[Prompt, None]] = {place: {} for place in Place}
        self._ends: dict[str, int] = {}  # by client, the tag that its next prompt would have
        self._present = 0  # the largest tag that a prompt had when its computation ended

    def admit(self, prompt: Prompt) -> None:
        """Adds a new prompt to the queue."""
        self._arrive(prompt, Place.WAITING)

    def at(self, place: Place) -> KeysView[Prompt]:
        return self._members[place].keys()

    def in_turn(self, place: Place, now_s: float) -> dict[Prompt, int]:
        """Returns the prompts WAITING or COMPUTING and their tags, in the order of service at `now_s`, a time of the
        engine's clock.

        Prompts of a better level go first. The level is the priority, which waiting improves, but not beyond 0. Prompts
        of one level go in the order of their tags (start-time fair queueing), and with equal tags the one with fewer
        tokens left goes first. A client's first prompt begins at the smallest tag of the prompts that are computed now.
        Each further prompt's tag is larger by the number of tokens that the one before it must compute. A tag grows
        with the tokens that are computed. So all clients get equally many tokens computed, and a new client need not
        wait for the others' queued prompts. One client's prompts are in the order in which they are due.
        """
        prompts = sorted(self._members[place], key=lambda prompt: prompt.due_s)
        if place is Place.WAITING:
            tags, present, ends = dict[Prompt, int](), self._present_tag(), dict(self._ends)
            for prompt in prompts:
                tags[prompt] = max(present, ends.get(prompt.client, present))
                ends[prompt.client] = tags[prompt] + prompt.num_uncomputed
        else:
            tags = {prompt: prompt.next_tag for prompt in prompts}

        def turn(prompt: Prompt) -> tuple[int, int, int]:
            level = self._ageing.level(prompt.due_s, now_s=now_s, best=prompt.best_level)
            return level, tags[prompt], prompt.num_left

        return {prompt: tags[prompt] for prompt in sorted(tags, key=turn)}

    def _present_tag(self) -> int:
        return min([prompt.next_tag for prompt in self._members[Place.COMPUTING]], default=self._present)

    def wait_for(self, prompt: Prompt, awaited: AwaitedKv[Prompt] | None, *, tag: int) -> None:
        """Notes which KV a queued prompt with this tag waits for, None if it waits for none.

        The prompt that brings it takes the waiting one's place in turn, where that is better. Else prompts that come
        between them would hold up both.
        """
        if awaited is not None and awaited is not prompt.awaited:
            source = awaited.source
            source.due_s, source.best_level = min(source.due_s, prompt.due_s), min(source.best_level, prompt.best_level)
            source.tag -= max(0, source.next_tag - tag)
        prompt.awaited = awaited

    def begin(self, prompt: Prompt, lease: RowLease, *, tag: int) -> None:
        """Gives a queued prompt with this tag its row, `lease`, so that it is computed from now on."""
        present = self._present_tag()
        prompt.tag = tag
        self._ends = {client: end for client, end in self._ends.items() if end > present}
        self._ends[prompt.client] = tag + prompt.num_uncomputed
        self.enter(prompt, PromptPhase.COMPUTING, lease=lease)
        prompt.num_launched_tokens = prompt.num_kept_tokens = lease.num_cached

    def _leave(self, prompt: Prompt, place: Place, following: Place) -> None:
        del self._members[place][prompt]
        if place is Place.COMPUTING:
            self._present = max(self._present, prompt.next_tag)
        if following is Place.NOWHERE:
            self._ended(prompt)

    def _arrive(self, prompt: Prompt, place: Place) -> None:
        if place is not Place.NOWHERE:
            self._members[place][prompt] = None
