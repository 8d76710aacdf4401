"""From a step's sampled tensors on the host to each entry's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from common.model.sampling import Sampled
from common.model.sampling_params import TokenLogprobs
from common.model.sampling_state import SamplingBatch


def unpack_logprobs(
    sampled: Sampled, batch: SamplingBatch, num_logprobs: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """One item per batch entry: None where none were asked for, else as many top entries as that entry asked for."""
    unpacked: list[TokenLogprobs | None] = [None] * len(num_logprobs)
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return unpacked
    chosen = sampled.logprobs.tolist()
    top_ids = sampled.top_ids.tolist()
    top_values = sampled.top_logprobs.tolist()
    for place, entry in enumerate(batch.with_logprobs):
        width = num_logprobs[entry] or 0
        unpacked[entry] = TokenLogprobs(chosen[place], tuple(top_ids[place][:width]), tuple(top_values[place][:width]))
    return unpacked
