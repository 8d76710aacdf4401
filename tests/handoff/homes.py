"""The settings ("homes") in which the contract tests run a handoff: gRPC, and gRPC with shared memory or NIXL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_kv import SharedKv
from common.kv.shared_pool import DIRECTORY, SharedPool
from common.nixl.child import TransferProcess
from common.service.server import ServiceServer
from common.wire.fingerprint import Fingerprint
from common.wire.handoff import KvSegment
from decode_service.handoff.grpc_transport import GrpcTransport
from decode_service.handoff.transport import HandoffTimeouts, HandoffTransport, TransportReport
from decode_service.messages import FrameArrived, SegmentsLanded
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from prefill_service.handoff.lent_memory import LentMemory, NixlLender
from prefill_service.messages import Event, FrameReady
from tests.handoff.scripted_prefill import BOUND_S, RecordingDecode, ScriptedPrefill
from tests.support.loop_thread import LoopThread
from tests.support.prefill_edge import PrefillEdge, start_prefill_edge
from tests.support.running_pair import wait_until
from tests.wire.strategies import VOCAB_SIZE

FAST = HandoffTimeouts(
    connect_timeout_s=BOUND_S,
    answer_timeout_s=BOUND_S,
    accept_timeout_s=BOUND_S,
    progress_timeout_s=BOUND_S,
    poll_interval_s=0.02,
    poll_timeout_s=BOUND_S,
    nixl_timeout_s=BOUND_S,
)
"""Time-outs that nothing reaches by chance, and polls that follow each other at once."""


class GrpcHome:
    """A home with the real gRPC edge and transport between the scripted engines, in one event loop."""

    shared_pool: SharedPool | None = None
    stall_timeout_s = 60.0
    timeouts = FAST
    most_under_way = 4
    """The most segments that the prefill side can send beyond the decode side's receive budget: one read ahead, one in
    the window, and one held at each end.
    """

    def __init__(
        self, prefill: ScriptedPrefill, decode: RecordingDecode, fingerprint: Fingerprint, receive_budget_bytes: int
    ) -> None:
        self._loop = self._open_loop()
        self._edge = self._loop.run(self._serve(prefill, fingerprint))
        self.address = self._edge.address
        self.transport: HandoffTransport = self._loop.run(self._connect(decode, fingerprint, receive_budget_bytes))
        decode.latest_replica(lambda replica: replica.is_ready)

    def _open_loop(self) -> LoopThread:
        return LoopThread()

    @property
    def lent_memory(self) -> LentMemory:
        return LentMemory(self.shared_pool)

    @property
    def servicer(self) -> PrefillServicer:
        return self._edge.servicer

    @property
    def server(self) -> ServiceServer:
        return self._edge.server

    async def _serve(self, prefill: ScriptedPrefill, fingerprint: Fingerprint) -> PrefillEdge:
        return await start_prefill_edge(
            prefill,
            limits=HandoffLimits(stall_timeout_s=self.stall_timeout_s),
            fingerprint=fingerprint,
            lent=self.lent_memory,
        )

    async def _connect(
        self, decode: RecordingDecode, fingerprint: Fingerprint, receive_budget_bytes: int
    ) -> GrpcTransport:
        transport = GrpcTransport(
            post=decode.post,
            addresses=[self.address],
            fingerprint=fingerprint,
            vocab_size=VOCAB_SIZE,
            receive_budget_bytes=receive_budget_bytes,
            timeouts=self.timeouts,
        )
        await transport.open()
        return transport

    def lose_peer(self) -> None:
        """Loses the prefill side, as if its process had been killed."""
        self._loop.run(self._edge.server.stop(0))

    def close_transport(self) -> None:
        self._loop.run(self.transport.close())

    def close(self) -> None:
        self.close_transport()
        self._loop.run(self._edge.server.stop(0))
        self._close_loop()

    def _close_loop(self) -> None:
        self._loop.close()


class LentSegments:
    """A shared-memory pool of one prefill engine, and a way to lend segments from it. They take consecutive slots,
    and the oldest slots are reused.
    """

    def __init__(self, groups: Sequence[LayerGroupSpec], num_slots: int, directory: Path | None = DIRECTORY) -> None:
        self.pool = SharedPool(groups=groups, num_slots=num_slots, directory=directory)
        self._next_slot = 1

    def lend(self, segment: KvSegment) -> KvSegment:
        if self._next_slot + segment.num_tokens > self.pool.num_slots:
            self._next_slot = 1
        slots = range(self._next_slot, self._next_slot + segment.num_tokens)
        self._next_slot = slots.stop
        layers = slice(segment.layer_start, segment.layer_start + segment.num_layers)
        into = self.pool.groups[segment.layer_group][layers, :, slots.start : slots.stop]
        into[:] = np.frombuffer(segment.payload, np.uint8).reshape(into.shape)
        self.pool.stamp(segment.layer_group, slots)
        shared = self.pool.lend(segment.layer_group, layers, slots)
        return replace(segment, payload=b"", shared=shared)


def read(shared: SharedKv) -> bytes:
    """Returns the bytes that a receiver would copy from these slots."""
    return shared.layers[:, :, list(shared.ticket.slots)].tobytes()


class SharedMemoryHome(GrpcHome):
    """A GrpcHome whose segments lie in shared memory. The decode side reads and releases each one as it arrives."""

    most_under_way = 64  # more than any test sends

    def __init__(
        self,
        prefill: ScriptedPrefill,
        decode: RecordingDecode,
        fingerprint: Fingerprint,
        receive_budget_bytes: int,
        lent: LentSegments | None = None,
    ) -> None:
        self._lent = lent or LentSegments(fingerprint.layer_groups, num_slots=4096)
        self._owns_pool = lent is None
        self.shared_pool = self._lent.pool
        self._record = decode.post
        decode.post = self._read  # type: ignore[method-assign]
        super().__init__(prefill, decode, fingerprint, receive_budget_bytes)
        self._deliver = prefill.deliver
        prefill.deliver = self._lend

    def close(self) -> None:
        super().close()
        if self._owns_pool:
            self._lent.pool.close()

    def _lend(self, events: Sequence[Event]) -> None:
        self._deliver([self._in_pool(event) for event in events])

    def _in_pool(self, event: Event) -> Event:
        if not isinstance(event, FrameReady) or not isinstance(event.frame, KvSegment):
            return event
        return replace(event, frame=self._lent.lend(event.frame))

    def _read(self, report: TransportReport) -> None:
        if isinstance(report, FrameArrived) and isinstance(report.frame, KvSegment):
            shared = report.frame.shared
            assert isinstance(shared, SharedKv) and shared.is_current, "it came as a payload"
            self._record(replace(report, frame=replace(report.frame, payload=read(shared), shared=None)))
            self.transport.landed(SegmentsLanded(report.call_id, 0, (shared.ticket.number,)))
        else:
            self._record(report)


class NixlPeers:
    """A process that lends memory, and the event loop for it and its readers. Tests share them, since they take half a
    second to start.
    """

    def __init__(self, groups: Sequence[LayerGroupSpec]) -> None:
        self.loop = LoopThread()
        self.lent = LentSegments(groups, num_slots=4096, directory=None)
        self.lender = NixlLender(self.lent.pool.file, restart_s=0.01, timeout_s=BOUND_S)
        self.loop.run(self.lender.open())
        self.loop.call_soon(lambda: self.lender.follow(lambda: True))

    def lender_now(self) -> TransferProcess:
        """Returns the lender's process. If it has ended, it is restarted first."""
        wait_until(lambda: self.lender.offer.agent_metadata != b"")
        assert self.lender._process is not None
        return self.lender._process

    def close(self) -> None:
        self.loop.run(self.lender.close())
        self.loop.close()
        self.lent.pool.close()


class NixlHome(SharedMemoryHome):
    """A SharedMemoryHome whose segments are read through NIXL before the decode side sees them."""

    def __init__(
        self,
        prefill: ScriptedPrefill,
        decode: RecordingDecode,
        fingerprint: Fingerprint,
        receive_budget_bytes: int,
        peers: NixlPeers,
    ) -> None:
        self._peers = peers
        super().__init__(prefill, decode, fingerprint, receive_budget_bytes, peers.lent)

    @property
    def lent_memory(self) -> LentMemory:
        return LentMemory(self._peers.lent.pool, self._peers.lender)

    def _open_loop(self) -> LoopThread:
        return self._peers.loop

    def _close_loop(self) -> None:
        """Does nothing: the loop belongs to the peers."""
