"""Turns a step's sampled tensors, once on the host, into the log-probabilities of each batch entry."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.sampling.operators import Sampled
from common.sampling.params import TokenLogprobs
from common.sampling.state import SamplingBatch


def unpack_logprobs(sampled: Sampled, batch: SamplingBatch, *, width: int = 1) -> NDArray[np.object_]:
    """Returns [B, width] objects: a TokenLogprobs for each token, or None where the request wants no log-probabilities.

    Each has as many top entries as the request asked for. `sampled` has `width` adjacent tokens for each entry of
    `batch`.
    """
    unpacked = np.full((len(sampled.token_ids) // width, width), None, dtype=np.object_)
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return unpacked
    columns = (
        sampled.logprobs.tolist(),
        sampled.top_ids.tolist(),
        sampled.top_logprobs.tolist(),
        batch.num_top_logprobs.repeat(width).tolist(),
    )
    items = [
        TokenLogprobs(chosen, tuple(top_ids[:num_top]), tuple(top_values[:num_top]))
        for chosen, top_ids, top_values, num_top in zip(*columns, strict=True)
    ]
    unpacked[batch.with_logprobs] = np.fromiter(items, np.object_, len(items)).reshape(-1, width)
    return unpacked
