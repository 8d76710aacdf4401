"""The prefill service's edge, which `ServiceLife` starts and stops, and the registration of its gRPC methods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc

from baton.v1 import prefill_pb2
from common.drain import Drain
from common.errors import BatonError
from common.service.engine_thread import EnginePort
from common.service.server import ServiceServer
from prefill_service.edge.servicer import PrefillServicer
from prefill_service.handoff.lent_memory import LentMemory
from prefill_service.messages import Command

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


_DRAIN_POLL_S = 0.05


class PrefillEdge:
    """A ServiceEdge of the prefill service: it serves the calls of decode services and lends them memory.

    For the event loop only.
    """

    def __init__(self, *, engine: EnginePort[Command], servicer: PrefillServicer, lent: LentMemory) -> None:
        self._engine = engine
        self._servicer = servicer
        self._lent = lent
        self._is_draining = False

    async def open(self) -> None:
        self._lent.follow(lambda: self._servicer.num_calls > 0)

    @property
    def is_ready(self) -> bool:
        """Whether the service takes calls: True until it drains."""
        return not self._is_draining

    @property
    def num_open(self) -> Mapping[str, int]:
        return {"num_calls": self._servicer.num_calls}

    def drain(self) -> None:
        """Makes the engine refuse new calls at once. It refuses each row, so that the decode service sends it to
        another replica.
        """
        if not self._is_draining:
            self._is_draining = True
            self._engine.post(Drain())

    async def wait_idle(self) -> None:
        while self._servicer.num_calls and self._engine.is_alive:  # noqa: ASYNC110 - either may change first
            await asyncio.sleep(_DRAIN_POLL_S)

    def fail_all(self, error: BatonError) -> None:
        self._servicer.fail_calls(error)

    def end_rest(self) -> None:
        """Does nothing: the server ends the calls that are left, and their rows are computed elsewhere."""

    async def close(self) -> None:
        """Does nothing: the lent memory must outlive the engine, which still writes to it."""
