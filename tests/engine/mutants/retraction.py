"""Mutants of retraction, in which a request gives its KV slots to an older one and returns later. They change which
request gives way, which returns first, and with which tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from common.kv.pool import KvPool
from common.priority import Ageing
from common.wire.handoff import HandoffRow
from decode_service.messages import Phase
from decode_service.schedule import dispatcher, retraction, scheduler
from decode_service.schedule.life import Lives
from decode_service.schedule.request import Request
from decode_service.schedule.retraction import Retraction
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.waiting_queue import WaitingQueue
from decode_service.speculate.depth import Depth
from decode_service.speculate.spec_info import SpecInfo


def oldest_gives_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retraction, "max", min, raising=False)


def priorities_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ageing, "due_s", lambda self, priority, arrived_s: arrived_s)
    patch.setattr(Ageing, "level", lambda self, priority, *, waited_s, best: best)


def waiting_improves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ageing, "due_s", lambda self, priority, arrived_s: arrived_s + priority * 1e6)
    patch.setattr(Ageing, "level", lambda self, priority, *, waited_s, best: priority)


def handoffs_under_way_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Never retracts a request whose handoff (its prefill and the transfer of its KV) is under way. A running request
    gives way instead, whatever is reserved for the handoff.
    """

    class OnlyRunning:
        bringing_kv = ()

        def __init__(self, lives: Lives) -> None:
            self.enter, self.requests = lives.enter, lives.requests

    def retraction_of_running(*, lives: Lives, **parts: Any) -> Retraction:
        return Retraction(lives=cast(Lives, OnlyRunning(lives)), **parts)

    patch.setattr(scheduler, "Retraction", retraction_of_running)


def _before_entering(patch: pytest.MonkeyPatch, phase: Phase, change: Callable[[Request], None]) -> None:
    enter = Lives.enter

    def mutant(self: Lives, req: Request, entered: Phase, **about: Any) -> None:
        if entered is phase:
            change(req)
        enter(self, req, entered, **about)

    patch.setattr(Lives, "enter", mutant)


def returns_behind_the_others(patch: pytest.MonkeyPatch) -> None:
    later = itertools.count(1 << 20)
    _before_entering(patch, Phase.QUEUE, lambda req: setattr(req, "due_s", float(next(later))))


def newcomers_are_handed_off_first(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: WaitingQueue, now_s: float) -> Iterator[Request]:
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
    """Sends only the prompt of a retracted request back to prefill, without the output it has already."""
    _rows_sent_as(patch, token_ids=lambda row: row.token_ids[: row.prompt_len])


def retractions_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    _before_entering(patch, Phase.QUEUE, lambda req: setattr(req, "num_retractions", 0))


def drafts_are_never_given_up(patch: pytest.MonkeyPatch) -> None:
    """Lets a step draft at full depth even if no slots are free for the drafts."""

    def mutant(depth: Depth | None, batch: ScheduleBatch, pool: KvPool) -> SpecInfo | None:
        if depth is None or batch.is_empty:
            return None
        return depth.choose(draft_lag=batch.draft_lag, num_wanted=batch.batch_size, num_forced=batch.num_forced)

    patch.setattr(scheduler, "depth_within", mutant)


def losses_are_counted_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Never resets a request's count of failed handoffs, not even when a handoff succeeds."""
    totals: dict[str, int] = {}

    def grow(req: Request, num_failures: int) -> None:
        totals[req.request_id] = max(num_failures, totals.get(req.request_id, 0))

    patch.setattr(Request, "num_failures", property(lambda req: totals[req.request_id], grow))


def waiting_for_slots_counts_as_refused(patch: pytest.MonkeyPatch) -> None:
    """Never moves the time of a request's first refusal, so that time in which it waits for slots counts too."""
    times: dict[str, float | None] = {}

    def write(req: Request, since_s: float | None) -> None:
        if since_s is None or times.get(req.request_id) is None:
            times[req.request_id] = since_s

    patch.setattr(Request, "refused_since_s", property(lambda req: times[req.request_id], write))


def a_request_put_off_has_no_place(patch: pytest.MonkeyPatch) -> None:
    """Skips requests whose handoff is put off, so that no slots are spared for them."""
    in_turn = WaitingQueue.in_turn

    def mutant(self: WaitingQueue, now_s: float) -> Iterator[Request]:
        yield from (req for req in in_turn(self, now_s) if req.not_before_s <= now_s)

    patch.setattr(WaitingQueue, "in_turn", mutant)
