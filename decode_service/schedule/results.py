"""How the results of a step become output: each request gets its next tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.upload import device_copy
from common.errors import EngineFault
from common.grammar.matcher import Matcher
from common.sampling.params import TokenLogprobs
from decode_service.forward.future_map import RelayPayload
from decode_service.messages import Event, Phase, Tokens
from decode_service.schedule.life import Lives
from decode_service.schedule.request import LostRow, Request
from decode_service.schedule.running_rows import Rows, RunningRows
from decode_service.schedule.schedule_batch import ReadyRows, ScheduleBatch
from decode_service.schedule.step import EndedStep, LaunchedStep, RowResults


@dataclass(frozen=True, slots=True)
class AheadMatcher:
    """A copy of a request's matcher that accepted the first `num_tokens` tokens of a step that had not ended."""

    matcher: Matcher
    num_tokens: int


def first_tokens(parts: Sequence[ReadyRows]) -> RowResults:
    """Returns the first tokens that came with the rows of `parts`, in order and in the form of a step's results."""
    token_ids = _first_token_ids(parts)
    logprobs = [part.columns.first_token_logprobs[entry] for part in parts for entry in part.entries.tolist()]
    return RowResults(
        token_ids=token_ids.reshape(-1, 1),
        accept_lens=np.ones_like(token_ids),
        are_invalid=np.zeros(token_ids.shape, dtype=np.bool_),
        num_sound=np.ones_like(token_ids),
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
        """Gives the requests of `prebuilt`, which joins the running batch next, their first tokens: `results`."""
        every = np.arange(prebuilt.batch_size)
        self._append(every, prebuilt.rows, prebuilt.reqs, prebuilt.request_ids, results, self._clock())
        self._follow_grammars(prebuilt.sampling.constrained, every, prebuilt.reqs, results, {})

    def look_ahead(self, step: LaunchedStep) -> dict[Request, AheadMatcher]:
        """Lets copies of matchers accept the tokens of a step with drafts that has published its lengths, and returns
        the copies. The step has not ended, so these tokens may still be lost.
        """
        ahead = dict[Request, AheadMatcher]()
        are_held = self.still_held(step)
        assert step.output.masked is not None
        gained = step.output.masked.gained.get()
        token_ids, accept_lens = gained.token_ids.numpy(), gained.accept_lens.numpy()
        for i in step.batch.sampling.constrained.tolist():
            req = step.reqs[i]
            if req.matcher is None or not (are_held[i] and req.wants_drafts):
                continue
            matcher = req.matcher.copy()
            offered = token_ids[i, : accept_lens[i]].tolist()
            num_tokens = len(list(takewhile(matcher.accept, offered)))
            ahead[req] = AheadMatcher(matcher, num_tokens)
        return ahead

    def take(self, step: EndedStep, ahead: Mapping[Request, AheadMatcher]) -> None:
        """Gives an ended step's results to the requests that still hold the rows they ran in. `ahead` has the matchers
        that have accepted tokens of the step before its end.
        """
        are_held = self.still_held(step)
        results, lost = self._sound_results(step, are_held)
        self._rows.num_in_flight[step.rows[are_held]] -= 1
        now_s = self._clock()
        for i in (are_held & results.are_invalid).nonzero()[0].tolist():
            self._lose_invalid(step.reqs[i])
        (entries,) = (are_held & ~results.are_invalid).nonzero()
        rows = step.rows[entries]
        self._rows.num_unread[rows] = step.output.reading.num_left[entries]
        for i in entries[self._rows.decode(rows)].tolist():
            if step.reqs[i].phase is Phase.FIRST_DECODE:  # otherwise it was retracted in the meantime
                self._lives.enter(step.reqs[i], Phase.DECODE, at_s=now_s)
        self._append(entries, rows, step.reqs, step.request_ids, results, now_s, step)
        self._follow_grammars(step.batch.sampling.constrained, entries, step.reqs, results, ahead)
        self._lose(lost)

    def _sound_results(self, step: EndedStep, are_held: NDArray[np.bool_]) -> tuple[RowResults, Sequence[LostRow]]:
        """Returns the step's results, and the requests that their grammars let go no further.

        Drafts may lead past the end of an output, or to where no token is allowed. There the row has no valid token,
        but those before count.
        """
        results, lost = step.results(), list[LostRow]()
        if not results.are_invalid.any():
            return results, lost
        are_cut = np.zeros_like(are_held)
        for i in (are_held & results.are_invalid & (results.num_sound > 0)).nonzero()[0].tolist():
            req, sound = step.reqs[i], results.token_ids[i, : results.num_sound[i]]
            if self._rows.ends_with(step.rows[i], sound):
                are_cut[i] = True
            elif (failure := req.withheld.get(tuple(sound.tolist()))) is not None:
                are_cut[i] = True
                lost.append(LostRow(req, req.sampling.constraint_error(failure), is_retryable=False))
        if not are_cut.any():
            return results, lost
        accept_lens = np.where(are_cut, results.num_sound, results.accept_lens)
        return replace(results, accept_lens=accept_lens, are_invalid=results.are_invalid & ~are_cut), lost

    def still_held(self, step: LaunchedStep) -> NDArray[np.bool_]:
        """Returns, for each entry [B] of the step, whether its request still holds the row it ran in."""
        held: NDArray[np.bool_] = self._rows.serials[step.rows] == step.serials
        return held

    def _lose_invalid(self, req: Request) -> None:
        """Gives up a row that had no valid token, and makes the prefix cache forget the row's KV.

        If the request began with KV that either service had cached, that KV may be the reason, and the request is
        retried without a cache; if not, it fails.
        """
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
        step: EndedStep | None = None,
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

    def _count_drafts(self, entries: NDArray[np.intp], rows: Rows, num_added: Rows, step: EndedStep) -> None:
        batch = step.batch
        if step.speculation is None:
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
