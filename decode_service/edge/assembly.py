"""Builds what serves the decode service's clients, in the engine's process or in a separate one, and the response of
GetModelInfo, which does not change during the process's life.

gRPC server ─▶ InferenceServicer ─▶ LiveRequests ─post─▶ EnginePort
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from common.config.settings import DecodeSettings
from common.grammar.grammar import GrammarKind
from common.host.descriptors import max_connections
from common.kv.pool_size import PoolSize
from common.priority import Ageing
from common.service.engine_thread import EnginePort
from common.service.roles import Roles
from common.service.runtime import Runtime
from common.service.server import ServerLimits, ServiceServer, open_server
from common.telemetry.metrics import RequestMetrics
from common.telemetry.timeline import Timeline
from common.telemetry.timeline_rpc import OtherTimeline
from common.text.chat_template import ChatRefused
from common.text.output_formats import FORMATS, NONE, OutputFormat, format_of_template
from common.text.tokenizer import TextTokenizer
from common.text.tool_grammars import ToolGrammars
from common.wire.codec_fingerprint import encode_fingerprint
from decode_service.edge.inference import INFERENCE_SERVICE, InferenceServicer, Served
from decode_service.edge.live_requests import LiveRequests
from decode_service.edge.matchers import Matchers, Replay
from decode_service.edge.observer import RequestObserver
from decode_service.edge.replicas import ReplicaStates
from decode_service.edge.request_checks import ModelLimits
from decode_service.edge.text.prompts import Prompts
from decode_service.messages import Command, FinishReason

DISTRIBUTION = "baton-serve"
CONNECTION_AGE_S = 30.0  # within this time other gRPC clients than Baton's find a new replica behind a DNS name


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgePlan:
    """The values from which an edge is built, besides its engine. They can be sent to another process.

    At most `max_live` requests are live, and the log-probabilities of their prompts take at most
    `max_prompt_logprob_bytes`. If the server `shares_port`, other edges listen on it too.
    """

    settings: DecodeSettings
    instance_id: str
    directory: Path
    limits: ModelLimits
    model_info: inference_pb2.GetModelInfoResponse
    max_live: int
    max_prompt_logprob_bytes: int
    shares_port: bool = False


@dataclass(frozen=True, slots=True)
class OpenedEdge:
    """An edge whose server has not started yet."""

    live_requests: LiveRequests
    server: ServiceServer


@asynccontextmanager
async def opened_edge(
    plan: EdgePlan,
    *,
    engine: EnginePort[Command],
    new_matchers: Callable[[Replay], Matchers],
    replicas: ReplicaStates,
    roles: Roles,
    tokenizer: TextTokenizer,
    registry: CollectorRegistry,
    tracer: Tracer,
    timeline: Timeline,
    other_timeline: OtherTimeline | None = None,
) -> AsyncIterator[OpenedEdge]:
    """Yields an edge of `engine`. `new_matchers` gets the function that runs work on the edge's threads.
    `other_timeline` is the timeline of the engine's process, if that is another process.
    """
    settings = plan.settings
    observer = RequestObserver(RequestMetrics(registry, finish_reasons=FinishReason, grammar_kinds=GrammarKind))
    live_requests = LiveRequests(
        engine=engine,
        max_live=plan.max_live,
        observer=observer,
        ageing=Ageing(settings.priority_step_s),
        timeline=timeline,
        max_prompt_logprob_bytes=plan.max_prompt_logprob_bytes,
    )
    server = open_server(
        settings,
        service_name=INFERENCE_SERVICE,
        instance_id=plan.instance_id,
        limits=ServerLimits(
            max_message_bytes=settings.max_request_bytes,
            # An eighth for the extra places of FairPlaces, another for requests that arrive or are being refused.
            max_streams=max(settings.max_streams, plan.max_live * 5 // 4),
            max_connections=max_connections(),
            connection_age_s=CONNECTION_AGE_S,
        ),
        timeline=timeline,
        roles=roles,
        other_timeline=other_timeline,
        shares_port=plan.shares_port,
    )
    served = Served(
        limits=plan.limits,
        model_info=plan.model_info,
        instance_id=plan.instance_id,
        client_stall_timeout_s=settings.client_stall_timeout_s,
        tool_grammars=ToolGrammars(output_format_of(settings, tokenizer), tokenizer.special_tokens),
        tells_tenants_apart=bool(settings.tenant_weights),
    )
    async with Prompts(tokenizer=tokenizer, limits=plan.limits, timeline=timeline) as prompts:
        servicer = InferenceServicer(
            engine=engine,
            live_requests=live_requests,
            prompts=prompts,
            matchers=new_matchers(prompts.replay),
            replicas=replicas,
            observer=observer,
            served=served,
            client_of=server.client_of,
            tracer=tracer,
            timeline=timeline,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc_server)
        yield OpenedEdge(live_requests, server)


def model_info(
    settings: DecodeSettings,
    runtime: Runtime,
    size: PoolSize,
    tokenizer: TextTokenizer,
    *,
    sampling_defaults: Mapping[str, float],
) -> inference_pb2.GetModelInfoResponse:
    form = output_format_of(settings, tokenizer)
    try:
        (template, special_tokens, _), variables = tokenizer.chat_template(), tokenizer.chat_template_variables()
    except ChatRefused:
        template, special_tokens, variables = "", {}, ()
    return inference_pb2.GetModelInfoResponse(
        model=settings.model,
        architecture=runtime.architecture,
        vocab_size=runtime.model.vocab_size,
        max_context_tokens=size.max_context_tokens,
        eos_token_ids=runtime.model.eos_token_ids,
        device=settings.device,
        dtype=settings.dtype,
        version=version(DISTRIBUTION),
        fingerprint=encode_fingerprint(runtime.fingerprint),
        output_format=form.name,
        has_reasoning=form.reasoning is not None,
        chat_template_variables=variables,
        chat_template=template,
        special_tokens=special_tokens,
        sampling_defaults=types_pb2.SamplingParams(**sampling_defaults),  # type: ignore[arg-type]
    )


def output_format_of(settings: DecodeSettings, tokenizer: TextTokenizer) -> OutputFormat:
    """Returns the form in which the model writes reasoning and tool calls: the configured one, or else the one that its
    chat templates show.
    """
    if settings.output_format != "auto":
        return FORMATS[settings.output_format]
    try:
        return format_of_template(*tokenizer.template_sources())
    except ChatRefused:
        return NONE
