"""A name that resolves to several decode services, which come and go while a client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton import AsyncClient
from baton.v1 import inference_pb2, inference_pb2_grpc
from common.service.server import ServerLimits, ServiceServer
from tests.support.name_server import NameServer

CONNECTION_AGE_S = 0.2
LOOK_UP_OFTEN = {"grpc.dns_min_time_between_resolutions_ms": 100}
BOUND_S = 20.0


class NamedService(inference_pb2_grpc.InferenceServicer):
    """An Inference service whose answers name its own host. `hold` keeps its streams open."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.hold = asyncio.Event()

    async def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:  # type: ignore[override]
        return inference_pb2.GetModelInfoResponse(model=self._host)

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(inference_pb2.GenerateEvent(started=inference_pb2.Started(request_id=self._host)))
        await self.hold.wait()
        await context.write(inference_pb2.GenerateEvent(finished=inference_pb2.Finished(reason=1)))


@asynccontextmanager
async def serving(host: str, port: int) -> AsyncIterator[tuple[NamedService, int]]:
    servicer = NamedService(host)
    server = ServiceServer(service_name="baton.v1.Inference", limits=ServerLimits(connection_age_s=CONNECTION_AGE_S))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc_server)
    port = await server.start(f"{host}:{port}")
    await server.set_ready(True)
    try:
        yield servicer, port
    finally:
        await server.stop(0.0)


async def test_a_service_that_a_name_gains_is_found_and_streams_stay_where_they_are() -> None:
    with NameServer("127.0.0.1") as names:
        async with (
            asyncio.timeout(BOUND_S),
            serving("127.0.0.1", 0) as (first, port),
            serving("127.0.0.2", port),
            AsyncClient(names.target("decode.test", port), channel_overrides=LOOK_UP_OFTEN) as client,
        ):
            stream = client.generate("Hi")
            assert (await anext(stream)).request_id == "127.0.0.1"  # type: ignore[union-attr]
            assert {(await client.model_info()).model for _ in range(10)} == {"127.0.0.1"}

            names.addresses = ("127.0.0.1", "127.0.0.2")
            while (await client.model_info()).model != "127.0.0.2":
                pass

            names.addresses = ("127.0.0.2",)
            while {(await client.model_info()).model for _ in range(10)} != {"127.0.0.2"}:
                pass
            first.hold.set()
            assert len([event async for event in stream]) == 1
