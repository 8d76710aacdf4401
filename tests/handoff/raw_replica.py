"""A prefill replica that sends whatever bytes the test gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from baton.v1 import prefill_pb2, types_pb2
from common.addresses import address_of
from common.rpc.grpc_options import server_options
from common.wire.codec_fingerprint import encode_fingerprint
from common.wire.fingerprint import Fingerprint
from tests.handoff.samples import FINGERPRINT

_UNBOUNDED = -1


class RawReplica:
    """A prefill replica with scripted answers. It writes `frames` to each Handoff call and then ends the call, unless
    it `hangs` or fails with `status`.

    A non-empty entry of `answers` replaces the correct answer to that method; with a status code the method fails. If
    it `is_silent`, it does not even begin to answer Handoff calls.
    """

    def __init__(
        self,
        fingerprint: Fingerprint = FINGERPRINT,
        instance_id: str = "raw",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.fingerprint = fingerprint
        self.instance_id = instance_id
        self.health = health_pb2.HealthCheckResponse.SERVING
        self.max_context_tokens = 0
        self.num_uncomputed_tokens = 0
        self.max_cached_tokens = 0
        self.num_evicted_tokens = 0
        self.num_free_slots = 0
        self.num_looks = 0
        self.peers: list[str] = []  # the connection of each call
        self.is_stepping = False  # whether a step ends between any two polls of its load
        self.num_steps = 0
        self.frames: Sequence[bytes] = ()
        self.answers: Mapping[str, bytes | grpc.StatusCode] = {}
        self.hangs = False
        self.is_silent = False
        self.status: grpc.StatusCode | None = None
        self.details = "the script says so"
        self.credentials: grpc.ServerCredentials | None = None
        self.host = host
        self.port = port

    async def start(self) -> None:
        """Listens on `port`, or on the port of the previous start, as a restarted process does."""
        self._server = grpc.aio.server(options=server_options(max_receive_bytes=_UNBOUNDED))
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "baton.v1.Prefill",
                    {
                        "Handoff": grpc.stream_stream_rpc_method_handler(self._handoff),
                        "GetFingerprint": grpc.unary_unary_rpc_method_handler(self._get_fingerprint),
                        "GetLoad": grpc.unary_unary_rpc_method_handler(self._get_load),
                    },
                ),
                grpc.method_handlers_generic_handler(
                    "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(self._check)}
                ),
            )
        )
        address = address_of(self.host, self.port)
        if self.credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self.credentials)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _handoff(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        if not self.is_silent:
            await context.send_initial_metadata(())
        await context.read()
        self.peers.append(context.peer())
        for frame in self.frames:
            await context.write(frame)
        if self.status is not None:
            await context.abort(self.status, self.details)
        if self.hangs:
            await asyncio.Event().wait()

    async def _get_fingerprint(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        response = prefill_pb2.GetFingerprintResponse(
            fingerprint=encode_fingerprint(self.fingerprint), instance_id=self.instance_id
        )
        return await self._answer("GetFingerprint", response, context)

    async def _get_load(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        self.num_steps += self.is_stepping
        response = prefill_pb2.GetPrefillLoadResponse(
            instance_id=self.instance_id,
            num_steps=self.num_steps,
            max_context_tokens=self.max_context_tokens,
            num_uncomputed_tokens=self.num_uncomputed_tokens + self.num_steps,
            max_cached_tokens=self.max_cached_tokens,
            num_evicted_tokens=self.num_evicted_tokens,
            slots=types_pb2.PoolLoad(free=self.num_free_slots),
        )
        return await self._answer("GetLoad", response, context)

    async def _check(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        self.num_looks += 1
        return await self._answer("Check", health_pb2.HealthCheckResponse(status=self.health), context)

    async def _answer(self, method: str, correct: Message, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        answer = self.answers.get(method) or correct.SerializeToString()
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, self.details)
        return answer
