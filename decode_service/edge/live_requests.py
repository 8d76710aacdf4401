"""Every live request of the process: admits a bounded number and passes engine events on to their streams."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

from common.errors import BatonError, Draining, DuplicateRequest, EngineFault, EngineLost, Overloaded
from common.grammar.matcher import Matcher
from common.priority import DEFAULT_AGEING, Ageing
from common.rpc.fair_shares import Caller, FairBytes, FairPlaces, Full, HeldPlace, NoRoom
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import num_bytes_of
from common.service.engine_thread import EnginePort
from common.telemetry.timeline import EDGE, Timeline
from decode_service.edge.live_request import LiveRequest
from decode_service.edge.observer import RequestObserver
from decode_service.edge.request_trace import UNTRACED, RequestTrace
from decode_service.edge.text.output import OutputProcessor
from decode_service.messages import (
    Abort,
    Command,
    Failed,
    FinishAtStop,
    Finished,
    PhaseBegan,
    PromptScored,
    RequestEvent,
    RowTaken,
    Submit,
    Tokens,
)

_log = structlog.get_logger(__name__)

MAX_PROMPT_LOGPROB_BYTES = 256 << 20
"""The most bytes of prompts' log-probabilities for live requests: a million tokens with 20 likely ones each."""
_RETRY_AFTER_S = 1


class AllLiveRequests(Protocol):
    """All live requests of a service, whichever processes have them."""

    def __len__(self) -> int: ...

    @property
    def is_draining(self) -> bool: ...

    def dispatch(self, event: RequestEvent) -> None:
        """Applies one engine event. Events come in order; those of released requests are dropped."""

    def fail_all(self, error: BatonError) -> None:
        """Ends every live stream with `error`."""

    def drain(self) -> None:
        """Stops admitting requests."""

    async def wait_idle(self) -> None:
        """Waits until no request is live any more."""


