"""How the attention of one forward's chunks is cut into items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton_cpu.attention import MAX_QUERIES
from baton_cpu.program.kernel.attending_chunks import QUERY_TOKENS, packed_tokens
from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from common.model.attention import ForwardInput


@dataclass(frozen=True, slots=True)
class ChunkParts:
    """Of the rows with more than MAX_QUERIES new tokens, each by its place in the batch.

    Shapes: key_parts [n, 2] int64, a row and the position of a panel's first key; query_parts [n, 2] int64, a row and
    the first of some new tokens, those with most to attend first, so that threads end together; packed_starts [B + 1]
    int64, where each row's panels begin, in tokens.
    """

    key_parts: NDArray[np.int64]
    query_parts: NDArray[np.int64]
    packed_starts: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Whose keys and values are packed."""
        return int(self.packed_starts[-1])

    @classmethod
    def of(cls, batch: ForwardInput) -> ChunkParts:
        key_parts: list[tuple[int, int]] = []
        query_parts: list[tuple[int, int, int]] = []
        starts = [0]
        extend_lens = batch.extend_lens or (1,) * batch.req_pool_indices.shape[0]
        for row, num_new in enumerate(extend_lens):
            starts.append(starts[-1])
            if num_new <= MAX_QUERIES:
                continue
            assert batch.prefix_lens is not None
            prefix_len = batch.prefix_lens[row]
            starts[-1] += packed_tokens(prefix_len + num_new)
            key_parts += [(row, begin) for begin in range(0, prefix_len + num_new, PANEL_WIDTH)]
            query_parts += [(prefix_len + begin, row, begin) for begin in range(0, num_new, QUERY_TOKENS)]
        query_parts.sort(reverse=True)
        return cls(
            np.array(key_parts, np.int64).reshape(-1, 2),
            np.array([part[1:] for part in query_parts], np.int64).reshape(-1, 2),
            np.array(starts, np.int64),
        )
