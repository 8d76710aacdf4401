"""The input of one forward of the decode service: a snapshot that the schedule side makes and never changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.upload import device_copy
from common.grammar.matcher import NOT_FORCED
from common.sampling.state import SamplingBatch
from decode_service.speculate.spec_info import SpecInfo


class ForwardMode(Enum):
    """How a batch gets its next tokens."""

    PREBUILT = auto()  # its first tokens came with the handoff: it needs no forward
    DECODE = auto()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward. It owns its tensors and refers to no request and no ScheduleBatch.

    The target computes M tokens per entry. `positions` [B * M] are the M positions after each entry's prefix; a worker
    that drafts a tree computes its own. `seq_lens` [B] includes the M tokens; `prefix_lens` [B] is the length of the KV
    before them. `seq_lens_sum` is the sum of `seq_lens`. `out_cache_loc` [B * S] are the slots after the prefix that
    the step may write, S for each entry. `undrafted` are the indices of entries whose requests want no drafts: their
    drafts are ignored. `draft_lag` [B] counts the tokens that the head has not read before this step.

    `forced` [B, levels] are the tokens that entries' grammars force, as far as they go: the rest is NOT_FORCED. They
    are drafted in place of the head's guesses. It is None if there are none. `num_forced` [B] says how many each entry
    has.
    """

    req_pool_indices: Tensor
    seq_lens: Tensor
    prefix_lens: Tensor
    seq_lens_cpu: NDArray[np.int64]
    seq_lens_sum: int
    positions: Tensor
    out_cache_loc: Tensor
    sampling: SamplingBatch
    spec_info: SpecInfo | None
    undrafted: tuple[int, ...]
    draft_lag: NDArray[np.int64]
    forced: Tensor | None
    num_forced: NDArray[np.int64]
    forward_mode: ForwardMode

    @classmethod
    def of(
        cls,
        *,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: NDArray[np.int64],
        out_cache_loc: Tensor,
        sampling: SamplingBatch,
        spec_info: SpecInfo | None,
        undrafted: tuple[int, ...],
        draft_lag: NDArray[np.int64],
        forced: NDArray[np.int64] | None = None,
    ) -> ForwardBatch:
        """Builds a step's batch from copies of the schedule side's columns.

        `seq_lens` and `seq_lens_cpu` [B] are the lengths that the step was prepared with. Without drafts they include
        its one token; with drafts they include none of its tokens. `forced` is the column, on the host.
        """
        num_tokens = 1 if spec_info is None else spec_info.num_verify_tokens
        num_ahead = num_tokens if spec_info is not None and spec_info.has_drafts else 0
        seq_lens_cpu = seq_lens_cpu + num_ahead
        seq_lens = seq_lens + num_ahead if num_ahead else seq_lens.clone()
        prefix_lens = seq_lens - num_tokens
        return cls(
            req_pool_indices=req_pool_indices.clone(),
            seq_lens=seq_lens,
            prefix_lens=prefix_lens,
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            positions=prefix_lens if num_tokens == 1 else windows(prefix_lens, num_tokens).flatten(),
            out_cache_loc=out_cache_loc.clone(),
            sampling=sampling,
            spec_info=spec_info,
            undrafted=undrafted,
            draft_lag=draft_lag.copy(),
            forced=None if forced is None else device_copy(torch.from_numpy(forced), seq_lens.device),
            num_forced=np.zeros_like(draft_lag) if forced is None else np.count_nonzero(forced != NOT_FORCED, axis=1),
            forward_mode=ForwardMode.DECODE,
        )

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_cpu)

    @property
    def num_tokens(self) -> int:
        """M: the number of tokens per entry that the target computes."""
        return 1 if self.spec_info is None else self.spec_info.num_verify_tokens

    @property
    def has_drafts(self) -> bool:
        """Whether the step drafts. If so, only the forward finds out how many tokens it commits."""
        return self.spec_info is not None and self.spec_info.has_drafts

    @property
    def leaves_head_behind(self) -> bool:
        """Whether the draft head does not read the step's tokens now: they are stored for it to read later."""
        return self.spec_info is not None and not self.spec_info.head_reads(self.draft_lag)

    @property
    def draft_lag_after(self) -> NDArray[np.int64]:
        """The number of tokens, [B], that the head has not read after the step."""
        return self.draft_lag + 1 if self.leaves_head_behind else np.zeros_like(self.draft_lag)

    @property
    def max_accept_len(self) -> int:
        """The largest number of tokens that the step commits per entry."""
        return 1 if self.spec_info is None else self.spec_info.max_accept_len


def windows(starts: Tensor, num_tokens: int) -> Tensor:
    """Returns `num_tokens` consecutive positions for each start in `starts` [B], as [B, num_tokens]."""
    return starts.unsqueeze(1) + torch.arange(num_tokens, device=starts.device)
