"""Drafts on their way through verification: a chain, or a tree whose node 0 is the token they all follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.sampling.state import Ancestors


@dataclass(frozen=True, slots=True)
class Accepted:
    """`path` [B, W] int64: the nodes after which tokens are committed, root first, then any. `accept_lens` [B]: how
    many of them count.
    """

    path: Tensor
    accept_lens: Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """`token_ids` [B, D] int64 are nodes 1 .. D, a parent before its children; siblings are different tokens.

    `parents` [B, D] int64: each one's parent node. `mask` [B, D + 1, D + 1] bool: for each node its ancestors and
    itself. `is_chain`: node i follows node i - 1. `num_levels` bounds the depth.
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
        """[B, D + 1] int64, the root's 0."""
        return self.mask.sum(dim=2) - 1

    def ancestors(self) -> Ancestors:
        """The drafts on the way to the token after each node, for [B * (D + 1)] nodes."""
        return Ancestors(
            token_ids=self.token_ids.repeat_interleave(self.num_nodes, dim=0),
            counted=self.mask[:, :, 1:].flatten(0, 1).to(torch.int32),
        )

    def accept(self, target_ids: Tensor) -> Accepted:
        """The nodes on the way that the target takes: `target_ids` [B, D + 1] are its own tokens after each node."""
        if self.is_chain:
            is_right = self.token_ids == target_ids[:, :-1]
            path = torch.arange(self.num_nodes, device=self.token_ids.device).expand(target_ids.shape[0], -1)
            return Accepted(path, is_right.cumprod(dim=1).sum(dim=1) + 1)
        is_right = torch.ones(target_ids.shape, dtype=torch.bool, device=target_ids.device)
        is_right[:, 1:] = self.token_ids == target_ids.gather(1, self.parents)
        is_accepted = ~(self.mask & ~is_right.unsqueeze(1)).any(dim=2)
        path = is_accepted.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
        return Accepted(path[:, : self.num_levels + 1], is_accepted.sum(dim=1))
