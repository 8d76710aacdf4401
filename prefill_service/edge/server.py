"""The prefill service's gRPC server: Prefill, health and reflection."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from baton.v1 import prefill_pb2
from common.service.serving import ServerLimits, ServiceServer
from common.service.timeline_rpc import TimelineServicer
from prefill_service.edge.servicer import PrefillServicer

PREFILL_SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


class PrefillServer(ServiceServer):
    def __init__(
        self,
        *,
        servicer: PrefillServicer,
        credentials: grpc.ServerCredentials | None = None,
        checks_certificates: bool = False,
        tokens: Sequence[str] = (),
        limits: ServerLimits | None = None,
        timeline: TimelineServicer | None = None,
    ) -> None:
        super().__init__(
            service_name=PREFILL_SERVICE,
            credentials=credentials,
            checks_certificates=checks_certificates,
            tokens=tokens,
            limits=limits,
            timeline=timeline,
        )
        self.grpc_server.add_generic_rpc_handlers((_prefill_handlers(servicer),))


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
