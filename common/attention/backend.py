"""The interface between transformers' models and attention over the paged KV pool.

    model.forward(..., attention_plan=plan)          once per forward: backend.plan(input)
        └─ each layer: paged_attention(module, q, k, v, ..., attention_plan=plan)
               └─ plan.attend(layer, q, k, v)        write K and V to their slots, attend over the row's slots

The plan is passed through the model's keyword arguments, so no global variable has to name the forward in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from common.kv.window_slots import WindowKv

ATTENTION_NAME = "baton"
MAX_SPLIT_BYTES = 256 << 20
"""The most GPU memory for the partial results of attention that splits rows.

Rows that need more together are computed in several groups. A single row may exceed it.
"""


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """The input of one forward: T new tokens in B rows (requests). A row's tokens are adjacent; rows are in the order
    of `req_pool_indices`.

    `input_ids`, `positions`, `out_cache_loc` [T] int64: the tokens, their positions, and the slot for each token's KV.
    `req_to_token` [rows, max_tokens] integer: the slot of each token of each pool row. `req_pool_indices`, `seq_lens`
    [B] int64: each row's index in the pool, and its length including the new tokens. `max_seq_len` is at least every
    length.

    `prefix_lens` and `extend_lens` count each row's earlier and new tokens. Both are None in a decode forward, which
    has one new token per row (T == B).

    `kv` [layers, 2, slots, heads, head_dim]: the pool, in the model's dtype, or the bits of FP8 (see fp8_kv.py). Its
    slot 0 is padding and holds finite numbers. `logits_rows` [R] int64: the indices (0 .. T-1) of the tokens whose
    logits are wanted; None for all.

    `tree_mask` [T, W] bool: for each new token, which of its row's last W tokens it attends, besides all earlier ones.
    All rows then have the same number of new tokens, at most W. None: each token attends its row up to itself.

    `windows` are the layers whose KV lies in slots of its own. `kv` has the other layers, in the model's order.
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
    windows: tuple[WindowKv, ...] = ()

    @property
    def is_decode(self) -> bool:
        return self.extend_lens is None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How the queries of one layer attend.

    `scaling` is the factor of the scores. With `window`, a query attends only the last `window` of the tokens that it
    would attend otherwise, itself among them. With `softcap` c, a score s becomes c * tanh(s / c). `sinks` [heads] hold
    one extra score per query head, which takes its share of the weights and adds nothing to the output.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def from_keywords(
        cls,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> LayerAttention:
        """Reads the keyword arguments that transformers passes to an attention function."""
        return cls(scaling, sliding_window, softcap, s_aux)


class AttentionPlan(Protocol):
    """Attention for one forward. It holds what layers share, such as slots and masks, computed once."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        """Writes `key` and `value` to their slots, then computes attention: each query attends its row's tokens up to
        itself.

        With a tree mask, the mask selects among the row's last tokens instead. `how` says which tokens a window leaves,
        and how scores become weights. Shapes: query [T, heads, head_dim]; key, value [T, kv_heads, head_dim]; returns
        [T, heads, head_dim]. `key` and `value` have the pool's dtype. Reads only slot 0 and the rows' own slots. Slots
        before the windows of all queries of a row may hold anything, even NaN.
        """


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A forward of one row to compile kernels for: its number of new tokens, the `max_seq_len` of its ForwardInput, and
    whether it has a tree mask.
    """

    num_new: int
    max_seq_len: int
    has_mask: bool = False


class AttentionBackend(Protocol):
    @property
    def follows_lengths(self) -> bool:
        """Whether a forward's cost depends only on the lengths of its rows, and not on `max_seq_len`."""

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        """Returns shapes of forwards that together use every kernel that any forward needs. Empty if none are compiled.

        `with_masks` adds forwards with tree masks.
        """

    def plan(self, batch: ForwardInput) -> AttentionPlan: ...


class AttentionOfGroups(AttentionBackend):
    """The attention of a model whose layers belong to several groups.

    `full` is the backend of the layers that attend all tokens, and `windows` has one backend for each group with a
    window, in the order of ForwardInput.windows. Groups of one shape may share a backend.
    """

    def __init__(self, full: AttentionBackend, windows: Sequence[AttentionBackend]) -> None:
        self._full = full
        self._windows = tuple(windows)

    @property
    def follows_lengths(self) -> bool:
        return all(backend.follows_lengths for backend in (self._full, *self._windows))

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        backends = (self._full, *self._windows)
        return list(dict.fromkeys(shape for each in backends for shape in each.kernel_shapes(with_masks=with_masks)))

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        """Returns the plan of a forward. Layers are numbered as in the model, whatever group their KV belongs to."""
        return _PlanOfGroups(self._full, self._windows, batch)


class _PlanOfGroups(AttentionPlan):
    """A forward's plan, made of one plan for each group of layers."""

    def __init__(self, full: AttentionBackend, windows: Sequence[AttentionBackend], batch: ForwardInput) -> None:
        self._places: dict[int, tuple[AttentionPlan, int]] = {}
        for backend, window in zip(windows, batch.windows, strict=True):
            plan = backend.plan(
                replace(
                    batch,
                    out_cache_loc=window.slot_of[batch.out_cache_loc],
                    req_to_token=window.req_to_token,
                    kv=window.kv,
                    windows=(),
                )
            )
            self._places |= {layer: (plan, number) for number, layer in enumerate(window.layers)}
        others = [layer for layer in range(len(self._places) + batch.kv.shape[0]) if layer not in self._places]
        if others:
            plan = full.plan(replace(batch, windows=()))
            self._places |= {layer: (plan, number) for number, layer in enumerate(others)}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        plan, number = self._places[layer]
        return plan.attend(number, query, key, value, how)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the forward's plan. transformers calls this function in each layer.

    Shapes: query, key and value [1, heads, T, head_dim]; returns [1, T, heads, head_dim]. `attention_mask` is always
    None: no mask function is registered for this attention, and a model that makes its own mask is refused at load.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    output = attention_plan.attend(layer, query, key, value, LayerAttention.from_keywords(**keywords))
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
