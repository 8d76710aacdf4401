"""Finds slots for the next step, and rows and slots for clients that hold less than others: the last requests in turn
give up theirs and wait again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.engine import Place
from common.kv.pool import KvPool, RowLease
from decode_service.messages import Phase
from decode_service.schedule.handoff_policy import RowNeed
from decode_service.schedule.life import RULES, Lives
from decode_service.schedule.request import Request
from decode_service.schedule.running_rows import RunningRows
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.waiting_queue import Shares


class Retraction:
    """Takes slots from the last requests when the next step or a waiting client lacks some.

    The last request has the worst priority after ageing (`level`). Among equals it belongs to the client with the
    largest standing in `shares`; among that client's requests it is the last in turn (`Request.turn`). Only the engine
    thread calls it.
    """

    def __init__(
        self,
        *,
        pool: KvPool,
        rows: RunningRows,
        lives: Lives,
        shares: Shares,
        level: Callable[[Request, float], int],
        reclaim_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._rows = rows
        self._lives = lives
        self._shares = shares
        self._level = level
        self._reclaim_after_s = reclaim_after_s
        self._clock = clock
        self._leaving: list[Request] = []  # requests that a step in flight still carries
        self.num_retractions = 0

    def prepare(self, running: ScheduleBatch) -> bool:
        """Takes slots for the next step of `running`, and returns True when the step has all of them.

        While too few slots are free, it retracts the last request in turn that holds some. But if the forward in flight
        will free enough when it ends, it retracts no more and returns False: the step must not be launched now.
        """
        while not running.prepare_for_decode(self._pool):
            if not self._pool.lacks(running.rows, running.wanted_tokens(), leaving=self._leaving_with(running)):
                return False
            self._retract_last(running)
        return True

    def make_way(self, running: ScheduleBatch, short: Sequence[RowNeed]) -> None:
        """Takes rows and slots for one of the waiting requests that lack some, from clients or tenants that hold more.

        That request has waited for `reclaim_after_s`. For the first in turn any client may give way, for the others
        only other tenants of their own client. Among requests of no better level, `shares` says which give way: they go
        back to the queue. If all of these would not be enough, none gives way.
        """
        now_s = self._clock()
        for place, each in enumerate(short):
            if not self._reclaim_after_s or now_s - each.req.since_s < self._reclaim_after_s:
                continue
            if giving_way := self._giving_way(running, each, now_s, is_first=place == 0):
                for req in giving_way:
                    assert req.lease is not None
                    self._shares.gives(req.sharer, req.lease.num_tokens)
                    self._retract(running, req)
                return

    def _giving_way(self, running: ScheduleBatch, short: RowNeed, now_s: float, *, is_first: bool) -> Sequence[Request]:
        """Returns the requests that give way to a waiting one: none if all would not be enough, or none need to."""
        req = short.req
        level = self._level(req, now_s)
        others = [
            each
            for each in dict.fromkeys((*running.reqs, *self._lives.bringing_kv))  # both: lost, and handed over again
            if each.lease is not None
            and each.sharer != req.sharer
            and (is_first or each.client == req.client)
            and self._level(each, now_s) >= level
        ]
        if not others:
            return ()
        num_cached = self._pool.num_cached(short.key, is_received=short.is_received)
        shares = self._shares.copy()  # as if those that give way had done so
        leaving: list[RowLease] = []
        giving_way: list[Request] = []
        while not self._pool.has_room(
            short.num_tokens,
            num_cached=num_cached,
            num_rows=1 + short.num_spared_rows,
            num_spared=short.num_spared,
            leaving=leaving,
        ):
            others = [
                each
                for each in others
                if each.lease is not None
                and shares.gives_way(each.sharer, each.lease.num_tokens, req.sharer, short.num_tokens)
            ]
            if not others:
                return ()
            last = self._last_of(others, shares, now_s)
            assert last.lease is not None
            others.remove(last)
            giving_way.append(last)
            leaving.append(last.lease)
            shares.gives(last.sharer, last.lease.num_tokens)
        return giving_way

    def requeue_left(self) -> None:
        """Moves the requests that `prepare` retracted back to the waiting queue.

        Call it after the results of the step in flight were taken, because that step still ran their rows.
        """
        leaving, self._leaving = self._leaving, []
        for req in leaving:
            if req.phase is Phase.RETRACTING:
                self._lives.enter(req, Phase.QUEUE, was_retracted=True)

    def _leaving_with(self, running: ScheduleBatch) -> list[RowLease]:
        """Returns the rows that are released when the forward in flight ends."""
        held = set(map(id, running.reqs))
        return [
            req.lease
            for req in self._lives.requests.values()
            if req.lease is not None and RULES[req.phase].place is Place.ROWS and id(req) not in held
        ]

    def _retract_last(self, running: ScheduleBatch) -> None:
        """Retracts the last request in turn that holds slots, whether its prompt is being computed or it is running."""
        now_s = self._clock()
        self._shares.look(self._lives.holding, now_s)
        self._retract(running, self._last_of([*running.reqs, *self._lives.bringing_kv], self._shares, now_s))

    def _last_of(self, reqs: Sequence[Request], shares: Shares, now_s: float) -> Request:
        return max(reqs, key=lambda req: (self._level(req, now_s), shares.standing(req.sharer), req.turn))

    def _retract(self, running: ScheduleBatch, req: Request) -> None:
        self.num_retractions += 1
        req.num_retractions += 1
        assert req.lease is not None
        if RULES[req.phase].place is not Place.ROWS:
            self._lives.enter(req, Phase.QUEUE, was_retracted=True)
            return
        running.filter_batch([i for i, other in enumerate(running.reqs) if other is not req])
        if self._rows.num_in_flight[req.lease.row]:
            self._lives.enter(req, Phase.RETRACTING)
            self._leaving.append(req)
        else:
            self._lives.enter(req, Phase.QUEUE, was_retracted=True)
