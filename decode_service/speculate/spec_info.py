"""The shape of a step's speculation: how many levels are drafted and how many tokens are verified."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

MAX_UNREAD = 128


@dataclass(frozen=True, slots=True)
class SpecInfo:
    """The shape of one step's drafts: a chain, or with `topk` > 1 a tree.

    `num_steps` is the number of levels; with 0 nothing is drafted. `num_draft_tokens` drafts of a row are verified. In
    a tree the `topk` likeliest nodes of each level get `topk` children each, and the likeliest of all drafts are
    verified. `leaves_seed` says whether the step leaves a draft seed (first drafts and hidden state), without which the
    next step cannot draft. A step that drafts nothing and leaves no draft seed need not run the head: its tokens are
    stored and stay unread, fewer than `max_unread` of each row. `reads_drafts` says
    whether the drafter reads a step's drafts to draft what follows them; a head of several layers does not, because it
    has drafted all levels before.
    """

    num_steps: int
    num_draft_tokens: int
    topk: int = 1
    leaves_seed: bool = True
    max_unread: int = MAX_UNREAD
    reads_drafts: bool = True

    def __post_init__(self) -> None:
        if self.topk == 1:
            assert self.num_draft_tokens == self.num_steps, "a chain drafts one token a step"
        else:
            assert self.num_steps <= self.num_draft_tokens <= num_drafted(self.num_steps, self.topk)

    @classmethod
    def chain(cls, num_draft_tokens: int) -> SpecInfo:
        return cls(num_draft_tokens, num_draft_tokens)

    def at_depth(self, num_steps: int) -> SpecInfo:
        """Returns the same speculation with `num_steps` levels, which must not be more than now."""
        num_draft_tokens = min(self.num_draft_tokens, num_drafted(num_steps, self.topk))
        return replace(self, num_steps=num_steps, num_draft_tokens=num_draft_tokens)

    def without_seed(self) -> SpecInfo:
        return replace(self, leaves_seed=False)

    def must_catch_up(self, num_unread: NDArray[np.int64]) -> bool:
        """Returns whether the head must read after the step, because one more unread token would be too many for some
        row.

        `num_unread` [B] counts the tokens of each row that the head has not read.
        """
        return int(num_unread.max(initial=0)) + 1 >= self.max_unread

    def head_reads(self, num_unread: NDArray[np.int64]) -> bool:
        """Returns whether the head reads all unread tokens after the step, instead of leaving more unread."""
        return self.leaves_seed or self.has_drafts or self.must_catch_up(num_unread)

    def num_head_tokens(self, num_unread: NDArray[np.int64]) -> int:
        """Returns how many tokens of all rows together the head reads after the step, or 0 if it does not read.

        It reads all tokens that the step may commit, and the unread ones of earlier steps.
        """
        return int(num_unread.sum()) + len(num_unread) * self.max_accept_len if self.head_reads(num_unread) else 0

    @property
    def has_drafts(self) -> bool:
        """Whether the step drafts. If so, only the forward finds out how many tokens it commits."""
        return self.num_steps > 0

    @property
    def num_verify_tokens(self) -> int:
        """The number of tokens that verification computes: the last committed token and the drafts."""
        return self.num_draft_tokens + 1

    @property
    def max_accept_len(self) -> int:
        """The largest number of tokens that a step commits per row."""
        return self.num_steps + 1

    @property
    def num_slots(self) -> int:
        """The number of slots past a row's committed KV that a step writes. Drafting and verification use the same."""
        return max(self.num_verify_tokens, self.topk * (self.num_steps - 1))


def num_drafted(num_steps: int, topk: int) -> int:
    """Returns how many tokens a tree of `num_steps` levels drafts before the best are chosen."""
    if topk == 1 or num_steps == 0:
        return num_steps
    return topk + (num_steps - 1) * topk * topk


NO_DRAFTS = SpecInfo.chain(0)
"""The steps of a service that never drafts."""
