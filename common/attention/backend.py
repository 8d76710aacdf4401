"""The seam between transformers' models and the paged KV pool.

    model.forward(..., attention_plan=plan)          once per forward: backend.plan(input)
        └─ each layer: paged_attention(module, q, k, v, ..., attention_plan=plan)
               └─ plan.attend(layer, q, k, v)        write K and V to their slots, attend over the row's slots

The plan travels through the model's keyword arguments, so nothing global knows which forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "baton"
MAX_SPLIT_BYTES = 256 << 20
"""GPU memory for attention that is computed in parts. Rows that need more take turns; one row may take more."""


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One forward of T tokens over B rows; a row's tokens are adjacent and in the order of `req_pool_indices`.

    Shapes: input_ids, positions, out_cache_loc [T] int64 (`out_cache_loc`: the slot that takes each token's KV);
    req_to_token [rows, max_tokens] integer, the slot of each token of each row; req_pool_indices, seq_lens [B] int64,
    `seq_lens` counting this forward's tokens too; kv [layers, 2, slots, heads, head_dim], slot 0 of it padding and
    finite; logits_rows [R] int64, the tokens (0 .. T-1) whose logits are wanted, None for all.
    `max_seq_len` >= max(seq_lens). `prefix_lens` and `extend_lens` say how many of a row's tokens were there before and
    are new; None in a decode forward, which has one token per row (T == B). `tree_mask` [T, W] bool: which of its row's
    last W tokens each new token attends, beside all that come before them; W >= max(extend_lens), and every row has as
    many tokens. None: those up to its own.
    """

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    prefix_lens: tuple[int, ...] | None
    extend_lens: tuple[int, ...] | None
    max_seq_len: int
    kv: Tensor
    logits_rows: Tensor | None
    tree_mask: Tensor | None = None

    @property
    def is_decode(self) -> bool:
        return self.extend_lens is None


class AttentionPlan(Protocol):
    """What one forward's layers share: slots and masks, worked out once."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write `key` and `value` to their slots, then attend each row's queries over its tokens up to their own.

        Shapes: query [T, heads, head_dim]; key, value [T, kv_heads, head_dim]; returns [T, heads, head_dim].
        Reads no slot but the rows' own and slot 0.
        """


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A forward of one row: its new tokens, `max_seq_len`, and whether there is a tree mask."""

    num_new: int
    max_seq_len: int
    has_mask: bool = False


class AttentionBackend(Protocol):
    @property
    def follows_lengths(self) -> bool:
        """Whether a forward's cost depends on its rows' lengths only, however large `max_seq_len` is."""

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        """Forwards that together use every kernel that any forward needs, with tree masks if wanted; empty if nothing
        is compiled.
        """

    def plan(self, batch: ForwardInput) -> AttentionPlan: ...


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_plan: AttentionPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer, with [1, heads, T, head_dim]. Returns [1, T, heads, head_dim].

    The mask is always None: none is registered under this name, and a model that makes its own is refused at load.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = attention_plan.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
