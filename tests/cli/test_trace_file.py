"""Tests that timelines of several services are merged onto one time axis."""

from __future__ import annotations

import pytest

from baton.timeline import ServiceTimeline, trace_events
from common.telemetry.timeline import EventKind, TimelineEvent


def timeline(service: str, *, start_ns: int, unix_offset_ns: int, clock_id: str) -> ServiceTimeline:
    """Returns the timeline of a service, with one span that starts 1 µs after its beginning."""
    span = TimelineEvent(EventKind.SPAN, "step", start_ns + 1000, 500, "", "", {"flow": 7})
    return ServiceTimeline(
        address="127.0.0.1:1",
        service=service,
        instance_id="i",
        clock_id=clock_id,
        unix_offset_ns=unix_offset_ns,
        start_ns=start_ns,
        end_ns=start_ns + 10_000,
        tracks={"engine": [span]},
        num_dropped={"engine": 0},
    )


@pytest.mark.parametrize(
    ("clock_ids", "second_us"),
    [
        pytest.param(("boot", "boot"), 3.0, id="one clock: its times as they are"),
        pytest.param(("boot", "other"), 8.0, id="two clocks: by Unix time"),
        pytest.param(("", ""), 8.0, id="not known to be one"),
    ],
)
def test_clocks(clock_ids: tuple[str, str], second_us: float) -> None:
    """The second timeline begins 2 µs later on its clock, and that clock's offset to Unix time is 5 µs larger."""
    events = trace_events(
        [
            timeline("prefill", start_ns=1_000_000, unix_offset_ns=50_000, clock_id=clock_ids[0]),
            timeline("decode", start_ns=1_002_000, unix_offset_ns=55_000, clock_id=clock_ids[1]),
        ]
    )
    assert [event["ts"] for event in events if event["ph"] == "X"] == [1.0, second_us]
    assert [(event["ph"], event["ts"]) for event in events if event["ph"] in "stf"] == [("s", 1.0), ("f", second_us)]


def test_an_arrow_needs_two_ends() -> None:
    events = trace_events([timeline("prefill", start_ns=0, unix_offset_ns=0, clock_id="")])
    assert [event for event in events if event["ph"] in "stf"] == []
