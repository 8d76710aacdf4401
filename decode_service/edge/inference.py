"""The gRPC servicer of the Inference service."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import grpc
import structlog
from opentelemetry.trace import Tracer

from baton.v1 import inference_pb2, inference_pb2_grpc
from common.errors import BatonError, DeadlineExceeded, EngineFault, RequestCancelled
from common.grammar.grammar import TokenRules
from common.grammar.matcher import Matcher
from common.grammar.reasoning import NUM_LAST_TOKENS
from common.rpc.errors import abort_with
from common.rpc.fair_shares import Caller
from common.rpc.server_bounds import BY_ADDRESS, ClientOf
from common.sampling.params import ResolvedSampling
from common.sampling.prompt_logprobs import PromptLogprobs
from common.service.engine_thread import EnginePort
from common.telemetry.timeline import EDGE, REQUESTS, Timeline
from common.telemetry.tracing import NO_TRACER
from common.text.tool_grammars import ToolGrammars
from decode_service.edge.live_request import Ending, LiveRequest, ending_of_brought
from decode_service.edge.live_requests import LiveRequests
from decode_service.edge.matchers import Matchers
from decode_service.edge.observer import (
    RequestObserver,
    client_left,
    ending_attributes,
    request_attributes,
    sampling_attributes,
)
from decode_service.edge.replicas import ReplicaStates
from decode_service.edge.request_checks import (
    GENERIC_TOOL_GRAMMARS,
    ChatPrompt,
    CheckedRequest,
    ModelLimits,
    check_detokenize,
    check_lengths,
    check_request,
    check_tokenize,
    tenant_key,
    tenant_of,
)
from decode_service.edge.request_trace import RequestTrace, RequestTraces
from decode_service.edge.responses import (
    ClientWrites,
    PromptTokens,
    delta_event,
    finished_event,
    pool_load,
    started_event,
)
from decode_service.edge.sampling_checks import check_token_ids
from decode_service.edge.text.output import OutputProcessor
from decode_service.edge.text.prompts import Prompts
from decode_service.messages import Command

_log = structlog.get_logger(__name__)

INFERENCE_SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The served model, and the rules by which it is served.

    A client that takes nothing of its answer for `client_stall_timeout_s` is dropped. If `tells_tenants_apart`, the
    engine treats tenants as clients; else they share their client's rows and slots.
    """

    limits: ModelLimits
    model_info: inference_pb2.GetModelInfoResponse
    instance_id: str
    client_stall_timeout_s: float
    tool_grammars: ToolGrammars = GENERIC_TOOL_GRAMMARS
    tells_tenants_apart: bool = False


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves the Inference service on the event loop. `prompts` does the slow work with texts, on threads and in
    processes.
    """

    def __init__(
        self,
        *,
        engine: EnginePort[Command],
        live_requests: LiveRequests,
        prompts: Prompts,
        matchers: Matchers,
        replicas: ReplicaStates,
        observer: RequestObserver,
        served: Served,
        client_of: ClientOf = BY_ADDRESS,
        tracer: Tracer = NO_TRACER,
        timeline: Timeline | None = None,
    ) -> None:
        timeline = timeline or Timeline()
        self._edge_track = timeline.track(EDGE)
        self._request_track = timeline.track(REQUESTS)
        self._engine = engine
        self._live_requests = live_requests
        self._prompts = prompts
        self._matchers = matchers
        self._decoder = prompts.tokenizer
        self._limits = served.limits
        self._served = served
        self._replicas = replicas
        self._observer = observer
        self._client_of = client_of
        self._traces = RequestTraces(tracer)

    async def Generate(  # type: ignore[override]  # the asyncio server also takes a coroutine that writes
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        with (
            self._traces.begin(context.invocation_metadata()) as trace,
            ClientWrites(context, stall_timeout_s=self._served.client_stall_timeout_s) as client,
        ):
            await self._generate(request, context, trace, client)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, context: Context, trace: RequestTrace, client: ClientWrites
    ) -> None:
        try:
            with self._edge_track.span("check_request"):
                checked = check_request(request, self._limits, self._served.tool_grammars)
            caller = self._caller(checked.tenant, context)
            live = self._live_requests.admit(checked.request_id, trace, caller=caller, priority=checked.priority)
        except BatonError as error:
            self._observer.on_refused(error)
            trace.failed(error)
            await abort_with(context, error)
        trace.describe(lambda: request_attributes(checked, live.request_id, self._served.model_info.model))
        end: Ending | BatonError | None = None
        time_out = self._fail_at_deadline(live, context)
        try:
            with self._request_track.task("Generate", live.request_id):
                end = await self._run(live, checked, context, client, caller)
        except BatonError as error:
            end = error
        except Exception as error:
            _log.exception("request_crashed", request_id=live.request_id)
            end = EngineFault(f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            if _remaining_s(context) == 0:
                end = _deadline_passed()
            raise
        finally:
            if time_out is not None:
                time_out.cancel()
            self._live_requests.release(live)
            self._observer.on_end(live, end)
            if not isinstance(end, Ending):
                trace.failed(client_left() if end is None else end)
        if isinstance(end, BatonError):
            await abort_with(context, end)
        trace.describe(partial(ending_attributes, end))
        try:
            await client.write(finished_event(end))
        except RequestCancelled as error:
            trace.failed(error)
            await abort_with(context, error)

    def _caller(self, tenant: str | None, context: Context) -> Caller:
        """Returns who shares the service for a call that names `tenant`. If tenants have weights, they are clients."""
        if tenant is None or not self._served.tells_tenants_apart:
            return self._client_of(context), tenant or ""
        return tenant_key(tenant), ""

    async def _run(
        self, live: LiveRequest, checked: CheckedRequest, context: Context, client: ClientWrites, caller: Caller
    ) -> Ending:
        """Runs an admitted request to its end, and returns the ending, which the caller writes to the client.

        Raises the request's error if it fails. gRPC cancels the call, and so this method, when the client leaves.
        """
        with self._request_track.task("tokenize", live.request_id):
            prompt_token_ids = await self._prompts.encode(checked.prompt, caller=caller)
            if checked.max_prompt_tokens is not None:
                prompt_token_ids = prompt_token_ids[-checked.max_prompt_tokens :]
        sampling = check_lengths(checked, prompt_token_ids, self._limits)
        if sampling.reasoning is not None:
            last_bytes = b"".join(map(self._decoder.bytes_of, prompt_token_ids[-NUM_LAST_TOKENS:]))
            continued = checked.prompt.continued if isinstance(checked.prompt, ChatPrompt) else ""
            reasoning = sampling.reasoning.after_prompt(last_bytes, continued=continued)
            sampling = replace(sampling, reasoning=reasoning)
        if bad_words := checked.sampling.bad_words:
            rules = sampling.token_rules or TokenRules()
            forbidden = await self._prompts.spell(bad_words, caller=caller)
            sampling = replace(sampling, token_rules=replace(rules, forbidden=forbidden))
        live.trace.describe(lambda: sampling_attributes(sampling, len(prompt_token_ids)))
        shown = checked.sampling.shown_special_tokens if checked.sampling.skips_special_tokens else None
        output = await self._replay(
            partial(
                OutputProcessor,
                decoder=self._decoder.showing(shown),
                prompt_token_ids=prompt_token_ids,
                stop_strings=checked.sampling.stop_strings,
                end_token_ids=frozenset(sampling.end_token_ids),
                includes_stop=checked.sampling.includes_stop,
                min_tokens=sampling.min_tokens,
                reasoning=sampling.reasoning,
                generated_token_ids=checked.generated_token_ids,
            ),
            num_tokens=len(checked.generated_token_ids),
            caller=caller,
        )
        shown_ids = prompt_token_ids if checked.returns_prompt_token_ids else ()
        started = started_event(live.request_id, len(prompt_token_ids), sampling, prompt_token_ids=shown_ids)
        matcher = None
        if sampling.is_constrained:
            matcher = await self._matcher(live, sampling, checked.generated_token_ids, caller)
        ending = ending_of_brought(
            checked.generated_token_ids, sampling=sampling, output=output, num_prompt_tokens=len(prompt_token_ids)
        )
        if ending is not None:
            live.end_at_once(output, len(prompt_token_ids))
            await client.write(started)
            return ending
        self._live_requests.submit(
            live,
            output=output,
            prompt_token_ids=prompt_token_ids,
            generated_token_ids=checked.generated_token_ids,
            sampling=sampling,
            choice_index=checked.choice_index,
            priority=checked.priority,
            deadline_s=_deadline_s(context),
            wants_drafts=checked.sampling.speculates,
            cache_salt=checked.cache_salt,
            matcher=matcher,
        )
        await client.write(started)
        prompt_tokens = PromptTokens(self._decoder, prompt_token_ids)
        if sampling.num_prompt_logprobs is not None:
            await client.write(prompt_tokens.first())
        while True:
            news = await live.read()
            if isinstance(news, Ending):
                return news
            if isinstance(news, PromptLogprobs):
                await client.write(prompt_tokens.event(news))
                continue
            with self._request_track.task("write", live.request_id, tokens=len(news.token_ids)):
                await client.write(delta_event(news))
            live.trace.output_written()

    async def _matcher(
        self, live: LiveRequest, sampling: ResolvedSampling, output_ids: Sequence[int], caller: Caller
    ) -> Matcher:
        with ExitStack() as spans:
            if (grammar := sampling.grammar) is not None:
                self._observer.on_grammar(grammar.kind)
                spans.enter_context(live.trace.grammar(grammar.kind.value))
            client, tenant = caller
            return await self._matchers.of(sampling, output_ids, client=client, tenant=tenant)

    def _fail_at_deadline(self, live: LiveRequest, context: Context) -> asyncio.TimerHandle | None:
        """Starts and returns a timer that fails the request at its deadline, or returns None if it has no deadline.

        gRPC alone would not end the call while no byte is sent or received.
        """
        remaining_s = _remaining_s(context)
        if remaining_s is None:
            return None
        return asyncio.get_running_loop().call_later(remaining_s, live.fail, _deadline_passed())

    async def _replay(
        self, new_output: Callable[[], OutputProcessor], *, num_tokens: int, caller: Caller
    ) -> OutputProcessor:
        """Calls `new_output`, which processes the `num_tokens` output tokens that the request brought along.

        If there are any, it runs on a thread, because it may take long. Raises Overloaded if too much text waits for
        the thread.
        """
        if num_tokens == 0:
            return new_output()
        return await self._prompts.replay(new_output, num_tokens=num_tokens, caller=caller)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else None
        try:
            prompt = check_tokenize(request)
            with self._place(tenant_of(request), context) as caller:
                token_ids = await self._prompts.encode(prompt, adds_special_tokens=adds, caller=caller)
                pieces: Sequence[str] = ()
                if request.with_pieces:
                    spell = partial(self._decoder.pieces_of, token_ids)
                    pieces = await self._prompts.replay(spell, num_tokens=len(token_ids), caller=caller)
        except BatonError as error:
            await abort_with(context, error)
        return inference_pb2.TokenizeResponse(token_ids=token_ids, pieces=pieces)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        def detokenize() -> str:
            token_ids = check_token_ids("token_ids", request.token_ids, self._limits.vocab_size)
            return self._decoder.showing(None).decode(token_ids)

        try:
            check_detokenize(request, self._limits)
            with self._place(tenant_of(request), context) as caller:
                text = await self._prompts.replay(detokenize, num_tokens=len(request.token_ids), caller=caller)
        except BatonError as error:
            await abort_with(context, error)
        return inference_pb2.DetokenizeResponse(text=text)

    @contextmanager
    def _place(self, tenant: str | None, context: Context) -> Iterator[Caller]:
        """Holds one of the places for live requests while the block runs, for a call that names `tenant` and needs only
        the text threads. Yields the caller.

        Raises Draining, EngineLost or Overloaded.
        """
        caller = self._caller(tenant, context)
        live = self._live_requests.admit(None, caller=caller)
        try:
            yield caller
        finally:
            self._live_requests.release(live)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        return self._served.model_info

    async def GetLoad(
        self, request: inference_pb2.GetInferenceLoadRequest, context: Context
    ) -> inference_pb2.GetInferenceLoadResponse:
        load = self._engine.load
        return inference_pb2.GetInferenceLoadResponse(
            instance_id=self._served.instance_id,
            rows=pool_load(load.rows),
            slots=pool_load(load.slots),
            num_queued=load.num_queued,
            num_running=load.num_running,
            num_steps=load.num_steps,
            prefill_replicas=[
                inference_pb2.PrefillReplica(
                    address=state.replica.address,
                    is_ready=state.replica.is_ready,
                    num_rows=state.num_rows,
                    reason="" if state.replica.error is None else str(state.replica.error),
                    error_reason="" if state.replica.error is None else state.replica.error.reason,
                    num_known_tokens=load.num_known_tokens.get(state.replica.address, 0),
                )
                for state in self._replicas.states()
            ],
            num_row_retries=load.num_row_retries,
            num_retractions=load.num_retractions,
            is_degraded=load.is_degraded,
        )


def _deadline_passed() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline passed")


def _deadline_s(context: Context) -> float:
    remaining_s = _remaining_s(context)
    return math.inf if remaining_s is None else time.monotonic() + remaining_s


def _remaining_s(context: Context) -> float | None:
    return cast("float | None", context.time_remaining())
