"""Tests of `baton trace` on a pair of real services: the trace contains every track, nested spans, and arrows from one
service to the other.
"""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from tests.support.running_pair import BOUND_S, RunningPair

NEW_TOKENS = 8
TRACKS = {
    "baton.v1.Inference": {
        "edge",
        "tokenize",
        "tokenize-long",
        "tokenize-longest",
        "handoff",
        "requests",
        "engine",
        "forward",
        "landing",
    },
    "baton.v1.Prefill": {"edge", "handoff", "requests", "engine", "forward", "sending"},
}
SPANS = {
    ("baton.v1.Inference", "edge"): {"check_request", "take_tokens"},
    ("baton.v1.Inference", "tokenize"): {"encode"},
    ("baton.v1.Inference", "handoff"): {
        "send PrefillBatch",
        "receive Accepted",
        "receive KvSegment",
        "receive PrebuiltBatch",
    },
    ("baton.v1.Inference", "engine"): {
        *("step", "apply", "collect", "next_batch", "resolve_seq_lens", "launch", "finish", "wait", "deliver")
    },
    ("baton.v1.Inference", "forward"): {"resolve", "verify", "stash_payload", "copy_results"},
    ("baton.v1.Inference", "landing"): {"land"},
    ("baton.v1.Prefill", "edge"): {"check_rows"},
    ("baton.v1.Prefill", "handoff"): {"send Accepted", "send KvSegment", "send PrebuiltBatch"},
    ("baton.v1.Prefill", "engine"): {"step", "apply", "admit", "launch", "finish", "send", "deliver"},
    ("baton.v1.Prefill", "forward"): {"forward"},
    ("baton.v1.Prefill", "sending"): {"copy_out"},
}

Track = tuple[str, str]
"""The name of a service, and the name of one of its tracks."""


@pytest.fixture(scope="module")
def pair(plain_pair: RunningPair) -> RunningPair:
    return plain_pair


