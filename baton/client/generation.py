"""The state of one generation, which may take several calls if connections break, and the order of its events.

Both clients use it; it makes no call itself. In this example the first call breaks after two Deltas:

call 1:  Started  Delta  Delta  ✗          the caller sees:  Started  Delta  Delta  Delta  Finished
call 2:                           (Started)  Delta  Finished
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, cast

from baton.client.servers import ANSWER_TIMEOUT_S, READY_TIMEOUT_S
from baton.codec import event_from_wire
from baton.errors import (
    QUEUE_FULL,
    AlreadyExists,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    invalid_field,
)
from baton.events import (
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    PromptToken,
    Started,
)
from baton.v1 import inference_pb2, types_pb2
from common.grammar.reasoning import Reasoning
from common.text.output_formats import without_header

LONGEST_S = 1e9
"""The longest timeout that is passed to gRPC, which takes no infinite one, and calls longer ones passed at once."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
TOLD_SPREAD_S = 0.5
"""Upper bound, in seconds, of the random delay that is added to the retry time that a server names.

It spreads out clients that were told to retry in the same second. The server reserves a place for each of them until
1 s after the time that it named.
"""
MAX_BREAKS = 40
"""How many calls in a row may break without output. The bound stops a request that crashes each server it reaches."""
_CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
_NO_PREFILL = "NO_PREFILL"


@dataclass(frozen=True, slots=True)
class Progress:
    """The output that a generation has delivered so far.

    A request with this seed and these tokens, and otherwise the same prompt and options, continues the output. `seed`
    is None before the Started event. `generated_token_ids` are the output tokens that the request brought along, and
    then those delivered since.
    """

    seed: int | None
    generated_token_ids: tuple[int, ...]


