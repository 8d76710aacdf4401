"""Where results become output: each request gets its next tokens, and ends where they say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import BatonError, EngineFault
from common.model.sampling_params import TokenLogprobs
from decode_service.messages import Event, Phase, Tokens
from decode_service.schedule.life import Lives
from decode_service.schedule.request import Request
from decode_service.schedule.running_rows import Rows, RunningRows
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.step_in_flight import RowResults, StepInFlight


class ResultTaker:
    """Only the engine thread calls it. What all rows of a batch do is done at once; who begins or ends is met alone."""

    def __init__(
        self,
        *,
        rows: RunningRows,
        lives: Lives,
        clock: Callable[[], float],
        post: Callable[[Event], None],
        fail: Callable[[Request, BatonError], None],
    ) -> None:
        self._rows = rows
        self._lives = lives
        self._clock = clock
        self._post = post
        self._fail = fail

    def take_first_tokens(self, prebuilt: ScheduleBatch, results: RowResults) -> None:
        """Of rows that have just entered."""
        every = np.arange(prebuilt.batch_size)
        self._append(every, prebuilt.rows, prebuilt.reqs, prebuilt.request_ids, results, self._clock())

    def take(self, step: StepInFlight) -> None:
        """Behind the step's end: its results go to the requests that still hold the rows they ran with."""
        results = step.results()
        are_held = self.still_held(step)
        self._rows.num_in_flight[step.rows[are_held]] -= 1
        now_s = self._clock()
        for i in (are_held & results.are_invalid).nonzero()[0].tolist():
            self._fail(step.reqs[i], EngineFault("a decode step relayed or produced no valid token"))
        (entries,) = (are_held & ~results.are_invalid).nonzero()
        rows = step.rows[entries]
        for i in entries[self._rows.decode(rows)].tolist():
            if step.reqs[i].phase is Phase.FIRST_DECODE:  # else it is retracted meanwhile
                self._lives.enter(step.reqs[i], Phase.DECODE, at_s=now_s)
        self._append(entries, rows, step.reqs, step.request_ids, results, now_s, step)

    def still_held(self, step: StepInFlight) -> NDArray[np.bool_]:
        """[B]"""
        held: NDArray[np.bool_] = self._rows.serials[step.rows] == step.serials
        return held

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
        """Give the requests at `entries`, in `rows`, their next tokens; end those that end with them."""
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

    def _finish(self, req: Request, now_s: float) -> None:
        ending = req.ending()
        assert ending is not None
        reason, stop_token_id = ending
        self._lives.enter(req, Phase.DELIVERY, at_s=now_s)
        self._post(req.finished(reason, req.num_output, stop_token_id=stop_token_id))

    def _count_drafts(self, entries: NDArray[np.intp], rows: Rows, num_added: Rows, step: StepInFlight) -> None:
        if step.batch.spec_info is None or step.speculation is None:
            return
        if step.batch.undrafted:
            were_drafted_for = ~np.isin(entries, step.batch.undrafted)
            rows, num_added = rows[were_drafted_for], num_added[were_drafted_for]
        self._rows.drafts.add(rows, step.batch.spec_info, num_accepted=num_added - 1, stats=step.speculation)
