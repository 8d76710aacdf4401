"""Slots for the next step: where too few are free, the youngest requests give theirs up and wait again."""

from __future__ import annotations

from collections.abc import Callable, Collection

from common.kv.pool import KvPool
from decode_service.schedule.dispatcher import PrefillDispatcher
from decode_service.schedule.request import Phase, Request
from decode_service.schedule.running_rows import RunningRows
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.stages import StageLog


class Retraction:
    """Only the engine thread calls it."""

    def __init__(
        self,
        *,
        pool: KvPool,
        rows: RunningRows,
        dispatcher: PrefillDispatcher,
        stages: StageLog,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._rows = rows
        self._dispatcher = dispatcher
        self._stages = stages
        self._clock = clock
        self._leaving: list[Request] = []  # a step in flight carries them
        self.num_retractions = 0

    def prepare(self, running: ScheduleBatch, requests: Collection[Request]) -> bool:
        """Prepare the next step, retracting of all live `requests` the youngest until there are slots for it.

        False when slots are on their way but a forward in flight still holds them: nothing is launched this time.
        """
        while not running.prepare_for_decode(self._pool):
            shortage = running.num_slots_needed(self._pool) - self._pool.num_free_slots
            if self._num_coming(running, requests) >= shortage:
                return False
            self._retract_youngest(running, requests)
        return True

    def requeue_left(self) -> None:
        """Call it after taking the results of the step that was in flight at the last `prepare`."""
        leaving, self._leaving = self._leaving, []
        for req in leaving:
            if req.phase is Phase.RETRACTING:
                self._requeue(req)

    def _requeue(self, req: Request) -> None:
        now_s = self._clock()
        self._rows.leave(req)
        req.clock.close("decode_s", now_s)
        self._stages.waits_again(req, now_s, was_retracted=True)
        self._dispatcher.requeue(req)

    def _num_coming(self, running: ScheduleBatch, requests: Collection[Request]) -> int:
        """Slots that come free when the forward in flight ends."""
        held = set(map(id, running.reqs))
        return self._pool.slot_counts().quarantined + sum(
            req.lease.num_tokens
            for req in requests
            if req.lease is not None
            and (req.phase is Phase.RETRACTING or (req.phase is Phase.RUNNING and id(req) not in held))
        )

    def _retract_youngest(self, running: ScheduleBatch, requests: Collection[Request]) -> None:
        """Retract the youngest that holds slots: a handoff under way goes before an older, running request."""
        handed_off = [req for req in requests if req.phase is Phase.HANDED_OFF]
        req = max((*running.reqs, *handed_off), key=lambda req: req.arrival)
        self.num_retractions += 1
        req.num_retractions += 1
        if req.phase is Phase.HANDED_OFF:
            self._dispatcher.take_back(req)
            return
        running.filter_batch([i for i, other in enumerate(running.reqs) if other is not req])
        req.phase = Phase.RETRACTING
        assert req.lease is not None
        if self._rows.num_in_flight[req.lease.row]:
            self._leaving.append(req)
        else:
            self._requeue(req)
