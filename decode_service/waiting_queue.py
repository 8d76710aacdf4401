"""Requests that hold nothing yet, oldest first, and which replica each goes to."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace

from common.errors import BatonError, ContextExceeded, FingerprintMismatch, PrefillUnavailable
from decode_service.messages import Replica, ReplicasChanged
from decode_service.request import Request


class WaitingQueue:
    """Ordered by arrival: a retried or retracted request returns to its own place, ahead of younger ones."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._num_of_client: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._waiting.values()))

    def in_turn(self, holders: Iterable[Request]) -> Iterator[Request]:
        """Oldest first. But where several clients have requests that were never handed off, these come last, and next
        is always the oldest of the client with the fewest rows: those of `holders`, and those given meanwhile.
        """
        waiting = list(self._waiting.values())
        if len(self._num_of_client) <= 1:
            yield from waiting
            return
        yield from (req for req in waiting if req.num_attempts)
        by_client: dict[str, deque[Request]] = {}
        for req in waiting:
            if not req.num_attempts:
                by_client.setdefault(req.client, deque()).append(req)
        num_rows = Counter(req.client for req in holders if req.lease is not None)
        turns = [(num_rows[client], reqs[0].arrival, client) for client, reqs in by_client.items()]
        heapify(turns)
        while turns:
            num, _, client = turns[0]
            req = by_client[client].popleft()
            yield req
            if by_client[client]:
                heapreplace(turns, (num + (req.lease is not None), by_client[client][0].arrival, client))
            else:
                heappop(turns)

    def add(self, req: Request) -> None:
        is_youngest = not self._waiting or req.arrival > next(reversed(self._waiting))
        self._waiting[req.arrival] = req
        self._num_of_client[req.client] += 1
        if not is_youngest:
            self._waiting = dict(sorted(self._waiting.items()))

    def remove(self, req: Request) -> None:
        if self._waiting.pop(req.arrival, None) is None:
            return
        self._num_of_client[req.client] -= 1
        if not self._num_of_client[req.client]:
            del self._num_of_client[req.client]


class ReplicaSet:
    """The prefill replicas as last reported, and since when none of them was ready."""

    def __init__(self, now_s: float) -> None:
        self._replicas: tuple[Replica, ...] = ()
        self._others_may_come = False
        self._none_ready_since_s: float | None = now_s

    def update(self, changed: ReplicasChanged, now_s: float) -> None:
        self._replicas, self._others_may_come = changed.replicas, changed.others_may_come
        if any(replica.is_ready for replica in changed.replicas):
            self._none_ready_since_s = None
        elif self._none_ready_since_s is None:
            self._none_ready_since_s = now_s

    @property
    def none_ready_since_s(self) -> float | None:
        return self._none_ready_since_s

    def least_loaded(self, num_rows_at: Callable[[str], int], avoid: str, num_tokens: int) -> str | None:
        """The ready replica that takes so many tokens and has the fewest rows of ours and of others; `avoid` only when
        it is the only one.
        """
        ready = [replica for replica in self._replicas if replica.is_ready and replica.takes(num_tokens)]
        preferred = [replica for replica in ready if replica.address != avoid] or ready
        if not preferred:
            return None
        return min(preferred, key=lambda r: max(num_rows_at(r.address), r.num_outstanding)).address

    def too_long_error(self, num_tokens: int) -> BatonError | None:
        """Why no ready replica takes so many: ContextExceeded where all are ready. None where none is."""
        limits = [each.max_context_tokens or 0 for each in self._replicas if each.is_ready]
        if not limits:
            return None
        message = f"{num_tokens} tokens are more than any prefill replica takes: the largest takes {max(limits)}"
        if len(limits) == len(self._replicas):
            return ContextExceeded("prompt", message, max_context_tokens=max(limits), num_prompt_tokens=num_tokens)
        return PrefillUnavailable(f"{message}, and {self._causes()}")

    @property
    def are_hopeless(self) -> bool:
        """No replica will ever serve: every one differs, and there will be no other. Waiting does not mend it."""
        return self._mismatch is not None and not self._others_may_come

    def unavailable_error(self) -> BatonError:
        """FingerprintMismatch when every replica differs, else PrefillUnavailable."""
        if (mismatch := self._mismatch) is not None:
            return mismatch
        causes = self._causes()
        return PrefillUnavailable("no prefill replica is ready" + (f" ({causes})" if causes else ""))

    def _causes(self) -> str:
        return "; ".join(f"{r.address}: {r.error}" for r in self._replicas if r.error is not None)

    @property
    def _mismatch(self) -> FingerprintMismatch | None:
        errors = [replica.error for replica in self._replicas]
        mismatches = [error for error in errors if isinstance(error, FingerprintMismatch)]
        return mismatches[0] if mismatches and len(mismatches) == len(errors) else None
