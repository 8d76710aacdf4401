"""Tests of the spans that the edge records on the timeline when the engine delivers tokens."""

from __future__ import annotations

import time
from collections import defaultdict

from common.telemetry.stats import Timings
from common.telemetry.timeline import EDGE, REQUESTS, Timeline
from decode_service.messages import Finished, FinishReason, Submit, Tokens
from tests.decode_edge.edge_under_test import events_of, ids_in, running_edge

A, B, C = ord("a"), ord("b"), ord("c")


async def test_tokens_told_together_are_one_span_and_each_requests_write_a_task() -> None:
    timeline, measured_at_ns = Timeline(), list[int]()

    def clock() -> float:
        measured_at_ns.append(time.monotonic_ns())
        return measured_at_ns[-1] / 1e9

    async with running_edge([], timeline=timeline, clock=clock) as edge:
        timeline.start(max_events=100)
        calls = {request_id: edge.generate(request_id=request_id) for request_id in ("r1", "r2")}
        await edge.engine.submitted(2)
        by_id = {submit.request_id.partition("#")[0]: submit.request_id for submit in edge.engine.of_type(Submit)}
        edge.deliver(
            Tokens((by_id["r1"], by_id["r2"]), (1, 2), (A, B, C)),
            *(
                Finished(by_id[request_id], FinishReason.LENGTH, 3, num_tokens, Timings())
                for request_id, num_tokens in (("r1", 1), ("r2", 2))
            ),
        )
        outputs = {request_id: ids_in(await events_of(call)) for request_id, call in calls.items()}
        events = {track.name: track.events for track in timeline.stop().take_tracks()}
    assert outputs == {"r1": [A], "r2": [B, C]}
    (span,) = [event for event in events[EDGE] if event.name == "take_tokens"]
    assert span.figures == {"requests": 2, "tokens": 3}
    assert len(measured_at_ns) == 2
    assert all(span.start_ns <= at_ns <= span.start_ns + span.duration_ns for at_ns in measured_at_ns)
    written = defaultdict(list)
    for event in events[REQUESTS]:
        if event.name == "write":
            written[event.task].append(event.figures["tokens"])
    assert written == {"r1": [1], "r2": [2]}
