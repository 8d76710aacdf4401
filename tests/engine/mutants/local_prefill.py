"""Mutants of the prefill in the decode service: chunks that are launched, counted or kept wrongly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import pytest

from common.kv.pool import KvPool, RowLease
from common.prompts import computing
from common.prompts.chunk_batch import Chunk
from common.sampling.state import RowStart
from decode_service.messages import Phase
from decode_service.schedule.config import DecodeConfig
from decode_service.schedule.handoff_policy import HandoffPolicy
from decode_service.schedule.life import Lives
from decode_service.schedule.local_prefill import LocalPrefill, LocalPrompt
from decode_service.schedule.replica_set import ReplicaSet
from decode_service.schedule.request import Request
from decode_service.schedule.waiting_queue import WaitingQueue
from tests.engine.mutants.kinds import instead_of, newest


@instead_of(LocalPrefill, "launch")
def chunk_holds_no_row(launch: Callable[..., bool], self: LocalPrefill) -> bool:
    with mock.patch.object(RowLease, "use_until"):
        return launch(self)


def given_up_prompts_are_computed_on(patch: pytest.MonkeyPatch) -> None:
    """Goes on computing the prompts of requests that were aborted or retracted."""
    entered: list[Phase] = []

    @instead_of(Lives, "enter")
    def noting(enter: Callable[..., None], self: Lives, req: Request, phase: Phase, **about: Any) -> None:
        entered.append(phase)
        enter(self, req, phase, **about)

    @instead_of(LocalPrefill, "forget")
    def mutant(forget: Callable[..., None], self: LocalPrefill, req: Request) -> None:
        if entered[-1] is Phase.BOOTSTRAP:
            forget(self, req)

    noting(patch)
    mutant(patch)


def row_is_not_seeded(patch: pytest.MonkeyPatch) -> None:
    """Draws a request's first token with the sampling state of the row's last request."""
    patch.setattr(LocalPrompt, "row_start", property(lambda self: RowStart(0, self.sampling, 0, (), 0)))


def unwritten_kv_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Counts every token of a prompt as computed as soon as the first chunk is launched."""
    pool, begun = newest(patch, KvPool), list[Request]()

    @instead_of(LocalPrefill, "begin")
    def noting(begin: Callable[..., None], self: LocalPrefill, req: Request) -> None:
        begun.append(req)
        begin(self, req)

    @instead_of(LocalPrefill, "launch")
    def mutant(launch: Callable[..., bool], self: LocalPrefill) -> bool:
        is_launched = launch(self)
        for req in begun:
            if req.phase is Phase.LOCAL_PREFILL:
                pool().keep(req.lease, np.array(req.token_ids), len(req.token_ids))
        return is_launched

    noting(patch)
    mutant(patch)


def prompts_all_stay(patch: pytest.MonkeyPatch) -> None:
    """Ignores the prompts that are being computed already when it decides whether another one is computed here."""
    patch.setattr(LocalPrefill, "num_short_left", 0)


def cached_tokens_are_left_to_compute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvPool, "num_cached", lambda self, key, is_received=False: 0)


def long_prompts_begin_together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalPrefill, "has_long", False)


def long_prompts_count_as_short(patch: pytest.MonkeyPatch) -> None:
    """Lets no short prompt begin until a long one is computed."""
    num_short_left = LocalPrefill.num_short_left.fget
    patch.setattr(LocalPrefill, "num_short_left", property(lambda self: num_short_left(self) + 1000 * self.has_long))


@instead_of(computing, "cut_chunks")
def the_oldest_prompt_is_always_first(
    cut: Callable[..., list[Chunk[LocalPrompt]]], prompts: Sequence[LocalPrompt], **limits: int
) -> list[Chunk[LocalPrompt]]:
    """Gives each chunk to the prompt that began first, until it is computed."""
    return cut(sorted(prompts, key=lambda prompt: prompt.req.arrival), **limits)


@instead_of(WaitingQueue, "in_turn")
def long_prompts_hold_up_short_ones(in_turn: Callable[..., Iterable[Request]], *args: Any) -> Iterable[Request]:
    """Lets no request begin before the one that comes first in turn, even if there is no replica for that one."""
    return islice(in_turn(*args), 1)


def fallback_never_ends(patch: pytest.MonkeyPatch) -> None:
    """Computes prompts in the decode service although a replica is ready."""
    patch.setattr(HandoffPolicy, "is_degraded", lambda self, now_s: True)


def only_short_turns_stay(patch: pytest.MonkeyPatch) -> None:
    """Hands over a long turn of a chat, however many tokens the replica has to compute for it."""
    patch.setattr(ReplicaSet, "least_uncomputed", lambda self, candidates, key, num_tokens: 0)


def fallback_keeps_the_limit(patch: pytest.MonkeyPatch) -> None:
    """Counts only prompts of up to `local_prefill_tokens` as short, even while no replica is ready."""
    patch.setattr(DecodeConfig, "max_chunk_tokens", property(lambda config: max(config.local_prefill_tokens, 1)))


def fallback_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandoffPolicy, "is_degraded", lambda self, now_s: False)


def each_step_looks_at_the_queue(patch: pytest.MonkeyPatch) -> None:
    """Lets the pool say at each step that rows or slots have become free."""
    changes = itertools.count()
    patch.setattr(KvPool, "num_changes", property(lambda self: next(changes), lambda self, value: None), raising=False)


def free_rows_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Does not look at the queue again when rows or slots have become free."""
    patch.setattr(KvPool, "num_changes", property(lambda self: 0, lambda self, value: None), raising=False)
