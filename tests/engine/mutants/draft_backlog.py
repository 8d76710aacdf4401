"""Mutants of the draft backlog (tokens that the draft head has not read yet): they lose or misplace tokens, or never
empty it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from common.kv.pool import KvPool
from decode_service.forward.drafter import Reading
from decode_service.forward.eagle_drafter import DraftBacklog, HeadDrafter, UnreadTokens
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.speculate.spec_info import Unread
from tests.engine.mutants.kinds import instead_of

Counts = NDArray[np.int64]


@instead_of(DraftBacklog, "put")
def each_step_puts_in_the_same_place(
    put: Callable[..., None], self: DraftBacklog, batch: ForwardBatch, num_unread: Counts, *of_target: Tensor
) -> None:
    put(self, batch, np.zeros_like(num_unread), *of_target)


def only_the_last_token_is_read(patch: pytest.MonkeyPatch) -> None:
    """Lets the head read only the last step's tokens, and never those that earlier steps put into the backlog."""
    put, unread = DraftBacklog.put, DraftBacklog.unread
    last: list[tuple[Tensor, ...]] = []

    def noting(self: DraftBacklog, batch: ForwardBatch, num_unread: Counts, *of_target: Tensor) -> None:
        last[:] = [of_target]
        put(self, batch, num_unread, *of_target)

    def mutant(self: DraftBacklog, batch: ForwardBatch, num_unread: Counts, pool: KvPool, group: str) -> UnreadTokens:
        none = np.zeros_like(num_unread)
        put(self, batch, none, *last[0])
        return unread(self, batch, none, pool, group)

    patch.setattr(DraftBacklog, "put", noting)
    patch.setattr(DraftBacklog, "unread", mutant)


@instead_of(DraftBacklog, "unread")
def every_row_is_as_far_behind(
    unread: Callable[..., UnreadTokens],
    self: DraftBacklog,
    batch: ForwardBatch,
    num_unread: Counts,
    pool: KvPool,
    group: str,
) -> UnreadTokens:
    """Treats every row's head as lagging only as much as the row whose head lags least."""
    return unread(self, batch, np.full_like(num_unread, num_unread.min()), pool, group)


@instead_of(HeadDrafter, "launch")
def unread_tokens_stay_unread(launch: Callable[..., Reading], self: HeadDrafter, batch: ForwardBatch) -> Reading:
    """Keeps counting a row's tokens as unread after the head has read everything."""
    reading = launch(self, batch)
    num_left = np.minimum(reading.unread.num_tokens + 1, 15)
    self._num_unread[batch.rows] = num_left
    return replace(reading, num_left=num_left)


@instead_of(HeadDrafter, "begin")
def a_new_request_has_unread_tokens(begin: Callable[..., None], self: HeadDrafter, starts: object) -> None:
    """Counts the unread tokens of a row's last request as those of its next one."""


def backlog_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unread, "must_be_read", property(lambda unread: False))
