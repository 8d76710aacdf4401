"""The results of a launched step, and how they become output: each request gets its next tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.cell import Cell
from common.device.stream import Device, Scope, Stream, wait_in_order
from common.device.stream import Event as StreamEvent
from common.device.upload import device_copy
from common.errors import EngineFault
from common.grammar.matcher import Matcher
from common.sampling.logprobs import unpack_logprobs
from common.sampling.operators import Sampled, sampled_to_host
from common.sampling.params import TokenLogprobs
from common.telemetry.step_stats import MaskStats, SpeculationStats
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import RelayPayload
from decode_service.forward.worker import WorkerOutput
from decode_service.messages import Event, Phase, Tokens
from decode_service.schedule.life import Lives
from decode_service.schedule.request import LostRow, Request
from decode_service.schedule.running_rows import Rows, RunningRows
from decode_service.schedule.schedule_batch import ReadyRows, ScheduleBatch


@dataclass(frozen=True, slots=True)
class RowResults:
    """The results of a step's rows, as columns. Row b gains the first `accept_lens[b]` tokens of `token_ids[b]`.

    `token_ids` is [B, W] int64 and `accept_lens` [B]. `are_invalid` [B] bool marks rows whose relayed input or logits
    were unusable. `logprobs` [B, W] of TokenLogprobs has None for rows that want none; it is None if no row wants any.
    """

    token_ids: NDArray[np.int64]
    accept_lens: NDArray[np.int64]
    are_invalid: NDArray[np.bool_]
    logprobs: NDArray[np.object_] | None = None


@dataclass(frozen=True, slots=True)
class _HostResults:
    """A step's results as tensors on the host. `accept_lens` is None if each entry has exactly one token."""

    sampled: Sampled
    accept_lens: Tensor | None
    is_invalid: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunStep:
    """A step whose forward is launched. `output.draw` has still to be called, if it is not None.

    `rows` [B] are the pool rows in which `reqs` run, and `serials` [B] the numbers that RunningRows gave them for their
    stay there; a request that has left its row since the launch gets no results.
    """

    scope: Scope
    batch: ForwardBatch
    reqs: tuple[Request, ...]
    request_ids: tuple[str, ...]
    rows: NDArray[np.int64]
    serials: NDArray[np.int64]
    output: WorkerOutput
    launched_s: float


@dataclass(frozen=True, slots=True)
class AheadMatcher:
    """A copy of a request's matcher that has accepted the first `num_tokens` tokens of a step before the step's end."""

    matcher: Matcher
    num_tokens: int


