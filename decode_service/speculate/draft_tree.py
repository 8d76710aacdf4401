"""The drafts of a batch in verification: a chain or a tree for each row. Its root is the last committed token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.sampling.state import Ancestors


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