def bounded_s(field: str, seconds: Any) -> float:
    """Returns a timeout that gRPC takes: infinity and what is near to it count as LONGEST_S. Raises InvalidArgument,
    which names the field, for NaN and for what is no number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or seconds != seconds:  # NaN
        raise invalid_field(field, f"{seconds!r} is no number of seconds")
    return float(min(cast(float, seconds), LONGEST_S))


def bounded_if_any_s(field: str, seconds: Any) -> float | None:
    """Returns what `bounded_s` does, and None for None, which is no limit."""
    return None if seconds is None else bounded_s(field, seconds)


class Generation:
    """Decides after each failed call of a generation whether another call continues it.

    `timeout_s` covers all calls together. After a break, new calls are made until `resume_timeout_s` has passed without
    an event; None means that no call follows. A server that accepts the request again counts as an event, unless it
    finds no prefill service for it. Before the first event, `admission_timeout_s` applies instead, unless it is None.

    A new call follows UNAVAILABLE, and CANCELLED without an ErrorInfo reason. After one break, a new call also follows
    refusals that the break may have caused: the queue is full, or the server that lost the connection still holds the
    request id. A request that is refused because the queue is full goes at once to another server that is ready and has
    not been tried yet. If there is none, and both `resume_timeout_s` and `admission_timeout_s` are set, the request is
    sent again at the earliest time that a server named, if that is within `admission_timeout_s`.

    If a stream has grown too long for one server's context, another server's may be large enough. The stream ends with
    Unavailable if no such server is found in time.
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
        timeout_s = bounded_if_any_s("timeout_s", timeout_s)
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._resume_timeout_s = resume_timeout_s
        resumes_with_own = resume_timeout_s is not None and admission_timeout_s is not None
        self._admission_timeout_s = admission_timeout_s if resumes_with_own else resume_timeout_s
        self._waits_for_a_place = resumes_with_own
        self._order = EventOrder()
        self._started: Started | None = None
        self._numbers = types_pb2.SamplingParams()  # in use at the first server: another may have other defaults
        self._token_ids: list[int] = list(request.generated_token_ids)
        self._num_prompt_tokens = 0  # of the prompt, that have come with their log-probabilities
        self._broken_since_s: float | None = None
        self._waiting_since_s: float | None = None  # for a server, or for its answer to a call
        self._was_admitted_again = False  # by the current call's server
        self._num_breaks = 0  # since `_broken_since_s` was set, or without new output
        self._refusals: list[tuple[float, BatonError]] = []  # of full servers since a pause, with the times they named

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        """Returns the first call's request."""
        return self._request

    @property
    def remaining_s(self) -> float | None:
        """The seconds that are left until the timeout, or None if there is no timeout."""
        return None if self._deadline_s is None else self._deadline_s - self._clock()

    @property
    def progress(self) -> Progress:
        return Progress(None if self._started is None else self._started.seed, tuple(self._token_ids))

    @property
    def has_finished(self) -> bool:
        return self._order.has_finished

    def begin_wait(self) -> float | None:
        """Must be called before waiting for a server. Returns how many seconds the wait may take (None: no limit)."""
        self._waiting_since_s = self._clock()
        if self._limit_s is None or self._broken_since_s is None:
            return self._limit_s
        return self._limit_s - (self._waiting_since_s - self._broken_since_s)

    def begin_wait_for_answer(self) -> float:
        """Must be called before waiting for the head of the current call's answer. Returns how many seconds that wait
        may take.
        """
        if self._waiting_since_s is None:
            self._waiting_since_s = self._clock()
        if self._limit_s is None:
            return READY_TIMEOUT_S
        return min(ANSWER_TIMEOUT_S, self._limit_s) if self._waits_for_a_place else ANSWER_TIMEOUT_S

    def answered(self) -> None:
        """Must be called when the head of the current call's answer has come."""
        self._waiting_since_s = None

    def next_call(self) -> tuple[inference_pb2.GenerateRequest, float | None]:
        """Returns the next call's request, and its timeout in seconds (None: no timeout)."""
        self._order = EventOrder()
        if self._started is None:
            return self._request, self.remaining_s
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.generated_token_ids[:] = self._token_ids
        request.sampling.CopyFrom(self._numbers)
        request.sampling.MergeFrom(self._request.sampling)
        request.sampling.seed = self._started.seed
        return request, self.remaining_s

    def accept(self, message: inference_pb2.GenerateEvent) -> Event | None:
        """Takes one message of the current call and returns the event for the caller.

        Returns None if an earlier call already delivered the event (Started, or tokens of the prompt). Raises Internal
        if the order of the events is wrong.
        """
        event: Event = self._order.accept(message)
        if isinstance(event, Started):
            if self._started is not None:
                _check_same(self._started, event)
                self._was_admitted_again = True
                return None
            self._started = event
            self._numbers = message.started.sampling
        elif isinstance(event, PromptLogprobs):
            if (new := self._new_of(event)) is None:
                return None
            event = new
        elif isinstance(event, Delta):
            self._token_ids += event.token_ids
        self._broken_since_s = None
        self._num_breaks = 0
        return event

    def _new_of(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """Returns the tokens of the prompt that no earlier call delivered, or None if there are none."""
        num_known = self._num_prompt_tokens - event.start
        if num_known < 0:
            raise Internal("the server left out tokens of the prompt", reason="PROTOCOL")
        if num_known >= len(event.tokens):
            return None
        self._num_prompt_tokens = event.start + len(event.tokens)
        return PromptLogprobs(event.start + num_known, event.tokens[num_known:])

    def end(self) -> None:
        """Must be called when a call has ended without an error status. Raises Internal if Finished is missing."""
        self._order.end()

    def pause_s_after(self, error: BatonError, *, is_another_ready: bool = False) -> float:
        """Returns how long to wait before `next_call`, in seconds. `is_another_ready` says whether a server is ready
        that has not been tried yet. Raises an error if no call follows: `error`, or of several refusals the one that
        named the earliest time, DeadlineExceeded if the timeout leaves no time, or Unavailable if no server has a large
        enough context.
        """
        limit_s, now_s = self._limit_s, self._clock()
        if limit_s is None:
            raise error
        pause_s: float | None = None
        is_refused = self._started is None and error.reason == QUEUE_FULL
        goes_elsewhere = is_refused and is_another_ready
        if is_refused and error.retry_after_s is not None:
            self._refusals.append((now_s + error.retry_after_s + TOLD_SPREAD_S * self._jitter(), error))
            told_at_s, error = min(self._refusals, key=lambda refusal: refusal[0])
            if self._waits_for_a_place:
                pause_s = max(0.0, told_at_s - now_s)
        if not is_another_ready:  # each is asked again
            self._refusals.clear()
        if pause_s is None and not goes_elsewhere and not self._may_pass(error):
            raise error
        if self._was_admitted_again and error.reason != _NO_PREFILL:
            self._broken_since_s = None  # the request may have waited there for long
        self._was_admitted_again = False
        if self._broken_since_s is None:
            self._broken_since_s = now_s if self._waiting_since_s is None else self._waiting_since_s
        if goes_elsewhere:
            pause_s = 0.0
        else:
            if pause_s is None:
                pause_s = self._pause_s()
            self._num_breaks += 1
        if now_s + pause_s - self._broken_since_s > limit_s or self._num_breaks > MAX_BREAKS:
            if isinstance(error, InvalidArgument):
                raise Unavailable(f"no server was found whose context holds what this stream has: {error}") from error
            raise error
        if self._deadline_s is not None and now_s + pause_s >= self._deadline_s:
            raise DeadlineExceeded(f"no time is left to resume after: {error}") from error
        return pause_s

    @property
    def _limit_s(self) -> float | None:
        return self._admission_timeout_s if self._started is None else self._resume_timeout_s

    def _pause_s(self) -> float:
        """Returns the pause before the next call. There is none after the first break, because another replica may be
        ready.

        Each later pause is twice as long as the one before, up to MAX_PAUSE_S, less a random part.
        """
        if self._num_breaks == 0:
            return 0.0
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._num_breaks - 1))
        return pause_s * (0.5 + 0.5 * self._jitter())

    def _may_pass(self, error: BatonError) -> bool:
        match error:
            case Unavailable():
                return True
            case Cancelled():  # gRPC sends CANCELLED without a reason, for example when a server shuts down
                return not error.reason
            case AlreadyExists():
                return self._num_breaks > 0 and self._request.HasField("request_id")
            case InvalidArgument():
                return self._num_breaks > 0 and self._started is not None and error.reason == _CONTEXT_EXCEEDED
            case ResourceExhausted():
                return self._num_breaks > 0 and error.reason == QUEUE_FULL
            case _:
                return False


