"""The input of one forward that computes chunks of many prompts together, and the log-probabilities of their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import Device
from common.device.upload import device_copy, upload, upload_array
from common.draft.extend import NextTokens
from common.grammar.matcher import Matcher, MinLength, fill_nodes, num_words
from common.kv.pool import KvPool, RowLease
from common.sampling.params import ResolvedSampling
from common.sampling.prompt_logprobs import PromptLogprobs
from common.sampling.state import RowStart, SamplingBatch

MAX_LOGITS_BYTES = 64 << 20
"""The most bytes of float32 logits for the prompt tokens of one forward. All that is computed from them takes less than
twice as much again, so that prompts with log-probabilities need at most 192 MiB more than others.
"""
_MAX_SCORED_TOKENS = 4096
"""The most prompt tokens of one forward that are scored. It bounds the messages that carry the results."""


class ChunkedPrompt(Protocol):
    """A prompt that is computed in chunks: its tokens [N] int64, its row, and how it is sampled.

    `num_launched_tokens` counts its tokens whose KV is cached, or is computed by a forward that was launched. The first
    `prompt_len` tokens are the prompt, and those after it output that the request has already. If its output is
    constrained, its `matcher` has accepted that output.
    """

    @property
    def token_ids(self) -> NDArray[np.int64]: ...

    @property
    def lease(self) -> RowLease | None: ...

    @property
    def sampling(self) -> ResolvedSampling: ...

    num_launched_tokens: int

    @property
    def prompt_len(self) -> int: ...

    @property
    def row_start(self) -> RowStart: ...

    @property
    def matcher(self) -> Matcher | None: ...


PromptT = TypeVar("PromptT", bound=ChunkedPrompt)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[PromptT]):
    """Tokens [start, stop) of one prompt."""

    prompt: PromptT
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_attended(self) -> int:
        """The number of tokens attended to, summed over the chunk's tokens. Each attends to itself and all before."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2

    @property
    def is_first(self) -> bool:
        """Whether nothing of the prompt was computed before, since it got its row."""
        return self.prompt.lease is not None and self.start == self.prompt.lease.num_cached

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prompt.token_ids)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self.prompt.token_ids[self.start : self.stop]

    @property
    def num_scored(self) -> int:
        """How many of the chunk's first tokens need logits, to score the prompt token that follows each of them."""
        if self.prompt.sampling.num_prompt_logprobs is None:
            return 0
        return max(min(self.stop, self.prompt.prompt_len - 1) - self.start, 0)

    @property
    def scored_ids(self) -> NDArray[np.int64]:
        """The prompt tokens whose log-probabilities this chunk's logits give. Shape: [num_scored]."""
        return self.prompt.token_ids[self.start + 1 : self.start + 1 + self.num_scored]

    def next_ids(self, num_ahead: int) -> NDArray[np.int64]:
        """Returns the ids of the prompt's tokens from start + 1 up to and including stop + `num_ahead`.

        The first `num_tokens` of them follow the chunk's tokens one by one. Shape: [num_tokens + num_ahead]. They may
        belong to a later chunk; past the prompt's end they are 0.
        """
        following = self.prompt.token_ids[self.start + 1 : self.stop + 1 + num_ahead]
        return np.append(following, np.zeros(self.num_tokens + num_ahead - len(following), np.int64))


def cut_chunks(
    prompts: Sequence[PromptT],
    *,
    chunk_tokens: int,
    max_batch_tokens: int,
    max_scored_tokens: int,
    min_last_tokens: int = 1,
) -> list[Chunk[PromptT]]:
    """Cuts the next chunk of each prompt for one forward, in the order of `prompts`, as far as the limits allow.

    A chunk has at most `chunk_tokens`, and all together have at most `max_batch_tokens`, of which at most
    `max_scored_tokens` are scored. A prompt's last chunk has at least `min_last_tokens`, or is the whole prompt.
    `chunk_tokens` and `max_scored_tokens` must be at least `min_last_tokens`.
    """
    chunks = []
    budget, num_to_score = max_batch_tokens, max_scored_tokens
    for prompt in prompts:
        num_left = len(prompt.token_ids) - prompt.num_launched_tokens
        size = min(chunk_tokens, num_left, budget)
        if prompt.sampling.num_prompt_logprobs is not None and prompt.num_launched_tokens < prompt.prompt_len - 1:
            size = min(size, num_to_score)
        if 0 < num_left - size < min_last_tokens:
            size = num_left - min_last_tokens
        if size > 0:
            chunk = Chunk(prompt, prompt.num_launched_tokens, prompt.num_launched_tokens + size)
            chunks.append(chunk)
            budget -= size
            num_to_score -= chunk.num_scored
    return chunks


