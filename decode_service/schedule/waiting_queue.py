"""The queue of requests that hold no row yet, and the choice of prefill replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from math import inf

from common.errors import BatonError, ContextExceeded, FingerprintMismatch, PrefillUnavailable
from decode_service.messages import Phase, Replica, ReplicasChanged
from decode_service.schedule.request import Request


class WaitingQueue:
    """The requests that wait for a handoff, in the order in which they are handed off.

    Requests that were handed off before come first, oldest first. After them clients take turns, one request per turn.
    A new client joins at the end of the line, and a client goes back to the end after its turn. So a client waits for
    at most one turn of each other client. Each client's requests keep their order. `num_changes` counts the requests
    that joined or left.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._num_waiting = 0
        self._returned: dict[int, Request] = {}
        # Requests by client; the client with the next turn comes first
        self._newcomers: dict[str, dict[int, Request]] = {}

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._returned.values(), *chain(*(reqs.values() for reqs in self._newcomers.values()))])

    def in_turn(self) -> Iterator[Request]:
        """Yields each waiting request once, in the order of handoff.

        If a yielded request still waits when the next one is taken, its client keeps its turn.
        """
        yield from list(self._returned.values())
        clients = deque(self._newcomers)
        rest: dict[str, deque[Request]] = {}
        while clients:
            client = clients[0]
            if client not in rest:
                rest[client] = deque(self._newcomers[client].values())
            if not rest[client]:
                clients.popleft()
                continue
            req = rest[client].popleft()
            yield req
            if req.phase is not Phase.QUEUE:
                clients.rotate(-1)
                if client in self._newcomers:
                    self._newcomers[client] = self._newcomers.pop(client)

    def add(self, req: Request) -> None:
        self.num_changes += 1
        self._num_waiting += 1
        if not (req.num_attempts or req.num_retractions or req.num_failures):
            self._newcomers.setdefault(req.client, {})[req.arrival] = req
            return
        is_youngest = not self._returned or req.arrival > next(reversed(self._returned))
        self._returned[req.arrival] = req
        if not is_youngest:
            self._returned = dict(sorted(self._returned.items()))

    def remove(self, req: Request) -> None:
        """Removes a request that waits."""
        self.num_changes += 1
        self._num_waiting -= 1
        self._returned.pop(req.arrival, None)
        reqs = self._newcomers.get(req.client, {})
        if reqs.pop(req.arrival, None) is not None and not reqs:
            del self._newcomers[req.client]


class ReplicaSet:
    """The prefill replicas as last reported.

    `none_ready_since_s` is the time, by the engine's clock, since which no replica is ready. It is None while one is.
    """

    def __init__(self, now_s: float) -> None:
        self._replicas: tuple[Replica, ...] = ()
        self._others_may_come = False
        self._most_tokens_ever = 0.0
        self._none_ready_since_s: float | None = now_s

    def update(self, changed: ReplicasChanged, now_s: float) -> None:
        self._replicas, self._others_may_come = changed.replicas, changed.others_may_come
        limits = [replica.max_context_tokens or inf for replica in changed.replicas if replica.is_ready]
        self._most_tokens_ever = max([self._most_tokens_ever, *limits])
        if any(replica.is_ready for replica in changed.replicas):
            self._none_ready_since_s = None
        elif self._none_ready_since_s is None:
            self._none_ready_since_s = now_s

    @property
    def none_ready_since_s(self) -> float | None:
        return self._none_ready_since_s

    def least_loaded(self, num_rows_at: Callable[[str], int], avoid: str, num_tokens: int) -> str | None:
        """Returns the address of the least loaded ready replica that takes `num_tokens` tokens, or None if there is
        none.

        A replica's load is its number of rows: those that this service handed to it (`num_rows_at`), or those that it
        reports, whichever are more. The address `avoid` is chosen only if no other replica qualifies.
        """
        ready = [replica for replica in self._replicas if replica.is_ready and replica.takes(num_tokens)]
        preferred = [replica for replica in ready if replica.address != avoid] or ready
        if not preferred:
            return None
        return min(preferred, key=lambda r: max(num_rows_at(r.address), r.num_outstanding)).address

    def too_long_error(self, num_tokens: int) -> BatonError | None:
        """Returns why no ready replica takes `num_tokens` tokens. Returns None if one does, or if none is ready.

        The error is PrefillUnavailable if waiting may help: if some replica is not ready, or if other replicas may come
        and one that took so many tokens was ready before. Otherwise it is ContextExceeded.
        """
        ready = [replica for replica in self._replicas if replica.is_ready]
        if not ready or any(replica.takes(num_tokens) for replica in ready):
            return None
        limit = max(replica.max_context_tokens or 0 for replica in ready)
        message = f"{num_tokens} tokens are more than any prefill replica takes: the largest takes {limit}"
        one_may_come = self._others_may_come and num_tokens <= self._most_tokens_ever
        if len(ready) == len(self._replicas) and not one_may_come:
            return ContextExceeded("prompt", message, max_context_tokens=limit, num_prompt_tokens=num_tokens)
        causes = self._causes()
        return PrefillUnavailable(message + (f", and {causes}" if causes else ""))

    @property
    def are_hopeless(self) -> bool:
        """Whether no replica will ever serve: all have a different fingerprint, and no others may come."""
        return self._mismatch is not None and not self._others_may_come

    def unavailable_error(self) -> BatonError:
        """Returns why no replica is ready: FingerprintMismatch if all have a different fingerprint, else
        PrefillUnavailable.
        """
        if (mismatch := self._mismatch) is not None:
            return mismatch
        causes = self._causes()
        return PrefillUnavailable("no prefill replica is ready" + (f" ({causes})" if causes else ""))

    def _causes(self) -> str:
        return "; ".join(f"{r.address}: {r.error or 'is not ready'}" for r in self._replicas if not r.is_ready)

    @property
    def _mismatch(self) -> FingerprintMismatch | None:
        errors = [replica.error for replica in self._replicas]
        mismatches = [error for error in errors if isinstance(error, FingerprintMismatch)]
        return mismatches[0] if mismatches and len(mismatches) == len(errors) else None
