"""The prefill engine's record of one row of a Handoff call."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from common.kv.pool import RowLease
from common.sampling.state import RowSeed
from common.wire.handoff import HandoffRow


class PromptPhase(Enum):
    QUEUED = auto()  # holds nothing
    COMPUTING = auto()  # chunks are left to launch, or the last one is in flight
    SENDING = auto()  # the decode service has its PrebuiltBatch entry; its KV is still being sent, or is lent
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Prompt:
    """The engine's record of one prompt, which is the row with index `index` in the OpenCall of `call_id`.

    `num_launched_tokens` counts the tokens of `row.token_ids` that were given to a forward.
    """

    call_id: str
    index: int
    row: HandoffRow
    arrived_s: float
    is_traced: bool = False
    phase: PromptPhase = PromptPhase.QUEUED
    lease: RowLease | None = None
    num_launched_tokens: int = 0
    started_s: float = 0.0
    token_ids: NDArray[np.int64] = field(init=False)  # those of `row`

    def __post_init__(self) -> None:
        self.token_ids = np.array(self.row.token_ids, np.int64)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_launched_tokens

    @property
    def row_seed(self) -> RowSeed:
        assert self.lease is not None
        row = self.row
        return RowSeed(self.lease.row, row.sampling, row.choice_index, row.token_ids, row.prompt_len)
