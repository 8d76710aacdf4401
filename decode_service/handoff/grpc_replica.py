"""One prefill replica: its connections, its health and its KV pool."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from itertools import cycle

import grpc
import structlog
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from baton.v1 import prefill_pb2
from common.errors import BatonError, FingerprintMismatch, PrefillUnavailable
from common.kv.shared_pool import MappedPool, PoolUnusable, sweep
from common.nixl.backoff import Backoff
from common.peer_text import peer_text
from common.rpc.errors import connection_words
from common.rpc.grpc_options import Metadata, Options
from common.rpc.messages import MessageT, ProtocolError, parse, require_few_fields
from common.wire.codec_fingerprint import decode_fingerprint
from common.wire.fingerprint import Fingerprint, first_difference
from decode_service.handoff.nixl_pool import NixlPool
from decode_service.handoff.transport import HandoffTimeouts
from decode_service.messages import Replica

PREFILL_SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
_CHECK = "/grpc.health.v1.Health/Check"
_GET_LOAD, _GET_FINGERPRINT = f"/{PREFILL_SERVICE}/GetLoad", f"/{PREFILL_SERVICE}/GetFingerprint"
_MAX_ANSWER_FIELDS = 1024
_MAX_DOUBLINGS = 7
"""How many times in a row the wait before a lost pool is opened again may double. The wait grows because each loss
breaks the calls that read the pool.
"""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillAccess:
    """How prefill services are reached: over TLS with `credentials`, or without. `metadata` is sent with every call."""

    credentials: grpc.ChannelCredentials | None = None
    metadata: Metadata = ()


OPEN_ACCESS = PrefillAccess()


class GrpcReplica:
    """The connections to one prefill replica, its state as last polled, and access to its KV pool.

    Calls take turns on `num_channels` connections. Polls have a connection of their own, so that no KV delays them.
    """

    def __init__(
        self,
        *,
        address: str,
        fingerprint: Fingerprint,
        access: PrefillAccess,
        options: Options,
        num_channels: int,
        timeouts: HandoffTimeouts,
    ) -> None:
        self.address = address
        self._fingerprint = fingerprint

        def connect() -> grpc.aio.Channel:
            if access.credentials is None:
                return grpc.aio.insecure_channel(address, options=options)
            return grpc.aio.secure_channel(address, access.credentials, options=options)

        self._channels = [connect() for _ in range(num_channels)]
        self._turns = cycle(self._channels)
        self._look_channel = connect()
        self._metadata = access.metadata
        self._known_instance_id: str | None = None
        self._mismatch: FingerprintMismatch | None = None
        self._timeouts = timeouts
        self._pool: MappedPool | NixlPool | None = None  # that of the instance polled last
        self._retired: list[NixlPool] = []  # running calls may use them
        self._opening: asyncio.Task[NixlPool] | None = None
        self._given_up: set[asyncio.Task[NixlPool]] = set()  # opening was cancelled and is about to end
        self._is_first_opening = False  # whether it is the first for this instance
        self._backoff = self._new_backoff()
        self._retry_pool_at_s = math.inf
        self.num_steps = 0  # steps of the replica's engine at the last poll

    @property
    def pool(self) -> MappedPool | NixlPool | None:
        """The replica's KV pool, or None if it cannot be read from here."""
        return None if isinstance(self._pool, NixlPool) and self._pool.is_lost else self._pool

    def next_channel(self) -> grpc.aio.Channel:
        return next(self._turns)

    async def look(self, timeout_s: float) -> Replica:
        """Polls the replica and returns its state. Each request of the poll may take `timeout_s`.

        If a new process answers at the address, its fingerprint is compared first.
        """
        self._retired = [pool for pool in self._retired if not pool.has_ended]
        try:
            asked = health_pb2.HealthCheckRequest(service=PREFILL_SERVICE)
            health = await self._ask(_CHECK, asked, health_pb2.HealthCheckResponse, timeout_s)
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                return self._not_ready(PrefillUnavailable(f"{self.address}: is not ready"))
            load = await self._ask(
                _GET_LOAD, prefill_pb2.GetPrefillLoadRequest(), prefill_pb2.GetPrefillLoadResponse, timeout_s
            )
            self._follow_pool()
            if peer_text(load.instance_id) != self._known_instance_id:
                await self._compare_fingerprints(timeout_s)
            elif time.monotonic() >= self._retry_pool_at_s:
                try:
                    await self._compare_fingerprints(timeout_s)
                except (grpc.aio.AioRpcError, ProtocolError) as failure:  # the replica serves without its pool
                    self._retry_pool_later(f"it does not say where its pool is: {_words(failure)}")
        except (grpc.aio.AioRpcError, ProtocolError) as failure:
            return self._not_ready(PrefillUnavailable(f"{self.address}: {_words(failure)}"))
        except Exception as error:  # polling must continue
            _log.exception("looking at prefill replica %s failed", self.address)
            reason = peer_text(f"{type(error).__name__}: {error}")
            return self._not_ready(PrefillUnavailable(f"{self.address}: {reason}"))
        self.num_steps = load.num_steps
        if self._mismatch is not None:
            return self._not_ready(self._mismatch)
        if self._opening is not None and self._is_first_opening:
            return self._not_ready(PrefillUnavailable(f"{self.address}: NIXL is being connected"))
        return Replica(
            self.address,
            is_ready=True,
            num_uncomputed_tokens=load.num_uncomputed_tokens,
            max_context_tokens=load.max_context_tokens or None,
            instance_id=peer_text(load.instance_id),
            max_cached_tokens=load.max_cached_tokens,
            num_evicted_tokens=load.num_evicted_tokens,
            num_free_slots=load.slots.free,
        )

    async def close(self) -> None:
        self._let_go_of_pool()
        if self._given_up:
            await asyncio.wait(self._given_up)
        for pool in self._retired:
            await pool.close()
        for channel in (*self._channels, self._look_channel):
            await channel.close()

    async def _compare_fingerprints(self, timeout_s: float) -> None:
        response = await self._ask(
            _GET_FINGERPRINT, prefill_pb2.GetFingerprintRequest(), prefill_pb2.GetFingerprintResponse, timeout_s
        )
        response.instance_id = peer_text(response.instance_id)
        difference = first_difference(self._fingerprint, decode_fingerprint(response.fingerprint))
        self._mismatch = None if difference is None else FingerprintMismatch(*difference)
        self._is_first_opening = response.instance_id != self._known_instance_id
        if self._is_first_opening:
            self._backoff = self._new_backoff()
        self._known_instance_id, self._retry_pool_at_s = response.instance_id, math.inf
        if self._mismatch is not None:
            _log.error("prefill replica %s cannot serve: %s", self.address, self._mismatch)
        elif self._is_first_opening:
            _log.info("prefill replica %s is instance %s", self.address, response.instance_id)
        self._let_go_of_pool()
        if self._mismatch is None:
            await self._open_pool(response)

    async def _open_pool(self, response: prefill_pb2.GetFingerprintResponse) -> None:
        """Maps the replica's pool if it is shared memory, or starts opening it in the background if it is NIXL's.

        A later poll (`_follow_pool`) takes the opened pool. If neither works, KV comes over gRPC, and what may have
        failed for a moment only is tried again later.
        """
        groups = self._fingerprint.layer_groups
        if response.kv_pool:
            try:
                self._pool = await asyncio.to_thread(MappedPool, response.kv_pool, groups=groups)
            except (PoolUnusable, RuntimeError) as error:  # a RuntimeError if no thread can be started
                if not isinstance(error, PoolUnusable) or error.may_pass:
                    self._retry_pool_later(str(error))
                else:
                    _log.info("prefill replica %s: its KV comes over gRPC: %s", self.address, error)
        elif response.nixl_pool.agent_metadata:
            opening = NixlPool.opened(response.nixl_pool, groups=groups, timeout_s=self._timeouts.nixl_timeout_s)
            self._opening = asyncio.create_task(opening, name="nixl")
        elif response.HasField("nixl_pool"):
            self._retry_pool_later("NIXL: its process is not there now")

    def _follow_pool(self) -> None:
        """Begins to use a pool that was opened since the last poll, and drops a lost one."""
        if self._opening is not None and self._opening.done():
            opening, self._opening = self._opening, None
            if (error := opening.exception()) is None:
                self._pool = opening.result()
                self._backoff.succeeded()
            else:
                self._retry_pool_later(peer_text(str(error) if isinstance(error, PoolUnusable) else repr(error)))
        if isinstance(self._pool, NixlPool) and self._pool.is_lost:
            self._retry_pool_later("NIXL: a read failed, or its process ended")

    def _retry_pool_later(self, reason: str) -> None:
        self._let_go_of_pool()
        wait_s = self._backoff.next_wait_s()
        self._retry_pool_at_s = time.monotonic() + wait_s
        _log.warning("prefill replica %s: its KV comes over gRPC for %s s: %s", self.address, wait_s, reason)

    def _new_backoff(self) -> Backoff:
        return Backoff(first_s=self._timeouts.pool_retry_s, max_doublings=_MAX_DOUBLINGS)

    def _let_go_of_pool(self) -> None:
        """Stops using the current pool, including one that is still being opened."""
        if (opening := self._opening) is not None:
            self._opening = None
            if not opening.done():
                self._given_up.add(opening)
                opening.add_done_callback(self._given_up.discard)
                opening.cancel()
            elif opening.exception() is None:
                self._pool = opening.result()
        if isinstance(self._pool, NixlPool):
            self._pool.retire()
            self._retired.append(self._pool)
        self._pool = None

    async def _ask(self, method: str, request: Message, kind: type[MessageT], timeout_s: float) -> MessageT:
        """Sends a unary request and returns the parsed answer. Raises ProtocolError if it cannot be parsed."""
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._look_channel.unary_unary(method)
        answer = await call(request.SerializeToString(), timeout=timeout_s, metadata=self._metadata)
        require_few_fields(answer, kind, at_most=_MAX_ANSWER_FIELDS)
        return parse(kind, answer)

    def _not_ready(self, error: BatonError) -> Replica:
        """Returns the state of a replica that cannot serve. Drops its pool if it is shared memory.

        The process that owns that memory may be dead; when the replica is ready again, its pool is mapped again. A pool
        read through NIXL stays, because it may still be read when the replica drains or missed one poll.
        """
        if isinstance(self._pool, MappedPool):
            self._pool = None
            self._known_instance_id = None
            sweep()
        return Replica(self.address, is_ready=False, error=error)


def _words(failure: grpc.aio.AioRpcError | ProtocolError) -> str:
    """Returns why asking a replica failed."""
    if isinstance(failure, ProtocolError):
        return f"answered something else: {failure}"
    return f"{failure.code().name}: {peer_text(connection_words(failure.details() or ''))}"