class LiveRequests(AllLiveRequests):
    """The live requests of the process. For the event loop only.

    From `admit` to `release` a request takes one of `max_live` places, which callers share fairly. If none is free, the
    request takes the place of the waiting request that is due last (see common/priority.py), if that one is due later
    and has had no row yet. So a full service sheds what it would serve last.

    A prompt's log-probabilities wait here until the client reads them. So from `submit` on they take bytes from
    `max_prompt_logprob_bytes`, which callers share as `FairBytes` has it. The engine knows a request by an id that is
    never reused. So no event of an aborted request can reach a later one with the same `request_id`.
    """

    def __init__(
        self,
        *,
        engine: EnginePort[Command],
        max_live: int,
        observer: RequestObserver,
        ageing: Ageing = DEFAULT_AGEING,
        timeline: Timeline | None = None,
        max_prompt_logprob_bytes: int = MAX_PROMPT_LOGPROB_BYTES,
    ) -> None:
        self._track = (timeline or Timeline()).track(EDGE)
        self._engine = engine
        self._ageing = ageing
        self._places = FairPlaces(max_live)
        self._logprob_bytes = FairBytes(max_prompt_logprob_bytes)
        # By engine id: the caller, and its place, or None once another request has it
        self._taken: dict[str, tuple[Caller, HeldPlace | None]] = {}
        self._observer = observer
        self._by_request_id: dict[str, LiveRequest] = {}
        self._by_engine_id: dict[str, LiveRequest] = {}
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        return len(self._by_request_id)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def admit(
        self,
        request_id: str | None,
        trace: RequestTrace = UNTRACED,
        *,
        caller: Caller = ("", ""),
        priority: int | None = None,
    ) -> LiveRequest:
        """Admits a request; a new id is made if `request_id` is None. Each success needs one `release`.

        Without `priority` it takes no other request's place.

        Raises Draining, EngineLost, DuplicateRequest or Overloaded.
        """
        if self._is_draining:
            raise Draining("the service is stopping")
        if not self._engine.is_alive:
            raise EngineLost("the engine does not run")
        if request_id in self._by_request_id:
            raise DuplicateRequest(str(request_id))
        due_s = math.inf if priority is None else self._ageing.due_s(priority, time.monotonic())
        try:
            place = self._places.take(caller)
        except Full as full:
            if (last := self._last_waiting(due_s)) is None:
                message = f"{len(self)} requests are queued or running"
                raise Overloaded(message, retry_after_s=full.retry_after_s) from None
            place = self._take_place_of(last, caller, retry_after_s=full.retry_after_s)
        if request_id is None:
            request_id = engine_id = uuid.uuid4().hex
        else:
            engine_id = f"{request_id}#{uuid.uuid4().hex}"
        live = LiveRequest(request_id, engine_id, trace, due_s=due_s)
        self._by_request_id[request_id] = self._by_engine_id[engine_id] = live
        self._taken[engine_id] = caller, place
        self._is_idle.clear()
        return live

    def _last_waiting(self, due_s: float) -> LiveRequest | None:
        """Returns the request due last among those that wait and have had no row, if it is due after `due_s`."""
        waiting = (live for live in self._by_engine_id.values() if live.is_waiting and live.due_s > due_s)
        return max(waiting, key=lambda live: live.due_s, default=None)

    def _take_place_of(self, last: LiveRequest, caller: Caller, *, retry_after_s: int) -> HeldPlace:
        """Fails the request `last` and gives its place to `caller`."""
        holder, place = self._taken[last.engine_id]
        assert place is not None, "a request without a place has failed, and so does not wait"
        self._taken[last.engine_id] = holder, None
        message = "the queue is full, and a request of better priority has come"
        last.fail(Overloaded(message, retry_after_s=retry_after_s))
        return self._places.hand_over(place, caller)

    def submit(
        self,
        live: LiveRequest,
        *,
        output: OutputProcessor,
        prompt_token_ids: Sequence[int],
        generated_token_ids: Sequence[int],
        sampling: ResolvedSampling,
        choice_index: int,
        priority: int = 0,
        deadline_s: float,
        wants_drafts: bool,
        cache_salt: str | None,
        matcher: Matcher | None = None,
    ) -> None:
        """Hands the request to the engine. Raises the request's error if it has failed since `admit`, and Overloaded if
        there is no room for the log-probabilities of its prompt.

        `generated_token_ids` are the output that the request brought along. `choice_index` is the answer's number, if a
        client asks for several answers. `Submit` explains `deadline_s`, `priority`, `cache_salt` and `matcher`.
        """
        if isinstance(live.ending, BatonError):
            raise live.ending
        caller, _ = self._taken[live.engine_id]
        client, tenant = caller
        if sampling.num_prompt_logprobs is not None:
            self._hold_logprobs(live, caller, num_bytes_of(len(prompt_token_ids), sampling.num_prompt_logprobs))
        live.begin(output, len(prompt_token_ids))
        live.trace.submitted()
        self._engine.post(
            Submit(
                request_id=live.engine_id,
                token_ids=(*prompt_token_ids, *generated_token_ids),
                prompt_len=len(prompt_token_ids),
                sampling=sampling,
                choice_index=choice_index,
                priority=priority,
                deadline_s=deadline_s,
                traceparent=live.trace.traceparent,
                wants_drafts=wants_drafts,
                cache_salt=cache_salt,
                matcher=matcher,
                client=client,
                tenant=tenant,
                is_traced=live.trace.is_recording,
            )
        )
        if not self._engine.is_alive:  # it died after `admit`, maybe too early for `fail_all`
            live.fail(EngineLost("the engine does not run"))

    def release(self, live: LiveRequest) -> None:
        """Removes the request when its client's stream is over, and aborts it in the engine if needed.

        A second call does nothing.
        """
        if self._by_engine_id.pop(live.engine_id, None) is None:
            return
        del self._by_request_id[live.request_id]
        caller, place = self._taken.pop(live.engine_id)
        if place is not None:
            self._places.give_back(place)
        self._logprob_bytes.give_back(caller, live.held_bytes)
        if live.is_submitted and not live.is_done_in_engine:
            self._engine.post(Abort(live.engine_id))
        if not self._by_request_id:
            self._is_idle.set()

    def dispatch(self, event: RequestEvent) -> None:
        match event:
            case Tokens():
                with self._track.span("take_tokens", requests=len(event.request_ids), tokens=len(event.token_ids)):
                    for request_id, token_ids, logprobs in event.each():
                        self._apply(request_id, partial(self._add_tokens, token_ids=token_ids, logprobs=logprobs))
            case PromptScored():
                self._apply(event.request_id, lambda live: live.add_prompt_logprobs(event.logprobs))
            case PhaseBegan():
                self._apply(event.request_id, lambda live: live.trace.on_phase(event))
            case RowTaken():
                self._apply(event.request_id, lambda live: live.take_row())
            case Finished():
                self._apply(event.request_id, lambda live: live.finish(event))
            case Failed():
                self._apply(event.request_id, lambda live: live.fail_by_engine(event.error))

    def fail_all(self, error: BatonError) -> None:
        for live in tuple(self._by_request_id.values()):
            live.fail(error)

    def drain(self) -> None:
        self._is_draining = True

    async def wait_idle(self) -> None:
        await self._is_idle.wait()

    def _hold_logprobs(self, live: LiveRequest, caller: Caller, num_bytes: int) -> None:
        try:
            live.held_bytes = self._logprob_bytes.take(caller, num_bytes)
        except NoRoom:
            message = f"log-probabilities of prompts wait to be read: there is no room for {num_bytes} bytes more"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from None

    def _apply(self, request_id: str, change: Callable[[LiveRequest], None]) -> None:
        live = self._by_engine_id.get(request_id)
        if live is None:
            return
        try:
            change(live)
        except Exception as error:  # one request's text must not delay the others' events
            _log.exception("output_failed", request_id=live.request_id)
            live.fail(EngineFault(f"output: {type(error).__name__}: {error}"))

    def _add_tokens(self, live: LiveRequest, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        num_before = live.num_output_tokens
        match = live.add_tokens(token_ids, logprobs)
        self._observer.on_tokens(live, live.num_output_tokens - num_before)
        if match is not None:
            self._engine.post(FinishAtStop(live.engine_id, match.num_output_tokens, match.stop_string))
