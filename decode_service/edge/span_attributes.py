"""The attributes of a request's span. They have OpenTelemetry's `gen_ai` names where these exist."""

from __future__ import annotations

import dataclasses

from common.sampling.params import ResolvedSampling
from decode_service.edge.live_request import Ending
from decode_service.edge.request_checks import ChatPrompt, CheckedRequest
from decode_service.edge.request_trace import Attributes, AttributeValue


def request_attributes(checked: CheckedRequest, request_id: str, model: str) -> Attributes:
    return {
        "gen_ai.operation.name": "chat" if isinstance(checked.prompt, ChatPrompt) else "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "baton.request_id": request_id,
        "baton.choice_index": checked.choice_index,
        "baton.num_resumed_tokens": len(checked.generated_token_ids),
    }


def sampling_attributes(sampling: ResolvedSampling, num_prompt_tokens: int) -> Attributes:
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": num_prompt_tokens,
    }


def ending_attributes(ending: Ending) -> Attributes:
    timings = ending.timings
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.finish_reasons": (ending.reason.value,),
        "gen_ai.usage.input_tokens": ending.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": timings.num_cached_tokens,
        "gen_ai.usage.output_tokens": ending.num_completion_tokens,
        "baton.num_reasoning_tokens": ending.num_reasoning_tokens,
        "baton.kv_bytes": timings.kv_bytes,
        "baton.num_handoff_attempts": timings.num_handoff_attempts,
        "baton.num_retractions": timings.num_retractions,
    }
    if ending.speculation is not None:
        counts = dataclasses.asdict(ending.speculation)
        attributes |= {f"baton.speculation.{name}": value for name, value in counts.items()}
    return attributes
