"""The attention plan of a whole forward, whose layers may form several groups, with KV in FP8 or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from common.attention.backend import AttentionBackend, AttentionPlan, ForwardInput, LayerAttention
from common.attention.fp8_kv import FP8_BITS, Fp8Plan, KvScale


def plan_of(backend: AttentionBackend, batch: ForwardInput, scales: Sequence[KvScale] | None = None) -> AttentionPlan:
    """Returns the plan of a forward. Layers are numbered as in the model, whatever group their KV belongs to.

    `scales` has one for each layer, for a pool in FP8. Without it all scales are 1.
    """
    plan = _PlanOfGroups(backend, batch) if batch.windows else backend.plan(batch)
    return Fp8Plan(plan, scales) if batch.kv.dtype == FP8_BITS else plan


class _PlanOfGroups(AttentionPlan):
    """A forward's plan that consists of one for each group of layers."""

    def __init__(self, backend: AttentionBackend, batch: ForwardInput) -> None:
        self._places: dict[int, tuple[AttentionPlan, int]] = {}
        for window in batch.windows:
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
            plan = backend.plan(replace(batch, windows=()))
            self._places |= {layer: (plan, number) for number, layer in enumerate(others)}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        plan, number = self._places[layer]
        return plan.attend(number, query, key, value, how)
