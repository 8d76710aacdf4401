"""Computes prompts in the decode service itself, in chunks between decode steps.

begin ──▶ chunk on the forward stream, before the next decode step ──▶ ... ──▶ last chunk ──▶ first token: ready

A request comes here when little of its prompt is left to compute, when every replica lacks much more of it, or when no
prefill replica is ready and `prefill_fallback` is on. Its KV is written to its own slots, so nothing is handed over. A
ready request joins the running batch like one whose KV has landed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from common.device.cell import Cell
from common.device.errors import PieceFailed
from common.device.stream import Event, Scope, Stream, raise_if_device_failed
from common.draft.seed import column_to_numpy
from common.engine.parts import EngineParts
from common.errors import EngineFault
from common.grammar.matcher import Matcher
from common.kv.pool import KvPool, RowLease
from common.prompts.chunk_batch import ChunkBatch, cut_chunks
from common.prompts.scores import max_scored_tokens
from common.prompts.worker import Computed, PromptWorker
from common.sampling.logprobs import unpack_logprobs
from common.sampling.params import ResolvedSampling
from common.sampling.prompt_logprobs import PromptLogprobs
from common.sampling.state import RowStart, SamplingState
from common.wire.handoff import PrebuiltBatch
from decode_service.schedule.request import LostRow, Request
from decode_service.schedule.schedule_batch import ReadyRows


@dataclass(slots=True, eq=False)
class LocalPrompt:
    """A request whose prompt is computed here. `token_ids` [N] int64 are its prompt and output so far.

    `is_long` means that, when it began, it did not fit in one chunk together with the short prompts. `sampling` are its
    sampling parameters as they were then.
    """

    req: Request
    token_ids: NDArray[np.int64]
    lease: RowLease
    sampling: ResolvedSampling
    num_launched_tokens: int
    is_long: bool

    @property
    def prompt_len(self) -> int:
        return self.req.prompt_len

    @property
    def matcher(self) -> Matcher | None:
        return self.req.matcher

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_launched_tokens

    @property
    def row_start(self) -> RowStart:
        req = self.req
        return RowStart(self.lease.row, req.sampling, req.choice_index, tuple(self.token_ids.tolist()), req.prompt_len)


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: ChunkBatch[LocalPrompt]
    computed: Cell[Computed]
    end: Event


@dataclass(frozen=True, slots=True)
class Collected:
    """The outcome of the chunks that have ended: log-probabilities of prompts, the requests that are ready now, and
    those whose forward failed.
    """

    scored: tuple[tuple[Request, PromptLogprobs], ...] = ()
    ready: tuple[ReadyRows, ...] = ()
    lost: tuple[LostRow, ...] = ()


class LocalPrefill:
    """Computes prompts on the decode service's forward stream. Only the engine thread calls it. `await_chunks` is the
    only method that waits for a forward.

    One forward of chunks is in flight at a time, of at most `max_chunk_tokens` tokens. So the running rows wait for at
    most one such forward from one of their tokens to the next. Prompts take turns: one that got tokens of a chunk goes
    to the end of the line. So a short prompt does not wait for a long one's end.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        draft_topk: int,
        pool: KvPool,
        sampling_state: SamplingState,
        stream: Stream,
        max_chunk_tokens: int,
    ) -> None:
        """Creates it without prompts. `stream` is the forward stream of the decode steps, and `draft_topk` the number
        of first drafts in a draft seed.
        """
        self._pool = pool
        self._device = parts.device
        self._stream = stream
        self._sampling_state = sampling_state
        self._layer_group = parts.model.layer_group.name
        self._num_draft_layers = max(parts.num_draft_layers, 1)
        self.max_chunk_tokens = max(max_chunk_tokens, self._num_draft_layers)
        self._max_scored_tokens = max(max_scored_tokens(parts.model.vocab_size), self._num_draft_layers)
        self._worker = PromptWorker(
            parts, draft_topk=draft_topk, pool=pool, sampling_state=sampling_state, stream=stream
        )
        self._prompts: dict[Request, LocalPrompt] = {}
        self._in_flight: _Launched | None = None
        self._num_launched = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._prompts)

    @property
    def num_short_left(self) -> int:
        """The number of tokens of all short prompts together whose forward is not launched yet."""
        return sum(prompt.num_left for prompt in self._prompts.values() if not prompt.is_long)

    @property
    def has_long(self) -> bool:
        """Whether a long prompt is being computed."""
        return any(prompt.is_long for prompt in self._prompts.values())

    def begin(self, req: Request) -> None:
        """Takes a request that has got its row, in which the KV of its cached prefix is already there."""
        assert req.lease is not None
        token_ids = np.array(req.token_ids, np.int64)
        num_cached = req.lease.num_cached
        is_long = len(token_ids) - num_cached + self.num_short_left > self.max_chunk_tokens
        self._prompts[req] = LocalPrompt(req, token_ids, req.lease, req.attempt_sampling, num_cached, is_long)

    def forget(self, req: Request) -> None:
        """Stops computing the request's prompt. A chunk in flight may still write to its row, which stays in quarantine
        until that chunk has ended.
        """
        self._prompts.pop(req, None)

    def launch(self) -> bool:
        """Launches the next chunks, if none are in flight. Returns whether it did."""
        if self._in_flight is not None or not self._prompts:
            return False
        chunks = cut_chunks(
            list(self._prompts.values()),
            chunk_tokens=self.max_chunk_tokens,
            max_batch_tokens=self.max_chunk_tokens,
            max_scored_tokens=self._max_scored_tokens,
            min_last_tokens=self._num_draft_layers,
        )
        batch = ChunkBatch.of(
            chunks,
            pool=self._pool,
            layer_group=self._layer_group,
            vocab_size=self._sampling_state.vocab_size,
            num_draft_layers=self._num_draft_layers,
        )
        scope = Scope(f"local prefill {self._num_launched}")
        self._num_launched += 1
        self._stream.wait(self._device.schedule_stream.record())
        if begun := [chunk.prompt.row_start for chunk in chunks if chunk.start == chunk.prompt.lease.num_cached]:
            self._stream.enqueue(partial(self._sampling_state.reset, begun), scope)
        launched = self._worker.forward(batch, scope)
        end = self._stream.record(scope)
        for chunk in chunks:
            chunk.prompt.lease.use_until(end, self._stream)
            chunk.prompt.num_launched_tokens = chunk.stop
            self._prompts[chunk.prompt.req] = self._prompts.pop(chunk.prompt.req)
        self._in_flight = _Launched(batch, launched.computed, end)
        return True

    def await_chunks(self, timeout_s: float) -> None:
        """Waits until the chunks in flight have ended. The engine calls it when it has nothing else to do.

        Raises the errors of `Event.synchronize`, but not the failure of the chunks' own forward, which `collect`
        reports.
        """
        if self._in_flight is None:
            return
        try:
            self._in_flight.end.synchronize(timeout_s)
        except PieceFailed as failure:
            if failure.is_of_device:
                raise

    def collect(self) -> Collected:
        """Returns the outcome of the chunks that have ended since the last call. Raises the error of a failed device or
        stream.
        """
        launched = self._in_flight
        if launched is None or not launched.end.is_done():
            return Collected()
        self._in_flight = None
        raise_if_device_failed(launched.end)
        chunks = [chunk for chunk in launched.batch.chunks if self._is_wanted(chunk.prompt)]
        if (failure := launched.end.error) is not None:
            error = EngineFault(f"a prefill step failed: {failure}")
            return Collected(lost=tuple(LostRow(chunk.prompt.req, error, is_retryable=True) for chunk in chunks))
        for chunk in chunks:
            self._pool.keep(chunk.prompt.lease, chunk.prompt.token_ids, chunk.stop)
            self._pool.leave_behind(np.array([chunk.prompt.lease.row]), np.array([chunk.stop]))
        scored: tuple[tuple[Request, PromptLogprobs], ...] = ()
        if (scores := launched.computed.get().scores) is not None:
            each = launched.batch.prompt_logprobs(scores)
            scored = tuple((prompt.req, logprobs) for prompt, logprobs in each if self._is_wanted(prompt))
        return Collected(scored, *self._first_tokens(launched))

    def _is_wanted(self, prompt: LocalPrompt) -> bool:
        return self._prompts.get(prompt.req) is prompt

    def _first_tokens(self, launched: _Launched) -> tuple[tuple[ReadyRows, ...], tuple[LostRow, ...]]:
        batch, computed = launched.batch, launched.computed.get()
        ended = [(place, batch.chunks[entry].prompt) for place, entry in enumerate(batch.sampled_entries)]
        ended = [(place, prompt) for place, prompt in ended if self._is_wanted(prompt)]
        are_invalid = computed.sampled.is_invalid.numpy()
        lost = []
        for place, prompt in ended:
            if prompt.matcher is not None and prompt.matcher.failure:
                refusal = prompt.sampling.constraint_error(prompt.matcher.failure)
                lost.append(LostRow(prompt.req, refusal, is_retryable=False))
            elif are_invalid[place]:
                self._pool.forget(prompt.lease)
                error = EngineFault("the model produced no finite logit")
                lost.append(LostRow(prompt.req, error, is_retryable=prompt.lease.num_cached > 0))
        ready = [(place, prompt) for place, prompt in ended if not are_invalid[place]]
        if not ready:
            return (), tuple(lost)
        places, prompts = [place for place, _ in ready], [prompt for _, prompt in ready]
        logprobs = unpack_logprobs(computed.sampled, batch.sampling)[:, 0].tolist()
        columns = PrebuiltBatch(
            rows=np.arange(len(prompts)),
            seq_lens=np.array([len(prompt.token_ids) for prompt in prompts], np.int64),
            first_token_ids=computed.sampled.token_ids.numpy()[places],
            bytes_sent={},
            queue_s=np.zeros(len(prompts)),
            compute_s=np.zeros(len(prompts)),
            num_cached_tokens=np.array([prompt.lease.num_cached for prompt in prompts], np.int64),
            first_token_logprobs=tuple(logprobs[place] for place in places),
            seed_columns={name: column_to_numpy(seeds[places]) for name, seeds in computed.seeds.items()},
        )
        return (ReadyRows(columns, np.arange(len(prompts)), tuple(prompt.req for prompt in prompts)),), tuple(lost)
