"""One prefill forward: chunks of many prompts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.device.upload import upload
from common.kv.pool import KvPool
from common.model.attention import ForwardInput
from common.model.sampling_state import SamplingBatch
from prefill_service.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of one prompt."""

    prompt: Prompt
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.prompt.num_tokens

    def next_ids(self) -> list[int]:
        """The token after each of the chunk's: at its end the prompt's next one, whatever computes it."""
        following = list(self.prompt.row.token_ids[self.start + 1 : self.stop + 1])
        return [*following, 0] if self.is_last else following


def cut_chunks(prompts: Sequence[Prompt], *, chunk_tokens: int, max_batch_tokens: int) -> list[Chunk]:
    """The next forward's chunks: oldest prompts first, at most `chunk_tokens` of each, `max_batch_tokens` together."""
    chunks = []
    budget = max_batch_tokens
    for prompt in prompts:
        size = min(chunk_tokens, prompt.num_left, budget)
        if size > 0:
            chunks.append(Chunk(prompt, prompt.num_launched_tokens, prompt.num_launched_tokens + size))
            budget -= size
    return chunks


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """The tensors of one forward; it owns them all.

    `sampled_rows` and `sampled_positions` [R] int64 belong to the chunks that end their prompt, in order: each row's
    first token is drawn there. `sampled_entries` are those chunks' places in `chunks`. `next_ids` [T] int64 is the
    token after each of the forward's; 0 at the end of a prompt, where it is the one to be drawn.
    """

    chunks: tuple[Chunk, ...]
    forward_input: ForwardInput
    next_ids: Tensor
    sampled_entries: tuple[int, ...]
    sampled_rows: Tensor
    sampled_positions: Tensor
    sampling: SamplingBatch

    @classmethod
    def of(cls, chunks: Sequence[Chunk], *, pool: KvPool, layer_group: str) -> ChunkBatch:
        table = pool.rows.req_to_token
        device = table.device

        def tensor(values: Sequence[int]) -> Tensor:
            return upload(values, torch.int64, device)

        leases = [chunk.prompt.lease for chunk in chunks]
        rows = [lease.row for lease in leases if lease is not None]
        assert len(rows) == len(chunks), "a prompt that computes holds a row"
        last_token_places = []
        num_before = 0
        for chunk in chunks:
            num_before += chunk.stop - chunk.start
            last_token_places.append(num_before - 1)
        entries = tuple(i for i, chunk in enumerate(chunks) if chunk.is_last)
        forward_input = ForwardInput(
            input_ids=tensor([token for c in chunks for token in c.prompt.row.token_ids[c.start : c.stop]]),
            positions=tensor([position for c in chunks for position in range(c.start, c.stop)]),
            out_cache_loc=tensor(
                [
                    slot
                    for c, lease in zip(chunks, leases, strict=True)
                    if lease is not None
                    for slot in lease.slots[c.start : c.stop]
                ]
            ),
            req_to_token=table,
            req_pool_indices=tensor(rows),
            seq_lens=tensor([chunk.stop for chunk in chunks]),
            prefix_lens=tuple(chunk.start for chunk in chunks),
            extend_lens=tuple(chunk.stop - chunk.start for chunk in chunks),
            max_seq_len=max(chunk.stop for chunk in chunks),
            kv=pool.buffers[layer_group],
            logits_rows=tensor([last_token_places[i] for i in entries]),
        )
        return cls(
            chunks=tuple(chunks),
            forward_input=forward_input,
            next_ids=tensor([token for chunk in chunks for token in chunk.next_ids()]),
            sampled_entries=entries,
            sampled_rows=tensor([rows[i] for i in entries]),
            sampled_positions=tensor([chunks[i].stop for i in entries]),
            sampling=SamplingBatch.of([chunks[i].prompt.row.sampling for i in entries]),
        )

    @property
    def num_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)
