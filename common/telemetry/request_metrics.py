"""Prometheus metrics of the decode service's requests."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Histogram

from common.errors import request_reasons
from common.telemetry.histogram import PHASE_S, TOKEN_S, OneWriterHistogram

PHASES = ("queue", "prefill", "transfer", "first_decode")


class RequestMetrics:
    """The metrics of requests. The counter `requests` has the label `outcome`: a finish reason ("eos", "length", ...),
    or an ErrorInfo reason in lower case.

    Every outcome is exposed with 0 from the start. Otherwise Prometheus would not count the requests that precede the
    first scrape of an outcome as an increase.
    """

    def __init__(
        self, registry: CollectorRegistry, *, finish_reasons: Iterable[Enum], grammar_kinds: Iterable[Enum]
    ) -> None:
        self.requests = Counter("baton_requests", "Requests ended, by outcome.", ["outcome"], registry=registry)
        for outcome in (
            *(reason.value for reason in finish_reasons),
            *(reason.lower() for reason in request_reasons()),
        ):
            self.requests.labels(outcome)
        self.constrained = Counter(
            "baton_constrained_requests", "Requests with a grammar, by its kind.", ["kind"], registry=registry
        )
        for kind in grammar_kinds:
            self.constrained.labels(kind.value)
        self.phases = {
            phase: Histogram(f"baton_{phase}_seconds", f"Phase: {phase}.", buckets=PHASE_S, registry=registry)
            for phase in PHASES
        }
        self.inter_token_s = OneWriterHistogram(
            "baton_inter_token_seconds", "Between output tokens of a request.", buckets=TOKEN_S
        )
        registry.register(self.inter_token_s)
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens of finished requests.", registry=registry)
        self.output_tokens = Counter("baton_output_tokens", "Output tokens delivered.", registry=registry)
        self.verify_steps = Counter(
            "baton_verify_steps", "Verify steps of finished requests, each request's counted.", registry=registry
        )
        self.drafted_tokens = Counter("baton_drafted_tokens", "Drafts verified, finished requests.", registry=registry)
        self.accepted_tokens = Counter(
            "baton_accepted_tokens", "Drafts accepted, finished requests.", registry=registry
        )
        self.forced_tokens = Counter(
            "baton_forced_tokens", "Accepted drafts that a grammar forced, finished requests.", registry=registry
        )
        self.drafted_at = Counter(
            "baton_drafted_at",
            "Verify steps without forced drafts, with a draft so far ahead.",
            ["position"],
            registry=registry,
        )
        self.accepted_at = Counter(
            "baton_accepted_at",
            "Verify steps without forced drafts that accepted a draft so far ahead.",
            ["position"],
            registry=registry,
        )
        self.handoff_bytes = Counter("baton_handoff_bytes", "KV bytes received.", registry=registry)
