"""The log-probabilities of tokens of a prompt, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

_TOKEN_BYTES = _TOP_BYTES = 4 + 8


def num_bytes_of(num_tokens: int, num_top: int) -> int:
    """Returns how many bytes PromptLogprobs of `num_tokens` tokens with `num_top` top tokens each take."""
    return num_tokens * (_TOKEN_BYTES + num_top * _TOP_BYTES)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of N tokens of a prompt, from position `start` on, under the model's unmodified distribution.

    `logprobs` [N] float32 and `ranks` [N] int64 are those of the prompt's own tokens; the most likely token at a
    position has rank 1. `top_ids` [N, k] int64 and `top_values` [N, k] float32 are the most likely tokens at each
    position.
    """

    start: int
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_values: NDArray[np.float32]

    @property
    def stop(self) -> int:
        return self.start + len(self.logprobs)

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(*self.top_ids.shape)

    def part(self, start: int, stop: int) -> Self:
        """Returns the log-probabilities of positions [start, stop) only. This object must have all of these."""
        own = slice(start - self.start, stop - self.start)
        columns = (self.logprobs[own], self.ranks[own], self.top_ids[own], self.top_values[own])
        return type(self)(start, *columns)
