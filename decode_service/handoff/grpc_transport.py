"""The handoff over gRPC, to any number of prefill replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog

from common.errors import BatonError, EngineFault, FingerprintMismatch, PrefillUnavailable
from common.rpc.grpc_options import MAX_MESSAGE_BYTES, channel_options
from common.rpc.name_lookup import LookUp, look_up
from common.telemetry.timeline import HANDOFF, Timeline
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import Fingerprint
from decode_service.handoff.grpc_call import GrpcCall
from decode_service.handoff.grpc_replica import OPEN_ACCESS, GrpcReplica, PrefillAccess
from decode_service.handoff.grpc_replicas import GrpcReplicas
from decode_service.handoff.receive_budget import AsyncReceiveBudget
from decode_service.handoff.transport import HandoffTimeouts, Post
from decode_service.messages import (
    BreakCall,
    CallEnded,
    CancelHandoffRows,
    SegmentsLanded,
    StartHandoff,
)

_log = structlog.get_logger(__name__)


class GrpcTransport:
    """A HandoffTransport over gRPC. It is created on the event loop on which it runs.

    `addresses` are "HOST:PORT", one replica each, "dns:///NAME:PORT", a replica for each address that `look_up`
    finds, or "file:///PATH", a replica for each address in the file. With TLS the certificates of replicas found by a
    DNS name must be for NAME, and the others for the replica's own host. While the receive budget is full, a
    handoff call reads one more frame and holds it; then gRPC's flow control stops the replica.
    """

    def __init__(
        self,
        *,
        post: Post,
        addresses: Sequence[str],
        fingerprint: Fingerprint,
        vocab_size: int,
        receive_budget_bytes: int,
        timeouts: HandoffTimeouts,
        access: PrefillAccess = OPEN_ACCESS,
        look_up: LookUp = look_up,
        num_channels_per_replica: int = 2,
        timeline: Timeline | None = None,
    ) -> None:
        self._track = (timeline or Timeline()).track(HANDOFF)
        self._post = post
        self._fingerprint = fingerprint
        self._codec = FrameCodec(fingerprint=fingerprint, vocab_size=vocab_size)
        self._timeouts = timeouts
        self._metadata = access.metadata
        self._budget = AsyncReceiveBudget(receive_budget_bytes)
        self._loop = asyncio.get_running_loop()

        def connect(address: str, certified_host: str | None) -> GrpcReplica:
            return GrpcReplica(
                address=address,
                fingerprint=fingerprint,
                access=access,
                options=channel_options(max_receive_bytes=MAX_MESSAGE_BYTES, server_name=certified_host),
                num_channels=num_channels_per_replica,
                timeouts=timeouts,
            )

        self._replicas = GrpcReplicas(
            addresses=addresses,
            connect=connect,
            look_up=look_up,
            has_calls=lambda address: any(call.replica == address for call in self._calls.values()),
            post=post,
            timeouts=timeouts,
        )
        self._calls: dict[str, GrpcCall] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._break_errors: dict[str, BatonError] = {}
        self._is_open = False

    async def open(self) -> None:
        self._is_open = True
        self._replicas.open()

    def start(self, command: StartHandoff) -> None:
        self._loop.call_soon_threadsafe(self._start, command)

    def cancel_rows(self, command: CancelHandoffRows) -> None:
        self._loop.call_soon_threadsafe(self._cancel_rows, command)

    def break_call(self, command: BreakCall) -> None:
        error = EngineFault(f"the call was broken: {command.reason}")
        self._loop.call_soon_threadsafe(self._break, command.call_id, error)

    def landed(self, command: SegmentsLanded) -> None:
        self._loop.call_soon_threadsafe(self._landed, command)

    async def close(self) -> None:
        self._is_open = False
        for call_id in list(self._tasks):
            self._break(call_id, PrefillUnavailable("the handoff is closed"))
        if tasks := tuple(self._tasks.values()):
            await asyncio.wait(tasks, timeout=self._timeouts.close_timeout_s)
        await self._replicas.close()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _start(self, command: StartHandoff) -> None:
        closed = PrefillUnavailable("the handoff is closed")
        replica = self._replicas.get(command.replica) if self._is_open else closed
        if isinstance(replica, BatonError):
            self._post(CallEnded(command.call_id, replica))
            return
        call = GrpcCall(
            command=command,
            replica=replica,
            fingerprint=self._fingerprint,
            codec=self._codec,
            budget=self._budget,
            post=self._post,
            timeouts=self._timeouts,
            metadata=self._metadata,
            track=self._track,
        )
        task = self._loop.create_task(call.exchange())
        self._calls[command.call_id] = call
        self._tasks[command.call_id] = task
        # Not in the task's own code: a task cancelled before its first step never runs any.
        task.add_done_callback(partial(self._ended, command))

    def _cancel_rows(self, command: CancelHandoffRows) -> None:
        if (call := self._calls.get(command.call_id)) is not None:
            call.cancel_rows(command.rows)

    def _landed(self, command: SegmentsLanded) -> None:
        self._budget.give_back(command.num_bytes)
        if command.shared and (call := self._calls.get(command.call_id)) is not None:
            call.release_segments(command.shared)

    def _break(self, call_id: str, error: BatonError) -> None:
        if (task := self._tasks.get(call_id)) is not None:
            self._break_errors.setdefault(call_id, error)
            task.cancel()

    def _ended(self, command: StartHandoff, task: asyncio.Task[None]) -> None:
        del self._calls[command.call_id], self._tasks[command.call_id]
        broken = self._break_errors.pop(command.call_id, None)
        error = broken or _error_of(task)
        if broken is None and isinstance(error, PrefillUnavailable | FingerprintMismatch):
            # The engine must learn of it before it chooses another replica; the next poll corrects a wrong report. A
            # fingerprint mismatch also counts as lost for now: only the poll can make it permanent.
            lost = error if isinstance(error, PrefillUnavailable) else PrefillUnavailable(str(error))
            self._replicas.lost(command.replica, lost)
        self._post(CallEnded(command.call_id, error))


def _error_of(task: asyncio.Task[None]) -> BatonError | None:
    if task.cancelled():
        return PrefillUnavailable("the call was cancelled")
    error = task.exception()
    if error is None or isinstance(error, BatonError):
        return error
    _log.error("a handoff call failed", exc_info=error)
    return EngineFault(f"a handoff call failed: {error!r}")
