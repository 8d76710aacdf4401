from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from baton.v1 import inference_pb2
from common.errors import FingerprintMismatch, RowFailure
from common.sampling.params import ResolvedSampling
from common.wire.handoff import HandoffRow, RowFailed
from decode_service.messages import (
    BreakCall,
    CallEnded,
    CancelHandoffRows,
    DegradedChanged,
    FrameArrived,
    Replica,
    ReplicasChanged,
    SegmentsLanded,
    StartHandoff,
)
from tests.decode_edge.edge_under_test import SERVICE, Edge, running_edge
from tests.decode_edge.fake_engine import BOUND_S, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
HERE = "127.0.0.1:1"


async def health_becomes(edge: Edge, status: int) -> None:
    """Waits until the service's own health has this status. The health of the process stays SERVING."""
    stub = health_pb2_grpc.HealthStub(edge.channel)
    async with asyncio.timeout(BOUND_S):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        while (await watch.read()).status != status:
            pass
        watch.cancel()
    assert (await stub.Check(health_pb2.HealthCheckRequest(service=""))).status == SERVING


async def test_ready_while_the_engine_runs_and_a_replica_is_ready(edge: Edge) -> None:
    await health_becomes(edge, SERVING)

    edge.replicas.on_report(ReplicasChanged((Replica(HERE, is_ready=False),)))
    await health_becomes(edge, NOT_SERVING)

    edge.replicas.on_report(ReplicasChanged((Replica(HERE, is_ready=False), Replica("127.0.0.1:2", is_ready=True))))
    await health_becomes(edge, SERVING)


async def test_ready_without_a_replica_where_it_serves_alone() -> None:
    """The edge logs only what the engine reports. It logs nothing when the replica is lost, because the replica may be
    ready again in a moment.
    """
    with capture_logs() as log:
        async with running_edge(log, serves_alone=True) as edge:
            await health_becomes(edge, SERVING)
            edge.replicas.on_report(ReplicasChanged((Replica(HERE, is_ready=False),)))
            assert edge.replicas.can_serve
            edge.deliver(DegradedChanged(True, "why"), DegradedChanged(False))
            edge.live_requests.drain()
            await health_becomes(edge, NOT_SERVING)
    (begun, ended) = [line for line in log if line["event"].startswith("degraded")]
    assert begun == {"event": "degraded", "log_level": "warning", "reason": "why"}
    assert (ended["event"], ended["log_level"]) == ("degraded_no_more", "info")


async def test_a_dead_engine_is_alive_but_not_ready(edge: Edge) -> None:
    await health_becomes(edge, SERVING)

    edge.engine.die()

    await health_becomes(edge, NOT_SERVING)


async def test_not_ready_while_draining(edge: Edge) -> None:
    await health_becomes(edge, SERVING)

    edge.live_requests.drain()

    await health_becomes(edge, NOT_SERVING)


async def test_reflection_lists_the_services(edge: Edge) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(edge.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))

    response = await call.read()

    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


async def test_model_info(edge: Edge) -> None:
    assert (await edge.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).model == "tiny"


def handoff(call_id: str, num_rows: int, replica: str = HERE) -> StartHandoff:
    row = HandoffRow("r", 0, (1,), 1, ResolvedSampling(seed=1, max_tokens=1))
    return StartHandoff(call_id, replica, (row,) * num_rows)


async def test_load_shows_pools_and_replicas(edge: Edge) -> None:
    mismatch = FingerprintMismatch("dtype", "float32", "bfloat16")
    edge.replicas.on_report(
        ReplicasChanged((Replica(HERE, is_ready=True), Replica("127.0.0.1:2", is_ready=False, error=mismatch)))
    )
    edge.deliver(handoff("c1", 3), handoff("c2", 2))
    await until(lambda: len(edge.transport.asked) == 2)
    edge.replicas.on_report(FrameArrived("c1", RowFailed(0, RowFailure.CAPACITY, retryable=True)))
    edge.replicas.on_report(CallEnded("c2", None))

    load = await edge.stub.GetLoad(inference_pb2.GetInferenceLoadRequest())

    assert load.instance_id == "this process"
    assert (load.rows.total, load.rows.free, load.rows.running, load.rows.transferring) == (4, 2, 1, 1)
    assert (load.slots.total, load.slots.quarantined) == (64, 4)
    assert (load.num_queued, load.num_running, load.num_steps, load.num_row_retries) == (1, 1, 9, 3)
    assert load.is_degraded
    first, second = load.prefill_replicas
    assert (first.address, first.is_ready, first.num_rows, first.reason) == (HERE, True, 2, "")
    assert (second.is_ready, second.num_rows) == (False, 0)
    assert (first.num_known_tokens, second.num_known_tokens) == (5, 0)
    assert "dtype" in second.reason


async def test_handoff_events_go_to_the_transport_in_order(edge: Edge) -> None:
    start, cancel = handoff("c1", 1), CancelHandoffRows("c1", (0,))
    landed, broken = SegmentsLanded("c1", 10), BreakCall("c1", "out of order")

    edge.deliver(start, landed)
    edge.deliver(cancel, broken)

    await until(lambda: len(edge.transport.asked) == 4)
    assert edge.transport.asked == [
        ("start", start),
        ("landed", landed),
        ("cancel_rows", cancel),
        ("break_call", broken),
    ]