@dataclass(frozen=True, slots=True)
class ChunkBatch(Generic[PromptT]):
    """The chunks and tensors of one forward. It owns all its tensors.

    `sampled_entries` are the indices of the R chunks that end their prompt; for these the forward draws a first token.
    `sampled_rows` [R] int64 are their pool rows, and `sampled_positions` [R] int64 the first tokens' own positions,
    which are the prompts' lengths. `scored_ids` [S] int64 are the prompt tokens whose log-probabilities are wanted, in
    the order of the chunks, or None if there are none. The forward gives R + S logits: those from which the first
    tokens are drawn, then those that score `scored_ids`. `next_tokens` gives the draft head the tokens that follow each
    token. Past a prompt's end they are 0; the forward fills in the first token when it is drawn. `masks` has a mask for
    each constrained first token, as `draw` takes them, or is None if none is constrained.
    """

    chunks: tuple[Chunk[PromptT], ...]
    forward_input: ForwardInput
    next_tokens: NextTokens
    sampled_entries: tuple[int, ...]
    sampled_rows: Tensor
    sampled_positions: Tensor
    scored_ids: Tensor | None
    sampling: SamplingBatch
    masks: Tensor | None

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk[PromptT]],
        *,
        pool: KvPool,
        layer_group: str,
        vocab_size: int,
        num_draft_layers: int = 1,
    ) -> ChunkBatch[PromptT]:
        table = pool.rows.req_to_token
        device = table.device

        def tensor(values: Sequence[int]) -> Tensor:
            return upload(values, torch.int64, device)

        def joined(parts: Iterable[NDArray[np.int64]]) -> Tensor:
            return upload_array(np.concatenate(list(parts)), device)

        leases = [chunk.prompt.lease for chunk in chunks]
        rows = [lease.row for lease in leases if lease is not None]
        assert len(rows) == len(chunks), "a prompt that computes holds a row"
        pool.extend_windows(np.array(rows), np.array([chunk.stop for chunk in chunks]))
        stops = list(itertools.accumulate(chunk.num_tokens for chunk in chunks))
        num_ahead = num_draft_layers - 1
        entries = tuple(i for i, chunk in enumerate(chunks) if chunk.is_last)
        scored_places = [
            place
            for chunk, stop in zip(chunks, stops, strict=True)
            for place in range(stop - chunk.num_tokens, stop - chunk.num_tokens + chunk.num_scored)
        ]
        forward_input = ForwardInput(
            input_ids=joined(chunk.token_ids for chunk in chunks),
            positions=joined(np.arange(chunk.start, chunk.stop) for chunk in chunks),
            out_cache_loc=joined(
                lease.slots[chunk.start : chunk.stop]
                for chunk, lease in zip(chunks, leases, strict=True)
                if lease is not None
            ),
            req_to_token=table,
            req_pool_indices=tensor(rows),
            seq_lens=tensor([chunk.stop for chunk in chunks]),
            prefix_lens=tuple(chunk.start for chunk in chunks),
            extend_lens=tuple(chunk.num_tokens for chunk in chunks),
            max_seq_len=max(chunk.stop for chunk in chunks),
            kv=pool.buffers[layer_group],
            windows=pool.windows_beside(layer_group),
            logits_rows=tensor([*(stops[i] - 1 for i in entries), *scored_places]),
        )
        return cls(
            chunks=tuple(chunks),
            forward_input=forward_input,
            next_tokens=NextTokens(
                joined(chunk.next_ids(num_ahead) for chunk in chunks),
                joined(
                    np.arange(stop - chunk.num_tokens, stop) + i * num_ahead
                    for i, (chunk, stop) in enumerate(zip(chunks, stops, strict=True))
                ),
            ),
            sampled_entries=entries,
            sampled_rows=tensor([rows[i] for i in entries]),
            sampled_positions=tensor([chunks[i].stop for i in entries]),
            scored_ids=joined(chunk.scored_ids for chunk in chunks) if scored_places else None,
            sampling=SamplingBatch.of([chunks[i].prompt.sampling for i in entries]),
            masks=_masks([chunks[i].prompt for i in entries], vocab_size, device),
        )

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_top_scored(self) -> int:
        """The largest number of most likely tokens that a scored prompt asks for at each position."""
        return max(chunk.prompt.sampling.num_prompt_logprobs or 0 for chunk in self.chunks if chunk.num_scored)

    def prompt_logprobs(self, scores: Scores) -> Iterator[tuple[PromptT, PromptLogprobs]]:
        """Yields the prompts of which tokens were scored, each with its log-probabilities.

        `scores` are those of `scored_ids`, on the host. The log-probabilities are copies, so they do not keep all of
        `scores` alive.
        """
        on_host = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_values)
        logprobs, ranks, top_ids, top_values = (column.numpy() for column in on_host)
        stop = 0
        for chunk in self.chunks:
            if not chunk.num_scored:
                continue
            own, stop = slice(stop, stop + chunk.num_scored), stop + chunk.num_scored
            num_top = chunk.prompt.sampling.num_prompt_logprobs
            columns = (logprobs[own], ranks[own], top_ids[own, :num_top], top_values[own, :num_top])
            yield chunk.prompt, PromptLogprobs(chunk.start + 1, *map(np.copy, columns))


def _masks(prompts: Sequence[ChunkedPrompt], vocab_size: int, device: torch.device) -> Tensor | None:
    """Returns the masks of the first tokens of those `prompts` that have a matcher, or None if none has."""
    constrained = [(prompt, prompt.matcher) for prompt in prompts if prompt.matcher is not None]
    if not constrained:
        return None
    masks = np.empty((len(constrained), 1, num_words(vocab_size)), np.int32)
    for place, (prompt, matcher) in enumerate(constrained):
        num_output = len(prompt.token_ids) - prompt.prompt_len
        least = MinLength(prompt.sampling.min_tokens - num_output, prompt.sampling.end_token_ids)
        fill_nodes(matcher, masks[place], least)
    return device_copy(torch.from_numpy(masks[:, 0]), device)


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
