"""The speculative seed: what one iteration leaves for the next to draft from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.draft.head import DraftHead
from common.model.sampling import propose
from common.model.sampling_state import SamplingBatch, SamplingState
from common.wire.fingerprint import SeedColumnSpec

TOPK_INDEX = "topk_index"
HIDDEN_STATES = "hidden_states"


@dataclass(frozen=True, slots=True)
class Seed:
    """`topk_index` [B, 1] int64: the first drafted token of each row, a target id. `hidden_states` [B, h]: the head's
    own output at the row that drafted it, which the next step of the chain is fed.
    """

    topk_index: Tensor
    hidden_states: Tensor

    def columns(self) -> dict[str, Tensor]:
        return {TOPK_INDEX: self.topk_index, HIDDEN_STATES: self.hidden_states}


def column_to_numpy(column: Tensor) -> NDArray[np.generic]:
    """For the wire. numpy has no bfloat16: its bits."""
    is_bfloat16 = column.dtype == torch.bfloat16
    values: NDArray[np.generic] = (column.view(torch.uint16) if is_bfloat16 else column).numpy()
    return values


def seed_columns(head: DraftHead) -> tuple[SeedColumnSpec, ...]:
    return (
        SeedColumnSpec(TOPK_INDEX, "int64", (1,)),
        SeedColumnSpec(HIDDEN_STATES, head.layer_group.dtype, (head.hidden_size,)),
    )


@torch.inference_mode()
def make_seed(
    head: DraftHead,
    hidden: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
) -> Seed:
    """From the head's outputs `hidden` [B, h] at each row's last token; `positions` [B] are the drafted tokens' own."""
    drafted = propose(head.logits(hidden), head.token_ids, rows, positions, state, batch)
    return Seed(drafted.unsqueeze(1), hidden)
