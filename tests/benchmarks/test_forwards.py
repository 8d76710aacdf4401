"""Tests of the figures that benchmarks compute from a recorded timeline: forwards, and the time between them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.timeline import ServiceTimeline
from benchmarks.forwards import forwards, step_figures
from common.telemetry.timeline import EventKind, TimelineEvent

MS = 1_000_000


def span(name: str, start_ms: int, end_ms: int, detail: str = "", **figures: int) -> TimelineEvent:
    return TimelineEvent(EventKind.SPAN, name, start_ms * MS, (end_ms - start_ms) * MS, detail, "", figures)


def forward(number: int, start_ms: int, end_ms: int, rows: int = 1) -> TimelineEvent:
    return span("decode", start_ms, end_ms, f"step {number}", rows=rows, context_tokens=100 * rows)


def launch(start_ms: int) -> list[TimelineEvent]:
    """Returns the spans of one engine step that launched something. It takes 4 ms and waits for half of them."""
    return [
        span("launch", start_ms, start_ms + 1),
        span("wait", start_ms + 1, start_ms + 3),
        span("step", start_ms, start_ms + 4),
    ]


def timeline(pieces: Sequence[TimelineEvent], num_dropped: dict[str, int] | None = None) -> ServiceTimeline:
    return ServiceTimeline(
        address="",
        service="decode",
        instance_id="",
        clock_id="",
        unix_offset_ns=0,
        start_ns=0,
        end_ns=1000 * MS,
        tracks={"forward": pieces, "engine": [*launch(0), *launch(10)]},
        num_dropped={"forward": 0, "engine": 0, **(num_dropped or {})},
    )


def test_the_time_between_forwards_is_that_of_the_stream() -> None:
    pieces = [forward(number, 10 * number, 10 * number + 8) for number in range(6)]
    figures = step_figures(timeline(pieces), num_rows=1)
    assert (figures.num_steps, figures.context_tokens) == (3, 100)  # the first and the last step may be incomplete
    assert figures.between_s == pytest.approx(0.002)
    assert figures.busy == pytest.approx(0.8)
    assert figures.schedule_s == pytest.approx(0.002)


def test_a_bubble_counts_though_the_engine_stepped_without_a_launch_meanwhile() -> None:
    begins_ms = {0: 0, 1: 10, 3: 50, 4: 60}  # step 2 launched nothing
    pieces = [forward(number, begin_ms, begin_ms + 10) for number, begin_ms in begins_ms.items()]
    figures = step_figures(timeline([*pieces, forward(5, 70, 80)]), num_rows=1)
    assert figures.between_p99_s == pytest.approx(0.0)
    assert (figures.num_steps, figures.busy) == (2, pytest.approx(20 / 50))


def test_forwards_of_other_sizes_are_left_out() -> None:
    rows = [1, 1, 1, 2, 2, 1, 1]
    pieces = [forward(number, 10 * number, 10 * number + 9, rows[number]) for number in range(len(rows))]
    assert step_figures(timeline(pieces), num_rows=2).num_steps == 1
    with pytest.raises(ValueError, match="no steps of 3 rows"):
        step_figures(timeline(pieces), num_rows=3)


def test_pieces_of_one_step_are_one_forward() -> None:
    pieces = [span("resolve", 0, 1, "step 7"), forward(7, 2, 5), span("unscoped", 5, 6)]
    (found,) = forwards(timeline(pieces))
    assert (found.start_ns, found.end_ns, found.busy_ns) == (0, 5 * MS, 4 * MS)
    assert found.figures == {"rows": 1, "context_tokens": 100}


@pytest.mark.parametrize("track", ["forward", "engine"])
def test_a_recording_that_is_not_whole_is_refused(track: str) -> None:
    pieces = [forward(number, 10 * number, 10 * number + 8) for number in range(6)]
    with pytest.raises(ValueError, match=f"3 events of {track} were dropped"):
        step_figures(timeline(pieces, {track: 3}), num_rows=1)