@pytest.fixture(scope="module")
def trace(pair: RunningPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The trace of some seconds in which requests come one after the other, and a few are answered."""
    path = tmp_path_factory.mktemp("trace") / "pair.json.gz"
    services = ["--address", pair.client.address, "--address", pair.prefills[0].address]
    is_over, num_answered = threading.Event(), itertools.count()

    def ask() -> None:
        while not is_over.is_set():
            pair.client.complete(
                "the quick brown fox", max_tokens=NEW_TOKENS, ignore_eos=True, timeout_s=BOUND_S, cache_prompt=False
            )
            next(num_answered)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for seconds in (1, 4, 16):
            before = next(num_answered)
            result = CliRunner().invoke(app, ["trace", *services, f"--seconds={seconds}", "--output", str(path)])
            if next(num_answered) - before > 4:
                break
    finally:
        is_over.set()
        asking.join(BOUND_S)
    assert result.exit_code == 0, result.output
    with gzip.open(path, "rt") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def services_of(trace: dict[str, Any]) -> dict[int, str]:
    events = trace["traceEvents"]
    return {each["pid"]: each["args"]["name"].split()[0] for each in events if each["name"] == "process_name"}


def by_track(trace: dict[str, Any], phase: str) -> dict[Track, list[dict[str, Any]]]:
    """Returns the trace's events with this phase, by their track."""
    events, services = trace["traceEvents"], services_of(trace)
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    found: dict[Track, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == phase:
            found[services[event["pid"]], names[event["pid"], event["tid"]]].append(event)
    return found


def test_every_service_has_its_tracks(trace: dict[str, Any]) -> None:
    services = services_of(trace)
    tracks: dict[str, set[str]] = defaultdict(set)
    for event in trace["traceEvents"]:
        if event["name"] == "thread_name":
            tracks[services[event["pid"]]].add(event["args"]["name"])
    assert tracks == TRACKS


def test_every_part_of_a_requests_way_is_a_span(trace: dict[str, Any]) -> None:
    spans = by_track(trace, "X")
    missing = {track: names - {span["name"] for span in spans[track]} for track, names in SPANS.items()}
    assert {track: names for track, names in missing.items() if names} == {}
    tasks = by_track(trace, "b")
    assert {task["name"] for task in tasks["baton.v1.Inference", "requests"]} == {"Generate", "tokenize", "write"}
    assert {task["name"] for task in tasks["baton.v1.Prefill", "requests"]} == {"write"}


def test_spans_of_a_track_nest(trace: dict[str, Any]) -> None:
    for track, spans in by_track(trace, "X").items():
        open_until: list[int] = []
        for begin, end in sorted(intervals_ns(spans), key=lambda interval: (interval[0], -interval[1])):
            assert begin <= end, track
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], track
            open_until.append(end)


def intervals_ns(spans: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    for span in spans:
        begin_ns = round(span["ts"] * 1e3)
        yield begin_ns, begin_ns + round(span["dur"] * 1e3)


def test_an_arrow_leads_from_each_segments_copy_to_its_landing(trace: dict[str, Any]) -> None:
    spans = by_track(trace, "X")
    # Either recording may begin and end anywhere in a request, and not when the other does.
    asked_ts = [span["ts"] for span in spans["baton.v1.Inference", "handoff"] if span["name"] == "send PrefillBatch"]
    answered_ts = [span["ts"] for span in spans["baton.v1.Prefill", "handoff"] if span["name"] == "send PrebuiltBatch"]
    copies = [
        span
        for span in spans["baton.v1.Prefill", "sending"]
        if span["name"] == "copy_out" and span["ts"] < max(answered_ts)
    ]
    landings = [span for span in spans["baton.v1.Inference", "landing"] if min(asked_ts) < span["ts"] < max(asked_ts)]
    flows = {span["args"]["flow"] for span in copies} & {span["args"]["flow"] for span in landings}
    begins = {arrow["id"] for arrow in by_track(trace, "s")["baton.v1.Prefill", "sending"]}
    ends = {arrow["id"] for arrow in by_track(trace, "f")["baton.v1.Inference", "landing"]}
    assert flows
    assert flows <= begins & ends
    between = by_track(trace, "t")
    for track in (("baton.v1.Prefill", "handoff"), ("baton.v1.Inference", "handoff")):
        assert flows <= {arrow["id"] for arrow in between[track]}


def test_a_segment_lands_after_it_was_copied_on_the_clock_of_both(trace: dict[str, Any]) -> None:
    spans = by_track(trace, "X")
    copied_us = {span["args"].get("flow"): span["ts"] + span["dur"] for span in spans["baton.v1.Prefill", "sending"]}
    landings = [span for span in spans["baton.v1.Inference", "landing"] if span["args"]["flow"] in copied_us]
    assert landings
    assert all(copied_us[span["args"]["flow"]] < span["ts"] for span in landings)


def test_a_forward_says_what_it_is_of(trace: dict[str, Any]) -> None:
    spans = by_track(trace, "X")
    decodes = [span for span in spans["baton.v1.Inference", "forward"] if span["name"] == "verify"]
    assert all(span["args"]["rows"] == span["args"]["tokens"] == 1 for span in decodes)
    assert all(span["args"]["of"].startswith("step ") for span in decodes)
    contexts = {span["args"]["context_tokens"] for span in decodes}
    assert contexts == set(range(min(contexts), min(contexts) + NEW_TOKENS - 1))
    (prefill, *_) = [span for span in spans["baton.v1.Prefill", "forward"] if span["name"] == "forward"]
    num_tokens = prefill["args"]["tokens"]
    assert num_tokens > 1
    assert (prefill["args"]["chunks"], prefill["args"]["attended"]) == (1, num_tokens * (num_tokens + 1) // 2)


def test_loads_are_counters(trace: dict[str, Any]) -> None:
    counters = by_track(trace, "C")["baton.v1.Inference", "engine"]
    running = {counter["args"]["running"] for counter in counters if counter["name"] == "rows"}
    assert running == {0, 1}
    assert {counter["name"] for counter in counters} == {"rows", "slots"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Missing option"),
        (["--address", "127.0.0.1:1", "-a", "127.0.0.1:1"], "127.0.0.1:1 is named twice"),
        (["--address", "127.0.0.1:1"], "UNAVAILABLE: 127.0.0.1:1: "),
        (["--address", "127.0.0.1:1", "--output", "/nowhere/x"], "output: /nowhere/x: there is no such directory"),
    ],
)
def test_mistakes_are_named(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert problem in result.output