@dataclass(frozen=True)
class StepInFlight:
    """The step `begun`, all of which is enqueued now, and whose results are not taken yet.

    It keeps every tensor and cell of the step alive until the event `end`, after which the results are on the host.
    `previous_end` is the end of the step that was in flight at the launch, or None.
    """

    begun: BegunStep
    host: Cell[_HostResults]
    end: StreamEvent
    previous_end: StreamEvent | None

    @classmethod
    def seal(
        cls, *, begun: BegunStep, device: Device, stream: Stream, previous_end: StreamEvent | None
    ) -> StepInFlight:
        """Enqueues the copy of the step's results to the host, records the event `end` and builds the StepInFlight."""
        host: Cell[_HostResults] = Cell()
        output = begun.output
        sampled, is_invalid = output.sampled, output.is_invalid
        accept_lens = None if output.has_one_each else output.accept_lens

        def copy_results() -> None:
            host.set(
                _HostResults(
                    sampled_to_host(device, sampled.get()),
                    None if accept_lens is None else device.to_host(accept_lens.get()),
                    device.to_host(is_invalid.get()),
                )
            )

        stream.enqueue(copy_results, begun.scope)
        if not device.runs_pieces_beside:  # otherwise its thread would stop to free finished objects
            begun = replace(begun, output=replace(output, kept=()))
        return cls(begun, host, end=stream.record(begun.scope, "the end"), previous_end=previous_end)

    def await_end(self, timeout_s: float, *, followed_by: BegunStep | None) -> None:
        """Waits for the step's end. Raises the errors of `Event.synchronize`.

        It waits first until the inputs of the step `followed_by` are prepared. Otherwise the Python code that prepares
        them would compete for the interpreter with the code that takes these results.
        """
        if followed_by is not None and (prepared := followed_by.output.prepared) is not None:
            wait_in_order(prepared, timeout_s)  # a failure is reported by that step's own end event
        self.end.synchronize(timeout_s)

    @cached_property
    def speculation(self) -> SpeculationStats | None:
        """The step's drafting and verification figures, or None without speculation. Read it only after `end`."""
        batch = self.begun.batch
        if batch.spec_info is None:
            return None
        begin, drafted, verified, extended = self.begun.output.marks.get()
        relayed_lens = self.host.get().accept_lens
        assert relayed_lens is not None, "who drafts says how many it accepted"
        accept_lens, num_forced = relayed_lens.numpy(), batch.num_forced
        if batch.undrafted:
            accept_lens, num_forced = (np.delete(each, batch.undrafted) for each in (accept_lens, num_forced))
        is_sound = (accept_lens >= 1) & (accept_lens <= batch.max_accept_len)  # a row with any other length fails
        accept_lens, num_forced = accept_lens[is_sound], num_forced[is_sound]
        return SpeculationStats(
            num_levels=batch.spec_info.num_steps,
            accept_lens=tuple(accept_lens.tolist()),
            num_forced=tuple(num_forced.tolist()) if batch.forced is not None else (),
            draft_s=drafted.seconds_since(begin),
            verify_s=verified.seconds_since(drafted),
            extend_s=extended.seconds_since(verified),
            idle_s=None if self.previous_end is None else begin.seconds_since(self.previous_end),
        )

    @property
    def masks(self) -> MaskStats | None:
        """The cost of the step's masks, or None if no grammar constrains its draws. Read it only after `end`."""
        num_rows, output = int(self.begun.batch.sampling.constrained.size), self.begun.output
        if not num_rows:
            return None
        computed, drawn = output.draw_marks.get()
        return MaskStats(num_rows, output.mask_s.get(), drawn.seconds_since(computed))

    def results(self) -> RowResults:
        """Returns the step's results as columns. Call this only after `end`."""
        host, batch = self.host.get(), self.begun.batch
        width = batch.max_accept_len
        are_unusable = host.sampled.is_invalid.numpy()
        if host.accept_lens is None:
            accept_lens = (~are_unusable).astype(np.int64)
        else:
            accept_lens = host.accept_lens.numpy()
            are_accepted = np.arange(width) < accept_lens[:, None]
            are_unusable = np.logical_or.reduce(are_unusable.reshape(-1, width) & are_accepted, axis=1)
            are_unusable |= (accept_lens < 1) | (accept_lens > width)
        logprobs = None
        if batch.sampling.with_logprobs.size:
            logprobs = unpack_logprobs(host.sampled, batch.sampling, width=width)
        return RowResults(
            token_ids=host.sampled.token_ids.numpy().reshape(-1, width),
            accept_lens=accept_lens,
            are_invalid=host.is_invalid.numpy() | are_unusable,
            logprobs=logprobs,
        )


def first_tokens(parts: Sequence[ReadyRows]) -> RowResults:
    """Returns the first tokens that came with the rows of `parts`, in order and in the form of a step's results."""
    token_ids = _first_token_ids(parts)
    logprobs = [part.columns.first_token_logprobs[entry] for part in parts for entry in part.entries.tolist()]
    return RowResults(
        token_ids=token_ids.reshape(-1, 1),
        accept_lens=np.ones_like(token_ids),
        are_invalid=np.zeros(token_ids.shape, dtype=np.bool_),
        logprobs=np.fromiter(logprobs, np.object_, len(logprobs)).reshape(-1, 1) if any(logprobs) else None,
    )


def first_token_payload(
    parts: Sequence[ReadyRows], seeds: Mapping[str, Tensor], torch_device: torch.device
) -> RelayPayload:
    """Builds what `FutureMap.bootstrap` writes for the rows of `parts`, in order: their first tokens and draft seeds.

    `seeds` are the FutureMap's buffers of draft seeds, by column name; their contents are not read. The results lie
    on `torch_device`.
    """
    columns = {
        name: device_copy(
            torch.from_numpy(np.concatenate([part.columns.seed_columns[name][part.entries] for part in parts])).view(
                buffer.dtype  # NumPy has no bfloat16: the column holds its bits
            ),
            torch_device,
        )
        for name, buffer in seeds.items()
    }
    return RelayPayload(device_copy(torch.from_numpy(_first_token_ids(parts)), torch_device), columns)


