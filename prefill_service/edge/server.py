"""Registers the prefill service's methods on a gRPC server."""

from __future__ import annotations

import grpc

from baton.v1 import prefill_pb2
from common.service.server import ServiceServer
from prefill_service.edge.servicer import PrefillServicer

PREFILL_SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


def add_prefill_servicer(servicer: PrefillServicer, server: ServiceServer) -> None:
    """Registers the methods. Handoff exchanges raw bytes, so that Baton itself handles messages that do not parse."""
    handlers = grpc.method_handlers_generic_handler(
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
    server.grpc_server.add_generic_rpc_handlers((handlers,))
