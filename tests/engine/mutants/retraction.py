"""Mutants of retraction, in which a request gives its KV slots to an older one and returns later. They change which
request gives way, which returns first, and with which tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

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
from tests.engine.mutants.kinds import Mutant, instead_of


def oldest_gives_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retraction, "max", min, raising=False)


def priorities_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ageing, "due_s", lambda self, priority, arrived_s: arrived_s)
    patch.setattr(Ageing, "level", lambda self, due_s, *, now_s, best: best)


def waiting_improves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ageing, "due_s", lambda self, priority, arrived_s: arrived_s + priority * 1e6)


def handoffs_under_way_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Never retracts a request whose handoff (its prefill and the transfer of its KV) is under way. A running request
    gives way instead, whatever is reserved for the handoff.
    """

    def retraction_of_running(*, lives: Lives, **parts: Any) -> Retraction:
        running = SimpleNamespace(bringing_kv=(), holding=lives.holding, enter=lives.enter, requests=lives.requests)
        return Retraction(lives=cast(Lives, running), **parts)

    patch.setattr(scheduler, "Retraction", retraction_of_running)


def _queued(change: Callable[[Request], None]) -> Mutant:
    """Returns a mutant that changes each request when it goes back to the queue."""

    @instead_of(Lives, "enter")
    def enters(enter: Callable[..., None], self: Lives, req: Request, phase: Phase, **about: Any) -> None:
        if phase is Phase.QUEUE:
            change(req)
        enter(self, req, phase, **about)

    return enters


def returns_behind_the_others(patch: pytest.MonkeyPatch) -> None:
    later = itertools.count(1 << 20)
    _queued(lambda req: setattr(req, "due_s", float(next(later))))(patch)


def retractions_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    _queued(lambda req: setattr(req, "num_retractions", 0))(patch)


@instead_of(WaitingQueue, "in_turn")
def newcomers_are_handed_off_first(_: object, self: WaitingQueue, now_s: float) -> Iterator[Request]:
    return iter(sorted(self, key=lambda req: -req.arrival))


@instead_of(dispatcher, "HandoffRow")
def output_counts_as_prompt(row: type[HandoffRow], **columns: Any) -> HandoffRow:
    return row(**{**columns, "prompt_len": len(columns["token_ids"])})


@instead_of(dispatcher, "HandoffRow")
def output_is_left_behind(row: type[HandoffRow], **columns: Any) -> HandoffRow:
    """Sends only the prompt of a retracted request back to prefill, without the output it has already."""
    return row(**{**columns, "token_ids": columns["token_ids"][: columns["prompt_len"]]})


@instead_of(ScheduleBatch, "choose_depth")
def drafts_are_never_given_up(
    choose_depth: Callable[..., None], self: ScheduleBatch, depth: Depth, pool: object, *unread: object
) -> None:
    """Lets a step draft at full depth even if no slots are free for the drafts."""
    choose_depth(self, depth, SimpleNamespace(lacks=lambda *_: False), *unread)


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


@instead_of(WaitingQueue, "in_turn")
def a_request_put_off_has_no_place(
    in_turn: Callable[..., Iterator[Request]], self: WaitingQueue, now_s: float
) -> Iterator[Request]:
    """Skips requests whose handoff is put off, so that no slots are spared for them."""
    return (req for req in in_turn(self, now_s) if req.not_before_s <= now_s)
