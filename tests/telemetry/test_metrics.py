from __future__ import annotations

import base64
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from common.errors import ConfigError, RowFailure
from common.grammar.grammar import GrammarKind
from common.telemetry import exposition
from common.telemetry.exposition import MetricsServer
from common.telemetry.metrics import (
    EngineMetrics,
    GrammarMetrics,
    MaskMetrics,
    OneWriterHistogram,
    RequestMetrics,
    SpeculationMetrics,
)
from common.telemetry.stats import EngineLoad, MaskStats, PoolCounts, SpeculationStats, StepStats
from common.wire.handoff import Accepted, KvSegment, PrebuiltBatch, RowFailed
from decode_service.messages import FinishReason
from prefill_service.edge.observer import HandoffMetrics
from tests.support.free_ports import needs_ipv6

BOUND_S = 60.0
LOAD = EngineLoad(
    rows=PoolCounts(total=8, free=1, reserved=2, transferring=3, running=1, quarantined=1),
    slots=PoolCounts(total=64, free=60, running=4),
    num_queued=5,
    num_running=1,
    num_steps=7,
    unsent_bytes=11,
    num_row_retries=2,
    num_retractions=1,
    num_uncomputed_tokens=12,
    num_expected_cached=13,
    held_bytes=14,
    window_slots={"target_24": PoolCounts(total=18, free=5, reserved=7, running=6)},
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_pools_are_what_the_engine_says_when_asked(registry: CollectorRegistry) -> None:
    loads = [LOAD]
    EngineMetrics(registry).watch(lambda: loads[-1], is_ready=lambda: True, grpc_port=lambda: 50051)

    states = {"free": 1, "reserved": 2, "transferring": 3, "running": 1, "quarantined": 1}
    assert {state: registry.get_sample_value("baton_rows", {"state": state}) for state in states} == states
    assert registry.get_sample_value("baton_kv_slots", {"state": "running"}) == 4
    windows = [registry.get_sample_value("baton_window_slots", {"group": "target_24", "state": s}) for s in states]
    assert windows == [5, 7, None, 6, None]
    assert registry.get_sample_value("baton_queued_requests") == 5
    assert registry.get_sample_value("baton_unsent_kv_bytes") == 11
    assert registry.get_sample_value("baton_row_retries_total") == 2
    assert registry.get_sample_value("baton_retractions_total") == 1
    assert registry.get_sample_value("baton_degraded") == 0
    assert registry.get_sample_value("baton_grpc_port") == 50051
    assert registry.get_sample_value("baton_uncomputed_tokens") == 12
    assert registry.get_sample_value("baton_expected_cached_tokens_total") == 13
    assert registry.get_sample_value("baton_handoff_held_bytes_total") == 14

    loads.append(EngineLoad(LOAD.rows, LOAD.slots, num_queued=0, num_running=0, num_steps=8, is_degraded=True))
    assert registry.get_sample_value("baton_degraded") == 1
    assert registry.get_sample_value("baton_queued_requests") == 0
    assert registry.get_sample_value("baton_steps_total") == 8


def test_readiness_is_what_health_says_when_asked(registry: CollectorRegistry) -> None:
    answers = [False, True]
    EngineMetrics(registry).watch(lambda: LOAD, is_ready=lambda: answers[-1])
    assert registry.get_sample_value("baton_ready") == 1
    answers.pop()
    assert registry.get_sample_value("baton_ready") == 0


def test_steps_fill_the_histograms(registry: CollectorRegistry) -> None:
    metrics = EngineMetrics(registry)

    metrics.on_step(StepStats(batch_size=3, num_tokens=48, step_s=0.25))
    metrics.on_step(StepStats(batch_size=1, num_tokens=1, step_s=0.25))

    assert registry.get_sample_value("baton_batch_size_sum") == 4
    assert registry.get_sample_value("baton_batch_size_bucket", {"le": "2.0"}) == 1
    assert registry.get_sample_value("baton_step_tokens_sum") == 49
    assert registry.get_sample_value("baton_step_seconds_sum") == 0.5


def test_a_histogram_counts_what_came_at_once_in_its_bucket_and_those_above() -> None:
    histogram = OneWriterHistogram("seconds", "Between tokens.", buckets=(0.5, 1.0))
    registry = CollectorRegistry()
    registry.register(histogram)

    for value, num_times in ((0.5, 1), (0.75, 3), (2.0, 2)):
        histogram.observe(value, num_times)

    buckets = [registry.get_sample_value("seconds_bucket", {"le": le}) for le in ("0.5", "1.0", "+Inf")]
    assert buckets == [1, 4, 6]
    assert registry.get_sample_value("seconds_count") == 6
    assert registry.get_sample_value("seconds_sum") == 6.75


def test_a_histogram_is_found_by_any_of_its_names_and_registered_once(registry: CollectorRegistry) -> None:
    registry.register(OneWriterHistogram("seconds", "Between tokens.", buckets=(0.5,)))
    for name in ("seconds_bucket", "seconds_sum", "seconds_count"):
        (found,) = registry.restricted_registry([name]).collect()
        assert {sample.name for sample in found.samples} == {name}
    with pytest.raises(ValueError, match="seconds"):
        registry.register(OneWriterHistogram("seconds", "Another's.", buckets=(1.0,)))


def test_a_speculative_steps_rows_are_counted_by_what_they_committed(registry: CollectorRegistry) -> None:
    metrics = SpeculationMetrics(registry)
    for num_levels, accept_lens in ((4, (1, 3, 3, 5)), (0, (1, 1))):
        stats = SpeculationStats(num_levels, accept_lens, draft_s=0.1, verify_s=0.1, extend_s=0.1)
        metrics.on_step(StepStats(4, 20, 0.3, stats))
    buckets = [registry.get_sample_value("baton_accept_length_bucket", {"le": le}) for le in ("1.0", "3.0", "+Inf")]
    assert buckets == [1, 3, 4], "steps that drafted nothing do not count"
    assert registry.get_sample_value("baton_accept_length_sum") == 12
    assert registry.get_sample_value("baton_accept_length_count") == 4


def test_steps_without_a_grammar_observe_no_masks(registry: CollectorRegistry) -> None:
    metrics = MaskMetrics(registry)
    metrics.on_step(StepStats(4, 20, 0.3))
    metrics.on_step(StepStats(4, 20, 0.3, masks=MaskStats(num_rows=3, mask_s=0.002, wait_s=0.25)))
    sums = {"baton_masked_rows": 3, "baton_mask_seconds": 0.002, "baton_mask_wait_seconds": 0.25}
    assert {name: registry.get_sample_value(f"{name}_sum") for name in sums} == sums
    assert {registry.get_sample_value(f"{name}_count") for name in sums} == {1}


def test_grammars_are_counted_by_whether_they_had_to_be_compiled(registry: CollectorRegistry) -> None:
    metrics = GrammarMetrics(registry)
    metrics.on_compiled(0.5)
    metrics.on_found()
    metrics.on_found()
    assert registry.get_sample_value("baton_cached_grammars_total") == 2
    assert registry.get_sample_value("baton_grammar_compile_seconds_count") == 1
    assert registry.get_sample_value("baton_grammar_compile_seconds_sum") == 0.5


def test_a_prefill_counts_rows_by_outcome_and_bytes(registry: CollectorRegistry) -> None:
    two = np.array([0, 1], np.int64)
    prebuilt = PrebuiltBatch(
        two, two, two, {"target": two}, np.array([0.25, 0.5]), np.array([1.0, 2.0]), 0 * two, (None, None)
    )
    segment = KvSegment(0, "target", 0, 1, 0, 1, b"x" * 100)

    HandoffMetrics(registry).on_frames(
        [Accepted("a"), segment, segment, prebuilt, RowFailed(2, RowFailure.CAPACITY, retryable=True)]
    )

    assert registry.get_sample_value("baton_requests_total", {"outcome": "prebuilt"}) == 2
    assert registry.get_sample_value("baton_requests_total", {"outcome": "capacity"}) == 1
    assert registry.get_sample_value("baton_handoff_bytes_total") == 200
    assert registry.get_sample_value("baton_queue_seconds_sum") == 0.75
    assert registry.get_sample_value("baton_prefill_seconds_sum") == 3.0


def outcomes(registry: CollectorRegistry) -> dict[str, float]:
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.name == "baton_requests_total"}


