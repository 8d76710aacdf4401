"""Tests of when spans are exported, and that a collector which does not answer costs nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from structlog.testing import capture_logs

from common.config.settings import GatewaySettings
from common.telemetry.span_export import LoggedExporter, SpanExport
from common.telemetry.tracing import process_tracer
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver

ROOT = Path(__file__).parents[2]
BOUND_S = 30.0


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


def test_what_has_ended_is_exported_at_the_latest_when_the_process_ends(receiver: OtlpReceiver) -> None:
    settings = GatewaySettings(otlp_endpoint=receiver.endpoint)
    with process_tracer(settings, service="gateway", instance_id="i1") as tracer:
        with tracer.start_as_current_span("outer"):
            tracer.start_span("inner").end()
        tracer.start_span("never ended")

    assert [(span.service, span.name) for span in receiver.spans] == [("gateway", "outer"), ("gateway", "inner")]


def test_a_ratio_of_0_begins_no_trace_and_follows_those_that_others_began(receiver: OtlpReceiver) -> None:
    sampled = SpanContext(trace_id=5, span_id=6, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    settings = GatewaySettings(otlp_endpoint=receiver.endpoint, trace_sample_ratio=0.0)
    with process_tracer(settings, service="gateway", instance_id="i1") as tracer:
        tracer.start_span("a root").end()
        tracer.start_span("a child", set_span_in_context(NonRecordingSpan(sampled))).end()

    assert [span.name for span in receiver.spans] == ["a child"]


def test_without_an_endpoint_there_is_no_sdk() -> None:
    program = """
        import sys
        import common.service.process
        from common.config.settings import GatewaySettings
        from common.telemetry.tracing import NO_TRACER, process_tracer

        with process_tracer(GatewaySettings(), service="s", instance_id="i") as tracer:
            assert tracer is NO_TRACER
            assert not tracer.start_span("none").is_recording()
        found = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
        assert not found, found
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert ended.returncode == 0, ended.stderr


class Collector(SpanExporter):
    """An exporter that keeps the spans it gets, or refuses them."""

    def __init__(self) -> None:
        self.takes = True

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE


def test_a_collector_that_fails_is_logged_once_and_once_when_it_is_back() -> None:
    collector = Collector()
    exporter = LoggedExporter(collector, "http://collector:4317")
    with capture_logs() as log:
        for collector.takes in (True, False, False, False, True, True, False):
            exporter.export([])

    assert [line["event"] for line in log] == ["spans_dropped", "spans_taken_again", "spans_dropped"]
    assert log[0]["endpoint"] == "http://collector:4317"


def test_a_collector_that_never_answers_holds_up_neither_spans_nor_the_end() -> None:
    """The collector accepts connections and never answers. More spans end than the queue holds, and nothing blocks."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        before = set(threading.enumerate())
        export = SpanExport(endpoint=endpoint, sample_ratio=1.0, service="s", instance_id="i", flush_timeout_s=0.1)
        for _ in range(5000):
            export.tracer.start_span("span").end()
        closing = threading.Thread(target=export.close)
        closing.start()
        closing.join(BOUND_S / 2)
        assert not closing.is_alive()
        for thread in set(threading.enumerate()) - before:
            thread.join(BOUND_S / 2)
            assert not thread.is_alive(), thread
