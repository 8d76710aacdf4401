"""Computes prompts in the decode service itself, in chunks between decode steps.

begin ──▶ chunk on the forward stream, before the next decode step ──▶ ... ──▶ last chunk ──▶ first token: ready

A request comes here when little of its prompt is left to compute, when every replica would have to compute much more,
or when no replica is ready and `prefill_fallback` is on. Its KV is written to its own slots, so nothing is handed over.
A ready request joins the running batch like one whose KV has landed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.device.stream import Stream, wait_in_order
from common.engine import EngineParts
from common.errors import error_for_row_failure
from common.grammar.matcher import Matcher
from common.kv.pool import KvPool, RowLease
from common.prompts.computing import ChunksInFlight, FailedPrompt, FirstTokens, PromptChunks
from common.sampling.params import ResolvedSampling
from common.sampling.prompt_logprobs import PromptLogprobs
from common.sampling.state import RowStart, SamplingState
from decode_service.schedule.request import LostRow, Request
from decode_service.schedule.schedule_batch import ReadyRows


@dataclass(slots=True, eq=False)
class LocalPrompt:
    """A request whose prompt is computed here. `token_ids` [N] int64 are its prompt and output so far.

    `is_long` means that at its begin the prompt did not fit in one chunk together with the short ones. `sampling` are
    the request's sampling parameters at that time.
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

    One forward of chunks is in flight at a time, of at most `chunk_tokens` tokens. So between two of its tokens a
    running row waits for at most one such forward. Prompts take turns: a prompt with a chunk in the forward goes to the
    end of the line. So a short prompt does not wait for a long one's end.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        draft_topk: int,
        pool: KvPool,
        sampling_state: SamplingState,
        stream: Stream,
        chunk_tokens: int,
    ) -> None:
        """Creates it without prompts. `stream` is the forward stream of the decode steps, and `draft_topk` the number
        of first drafts in a draft seed.
        """
        self._chunk_tokens = chunk_tokens
        self._chunks = PromptChunks[LocalPrompt](
            parts,
            name="local prefill",
            pool=pool,
            sampling_state=sampling_state,
            stream=stream,
            draft_topk=draft_topk,
            chunk_tokens=chunk_tokens,
            max_batch_tokens=chunk_tokens,
        )
        self._prompts: dict[Request, LocalPrompt] = {}
        self._in_flight: ChunksInFlight[LocalPrompt] | None = None

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
        """Takes a request that holds a row. The KV of its cached prefix is already in the row."""
        assert req.lease is not None
        token_ids = np.array(req.token_ids, np.int64)
        num_cached = req.lease.num_cached
        is_long = len(token_ids) - num_cached + self.num_short_left > self._chunk_tokens
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
        chunks = self._chunks.cut(list(self._prompts.values()))
        self._in_flight = self._chunks.launch(chunks)
        for chunk in chunks:
            self._prompts[chunk.prompt.req] = self._prompts.pop(chunk.prompt.req)
        return True

    def await_chunks(self, timeout_s: float) -> None:
        """Waits until the chunks in flight have ended. The engine calls it when it has nothing else to do.

        Raises the errors of `wait_in_order`. `collect` reports the failure of the chunks' own forward.
        """
        if self._in_flight is not None:
            wait_in_order(self._in_flight.end, timeout_s)

    def collect(self) -> Collected:
        """Returns the outcome of the chunks that have ended since the last call. Raises the error of a failed device or
        stream.
        """
        in_flight = self._in_flight
        if in_flight is None or not in_flight.end.is_done():
            return Collected()
        self._in_flight = None
        ended = self._chunks.take(in_flight, lambda prompt: self._prompts.get(prompt.req) is prompt)
        return Collected(
            scored=tuple((prompt.req, logprobs) for prompt, logprobs in ended.scored),
            ready=() if ended.first is None else (_ready(ended.first),),
            lost=tuple(map(_lost, ended.failed)),
        )


def _lost(failed: FailedPrompt[LocalPrompt]) -> LostRow:
    req = failed.prompt.req
    error = error_for_row_failure(failed.reason, failed.message, constraint_field=req.sampling.constraint_field)
    return LostRow(req, error, failed.is_retryable)


def _ready(first: FirstTokens[LocalPrompt]) -> ReadyRows:
    places = np.arange(len(first.prompts))
    no_time = np.zeros(len(places))
    columns = first.frame(rows=places, bytes_sent={}, queue_s=no_time, compute_s=no_time)
    return ReadyRows(columns, places, tuple(prompt.req for prompt in first.prompts))
