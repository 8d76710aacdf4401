"""The state of one generation across its calls. Both clients use it; it makes no call itself.

call 1:  Started  Delta  Delta  ✗          what its caller sees:  Started  Delta  Delta  Delta  Finished
call 2:                           (Started)  Delta  Finished
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.client.event_order import EventOrder
from baton.errors import (
    AlreadyExists,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from baton.events import Delta, Event, Started
from baton.v1 import inference_pb2

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
TOLD_SPREAD_S = 0.5
"""Upper bound of a random delay: clients told to return in the same second spread out. A place is kept for 1 s."""
MAX_BREAKS = 40
"""Bound on breaks without output in between. It stops a request that brings down each server it reaches."""

_QUEUE_FULL, _RETRY_AFTER_S = "QUEUE_FULL", "retry_after_s"
_CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a generation has delivered. With the same prompt and options it makes a request that continues the output.

    `seed` is None before Started. `generated_token_ids` begins with those in the request.
    """

    seed: int | None
    generated_token_ids: tuple[int, ...]


class Generation:
    """Decides after each call whether another one continues the generation.

    `timeout_s` covers all calls together. After a break another call follows until `resume_timeout_s` has passed
    without an event; with None none follows. Before the first event `admission_timeout_s` takes its place.

    Another call follows UNAVAILABLE, and CANCELLED without a reason. Once a call broke, it also follows refusals that
    the break may cause: admission is full, or the server that lost the connection still holds the caller's own request
    id. With both times set, a request refused by a full admission is sent again when the server said, if that is within
    `admission_timeout_s`.

    A stream that has begun and is too long for one server may fit another's context. If none fits in time,
    it ends UNAVAILABLE.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float | None,
        resume_timeout_s: float | None,
        admission_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._request = request
        self._clock = clock
        self._jitter = jitter
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._resume_timeout_s = resume_timeout_s
        resumes_with_own = resume_timeout_s is not None and admission_timeout_s is not None
        self._admission_timeout_s = admission_timeout_s if resumes_with_own else resume_timeout_s
        self._waits_for_a_place = resumes_with_own
        self._order = EventOrder()
        self._started: Started | None = None
        self._token_ids: list[int] = list(request.generated_token_ids)
        self._broken_since_s: float | None = None
        self._num_breaks = 0  # since then

    @property
    def progress(self) -> Progress:
        return Progress(None if self._started is None else self._started.seed, tuple(self._token_ids))

    @property
    def has_finished(self) -> bool:
        return self._order.has_finished

    def next_call(self) -> tuple[inference_pb2.GenerateRequest, float | None]:
        """The next call's request and time-out in seconds."""
        self._order = EventOrder()
        timeout_s = None if self._deadline_s is None else self._deadline_s - self._clock()
        if self._started is None:
            return self._request, timeout_s
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.generated_token_ids[:] = self._token_ids
        request.sampling.seed = self._started.seed
        return request, timeout_s

    def accept(self, message: inference_pb2.GenerateEvent) -> Event | None:
        """Returns the caller's event; None for a later call's Started. Raises Internal for a wrong order."""
        event = self._order.accept(message)
        if isinstance(event, Started):
            if self._started is not None:
                _check_same(self._started, event)
                self._broken_since_s = None  # it was taken in again; the breaks count on until something comes of it
                return None
            self._started = event
        elif isinstance(event, Delta):
            self._token_ids += event.token_ids
        self._broken_since_s = None
        self._num_breaks = 0
        return event

    def end(self) -> None:
        """The call ended without an error status."""
        self._order.end()

    def pause_s_after(self, error: BatonError) -> float:
        """Returns how long to wait before `next_call`. Raises `error` or DeadlineExceeded if no call follows."""
        limit_s = self._admission_timeout_s if self._started is None else self._resume_timeout_s
        told_s = self._told_s(error)
        if limit_s is None or (told_s is None and not self._may_pass(error)):
            raise error
        now_s = self._clock()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        pause_s = self._pause_s() if told_s is None else told_s
        self._num_breaks += 1
        if now_s + pause_s - self._broken_since_s > limit_s or self._num_breaks > MAX_BREAKS:
            if isinstance(error, InvalidArgument):
                raise Unavailable(f"no server was found whose context holds what this stream has: {error}") from error
            raise error
        if self._deadline_s is not None and now_s + pause_s >= self._deadline_s:
            raise DeadlineExceeded(f"no time is left to resume after: {error}") from error
        return pause_s

    def _pause_s(self) -> float:
        """No pause after the first break, because another replica may be ready; then twice as long each time."""
        if self._num_breaks == 0:
            return 0.0
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._num_breaks - 1))
        return pause_s * (0.5 + 0.5 * self._jitter())

    def _told_s(self, error: BatonError) -> float | None:
        """When the server told a request that waits for a place to return; None without such a time."""
        if not self._waits_for_a_place or self._started is not None or error.reason != _QUEUE_FULL:
            return None
        told_s = error.metadata.get(_RETRY_AFTER_S, "")
        return float(told_s) + TOLD_SPREAD_S * self._jitter() if told_s.isdecimal() else None

    def _may_pass(self, error: BatonError) -> bool:
        match error:
            case Unavailable():
                return True
            case Cancelled():  # without a reason it is gRPC's: a server that shuts down ends its calls this way
                return not error.reason
            case AlreadyExists():
                return self._num_breaks > 0 and self._request.HasField("request_id")
            case InvalidArgument():
                return self._num_breaks > 0 and self._started is not None and error.reason == _CONTEXT_EXCEEDED
            case ResourceExhausted():
                return self._num_breaks > 0 and error.reason == _QUEUE_FULL
            case _:
                return False


def _check_same(first: Started, again: Started) -> None:
    if first.num_prompt_tokens != again.num_prompt_tokens:
        raise Internal(
            f"the prompt was {first.num_prompt_tokens} tokens and is {again.num_prompt_tokens} where it was resumed: "
            "another model",
            reason="PROTOCOL",
        )
