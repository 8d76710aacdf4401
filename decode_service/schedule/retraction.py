"""Finds slots for the next step. If too few are free, the last requests in turn give up their slots and wait again."""

from __future__ import annotations

from common.kv.pool import KvPool, RowLease
from decode_service.messages import Phase
from decode_service.schedule.life import RULES, Lives, Place
from decode_service.schedule.request import Request
from decode_service.schedule.running_rows import RunningRows
from decode_service.schedule.schedule_batch import ScheduleBatch


class Retraction:
    """Takes slots from the last requests in turn (`Request.turn`) when the next step lacks some.

    These have the worst priority after ageing, and are the youngest of those with one priority. Only the engine thread
    calls it.
    """

    def __init__(
        self,
        *,
        pool: KvPool,
        rows: RunningRows,
        lives: Lives,
    ) -> None:
        self._pool = pool
        self._rows = rows
        self._lives = lives
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
        req = max((*running.reqs, *self._lives.bringing_kv), key=lambda req: req.turn)
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
