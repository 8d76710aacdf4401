"""The speculative seed: what one iteration leaves for the next to draft from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.draft.head import DraftHead
from common.kv.layer_group import SeedColumnSpec

TOPK_INDEX = "topk_index"
TOPK_P = "topk_p"
HIDDEN_STATES = "hidden_states"


@dataclass(frozen=True, slots=True)
class Seed:
    """`topk_index` int64: of a head with one layer [B, topk], each row's best first drafts; of several layers
    [B, layers], each layer's draft. All are target ids.

    `topk_p` [B, topk] float32: what the head gives each of several first drafts; None where there is just one.
    `hidden_states` [B, h]: the output of a head's only layer at the row that drafted, which the next step of the chain
    is fed; None of several layers, where nothing is left to chain.
    """

    topk_index: Tensor
    topk_p: Tensor | None = None
    hidden_states: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        columns = {TOPK_INDEX: self.topk_index, TOPK_P: self.topk_p, HIDDEN_STATES: self.hidden_states}
        return {name: column for name, column in columns.items() if column is not None}


def seed_columns(head: DraftHead, *, topk: int) -> tuple[SeedColumnSpec, ...]:
    """What `extend_draft` returns for each row."""
    num_layers = head.layer_group.num_layers
    if num_layers > 1:
        return (SeedColumnSpec(TOPK_INDEX, "int64", (num_layers,)),)
    hidden_states = SeedColumnSpec(HIDDEN_STATES, head.layer_group.dtype, (head.hidden_size,))
    if topk == 1:
        return (SeedColumnSpec(TOPK_INDEX, "int64", (1,)), hidden_states)
    return (SeedColumnSpec(TOPK_INDEX, "int64", (topk,)), SeedColumnSpec(TOPK_P, "float32", (topk,)), hidden_states)


def column_to_numpy(column: Tensor) -> NDArray[np.generic]:
    """For the wire. numpy has no bfloat16, so its bits are used."""
    is_bfloat16 = column.dtype == torch.bfloat16
    values: NDArray[np.generic] = (column.view(torch.uint16) if is_bfloat16 else column).numpy()
    return values
