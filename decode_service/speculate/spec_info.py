"""The shape of a step's speculation, which says how many levels are drafted and how many tokens are verified, and the
drafts of a batch in verification: a chain or a tree for each row, whose root is the last committed token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.sampling.state import Ancestors

MAX_UNREAD = 128


@dataclass(frozen=True, slots=True)
class SpecInfo:
    """The shape of one step's drafts: a chain, or with `topk` > 1 a tree.

    `num_steps` is the number of levels; with 0 nothing is drafted. `num_draft_tokens` drafts of a row are verified. In
    a tree the `topk` likeliest nodes of each level get `topk` children each, and the likeliest of all drafts are
    verified. `leaves_seed` says whether the step leaves a draft seed (first drafts and hidden state), without which the
    next step cannot draft. A step that drafts nothing and leaves no draft seed need not run the head: its tokens stay
    unread, fewer than `max_unread` per row. `reads_drafts` says whether the drafter reads a step's drafts to draft what
    follows them; a head of several layers does not, because it has drafted all levels before.
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
        """The number of slots past a row's committed KV that a step writes. Drafting and verification write the same
        slots.
        """
        return max(self.num_verify_tokens, self.topk * (self.num_steps - 1))


def num_drafted(num_steps: int, topk: int) -> int:
    """Returns how many tokens a tree of `num_steps` levels drafts before the best are chosen."""
    if topk == 1 or num_steps == 0:
        return num_steps
    return topk + (num_steps - 1) * topk * topk


NO_DRAFTS = SpecInfo.chain(0)
"""The shape of every step of a service that never drafts."""


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """The accepted nodes of each row, root first. The step commits the token that the target drew after each of them.

    `path` [B, W] int64 holds node numbers. Only the first `accept_lens` [B] entries of a row count.
    """

    path: Tensor
    accept_lens: Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The drafted tokens of each row as a tree. Node 0 is the root, and `token_ids` [B, D] int64 are nodes 1 .. D.

    A parent comes before its children, and siblings are different tokens. `parents` [B, D] int64 is each draft's parent
    node. `mask` [B, D + 1, D + 1] bool marks each node's ancestors and itself. `is_chain` means that the parent of node
    i is node i - 1. No node is deeper than `num_levels`.
    """

    token_ids: Tensor
    parents: Tensor
    mask: Tensor
    is_chain: bool
    num_levels: int

    @classmethod
    def chain(cls, token_ids: Tensor) -> DraftTree:
        num_rows, num_drafts = token_ids.shape
        device = token_ids.device
        ancestors = torch.ones((num_drafts + 1, num_drafts + 1), dtype=torch.bool, device=device).tril()
        return cls(
            token_ids,
            torch.arange(num_drafts, device=device).expand(num_rows, -1),
            ancestors.expand(num_rows, -1, -1),
            is_chain=True,
            num_levels=num_drafts,
        )

    @classmethod
    def of(cls, token_ids: Tensor, parents: Tensor, *, num_levels: int) -> DraftTree:
        num_rows, num_drafts = token_ids.shape
        num_nodes = num_drafts + 1
        itself = torch.eye(num_nodes, device=token_ids.device).expand(num_rows, -1, -1)
        above = torch.zeros((num_rows, num_nodes, num_nodes), device=token_ids.device)
        above[:, 1:].scatter_(2, parents.unsqueeze(2), 1.0)
        mask = itself
        for _ in range(num_levels):
            mask = itself + above @ mask
        return cls(token_ids, parents, mask > 0, is_chain=False, num_levels=num_levels)

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[1] + 1

    def depths(self) -> Tensor:
        """Returns the depth of each node, [B, D + 1] int64. The root has depth 0."""
        return self.mask.sum(dim=2) - 1

    def ancestors(self) -> Ancestors:
        """Returns, for each of the B * (D + 1) nodes, the drafts on the path from the root to it, itself included."""
        return Ancestors(
            token_ids=self.token_ids.repeat_interleave(self.num_nodes, dim=0),
            counted=self.mask[:, :, 1:].flatten(0, 1).to(torch.int32),
        )

    def accept(self, target_ids: Tensor) -> AcceptedPath:
        """Returns the nodes that the target model accepts.

        `target_ids` [B, D + 1] are the tokens that the target draws after each node. A draft is accepted if it and all
        its ancestors equal the token drawn after their parents.
        """
        if self.is_chain:
            is_right = self.token_ids == target_ids[:, :-1]
            path = torch.arange(self.num_nodes, device=self.token_ids.device).expand(target_ids.shape[0], -1)
            return AcceptedPath(path, is_right.cumprod(dim=1).sum(dim=1) + 1)
        is_right = torch.ones(target_ids.shape, dtype=torch.bool, device=target_ids.device)
        is_right[:, 1:] = self.token_ids == target_ids.gather(1, self.parents)
        is_accepted = ~(self.mask & ~is_right.unsqueeze(1)).any(dim=2)
        path = is_accepted.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
        return AcceptedPath(path[:, : self.num_levels + 1], is_accepted.sum(dim=1))
