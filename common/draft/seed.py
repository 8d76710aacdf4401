"""The draft seed: the first drafts and hidden states with which the next decode step starts drafting."""

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
class DraftSeed:
    """The drafts of B rows, with which the next decode step starts.

    `topk_index` int64 holds target token ids. For a head with one layer it is [B, topk]: the best candidates for each
    row's next token. For a head with several layers it is [B, layers]: one draft of each layer.

    `topk_p` [B, topk] float32 holds the candidates' probabilities; None if there is only one candidate.
    `hidden_states` [B, hidden size of the head] is the head's output for each row, which is the input of its next draft
    step; None for a head with several layers, because all its drafts are made already.
    """

    topk_index: Tensor
    topk_p: Tensor | None = None
    hidden_states: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """Returns the seed's tensors that are not None, by the names of their fields."""
        columns = {TOPK_INDEX: self.topk_index, TOPK_P: self.topk_p, HIDDEN_STATES: self.hidden_states}
        return {name: column for name, column in columns.items() if column is not None}


def seed_columns(head: DraftHead, *, topk: int) -> tuple[SeedColumnSpec, ...]:
    """Returns the name, the dtype and one row's shape of each column of the DraftSeeds that this head makes.

    `topk` is the number of candidates for a row's next token. A head with several layers does not use it.
    """
    num_layers = head.layer_group.num_layers
    if num_layers > 1:
        return (SeedColumnSpec(TOPK_INDEX, "int64", (num_layers,)),)
    hidden_states = SeedColumnSpec(HIDDEN_STATES, head.dtype, (head.hidden_size,))
    if topk == 1:
        return (SeedColumnSpec(TOPK_INDEX, "int64", (1,)), hidden_states)
    return (SeedColumnSpec(TOPK_INDEX, "int64", (topk,)), SeedColumnSpec(TOPK_P, "float32", (topk,)), hidden_states)


def column_to_numpy(column: Tensor) -> NDArray[np.generic]:
    """Returns the column as a numpy array. bfloat16, which numpy lacks, becomes uint16 with the same bits."""
    is_bfloat16 = column.dtype == torch.bfloat16
    values: NDArray[np.generic] = (column.view(torch.uint16) if is_bfloat16 else column).numpy()
    return values
