"""Tests that clients get every figure that the services send of a request, and of a pool."""

from __future__ import annotations

import dataclasses

from baton.codec import event_from_wire
from baton.events import Finished
from baton.v1 import inference_pb2, types_pb2
from common.telemetry.stats import PoolCounts, SpeculationCounts, Timings
from decode_service.edge.live_request import Ending
from decode_service.edge.responses import finished_event
from decode_service.messages import FinishReason

TIMINGS = Timings(**{field.name: n for n, field in enumerate(dataclasses.fields(Timings), start=1)})
SPECULATION = SpeculationCounts(
    7, 6, 5, drafted_at=(4, 2), accepted_at=(3, 2), draft_s=0.5, verify_s=0.25, extend_s=2.0
)


def test_a_client_gets_each_figure_of_a_request() -> None:
    message = finished_event(Ending(FinishReason.EOS, 3, 2, 0, TIMINGS, SPECULATION))
    event = event_from_wire(message)
    assert isinstance(event, Finished)
    assert (event.timings, event.speculation) == (TIMINGS, SPECULATION)


def test_the_messages_have_no_field_that_the_types_lack() -> None:
    for message, kind in (
        (inference_pb2.Timings, Timings),
        (inference_pb2.SpeculationCounts, SpeculationCounts),
        (types_pb2.PoolLoad, PoolCounts),
    ):
        assert set(message.DESCRIPTOR.fields_by_name) == {field.name for field in dataclasses.fields(kind)}
