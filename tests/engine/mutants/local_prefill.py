"""Mutants of the prefill in the decode service: chunks that are launched, counted or kept wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest

from common.kv.pool import KvPool, RowLease
from common.prompts.chunk_batch import Chunk
from common.sampling.state import RowSeed
from decode_service.schedule import local_prefill
from decode_service.schedule.dispatcher import PrefillDispatcher
from decode_service.schedule.local_prefill import LocalPrefill, LocalPrompt
from decode_service.schedule.replica_set import ReplicaSet
from decode_service.schedule.request import Request


def chunk_holds_no_row(patch: pytest.MonkeyPatch) -> None:
    launch = LocalPrefill.launch

    def mutant(self: LocalPrefill) -> bool:
        with mock.patch.object(RowLease, "use_until"):
            return launch(self)

    patch.setattr(LocalPrefill, "launch", mutant)


def given_up_prompts_are_computed_on(patch: pytest.MonkeyPatch) -> None:
    """Goes on computing the prompts of requests that were aborted or retracted."""
    forget = LocalPrefill.forget

    def mutant(self: LocalPrefill, req: Request) -> None:
        if not self._prompts[req].num_left:
            forget(self, req)

    patch.setattr(LocalPrefill, "forget", mutant)


def row_is_not_seeded(patch: pytest.MonkeyPatch) -> None:
    """Draws a request's first token with the sampling state of the row's last request."""
    patch.setattr(LocalPrompt, "row_seed", property(lambda self: RowSeed(0, self.sampling, 0, (), 0)))


def unwritten_kv_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Counts every token of a prompt as computed as soon as the first chunk is launched."""
    launch = LocalPrefill.launch

    def mutant(self: LocalPrefill) -> bool:
        is_launched = launch(self)
        for prompt in self._prompts.values():
            self._pool.keep(prompt.lease, prompt.token_ids, len(prompt.token_ids))
        return is_launched

    patch.setattr(LocalPrefill, "launch", mutant)


def prompts_all_stay(patch: pytest.MonkeyPatch) -> None:
    """Ignores the prompts that are being computed already when it decides whether another one is computed here."""
    patch.setattr(LocalPrefill, "num_short_left", 0)


def cached_tokens_are_left_to_compute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvPool, "num_cached", lambda self, key, is_received=False: 0)


def long_prompts_begin_together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalPrefill, "has_long", False)


def long_prompts_count_as_short(patch: pytest.MonkeyPatch) -> None:
    """Lets no short prompt begin until nearly all of a long one is launched."""
    patch.setattr(
        LocalPrefill, "num_short_left", property(lambda self: sum(p.num_left for p in self._prompts.values()))
    )


def the_oldest_prompt_is_always_first(patch: pytest.MonkeyPatch) -> None:
    """Gives each chunk to the prompt that began first, until it is computed."""
    cut = local_prefill.cut_chunks

    def mutant(prompts: Sequence[LocalPrompt], **limits: int) -> list[Chunk[LocalPrompt]]:
        return cut(sorted(prompts, key=lambda prompt: prompt.req.arrival), **limits)

    patch.setattr(local_prefill, "cut_chunks", mutant)


def long_prompts_hold_up_short_ones(patch: pytest.MonkeyPatch) -> None:
    """Lets no request begin before one that comes first and for which there is no replica."""
    patch.setattr(PrefillDispatcher, "_may_start_later", False)


def fallback_never_ends(patch: pytest.MonkeyPatch) -> None:
    """Computes prompts in the decode service although a replica is ready."""
    patch.setattr(PrefillDispatcher, "is_degraded", True)


def only_short_turns_stay(patch: pytest.MonkeyPatch) -> None:
    """Hands over a long turn of a chat, however many tokens the replica has to compute for it."""
    patch.setattr(ReplicaSet, "least_uncomputed", lambda self, candidates, key, num_tokens: 0)


def fallback_keeps_the_limit(patch: pytest.MonkeyPatch) -> None:
    """Counts only prompts of up to `local_prefill_tokens` as short, even while no replica is ready."""
    patch.setattr(PrefillDispatcher, "_max_short_tokens", property(lambda self: self._local_prefill_tokens))


def fallback_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillDispatcher, "is_degraded", False)


def each_step_looks_at_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillDispatcher, "_changes", lambda self: (object(),))


def free_rows_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Does not look at the queue again when rows or slots have become free."""
    patch.setattr(KvPool, "num_changes", property(lambda self: 0, lambda self, value: None), raising=False)
