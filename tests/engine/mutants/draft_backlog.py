"""Mutants of the draft backlog (tokens that the draft head has not read yet): they lose or misplace tokens, or never
empty it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from torch import Tensor

from common.kv.pool import KvPool
from decode_service.forward.draft_backlog import DraftBacklog, UnreadTokens
from decode_service.forward.forward_batch import ForwardBatch
from tests.engine.mutants.kinds import instead_of


def _lagging(batch: ForwardBatch, draft_lag: int) -> ForwardBatch:
    return dataclasses.replace(batch, draft_lag=np.full_like(batch.draft_lag, draft_lag))


@instead_of(DraftBacklog, "put")
def each_step_puts_in_the_same_place(
    put: Callable[..., None], self: DraftBacklog, batch: ForwardBatch, captured: Tensor, next_ids: Tensor
) -> None:
    put(self, _lagging(batch, 0), captured, next_ids)


def only_the_last_token_is_read(patch: pytest.MonkeyPatch) -> None:
    """Lets the head read only the last step's tokens, and never those that earlier steps put into the backlog."""
    put, unread = DraftBacklog.put, DraftBacklog.unread
    last: list[tuple[Tensor, Tensor]] = []

    def noting(self: DraftBacklog, batch: ForwardBatch, captured: Tensor, next_ids: Tensor) -> None:
        last[:] = [(captured, next_ids)]
        put(self, batch, captured, next_ids)

    def mutant(self: DraftBacklog, batch: ForwardBatch, pool: KvPool, group: str) -> UnreadTokens:
        entries = _lagging(batch, 0)
        put(self, entries, *last[0])
        return unread(self, entries, pool, group)

    patch.setattr(DraftBacklog, "put", noting)
    patch.setattr(DraftBacklog, "unread", mutant)


@instead_of(DraftBacklog, "unread")
def every_row_is_as_far_behind(
    unread: Callable[..., UnreadTokens], self: DraftBacklog, batch: ForwardBatch, pool: KvPool, group: str
) -> UnreadTokens:
    """Treats every row's head as lagging only as much as the row whose head lags least."""
    return unread(self, _lagging(batch, batch.draft_lag.min()), pool, group)


def lag_is_not_reset(patch: pytest.MonkeyPatch) -> None:
    """Keeps counting a row's head as lagging after it has read everything."""
    patch.setattr(ForwardBatch, "draft_lag_after", property(lambda self: np.minimum(self.draft_lag + 1, 15)))


def backlog_has_no_end(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ForwardBatch) -> bool:
        return not (self.spec_info is None or self.has_drafts or self.spec_info.leaves_seed)

    patch.setattr(ForwardBatch, "leaves_head_behind", property(mutant))