def _first_token_ids(parts: Sequence[ReadyRows]) -> NDArray[np.int64]:
    return np.concatenate([part.columns.first_token_ids[part.entries] for part in parts])


class ResultTaker:
    """Gives the results of steps to their requests. Only the engine thread calls it.

    Rows are handled together as columns. Only requests that begin or end are handled one by one. `lose` is called with
    the rows that had no valid token.
    """

    def __init__(
        self,
        *,
        rows: RunningRows,
        lives: Lives,
        clock: Callable[[], float],
        post: Callable[[Event], None],
        lose: Callable[[Sequence[LostRow]], None],
    ) -> None:
        self._rows = rows
        self._lives = lives
        self._clock = clock
        self._post = post
        self._lose = lose

    def take_first_tokens(self, prebuilt: ScheduleBatch, results: RowResults) -> None:
        """Gives the first tokens to requests that have just entered their rows."""
        every = np.arange(prebuilt.batch_size)
        self._append(every, prebuilt.rows, prebuilt.reqs, prebuilt.request_ids, results, self._clock())
        self._follow_grammars(prebuilt.sampling.constrained, every, prebuilt.reqs, results, {})

    def look_ahead(self, step: StepInFlight) -> dict[Request, AheadMatcher]:
        """Lets copies of matchers accept the tokens of a step with drafts that has published its lengths, and returns
        them. The step has not ended, so what they accept may still be lost.
        """
        begun, ahead = step.begun, dict[Request, AheadMatcher]()
        are_held = self.still_held(begun)
        gained = begun.output.gained.get()
        token_ids, accept_lens = gained.token_ids.numpy(), gained.accept_lens.numpy()
        for i in begun.batch.sampling.constrained.tolist():
            req = begun.reqs[i]
            if req.matcher is None or not (are_held[i] and req.wants_drafts):
                continue
            matcher = req.matcher.copy()
            offered = token_ids[i, : accept_lens[i]].tolist()
            num_tokens = len(list(takewhile(matcher.accept, offered)))
            ahead[req] = AheadMatcher(matcher, num_tokens)
        return ahead

    def take(self, step: StepInFlight, ahead: Mapping[Request, AheadMatcher]) -> None:
        """Gives an ended step's results to the requests that still hold the rows they ran in. `ahead` has the matchers
        that have accepted tokens of the step before its end.
        """
        begun, results = step.begun, step.results()
        are_held = self.still_held(begun)
        self._rows.num_in_flight[begun.rows[are_held]] -= 1
        now_s = self._clock()
        for i in (are_held & results.are_invalid).nonzero()[0].tolist():
            self._lose_invalid(begun.reqs[i], results.token_ids[i, : results.accept_lens[i]].tolist())
        (entries,) = (are_held & ~results.are_invalid).nonzero()
        rows = begun.rows[entries]
        self._rows.draft_lags[rows] = begun.batch.draft_lag_after[entries]
        for i in entries[self._rows.decode(rows)].tolist():
            if begun.reqs[i].phase is Phase.FIRST_DECODE:  # otherwise it was retracted in the meantime
                self._lives.enter(begun.reqs[i], Phase.DECODE, at_s=now_s)
        self._append(entries, rows, begun.reqs, begun.request_ids, results, now_s, step)
        self._follow_grammars(begun.batch.sampling.constrained, entries, begun.reqs, results, ahead)

    def still_held(self, begun: BegunStep) -> NDArray[np.bool_]:
        """Returns, for each entry [B] of the step, whether its request still holds the row it ran in."""
        held: NDArray[np.bool_] = self._rows.serials[begun.rows] == begun.serials
        return held

    def _lose_invalid(self, req: Request, token_ids: Sequence[int]) -> None:
        """Gives up a row that had no valid token. `token_ids` are the step's accepted tokens up to the invalid one, or
        none.

        If its grammar had reached a limit there, the request fails. Otherwise the row's KV is forgotten. If the request
        began with KV that either service had cached, that KV may be the reason, and the request is retried without a
        cache; if not, it fails.
        """
        if (failure := req.withheld.get(tuple(token_ids[:-1]))) is not None:
            self._lose([LostRow(req, req.sampling.constraint_error(failure), is_retryable=False)])
            return
        self._lives.forget_kv(req)
        if req.began_cached:
            req.avoid_cache()  # so this cannot happen to it again
        error = EngineFault("a decode step relayed or produced no valid token")
        self._lose([LostRow(req, error, is_retryable=req.began_cached)])

    def _append(
        self,
        entries: NDArray[np.intp],
        rows: Rows,
        reqs: Sequence[Request],
        request_ids: tuple[str, ...],
        results: RowResults,
        now_s: float,
        step: StepInFlight | None = None,
    ) -> None:
        """Gives new tokens to the requests at `entries`, posts them, and finishes the requests that end with them.

        `entries` are indices into `reqs` and `results`; `rows` are the pool rows of these entries. `step` is None for
        first tokens, which no decode step produced.
        """
        if not entries.size:
            return
        token_ids = results.token_ids[entries]
        num_added, have_ended = self._rows.append(rows, token_ids, results.accept_lens[entries])
        if step is not None:
            self._count_drafts(entries, rows, num_added, step)
        if len(entries) < len(request_ids):
            request_ids = tuple([request_ids[i] for i in entries.tolist()])
        are_added = np.arange(token_ids.shape[1]) < num_added[:, None]
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        if results.logprobs is not None:
            logprobs = tuple(results.logprobs[entries][are_added].tolist())
        self._post(Tokens(request_ids, tuple(num_added.tolist()), tuple(token_ids[are_added].tolist()), logprobs))
        for i in entries[have_ended].tolist():
            self._finish(reqs[i], now_s)

    def _follow_grammars(
        self,
        constrained: NDArray[np.int64],
        entries: NDArray[np.intp],
        reqs: Sequence[Request],
        results: RowResults,
        ahead: Mapping[Request, AheadMatcher],
    ) -> None:
        """Lets the matchers of constrained requests accept their new tokens, unless the request has ended.

        `constrained` and `entries` are indices into `reqs` and `results`: entries under a grammar, and entries that got
        tokens. Matchers `ahead` have accepted some of the tokens. A request fails if its grammar forbids one
        of the tokens, because then a draw did not obey its mask. A matcher that has reached a limit makes its request
        fail when the next masks are computed.
        """
        if not constrained.size:
            return
        for i in np.intersect1d(constrained, entries).tolist():
            req = reqs[i]
            if req.matcher is None or req.has_ended:
                continue
            token_ids = results.token_ids[i, : results.accept_lens[i]].tolist()
            if req in ahead:
                req.matcher, token_ids = ahead[req].matcher, token_ids[ahead[req].num_tokens :]
            if not all(map(req.matcher.accept, token_ids)) and not req.matcher.failure:
                error = EngineFault("a token was drawn that the grammar forbids")
                self._lose([LostRow(req, error, is_retryable=False)])

    def _finish(self, req: Request, now_s: float) -> None:
        ending = req.ending()
        assert ending is not None
        reason, stop_token_id = ending
        self._lives.enter(req, Phase.DELIVERY, at_s=now_s)
        self._post(req.finished(reason, req.num_output, stop_token_id=stop_token_id))

    def _count_drafts(self, entries: NDArray[np.intp], rows: Rows, num_added: Rows, step: StepInFlight) -> None:
        batch = step.begun.batch
        if batch.spec_info is None or step.speculation is None:
            return
        if batch.undrafted:
            were_drafted_for = ~np.isin(entries, batch.undrafted)
            entries, rows, num_added = entries[were_drafted_for], rows[were_drafted_for], num_added[were_drafted_for]
        self._rows.drafts.add(
            rows,
            batch.spec_info,
            num_accepted=num_added - 1,
            num_forced=batch.num_forced[entries],
            stats=step.speculation,
        )
