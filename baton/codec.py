"""Converts protobuf messages into the client's own types."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2

from baton.errors import Internal
from baton.events import (
    Delta,
    Event,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    PromptToken,
    Started,
    TokenLogprob,
    Usage,
)
from baton.server_info import HealthStatus, InferenceLoad, ModelInfo, PrefillLoad, PrefillReplica
from baton.v1 import inference_pb2, prefill_pb2, types_pb2
from common.peer_text import peer_text
from common.sampling.params import as_written
from common.telemetry.stats import PoolCounts, SpeculationCounts, Timings

_FINISH_REASONS = {inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}
_MAX_REASON_BYTES = 1024
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def event_from_wire(message: inference_pb2.GenerateEvent) -> Event:
    """Converts one message of a generation's stream. Raises Internal if it holds none of the four events."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(
                peer_text(started.request_id),
                started.num_prompt_tokens,
                started.seed,
                started.is_reasoning_open,
                tuple(started.prompt_token_ids),
            )
        case "delta":
            delta = message.delta
            return Delta(tuple(delta.token_ids), delta.text, tuple(map(_position_logprobs, delta.logprobs)))
        case "prompt_logprobs":
            prompt = message.prompt_logprobs
            return PromptLogprobs(prompt.start, tuple(map(_prompt_token, prompt.tokens)))
        case "finished":
            return _finished(message.finished)
        case _:
            raise Internal("the server sent an event of an unknown kind", reason="PROTOCOL")


def _position_logprobs(position: types_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(chosen=_token_logprob(position.chosen), top=tuple(map(_token_logprob, position.top)))


def _prompt_token(entry: inference_pb2.PromptToken) -> PromptToken:
    has_logprob = entry.HasField("logprob")
    return PromptToken(
        token_id=entry.token_id,
        token=entry.token,
        logprob=entry.logprob if has_logprob else None,
        rank=entry.rank if has_logprob else None,
        top=tuple(map(_token_logprob, entry.top)),
    )


def _token_logprob(entry: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.token)


def _finished(finished: inference_pb2.Finished) -> Finished:
    reason = _FINISH_REASONS.get(finished.reason)
    if reason is None:
        raise Internal(f"the server finished for an unknown reason ({finished.reason})", reason="PROTOCOL")
    matched = finished.WhichOneof("matched_stop")
    return Finished(
        reason=reason,
        matched_stop=getattr(finished, matched) if matched else None,
        usage=Usage(
            num_prompt_tokens=finished.usage.num_prompt_tokens,
            num_completion_tokens=finished.usage.num_completion_tokens,
            num_reasoning_tokens=finished.usage.num_reasoning_tokens,
        ),
        timings=_stats_of(Timings, finished.timings),
        speculation=_stats_of(SpeculationCounts, finished.speculation) if finished.HasField("speculation") else None,
    )


StatsT = TypeVar("StatsT", Timings, SpeculationCounts, PoolCounts)


def _stats_of(
    kind: type[StatsT], message: inference_pb2.Timings | inference_pb2.SpeculationCounts | types_pb2.PoolLoad
) -> StatsT:
    """Returns an object of type `kind`, whose fields have the values of the message's fields of the same names."""
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in dataclasses.fields(kind)}
    columns: dict[str, Any] = {name: tuple(n) for name, n in values.items() if not isinstance(n, int | float)}
    return kind(**{**values, **columns})


def model_info_from_wire(info: inference_pb2.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model=peer_text(info.model),
        architecture=peer_text(info.architecture),
        vocab_size=info.vocab_size,
        max_context_tokens=info.max_context_tokens,
        eos_token_ids=tuple(info.eos_token_ids),
        device=peer_text(info.device),
        dtype=peer_text(info.dtype),
        version=peer_text(info.version),
        digest=_digest_of(info.fingerprint),
        layer_groups={
            peer_text(group.name): group.num_layers
            * group.num_planes
            * group.num_heads
            * group.head_dim
            * _DTYPE_BYTES.get(group.dtype, 0)
            for group in info.fingerprint.layer_groups
        },
        output_format=peer_text(info.output_format),
        has_reasoning=info.has_reasoning,
        sampling_defaults={each.name: as_written(value) for each, value in info.sampling_defaults.ListFields()},
        chat_template_variables=tuple(map(peer_text, info.chat_template_variables)),
        chat_template=info.chat_template,
        special_tokens=dict(info.special_tokens),
    )


def _digest_of(fingerprint: types_pb2.Fingerprint) -> str:
    parts = (fingerprint.config_digest, fingerprint.target_weights_digest, fingerprint.tokenizer_digest)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def inference_load_from_wire(load: inference_pb2.GetInferenceLoadResponse) -> InferenceLoad:
    return InferenceLoad(
        instance_id=peer_text(load.instance_id),
        rows=_stats_of(PoolCounts, load.rows),
        slots=_stats_of(PoolCounts, load.slots),
        num_queued=load.num_queued,
        num_running=load.num_running,
        num_steps=load.num_steps,
        prefill_replicas=tuple(
            PrefillReplica(
                peer_text(replica.address),
                replica.is_ready,
                replica.num_rows,
                peer_text(replica.reason, _MAX_REASON_BYTES),
                peer_text(replica.error_reason),
                replica.num_known_tokens,
            )
            for replica in load.prefill_replicas
        ),
        num_row_retries=load.num_row_retries,
        num_retractions=load.num_retractions,
        is_degraded=load.is_degraded,
    )


def prefill_load_from_wire(load: prefill_pb2.GetPrefillLoadResponse) -> PrefillLoad:
    return PrefillLoad(
        instance_id=peer_text(load.instance_id),
        rows=_stats_of(PoolCounts, load.rows),
        slots=_stats_of(PoolCounts, load.slots),
        num_queued=load.num_queued,
        num_computing=load.num_computing,
        num_steps=load.num_steps,
        unsent_bytes=load.unsent_bytes,
        num_uncomputed_tokens=load.num_uncomputed_tokens,
        num_computed_tokens=load.num_computed_tokens if load.HasField("num_computed_tokens") else None,
    )


def health_from_wire(response: health_pb2.HealthCheckResponse) -> HealthStatus:
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return HealthStatus.SERVING
    return HealthStatus.NOT_SERVING
