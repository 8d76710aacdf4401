"""Computes prompts chunk by chunk, for both services: what is launched, and what each forward has brought at its end.

cut ──▶ chunks ──launch──▶ ChunksInFlight ──its end, taken──▶ EndedChunks: first tokens, log-probabilities, failures

The caller decides in which order prompts are computed, how many forwards are in flight, how to wait for them, and where
first tokens and KV go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from common.device.stream import NOT_YET, Event, Scope, Stream, raise_if_device_failed
from common.draft.seed import column_to_numpy
from common.engine import EngineParts
from common.errors import RowFailure
from common.kv.pool import KvPool
from common.prompts.chunk_batch import Chunk, ChunkBatch, PromptT, cut_chunks, max_scored_tokens
from common.prompts.worker import Computed, LaunchedChunks, Meanwhile, PromptWorker
from common.sampling.operators import unpack_logprobs
from common.sampling.params import TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.sampling.state import SamplingState
from common.wire.handoff import PrebuiltBatch


@dataclass(frozen=True, slots=True)
class ChunksInFlight(Generic[PromptT]):
    """A launched forward of chunks. It keeps its tensors alive until `end`."""

    batch: ChunkBatch[PromptT]
    launched: LaunchedChunks
    end: Event


@dataclass(frozen=True, slots=True)
class FirstTokens(Generic[PromptT]):
    """The first tokens and draft seeds of `prompts`, as columns in their order."""

    prompts: tuple[PromptT, ...]
    token_ids: NDArray[np.int64]
    logprobs: tuple[TokenLogprobs | None, ...]
    seeds: dict[str, NDArray[np.generic]]

    @classmethod
    def drawn(cls, places: Sequence[int], batch: ChunkBatch[PromptT], computed: Computed) -> FirstTokens[PromptT]:
        """Returns the first tokens of a forward at `places`, indices of the batch's `sampled_entries`."""
        rows = np.array(places, np.int64)
        logprobs = unpack_logprobs(computed.sampled, batch.sampling)[:, 0].tolist()
        return cls(
            tuple(batch.chunks[batch.sampled_entries[place]].prompt for place in places),
            computed.sampled.token_ids.numpy()[rows],
            tuple(logprobs[place] for place in places),
            {name: column_to_numpy(seeds)[rows] for name, seeds in computed.seeds.items()},
        )

    def at(self, places: Sequence[int]) -> FirstTokens[PromptT]:
        """Returns the first tokens of the prompts at these places."""
        return FirstTokens(
            tuple(self.prompts[place] for place in places),
            self.token_ids[places],
            tuple(self.logprobs[place] for place in places),
            {name: column[places] for name, column in self.seeds.items()},
        )

    def frame(
        self,
        *,
        rows: NDArray[np.int64],
        bytes_sent: dict[str, NDArray[np.int64]],
        queue_s: NDArray[np.float64],
        compute_s: NDArray[np.float64],
    ) -> PrebuiltBatch:
        """Returns the frame with these first tokens. The arguments are columns with one entry for each prompt."""
        leases = [prompt.lease for prompt in self.prompts]
        return PrebuiltBatch(
            rows=rows,
            seq_lens=np.array([len(prompt.token_ids) for prompt in self.prompts], np.int64),
            first_token_ids=self.token_ids,
            bytes_sent=bytes_sent,
            queue_s=queue_s,
            compute_s=compute_s,
            num_cached_tokens=np.array([lease.num_cached for lease in leases if lease is not None], np.int64),
            first_token_logprobs=self.logprobs,
            seed_columns=self.seeds,
        )


@dataclass(frozen=True, slots=True)
class FailedPrompt(Generic[PromptT]):
    """A prompt that cannot be computed further, and why. If `is_retryable`, it may succeed when it is computed anew."""

    prompt: PromptT
    reason: RowFailure
    message: str
    is_retryable: bool


@dataclass(frozen=True, slots=True)
class EndedChunks(Generic[PromptT]):
    """What a forward has brought for the prompts that still want it: the KV of `chunks`, log-probabilities of their
    tokens, and the first tokens of those whose last chunk it computed. `failed` are the prompts that have failed.
    """

    chunks: Sequence[Chunk[PromptT]] = ()
    scored: Sequence[tuple[PromptT, PromptLogprobs]] = ()
    first: FirstTokens[PromptT] | None = None
    failed: Sequence[FailedPrompt[PromptT]] = ()