def test_a_decode_service_exposes_every_outcome_before_the_first_request(registry: CollectorRegistry) -> None:
    RequestMetrics(registry, finish_reasons=FinishReason, grammar_kinds=GrammarKind)

    expected = {"eos", "stop_token", "stop_string", "length"}
    expected |= {"invalid_field", "context_exceeded", "duplicate_request_id", "queue_full", "unauthenticated"}
    expected |= {"deadline", "cancelled", "fingerprint_mismatch", "no_prefill", "draining"}
    expected |= {"engine_fault", "engine_lost", "engine_stalled", "internal"}
    assert outcomes(registry) == dict.fromkeys(expected, 0.0)


def test_a_prefill_service_exposes_every_outcome_before_the_first_row(registry: CollectorRegistry) -> None:
    HandoffMetrics(registry)

    expected = {"prebuilt", "fingerprint_mismatch", "invalid_row", "capacity", "cancelled", "deadline", "draining"}
    assert outcomes(registry) == dict.fromkeys(expected | {"compute", "stalled", "context_exceeded", "constraint"}, 0.0)


def test_the_endpoint_serves_the_registry_it_was_given(registry: CollectorRegistry) -> None:
    EngineMetrics(registry).watch(lambda: LOAD, is_ready=lambda: True)

    with MetricsServer("127.0.0.1:0", registry) as server:
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=BOUND_S).read().decode()

    assert 'baton_rows{state="transferring"} 3.0' in text


