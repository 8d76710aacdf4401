"""What is recorded of each request: metrics, a log line, and the attributes of its span, which have OpenTelemetry's
`gen_ai` names where these exist.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import structlog

from common.errors import BatonError, RequestCancelled
from common.grammar.grammar import GrammarKind
from common.sampling.params import ResolvedSampling
from common.telemetry.metrics import RequestMetrics
from decode_service.edge.live_request import Ending, LiveRequest
from decode_service.edge.request_checks import ChatPrompt, CheckedRequest
from decode_service.edge.request_trace import Attributes, AttributeValue


class RequestObserver:
    """Logs one INFO line and counts one outcome for each admitted request. A refused request is only counted."""

    def __init__(self, metrics: RequestMetrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._log = structlog.get_logger("decode_service.requests")

    def on_tokens(self, live: LiveRequest, num_tokens: int) -> None:
        """Counts `num_tokens` new tokens, and observes the time between tokens.

        If several tokens come at once, each counts an equal share of the time since the token before them.
        """
        if num_tokens == 0:
            return
        now_s = self._clock()
        if live.last_token_at_s is not None:
            self._metrics.inter_token_s.observe((now_s - live.last_token_at_s) / num_tokens, num_tokens)
        live.last_token_at_s = now_s
        self._metrics.output_tokens.inc(num_tokens)

    def on_refused(self, error: BatonError) -> None:
        self._metrics.requests.labels(error.reason.lower()).inc()

    def on_grammar(self, kind: GrammarKind) -> None:
        self._metrics.constrained.labels(kind.value).inc()

    def on_end(self, live: LiveRequest, end: Ending | BatonError | None) -> None:
        """Records how the request's stream ended: with an ending, an error, or None if the client left."""
        ending = end if isinstance(end, Ending) else None
        error = None if ending else end or client_left()
        outcome = ending.reason.value if ending else error.reason.lower() if isinstance(error, BatonError) else ""
        self._metrics.requests.labels(outcome).inc()
        fields: dict[str, object] = {
            "request_id": live.request_id,
            "outcome": outcome,
            "num_prompt_tokens": live.num_prompt_tokens,
            "num_output_tokens": live.num_output_tokens,
        }
        if live.trace.trace_id:
            fields["trace_id"] = live.trace.trace_id
        if ending:
            fields["num_reasoning_tokens"] = ending.num_reasoning_tokens
            self._observe(ending)
            for stats in (ending.timings, ending.speculation):
                if stats is not None:
                    values = dataclasses.asdict(stats)
                    fields |= {name: round(n, 6) if isinstance(n, float) else n for name, n in values.items()}
        else:
            fields["error"] = str(error)
        self._log.info("request_finished", **fields)

    def _observe(self, ending: Ending) -> None:
        timings = ending.timings
        for phase, histogram in self._metrics.phases.items():
            if (seconds := getattr(timings, f"{phase}_s")) > 0.0:
                histogram.observe(seconds)
        self._metrics.prompt_tokens.inc(ending.num_prompt_tokens)
        self._metrics.handoff_bytes.inc(timings.kv_bytes)
        if (speculation := ending.speculation) is not None:
            self._metrics.verify_steps.inc(speculation.num_verify_steps)
            self._metrics.drafted_tokens.inc(speculation.num_drafted_tokens)
            self._metrics.accepted_tokens.inc(speculation.num_accepted_tokens)
            self._metrics.forced_tokens.inc(speculation.num_forced_tokens)
            for position, (drafted, accepted) in enumerate(
                zip(speculation.drafted_at, speculation.accepted_at, strict=True), start=1
            ):
                self._metrics.drafted_at.labels(position).inc(drafted)
                self._metrics.accepted_at.labels(position).inc(accepted)


def client_left() -> RequestCancelled:
    """Returns the error of a request that ended because its client left."""
    return RequestCancelled("the client left")


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