class PromptChunks(Generic[PromptT]):
    """Launches forwards of chunks on the forward stream `stream`, and takes their results. Only the engine's thread
    calls it, and nothing here waits.

    A chunk has at most `chunk_tokens`, and a forward at most `max_batch_tokens`; each is at least the number of the
    draft head's layers. `draft_topk` is the number of first drafts in a draft seed. `name` is what forwards are called
    in errors of the device and in the timeline.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        name: str,
        pool: KvPool,
        sampling_state: SamplingState,
        stream: Stream,
        draft_topk: int,
        chunk_tokens: int,
        max_batch_tokens: int,
    ) -> None:
        self._name = name
        self._pool = pool
        self._device = parts.device
        self._stream = stream
        self._sampling_state = sampling_state
        self._layer_group = parts.model.layer_group.name
        self._num_draft_layers = max(parts.num_draft_layers, 1)
        assert min(chunk_tokens, max_batch_tokens) >= self._num_draft_layers, "a last chunk has a token for each layer"
        self._chunk_tokens = chunk_tokens
        self._max_batch_tokens = max_batch_tokens
        self._max_scored_tokens = max(max_scored_tokens(parts.model.vocab_size), self._num_draft_layers)
        self.worker = PromptWorker(
            parts, draft_topk=draft_topk, pool=pool, sampling_state=sampling_state, stream=stream
        )
        self._num_launched = 0

    def cut(self, prompts: Sequence[PromptT]) -> list[Chunk[PromptT]]:
        """Returns the next chunks of `prompts`, in this order, as far as one forward has room. A last chunk has a token
        for each layer of the draft head, or is the whole prompt.
        """
        return cut_chunks(
            prompts,
            chunk_tokens=self._chunk_tokens,
            max_batch_tokens=self._max_batch_tokens,
            max_scored_tokens=self._max_scored_tokens,
            min_last_tokens=self._num_draft_layers,
        )

    def launch(
        self, chunks: Sequence[Chunk[PromptT]], *, layers_per_event: int = 0, meanwhile: Meanwhile | None = None
    ) -> ChunksInFlight[PromptT]:
        """Launches the forward of `chunks`, which are not empty. The other arguments are those of
        `PromptWorker.forward`.
        """
        batch = ChunkBatch.of(
            chunks,
            pool=self._pool,
            layer_group=self._layer_group,
            vocab_size=self._sampling_state.vocab_size,
            num_draft_layers=self._num_draft_layers,
        )
        scope = Scope(f"{self._name} {self._num_launched}")
        self._num_launched += 1
        self._stream.wait(self._device.schedule_stream.record())
        if starts := [chunk.prompt.row_start for chunk in chunks if chunk.is_first]:
            self._stream.enqueue(partial(self._sampling_state.reset, starts), scope)
        self._use_until(NOT_YET, chunks)  # while these are launched, ended chunks may give their KV to the cache
        launched = self.worker.forward(batch, scope, layers_per_event=layers_per_event, meanwhile=meanwhile)
        in_flight = ChunksInFlight(batch, launched, self._stream.record(scope))
        self._use_until(in_flight.end, chunks)
        for chunk in chunks:
            chunk.prompt.num_launched_tokens = chunk.stop
        return in_flight

    def _use_until(self, end: Event, chunks: Sequence[Chunk[PromptT]]) -> None:
        for chunk in chunks:
            assert chunk.prompt.lease is not None
            chunk.prompt.lease.use_until(end, self._stream)

    def take(self, ended: ChunksInFlight[PromptT], is_wanted: Callable[[PromptT], bool]) -> EndedChunks[PromptT]:
        """Takes the results of a forward that has ended. KV that it computed goes to the prefix cache.

        `is_wanted` says whether a prompt is still to be computed: others get nothing. Raises the error of a failed
        device or stream.
        """
        raise_if_device_failed(ended.end)  # no later forward can succeed
        chunks = [chunk for chunk in ended.batch.chunks if is_wanted(chunk.prompt)]
        if (failure := ended.end.error) is not None:
            why = f"a prefill step failed: {failure}"
            return EndedChunks(failed=[FailedPrompt(chunk.prompt, RowFailure.COMPUTE, why, True) for chunk in chunks])
        for chunk in chunks:
            assert chunk.prompt.lease is not None
            self._pool.keep(chunk.prompt.lease, chunk.prompt.token_ids, chunk.stop)
            self._pool.leave_behind(np.array([chunk.prompt.lease.row]), np.array([chunk.stop]))
        computed = ended.launched.computed.get()
        scores = () if computed.scores is None else ended.batch.prompt_logprobs(computed.scores)
        scored = [(prompt, logprobs) for prompt, logprobs in scores if is_wanted(prompt)]
        failed, drawn = list[FailedPrompt[PromptT]](), list[int]()
        are_invalid = computed.sampled.is_invalid.tolist()
        for place, entry in enumerate(ended.batch.sampled_entries):
            prompt = ended.batch.chunks[entry].prompt
            if not is_wanted(prompt):
                continue
            if (failed_prompt := _failure_of(prompt, is_invalid=are_invalid[place])) is None:
                drawn.append(place)
                continue
            failed.append(failed_prompt)
            if failed_prompt.reason is RowFailure.COMPUTE:
                assert prompt.lease is not None
                self._pool.forget(prompt.lease)
        first = FirstTokens.drawn(drawn, ended.batch, computed) if drawn else None
        return EndedChunks(chunks, scored, first, failed)


def _failure_of(prompt: PromptT, *, is_invalid: bool) -> FailedPrompt[PromptT] | None:
    """Returns why the prompt has no first token, or None if it has one. `is_invalid` says that no valid token was
    drawn.
    """
    if prompt.matcher is not None and prompt.matcher.failure:
        why = prompt.sampling.constraint_error(prompt.matcher.failure).message
        return FailedPrompt(prompt, RowFailure.CONSTRAINT, why, is_retryable=False)
    if is_invalid:
        is_retryable = prompt.lease is not None and prompt.lease.num_cached > 0
        return FailedPrompt(prompt, RowFailure.COMPUTE, "the model produced no finite logit", is_retryable)
    return None
