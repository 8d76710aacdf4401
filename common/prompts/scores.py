"""Log-probabilities of prompt tokens, from the forwards that compute the prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.device.stream import Device

MAX_LOGITS_BYTES = 64 << 20
"""The most bytes of float32 logits for the prompt tokens of one forward. All that is computed from them takes less than
twice as much again, so that prompts with log-probabilities need at most 192 MiB more than others.
"""
_MAX_SCORED_TOKENS = 4096
"""The most prompt tokens of one forward that are scored. It bounds the messages that carry the results."""


def max_scored_tokens(vocab_size: int) -> int:
    """Returns for how many prompt tokens one forward may compute log-probabilities."""
    return max(1, min(MAX_LOGITS_BYTES // (4 * vocab_size), _MAX_SCORED_TOKENS))


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probabilities of S prompt tokens: `logprobs` [S] float32 and `ranks` [S] int64, and of the k most likely
    tokens at each of their positions: `top_ids` [S, k] int64 and `top_values` [S, k] float32.

    The most likely token at a position has rank 1.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, *, num_top: int) -> Scores:
        """Scores `token_ids` [S] int64 by the logits [S, vocab] float32 of the tokens before them."""
        logprobs = torch.log_softmax(logits, dim=-1)
        own = logprobs.gather(1, token_ids.unsqueeze(1))
        top = logprobs.topk(num_top, dim=-1)
        return cls(own.squeeze(1), (logprobs > own).sum(dim=1) + 1, top.indices, top.values)

    def to_host(self, device: Device) -> Scores:
        """Starts to copy the tensors to the host, and returns the copies.

        Read them only after an event that is recorded later on the current stream.
        """
        return Scores(*map(device.to_host, (self.logprobs, self.ranks, self.top_ids, self.top_values)))