def status_of(server: MetricsServer, **headers: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=headers)
    try:
        return int(urllib.request.urlopen(request, timeout=BOUND_S).status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_endpoint_asks_for_a_token(registry: CollectorRegistry) -> None:
    with MetricsServer("127.0.0.1:0", registry, tokens=("some-long-token", "another-token")) as server:
        ask = partial(status_of, server)
        assert (ask(), ask(authorization="Bearer some"), ask(authorization="some-long-token")) == (401, 401, 401)
        assert (ask(authorization="Bearer another-token"), ask(authorization="Bearer some-long-token")) == (200, 200)
        assert ask(authorization="Basic " + base64.b64encode(b"me:another-token").decode()) == 200


def test_the_endpoint_answers_no_page_that_points_its_domain_at_loopback(registry: CollectorRegistry) -> None:
    with MetricsServer("127.0.0.1:0", registry) as server:
        ask = partial(status_of, server)
        assert (ask(host="rebind.example"), ask(host="localhost:1"), ask(host="[::1]")) == (403, 200, 200)
    with MetricsServer("0.0.0.0:0", registry) as server:
        assert status_of(server, host="prefill:9000") == 200


@pytest.mark.parametrize("begun", [b"", b"GET /metrics HTTP/1.1\r\nx: "], ids=["nothing", "half a head"])
def test_clients_that_send_no_request_keep_nobody_out(
    registry: CollectorRegistry, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More clients connect than may be connected at a time. A silent one is closed after its time-out, or earlier to
    make room for another.
    """
    with MetricsServer("127.0.0.1:0", registry) as server, ExitStack() as stack:

        def connect_many() -> list[socket.socket]:
            address = ("127.0.0.1", server.port)
            slow = [stack.enter_context(socket.create_connection(address, BOUND_S)) for _ in range(100)]
            for each in slow:
                each.sendall(begun)
            return slow

        monkeypatch.setattr(exposition, "HEAD_TIMEOUT_S", 2 * BOUND_S)
        closed_for_room = connect_many()
        assert status_of(server) == 200
        monkeypatch.setattr(exposition, "HEAD_TIMEOUT_S", 0.2)
        assert [each.recv(1) for each in (*connect_many(), *closed_for_room)] == [b""] * 200


@pytest.mark.parametrize(
    ("listen", "tokens", "expected"),
    [
        ("0.0.0.0:0", (), ["metrics"]),
        ("0.0.0.0:0", ("some-long-token",), []),
        pytest.param("[::1]:0", (), [], marks=needs_ipv6),
    ],
)
def test_a_listener_that_is_open_to_all_says_so(
    registry: CollectorRegistry, listen: str, tokens: tuple[str, ...], expected: list[str]
) -> None:
    with capture_logs() as log, MetricsServer(listen, registry, tokens=tokens):
        assert [line["what"] for line in log if line["event"] == "open_to_all"] == expected


def test_an_address_in_use_is_a_wrong_configuration(registry: CollectorRegistry) -> None:
    with (
        MetricsServer("127.0.0.1:0", registry) as server,
        pytest.raises(ConfigError, match="metrics_listen"),
        MetricsServer(f"127.0.0.1:{server.port}", registry),
    ):
        pass


def test_without_an_address_nothing_listens(registry: CollectorRegistry) -> None:
    with MetricsServer("", registry) as server:
        assert server.port is None
