"""The prefill service's gRPC server: Prefill, health and reflection."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from baton.v1 import prefill_pb2
from common.wire.grpc_options import MAX_MESSAGE_BYTES, server_options
from prefill_service.edge.servicer import PrefillServicer

PREFILL_SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
_ALIVE = ""


class PrefillServer:
    """Health tells "" (the process is alive) from the service's name (calls are served: `set_ready`)."""

    def __init__(
        self,
        *,
        servicer: PrefillServicer,
        credentials: grpc.ServerCredentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._credentials = credentials
        self._health = health_aio.HealthServicer()
        self._server = grpc.aio.server(options=server_options(max_receive_bytes=max_message_bytes))
        self._server.add_generic_rpc_handlers((_prefill_handlers(servicer),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((PREFILL_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), self._server)

    async def start(self, address: str) -> int:
        """Listen on `address` ("host:port", port 0 for any); returns the port. Not ready until `set_ready`."""
        if self._credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self._credentials)
        await self._health.set(_ALIVE, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        await self._server.start()
        return port

    async def set_ready(self, is_ready: bool) -> None:
        response = health_pb2.HealthCheckResponse
        await self._health.set(PREFILL_SERVICE, response.SERVING if is_ready else response.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no further call; those open have `grace_s` to end."""
        await asyncio.shield(self._server.stop(grace_s))


def _prefill_handlers(servicer: PrefillServicer) -> grpc.GenericRpcHandler:
    """Handoff takes and gives bytes: what cannot be parsed then fails its call by our own rules."""
    return grpc.method_handlers_generic_handler(
        PREFILL_SERVICE,
        {
            "Handoff": grpc.stream_stream_rpc_method_handler(servicer.handoff),
            "GetFingerprint": grpc.unary_unary_rpc_method_handler(
                servicer.get_fingerprint,
                request_deserializer=prefill_pb2.GetFingerprintRequest.FromString,
                response_serializer=prefill_pb2.GetFingerprintResponse.SerializeToString,
            ),
            "GetLoad": grpc.unary_unary_rpc_method_handler(
                servicer.get_load,
                request_deserializer=prefill_pb2.GetPrefillLoadRequest.FromString,
                response_serializer=prefill_pb2.GetPrefillLoadResponse.SerializeToString,
            ),
        },
    )
