"""Builds the frame that takes a prompt's first token and draft seeds to the decode service."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.draft.seed import column_to_numpy
from common.kv.pool import KvPool
from common.prompts.chunk_batch import ChunkBatch
from common.prompts.worker import Computed
from common.sampling.logprobs import unpack_logprobs
from common.sampling.params import TokenLogprobs
from common.wire.handoff import PrebuiltBatch
from prefill_service.handoff.piece import first_sent
from prefill_service.prompt import Prompt


def first_tokens(
    batch: ChunkBatch[Prompt],
    computed: Computed,
    calls: Sequence[Sequence[int]],
    *,
    pool: KvPool,
    now_s: float,
) -> list[PrebuiltBatch]:
    """Returns one PrebuiltBatch for each Handoff call in `calls`.

    A call is given as the indices of its prompts in `batch.sampled_entries`. `pool` has the KV that is sent. `now_s` is
    the time by the engine's clock.
    """
    prompts = [batch.chunks[entry].prompt for entry in batch.sampled_entries]
    logprobs = unpack_logprobs(computed.sampled, batch.sampling)[:, 0].tolist()
    return [
        _of_call([prompts[place] for place in places], places, computed, logprobs, pool=pool, now_s=now_s)
        for places in calls
    ]


def _of_call(
    prompts: Sequence[Prompt],
    places: Sequence[int],
    computed: Computed,
    logprobs: Sequence[TokenLogprobs | None],
    *,
    pool: KvPool,
    now_s: float,
) -> PrebuiltBatch:
    num_tokens = np.array([prompt.num_tokens for prompt in prompts], dtype=np.int64)
    return PrebuiltBatch(
        rows=np.array([prompt.index for prompt in prompts], dtype=np.int64),
        seq_lens=num_tokens,
        first_token_ids=computed.sampled.token_ids.numpy()[list(places)],
        bytes_sent={
            name: np.array(
                [group.token_bytes * (prompt.num_tokens - first_sent(prompt, pool, name)) for prompt in prompts],
                np.int64,
            )
            for name, group in pool.groups.items()
        },
        queue_s=np.array([prompt.started_s - prompt.arrived_s for prompt in prompts]),
        compute_s=np.array([now_s - prompt.started_s for prompt in prompts]),
        num_cached_tokens=np.array([_num_cached(prompt) for prompt in prompts], dtype=np.int64),
        first_token_logprobs=tuple(logprobs[place] for place in places),
        seed_columns={name: column_to_numpy(seeds[list(places)]) for name, seeds in computed.seeds.items()},
    )


def _num_cached(prompt: Prompt) -> int:
    assert prompt.lease is not None, "a prompt whose first token is told holds a row"
    return prompt.lease.num_cached
