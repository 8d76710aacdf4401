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
"""How many unread tokens of a row are too many for a drafter."""


@dataclass(frozen=True, slots=True)
class SpecInfo:
    """The shape of one step's drafts: a chain, or with `topk` > 1 a tree.

    `num_steps` is the number of levels; with 0 nothing is drafted. `num_draft_tokens` drafts of a row are verified. In
    a tree the `topk` likeliest nodes of each level get `topk` children each, and the likeliest of all drafts are
    verified. `leaves_seed` says whether the step leaves a draft seed (first drafts and hidden state), without which the
    next step cannot draft. `reads_drafts` says whether the drafter reads a step's drafts to draft what follows them; a
    head of several layers does not, because it has drafted all levels before.
    """

    num_steps: int
    num_draft_tokens: int
    topk: int = 1
    leaves_seed: bool = True
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
class Unread:
    """The tokens of a step's B rows that the drafter has not read before the step.

    `num_tokens` [B] counts those of each row; there are always fewer than `max_tokens`.
    """

    num_tokens: NDArray[np.int64]
    max_tokens: int = MAX_UNREAD

    @property
    def must_be_read(self) -> bool:
        """Whether the drafter must read after the step, because one more unread token would be too many for some
        row.
        """
        return int(self.num_tokens.max(initial=0)) + 1 >= self.max_tokens

    @property
    def num_read(self) -> int:
        """How many tokens of all rows together the drafter reads if it reads after a step without drafts."""
        return int(self.num_tokens.sum()) + len(self.num_tokens)

    def are_read(self, spec_info: SpecInfo) -> bool:
        """Returns whether the drafter reads all unread tokens after the step, instead of leaving more unread."""
        return spec_info.leaves_seed or spec_info.has_drafts or self.must_be_read


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