def _check_same(first: Started, again: Started) -> None:
    if first.num_prompt_tokens != again.num_prompt_tokens:
        raise Internal(
            f"the prompt was {first.num_prompt_tokens} tokens and is {again.num_prompt_tokens} where it was resumed: "
            "another model",
            reason="PROTOCOL",
        )


class EventOrder:
    """Passes a generation's events on, and raises Internal unless their order is Started, PromptLogprobs*, Delta*,
    Finished.
    """

    def __init__(self) -> None:
        self._has_started = False
        self._has_output = False
        self._has_finished = False

    @property
    def has_finished(self) -> bool:
        return self._has_finished

    def accept(self, message: inference_pb2.GenerateEvent) -> Event:
        event = event_from_wire(message)
        is_late = isinstance(event, PromptLogprobs) and self._has_output
        if self._has_finished or is_late or isinstance(event, Started) == self._has_started:
            raise Internal(f"the server sent {type(event).__name__} out of order", reason="PROTOCOL")
        self._has_started = True
        self._has_output = self._has_output or isinstance(event, Delta)
        self._has_finished = isinstance(event, Finished)
        return event

    def end(self) -> None:
        """Must be called when the stream has ended without an error status. Raises Internal if Finished is missing."""
        if not self._has_finished:
            raise Internal("the server ended the stream before it finished", reason="PROTOCOL")


class CompletionBuilder:
    """Collects the events of one generation into a Completion.

    `parse` turns the answer into the completion's `parsed`. It is called only if the model itself ended the output. The
    answer is the text after the reasoning, whose form `reasoning` describes; None means that there is no reasoning.
    """

    def __init__(self, parse: Callable[[str], Any] | None = None, *, reasoning: Reasoning | None = None) -> None:
        self._parse = parse
        self._reasoning = reasoning
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_logprobs: list[PromptToken] = []
        self._logprobs: list[PositionLogprobs] = []
        self._started: Started | None = None

    def add(self, event: Event) -> Completion | None:
        """Adds an event. Returns the completion if `event` is Finished, else None.

        Raises what `parse` raises.
        """
        match event:
            case Started():
                self._started = event
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.tokens)
            case Delta():
                self._text.append(event.text)
                self._token_ids.extend(event.token_ids)
                self._logprobs.extend(event.logprobs)
            case Finished():
                assert self._started is not None
                text = "".join(self._text)
                answer = text
                if self._reasoning is not None:
                    answer = replace(self._reasoning, is_open=self._started.is_reasoning_open).answer_in(text)
                is_whole = event.reason is FinishReason.EOS
                return Completion(
                    request_id=self._started.request_id,
                    seed=self._started.seed,
                    text=text,
                    token_ids=tuple(self._token_ids),
                    prompt_logprobs=tuple(self._prompt_logprobs),
                    logprobs=tuple(self._logprobs),
                    finish_reason=event.reason,
                    matched_stop=event.matched_stop,
                    usage=event.usage,
                    timings=event.timings,
                    speculation=event.speculation,
                    parsed=self._parse(without_header(answer)) if is_whole and self._parse is not None else None,
                )
        return None
