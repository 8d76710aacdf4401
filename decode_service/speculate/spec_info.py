"""The shape of a batch's speculation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

MAX_DRAFT_LAG = 128


@dataclass(frozen=True, slots=True)
class SpecInfo:
    """`num_steps` levels of drafts, of which `num_draft_tokens` are verified: a chain, or with `topk` > 1 a tree.

    A tree's nodes have `topk` children each, of every level the `topk` best are continued, and of all that were drafted
    the best are verified. No steps: nothing is drafted. `leaves_seed`: whether the next step is to draft; without it
    the head may fall behind, by less than `max_draft_lag` tokens a row. Many rows end before that, and what is put down
    for the head takes a small part of what a row's KV may take.
    """

    num_steps: int
    num_draft_tokens: int
    topk: int = 1
    leaves_seed: bool = True
    max_draft_lag: int = MAX_DRAFT_LAG

    def __post_init__(self) -> None:
        if self.topk == 1:
            assert self.num_draft_tokens == self.num_steps, "a chain drafts one token a step"
        else:
            assert self.num_steps <= self.num_draft_tokens <= num_drafted(self.num_steps, self.topk)

    @classmethod
    def chain(cls, num_draft_tokens: int) -> SpecInfo:
        return cls(num_draft_tokens, num_draft_tokens)

    def at_depth(self, num_steps: int) -> SpecInfo:
        """The same with fewer levels."""
        num_draft_tokens = min(self.num_draft_tokens, num_drafted(num_steps, self.topk))
        return replace(self, num_steps=num_steps, num_draft_tokens=num_draft_tokens)

    def without_seed(self) -> SpecInfo:
        return replace(self, leaves_seed=False)

    def must_catch_up(self, draft_lag: NDArray[np.int64]) -> bool:
        """Whether a row has no room for one token more that the head has not read; `draft_lag` [B]: those it has."""
        return int(draft_lag.max(initial=0)) + 1 >= self.max_draft_lag

    def head_reads(self, draft_lag: NDArray[np.int64]) -> bool:
        """Whether the head reads what it has not read after the step, instead of being left behind."""
        return self.leaves_seed or self.has_drafts or self.must_catch_up(draft_lag)

    def num_head_tokens(self, draft_lag: NDArray[np.int64]) -> int:
        """Tokens that the head then reads: as many as the step may commit, and those of earlier steps."""
        return int(draft_lag.sum()) + len(draft_lag) * self.max_accept_len if self.head_reads(draft_lag) else 0

    @property
    def has_drafts(self) -> bool:
        """Whether only the forward finds out how many tokens the step commits."""
        return self.num_steps > 0

    @property
    def num_verify_tokens(self) -> int:
        """The bonus token of the step before, and the drafts."""
        return self.num_draft_tokens + 1

    @property
    def max_accept_len(self) -> int:
        """Tokens that a step commits at most."""
        return self.num_steps + 1

    @property
    def num_slots(self) -> int:
        """Slots past a row's committed KV that a step writes to: it drafts in them, then verifies in them."""
        return max(self.num_verify_tokens, self.topk * (self.num_steps - 1))


def num_drafted(num_steps: int, topk: int) -> int:
    """Tokens that a tree of so many levels drafts before the best are chosen."""
    if topk == 1 or num_steps == 0:
        return num_steps
    return topk + (num_steps - 1) * topk * topk
