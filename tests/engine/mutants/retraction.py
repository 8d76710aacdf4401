"""Retraction broken: who gives way, who comes back first, and with what."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator

import pytest

from common.kv.pool import KvPool
from common.wire.handoff import HandoffRow
from decode_service.schedule import dispatcher, retraction, scheduler
from decode_service.schedule.dispatcher import PrefillDispatcher
from decode_service.schedule.request import Request
from decode_service.schedule.retraction import Retraction
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.waiting_queue import WaitingQueue
from decode_service.speculate.depth import Depth
from decode_service.speculate.spec_info import SpecInfo


def oldest_gives_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retraction, "max", min, raising=False)


def handoffs_under_way_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Whatever was reserved for them, a running request gives way."""
    sound = Retraction._retract_youngest

    def mutant(self: Retraction, running: ScheduleBatch, requests: Collection[Request]) -> None:
        sound(self, running, ())

    patch.setattr(Retraction, "_retract_youngest", mutant)


def returns_behind_the_others(patch: pytest.MonkeyPatch) -> None:
    later = itertools.count(1 << 20)
    requeue = PrefillDispatcher.requeue

    def mutant(self: PrefillDispatcher, req: Request) -> None:
        req.arrival = next(later)
        requeue(self, req)

    patch.setattr(PrefillDispatcher, "requeue", mutant)


def newcomers_are_handed_off_first(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: WaitingQueue) -> Iterator[Request]:
        return iter(sorted(self, key=lambda req: -req.arrival))

    patch.setattr(WaitingQueue, "in_turn", mutant)


def _rows_sent_as(patch: pytest.MonkeyPatch, **changes: object) -> None:
    def mutant(**columns: object) -> HandoffRow:
        row = HandoffRow(**columns)  # type: ignore[arg-type]
        return dataclasses.replace(row, **{name: change(row) for name, change in changes.items()})  # type: ignore

    patch.setattr(dispatcher, "HandoffRow", mutant)


def output_counts_as_prompt(patch: pytest.MonkeyPatch) -> None:
    _rows_sent_as(patch, prompt_len=lambda row: len(row.token_ids))


def output_is_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The prompt alone goes back to prefill."""
    _rows_sent_as(patch, token_ids=lambda row: row.token_ids[: row.prompt_len])


def retractions_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    sound = Retraction._retract_youngest

    def mutant(self: Retraction, running: ScheduleBatch, requests: Collection[Request]) -> None:
        before = {id(req): req.num_retractions for req in requests}
        sound(self, running, requests)
        for req in requests:
            req.num_retractions = before[id(req)]

    patch.setattr(Retraction, "_retract_youngest", mutant)


def drafts_are_never_given_up(patch: pytest.MonkeyPatch) -> None:
    """A step drafts as deep as it likes, whatever slots are free."""

    def mutant(depth: Depth | None, batch: ScheduleBatch, pool: KvPool) -> SpecInfo | None:
        if depth is None or batch.is_empty:
            return None
        return depth.choose(draft_lag=batch.draft_lag, num_wanted=batch.batch_size)

    patch.setattr(scheduler, "depth_within", mutant)


def losses_are_counted_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A handoff that succeeded forgives none of those that failed before it."""
    lost = PrefillDispatcher._is_given_up
    totals: dict[int, int] = {}

    def mutant(self: PrefillDispatcher, req: Request, row: dispatcher.LostRow, now_s: float) -> bool:
        req.num_failures = totals.get(id(req), 0)
        is_given_up = lost(self, req, row, now_s)
        totals[id(req)] = req.num_failures
        return is_given_up

    patch.setattr(PrefillDispatcher, "_is_given_up", mutant)


def waiting_for_slots_counts_as_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillDispatcher, "_excuse_waiting_for_slots", lambda self, now_s, *, is_short: None)


def a_request_put_off_has_no_place(patch: pytest.MonkeyPatch) -> None:
    reserve = PrefillDispatcher._reserve
    patch.setattr(PrefillDispatcher, "_reserve", lambda self, req, older: reserve(self, req, ()))
