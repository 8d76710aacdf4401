"""Slots for the next step: where too few are free, the youngest requests give theirs up and wait again."""

from __future__ import annotations

from collections.abc import Callable, Collection

from common.kv.pool import KvPool
from decode_service.dispatcher import PrefillDispatcher
from decode_service.request import Phase, Request
from decode_service.schedule_batch import ScheduleBatch
from decode_service.stages import StageLog


class Retraction:
    """Only the engine thread calls it."""

    def __init__(
        self, *, pool: KvPool, dispatcher: PrefillDispatcher, stages: StageLog, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._stages = stages
        self._clock = clock
        self.num_retractions = 0

    def secure_slots(self, running: ScheduleBatch, requests: Collection[Request]) -> bool:
        """Make sure the slots of the next step are free, retracting of all live `requests` the youngest as needed.

        False when slots are on their way but a forward in flight still holds them: nothing is launched this time.
        """
        while (shortage := running.num_slots_needed(self._pool) - self._pool.num_free_slots) > 0:
            if self._num_coming(running, requests) >= shortage:
                return False
            self._retract_youngest(running, requests)
        return True

    def requeue(self, req: Request) -> None:
        """A retracted request that no step in flight carries any more."""
        now_s = self._clock()
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
        """Of all that hold slots: what a handoff under way reserved goes before the KV of an older, running request."""
        handed_off = [req for req in requests if req.phase is Phase.HANDED_OFF]
        req = max((*running.reqs, *handed_off), key=lambda req: req.arrival)
        self.num_retractions += 1
        req.num_retractions += 1
        if req.phase is Phase.HANDED_OFF:
            self._dispatcher.take_back(req)
            return
        running.filter_batch([i for i, other in enumerate(running.reqs) if other is not req])
        req.phase = Phase.RETRACTING
        if not req.num_in_flight:
            self.requeue(req)
