"""One Handoff call: sends rows to a prefill replica over one connection and receives their KV. A call that fails loses
its rows with the error that its gRPC status means.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext, suppress
from dataclasses import replace

import grpc

from baton.v1 import prefill_pb2
from common.errors import BatonError, EngineFault, FingerprintMismatch, Overloaded, PrefillUnavailable, RowFailure
from common.kv.shared_kv import PoolLost, ReadablePool, RemoteKv
from common.peer_text import peer_text
from common.rpc.aio import begin_read
from common.rpc.errors import connection_words, error_info
from common.rpc.grpc_options import Metadata
from common.rpc.messages import ProtocolError
from common.telemetry.timeline import Track
from common.wire.codec_commands import encode_cancel_rows, encode_prefill_batch, encode_release_segments
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import Fingerprint
from common.wire.handoff import Accepted, Frame, KvSegment, RowFailed, frame_figures
from decode_service.handoff.grpc_replica import GrpcReplica
from decode_service.handoff.receive_budget import ReceiveBudget
from decode_service.handoff.transport import HandoffTimeouts, Post
from decode_service.messages import FrameArrived, StartHandoff

# Without an ErrorInfo the connection or the peer's process is at fault, not the rows: another replica may serve.
_PEER_LOST = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
    }
)
# UNIMPLEMENTED: the process at this address is a decode service now.
_PEER_REFUSES = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED}
)
_HANDOFF = f"/{prefill_pb2.DESCRIPTOR.services_by_name['Prefill'].full_name}/Handoff"
_LOOKS_PER_TIMEOUT = 4
_LONGEST_RETRY_S = 60.0


def error_of_status(replica: str, failure: grpc.aio.AioRpcError) -> BatonError:
    """Returns FingerprintMismatch, PrefillUnavailable or EngineFault, depending on the status code and the ErrorInfo.

    gRPC reports a message above the size limit as RESOURCE_EXHAUSTED without an ErrorInfo. That becomes an EngineFault,
    because the message would be too large for any replica.
    """
    code, info = failure.code(), error_info(failure)
    details = failure.details() or ""
    message = f"{replica}: {code.name}: {peer_text(details if info else connection_words(details))}"
    if info is None:
        return PrefillUnavailable(message) if code in _PEER_LOST else EngineFault(message)
    if info.reason == FingerprintMismatch.reason:
        told = {key: peer_text(info.metadata[key]) for key in ("field", "decode", "prefill") if key in info.metadata}
        return FingerprintMismatch(
            told.get("field", "a field"), told.get("decode", "one value"), told.get("prefill", "another")
        )
    return PrefillUnavailable(message) if code in _PEER_REFUSES else EngineFault(message)


def retry_after_ms_of(failure: grpc.aio.AioRpcError) -> int | None:
    """Returns when a replica that refused the call wants to be asked again, or None if it did not refuse it for being
    full.
    """
    info = error_info(failure)
    told_s = "" if info is None or info.reason != Overloaded.reason else info.metadata.get("retry_after_s", "")
    return round(1000 * min(float(told_s), _LONGEST_RETRY_S)) if told_s.isdecimal() else None


Stream = grpc.aio.StreamStreamCall[bytes, bytes]


class GrpcCall:
    """Runs one Handoff call. For the event loop only.

    Run `exchange` once, as a task. Cancelling the task cancels the call.
    """

    def __init__(
        self,
        *,
        command: StartHandoff,
        replica: GrpcReplica,
        fingerprint: Fingerprint,
        codec: FrameCodec,
        budget: ReceiveBudget,
        post: Post,
        timeouts: HandoffTimeouts,
        metadata: Metadata,
        track: Track,
    ) -> None:
        """Prepares a call; `exchange` begins it. `track` of the timeline gets a span for each frame."""
        self._track = track
        self._call_id = command.call_id
        self.replica = command.replica
        self._rows = command.rows
        self._channel = replica.next_channel()
        self._fingerprint = fingerprint
        self._codec = codec
        self._budget = budget
        self._post = post
        self._timeouts = timeouts
        self._metadata = metadata
        self._replica = replica
        self._pool: ReadablePool | None = replica.pool  # of the instance that is there now
        self._commands: asyncio.Queue[bytes] = asyncio.Queue()

    def cancel_rows(self, rows: tuple[int, ...]) -> None:
        self._commands.put_nowait(encode_cancel_rows(rows))

    def release_segments(self, numbers: tuple[int, ...]) -> None:
        self._commands.put_nowait(encode_release_segments(numbers))

    async def exchange(self) -> None:
        """Sends the rows and posts the frames that come back, until the replica ends the call.

        If the replica has no room for the call, it has refused each row: then as many RowFailed are posted. Raises a
        BatonError if the call ends in another way.
        """
        secret = b"" if self._pool is None else self._pool.secret
        start_ns = time.monotonic_ns()
        batch = encode_prefill_batch(self._fingerprint, self._rows, pool_secret=secret)
        self._track.ended("send PrefillBatch", start_ns, self._call_id, bytes=len(batch), rows=len(self._rows))
        await self._connect()
        stream: Stream = self._channel.stream_stream(_HANDOFF)(metadata=self._metadata)
        writer = asyncio.create_task(self._write_commands(stream, batch))
        try:
            with nullcontext() if self._pool is None else self._pool.in_use():
                await self._read_frames(stream)
        except grpc.aio.AioRpcError as failure:
            error = error_of_status(self.replica, failure)
            if (retry_after_ms := retry_after_ms_of(failure)) is None:
                raise error from failure
            for row in range(len(self._rows)):
                refused = RowFailed(row, RowFailure.CAPACITY, True, retry_after_ms, str(error))
                self._post(FrameArrived(self._call_id, refused))
        except PoolLost as error:
            raise PrefillUnavailable(f"{self.replica}: {peer_text(str(error))}") from error
        except ProtocolError as error:
            raise EngineFault(f"{self.replica} broke the protocol: {error}") from error
        finally:
            writer.cancel()
            stream.cancel()

    async def _connect(self) -> None:
        timeout_s = self._timeouts.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            raise PrefillUnavailable(f"{self.replica}: no connection within {timeout_s} s") from None

    async def _write_commands(self, stream: Stream, batch: bytes) -> None:
        # The reader reports why a stream broke.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.write(batch)
            while True:
                await stream.write(await self._commands.get())

    async def _read_frames(self, stream: Stream) -> None:
        """Reads frames from the gRPC call `stream` and posts them, until the replica ends the call.

        If the budget has room for a frame, the next one is read while this one is decoded. The replica sends the head
        of its answer before it reads the rows, so one that sends none hangs, or cannot be reached.
        """
        await self._arrived(begin_read(stream.initial_metadata()), self._timeouts.answer_timeout_s, what="answer")
        reading = begin_read(stream.read())
        accepted = await self._arrived(reading, self._timeouts.accept_timeout_s)
        if accepted is None or not isinstance(frame := self._decode(accepted), Accepted):
            raise ProtocolError("frame", "is not Accepted, the first frame of a call")
        self._post(FrameArrived(self._call_id, frame))
        reading = begin_read(stream.read())
        timeout_s = self._timeouts.progress_timeout_s
        while (data := await self._arrived(reading, timeout_s, steps_count=True)) is not None:
            if reads_ahead := self._budget.take_at_once(len(data)):
                reading = begin_read(stream.read())
            await self._take(data, len(data) if reads_ahead else 0)
            if not reads_ahead:
                reading = begin_read(stream.read())

    async def _take(self, data: bytes, num_taken: int) -> None:
        """Decodes the frame in `data` and posts it.

        `num_taken` is how many bytes of the receive budget were taken for the frame: as many as `data` has, or 0 if
        there was no room. A segment needs as many bytes as its KV has, until the KV has landed. It waits for them if
        `num_taken` is too small, because there was no room or because the KV lies in lent memory and not in `data`. All
        other bytes are given back.
        """
        try:
            if num_taken:
                await asyncio.sleep(0)  # asks for the next frame before this thread is busy
            frame = self._decode(data)
            if isinstance(frame, Accepted):
                raise ProtocolError("accepted", "is not the first frame of a call")
            if isinstance(frame, KvSegment):
                if frame.num_bytes <= num_taken:
                    num_taken -= frame.num_bytes
                else:  # the KV is in shared memory, or the budget had no room
                    self._budget.give_back(num_taken)
                    num_taken = 0
                    await self._budget.take(self._call_id, frame.num_bytes)
                if isinstance(frame.shared, RemoteKv):
                    frame = await self._fetched(frame, frame.shared)
        finally:
            self._budget.give_back(num_taken)
        self._post(FrameArrived(self._call_id, frame))

    async def _fetched(self, segment: KvSegment, remote: RemoteKv) -> KvSegment:
        is_here = False
        try:
            segment = replace(segment, shared=await remote.fetch(remote))
            is_here = True
        finally:
            if not is_here:
                self._budget.give_back(remote.num_bytes)
        return segment

    async def _arrived(
        self, reading: asyncio.Future[object], timeout_s: float, *, steps_count: bool = False, what: str = "frame"
    ) -> bytes | None:
        """Waits for a frame and returns it. Returns None if the replica ended the call without an error.

        Raises PrefillUnavailable after `timeout_s` without a frame; `what` is its name in the error. If `steps_count`,
        the time-out starts again when a poll has found that the replica's engine has made steps: then it is busy with
        other rows, not lost. The time-out is counted in short waits, not by the clock, so that a time in which this
        process was stopped counts as one wait.
        """
        seen, num_looks = self._replica.num_steps, 0
        while not reading.done() and not (await asyncio.wait({reading}, timeout=timeout_s / _LOOKS_PER_TIMEOUT))[0]:
            num_looks += 1
            if steps_count and self._replica.num_steps != seen:
                seen, num_looks = self._replica.num_steps, 0
            elif num_looks == _LOOKS_PER_TIMEOUT:
                raise PrefillUnavailable(f"{self.replica}: no {what} within {timeout_s} s")
        data = reading.result()
        return data if isinstance(data, bytes) else None

    def _decode(self, data: bytes) -> Frame:
        start_ns = time.monotonic_ns()
        frame = self._codec.decode(data, self._rows, self._pool)
        if self._track.ring is not None:
            figures = frame_figures(frame, self._rows.__getitem__)
            self._track.ended(f"receive {type(frame).__name__}", start_ns, self._call_id, bytes=len(data), **figures)
        return frame
