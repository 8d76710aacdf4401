"""Serves Handoff, GetFingerprint and GetLoad, and connects the calls to the prefill engine.

receiver ──PrefillBatch, CancelRows, ReleaseSegments──▶ servicer
         servicer ──OpenCall, GiveMatcher, FailRow, CancelCallRows, CloseCall──▶ engine
         servicer ──BytesSent, SegmentsReturned──▶ engine
receiver ◀──Accepted, frames in order── servicer ◀───────────── FrameReady, CallDone ───────────────────── engine
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count

import grpc
import structlog
from opentelemetry.trace import Tracer

from baton.v1 import prefill_pb2, types_pb2
from common.errors import (
    BatonError,
    EngineFault,
    EngineLost,
    FingerprintMismatch,
    InvalidRequest,
    Overloaded,
    PrefillUnavailable,
)
from common.grammar.matcher import Matcher, NewMatcher, TokenRulesMatcher
from common.rpc.aio import whole_read
from common.rpc.errors import abort_with
from common.rpc.messages import ProtocolError, require
from common.service.engine_thread import EnginePort
from common.telemetry.stats import PoolCounts
from common.telemetry.timeline import EDGE, HANDOFF, REQUESTS, Timeline
from common.telemetry.tracing import NO_TRACER
from common.wire.codec_commands import PrefillBatch, ReleaseSegments, decode_command
from common.wire.codec_fingerprint import encode_fingerprint
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import Fingerprint, first_difference
from common.wire.handoff import (
    MAX_CALL_ROWS,
    Accepted,
    Frame,
    HandoffRow,
    KvSegment,
    RowFailed,
    frame_figures,
    unsent_bytes,
)
from prefill_service.edge.call import (
    HandoffCall,
    ReplicaLimits,
    RowNumbering,
    check_row,
    no_room_for_row,
    uncomputed_row,
    unmatched_row,
)
from prefill_service.edge.observer import RowTraces
from prefill_service.handoff.lent_memory import LentMemory
from prefill_service.messages import (
    BytesSent,
    CancelCallRows,
    CloseCall,
    Command,
    Event,
    FailRow,
    GiveMatcher,
    OpenCall,
    SegmentsReturned,
)

HandoffContext = grpc.aio.ServicerContext[bytes, bytes]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLimits:
    """The bounds of one handoff call.

    It has at most `max_rows` rows. It fails if its first command does not come within `first_command_timeout_s`, or if
    for `stall_timeout_s` the receiver takes no frame, or returns no lent segment after the last frame. A row whose
    matcher is not made within `matcher_timeout_s` fails alone; the receiver may have to wait that long for a frame.
    """

    max_rows: int = MAX_CALL_ROWS
    first_command_timeout_s: float = 10.0
    stall_timeout_s: float = 60.0
    matcher_timeout_s: float = 15.0  # longer than a grammar may wait for its turn


class PrefillServicer:
    """The gRPC servicer of the Prefill service. For the event loop only, except `deliver` and `engine_died`.

    For every OpenCall it posts one CloseCall, unless the engine ended the call (CallDone) and every frame was written.
    When gRPC has taken KV or log-probabilities, it posts BytesSent, which gives their bytes back to the send budget.
    CloseCall gives back the bytes that gRPC has not taken.
    """

    def __init__(
        self,
        *,
        engine: EnginePort[Command],
        fingerprint: Fingerprint,
        model_limits: ReplicaLimits,
        instance_id: str,
        limits: HandoffLimits,
        new_matcher: NewMatcher,
        tracer: Tracer = NO_TRACER,
        timeline: Timeline | None = None,
        lent: LentMemory | None = None,
    ) -> None:
        """Creates the servicer. `lent` is the memory of the KV pool if receivers can read it."""
        timeline = timeline or Timeline()
        self._edge_track = timeline.track(EDGE)
        self._frame_track = timeline.track(HANDOFF)
        self._call_track = timeline.track(REQUESTS)
        self._engine = engine
        self._new_matcher = new_matcher
        self._fingerprint = fingerprint
        self._codec = FrameCodec(fingerprint=fingerprint, vocab_size=model_limits.vocab_size)
        self._model_limits = model_limits
        self._instance_id = instance_id
        self._limits = limits
        self._tracer = tracer
        self._lent = lent or LentMemory(None)
        self._loop = asyncio.get_running_loop()
        self._calls: dict[str, HandoffCall] = {}
        self._call_numbers = count()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes the engine's events, in order. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def engine_died(self, error: BaseException) -> None:
        """Fails every call, because the engine has died. Any thread may call it."""
        self._loop.call_soon_threadsafe(self.fail_calls, EngineLost(f"the prefill engine died: {error!r}"))

    def fail_calls(self, error: BatonError) -> None:
        """Ends every call with `error`. For the event loop only."""
        for call in self._calls.values():
            call.fail(error)

    # ---- rpcs -------------------------------------------------------------------------------------------------------

    async def handoff(self, _requests: AsyncIterator[bytes], context: HandoffContext) -> None:
        try:
            await self._serve(context)
        except ProtocolError as error:
            await self._abort(context, InvalidRequest(error.field, error.message))
        except BatonError as error:
            await self._abort(context, error)

    async def get_fingerprint(
        self, _request: prefill_pb2.GetFingerprintRequest, _context: object
    ) -> prefill_pb2.GetFingerprintResponse:
        answer = prefill_pb2.GetFingerprintResponse(
            fingerprint=encode_fingerprint(self._fingerprint), instance_id=self._instance_id
        )
        self._lent.offer(answer)
        return answer

    async def get_load(
        self, _request: prefill_pb2.GetPrefillLoadRequest, _context: object
    ) -> prefill_pb2.GetPrefillLoadResponse:
        load = self._engine.load
        return prefill_pb2.GetPrefillLoadResponse(
            instance_id=self._instance_id,
            rows=_pool_load(load.rows),
            slots=_pool_load(load.slots),
            num_queued=load.num_queued,
            num_computing=load.num_running,
            num_steps=load.num_steps,
            unsent_bytes=load.unsent_bytes,
            max_context_tokens=self._model_limits.max_context_tokens,
            num_uncomputed_tokens=load.num_uncomputed_tokens,
            max_cached_tokens=self._model_limits.max_cached_tokens,
            num_evicted_tokens=load.prefixes.num_evicted,
            num_computed_tokens=load.num_computed_tokens,
        )

    # ---- one call ---------------------------------------------------------------------------------------------------

    async def _serve(self, context: HandoffContext) -> None:
        # Not refused earlier: a client that still writes may see INTERNAL instead (grpc/grpc#36066).
        batch = await self._first_command(context)
        with self._edge_track.span("check_rows", rows=len(batch.rows)):
            rows = self._checked_rows(batch)
        numbering = RowNumbering(rows)
        call = HandoffCall(f"{self._instance_id}/{next(self._call_numbers)}", numbering, RowTraces(self._tracer))
        if not numbering.accepted:
            await self._write_opening(context, call)
            return
        self._calls[call.call_id] = call
        self._require_engine_of(call)
        traced = call.traces.begin((numbering.call_row(row), each) for row, each in enumerate(numbering.accepted))
        self._engine.post(
            OpenCall(
                call.call_id,
                numbering.accepted,
                frozenset(numbering.for_engine(sorted(traced))),
                shares_memory=self._lent.is_read_with(batch.pool_secret),
            )
        )
        beside = [
            asyncio.create_task(self._follow_commands(context, call)),
            *(
                asyncio.create_task(self._make_matcher(call, index, row))
                for index, row in enumerate(numbering.accepted)
                if row.sampling.is_constrained
            ),
        ]
        is_complete = False
        try:
            await self._write_opening(context, call)
            while (frame := await self._next_frame(call)) is not None:
                begun_s = call.traces.now_s()
                await self._write(context, call, frame)
                call.traces.on_frame(frame, begun_s)
                if num_bytes := unsent_bytes(frame):
                    self._engine.post(BytesSent(call.call_id, num_bytes))
            is_complete = True
        finally:
            for task in beside:
                task.cancel()
            call.traces.close()
            del self._calls[call.call_id]
            if not is_complete:
                self._engine.post(CloseCall(call.call_id))

    def _require_engine_of(self, call: HandoffCall) -> None:
        """Raises EngineLost and forgets the call, if the engine is dead.

        Call it once the call is registered: `engine_died` fails only the calls that were registered before it.
        """
        if not self._engine.is_alive:
            del self._calls[call.call_id]
            raise EngineLost("the prefill engine is not running")

    async def _first_command(self, context: HandoffContext) -> PrefillBatch:
        timeout_s = self._limits.first_command_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                data = await whole_read(context.read())
        except TimeoutError:
            raise InvalidRequest("prefill_batch", f"did not arrive within {timeout_s} s") from None
        require(isinstance(data, bytes), "prefill_batch", "is absent: the stream ended before it")
        command = decode_command(data, max_rows=self._limits.max_rows)
        if not isinstance(command, PrefillBatch):
            raise ProtocolError("command", "is not a PrefillBatch, the first command of a call")
        return command

    def _checked_rows(self, batch: PrefillBatch) -> list[HandoffRow | RowFailed]:
        difference = first_difference(batch.fingerprint, self._fingerprint)
        if difference is not None:
            raise FingerprintMismatch(*difference)
        group_names = [group.name for group in self._fingerprint.layer_groups]
        return [
            check_row(index, row, self._model_limits, group_names=group_names) if isinstance(row, HandoffRow) else row
            for index, row in enumerate(batch.rows)
        ]

    async def _make_matcher(self, call: HandoffCall, index: int, row: HandoffRow) -> None:
        """Makes the matcher of a constrained row, which has number `index` in the engine, and posts it to the engine.

        A row whose grammar is refused, or whose matcher comes too late or cannot be made, fails alone; so does one
        whose output so far breaks its rules.
        """
        command: Command
        try:
            async with asyncio.timeout(self._limits.matcher_timeout_s):
                command = GiveMatcher(call.call_id, index, await self._matcher(row))
        except InvalidRequest as error:
            command = FailRow(call.call_id, unmatched_row(index, error))
        except Overloaded as error:
            command = FailRow(call.call_id, no_room_for_row(index, str(error)))
        except TimeoutError:
            message = f"its matcher was not made within {self._limits.matcher_timeout_s} s"
            command = FailRow(call.call_id, no_room_for_row(index, message))
        except Exception as error:  # it is this row's alone, as where no thread can be started
            _log.exception("matcher_failed", request_id=row.request_id)
            command = FailRow(call.call_id, uncomputed_row(index, f"making its matcher failed: {error!r}"))
        self._engine.post(command)

    async def _matcher(self, row: HandoffRow) -> Matcher:
        output_ids, sampling = row.token_ids[row.prompt_len :], row.sampling
        matcher: Matcher | None = None
        if sampling.constrains_text:
            matcher = await self._new_matcher(sampling.grammar, output_ids, sampling.reasoning, client=row.client)
        if (rules := sampling.token_rules) is not None:
            vocab_size = self._model_limits.vocab_size
            matcher = await asyncio.to_thread(TokenRulesMatcher, matcher, rules, output_ids, vocab_size=vocab_size)
        assert matcher is not None
        return matcher

    async def _follow_commands(self, context: HandoffContext, call: HandoffCall) -> None:
        """Forwards cancellations and returned segments until the receiver closes its side. An invalid command fails the
        call.
        """
        try:
            while isinstance(data := await whole_read(context.read()), bytes):
                command = decode_command(data, max_rows=self._limits.max_rows)
                if isinstance(command, PrefillBatch):
                    raise ProtocolError("prefill_batch", "is not the first command")
                if isinstance(command, ReleaseSegments):
                    call.release(command.numbers)
                    self._engine.post(SegmentsReturned(call.call_id, command.numbers))
                    continue
                num_rows = call.numbering.num_rows
                in_range = all(row < num_rows for row in command.rows)
                require(in_range, "cancel_rows.rows", f"names a row that is not one of the call's {num_rows}")
                self._give_back(call, call.cancel(command.rows))
                if rows := call.numbering.for_engine(command.rows):
                    self._engine.post(CancelCallRows(call.call_id, rows))
        except (ProtocolError, FingerprintMismatch) as error:
            call.fail(error)
        except Exception as error:  # a broken stream ends the call anyway; other errors end it here
            call.fail(EngineFault(f"reading the call's commands failed: {error!r}"))

    def _give_back(self, call: HandoffCall, dropped: Sequence[Frame]) -> None:
        if num_bytes := sum(map(unsent_bytes, dropped)):
            self._engine.post(BytesSent(call.call_id, num_bytes))
        segments = [frame for frame in dropped if isinstance(frame, KvSegment)]
        if numbers := tuple(segment.shared.ticket.number for segment in segments if segment.shared is not None):
            self._engine.post(SegmentsReturned(call.call_id, numbers))

    async def _next_frame(self, call: HandoffCall) -> Frame | None:
        timeout_s = self._limits.stall_timeout_s
        try:
            return await call.next_frame(timeout_s)
        except TimeoutError:
            raise PrefillUnavailable(f"the receiver gave no segment back for {timeout_s} s") from None

    async def _write_opening(self, context: HandoffContext, call: HandoffCall) -> None:
        await self._write(context, call, Accepted(self._instance_id))
        for failed in call.numbering.refused:
            await self._write(context, call, failed)

    async def _write(self, context: HandoffContext, call: HandoffCall, frame: Frame) -> None:
        """Writes a frame and returns when gRPC has taken it, which the receiver's flow control may delay.

        Raises PrefillUnavailable after `stall_timeout_s`.
        """
        data = self._encode(call, frame)
        timeout_s = self._limits.stall_timeout_s
        try:
            with self._call_track.task("write", call.call_id, bytes=len(data)):
                async with asyncio.timeout(timeout_s):
                    await context.write(data)
        except TimeoutError:
            raise PrefillUnavailable(f"the receiver took nothing for {timeout_s} s") from None

    def _encode(self, call: HandoffCall, frame: Frame) -> bytes:
        start_ns = time.monotonic_ns()
        data = self._codec.encode(frame)
        if self._frame_track.ring is not None:
            figures = frame_figures(frame, call.numbering.row)
            self._frame_track.ended(f"send {type(frame).__name__}", start_ns, call.call_id, bytes=len(data), **figures)
        return data

    async def _abort(self, context: HandoffContext, error: BatonError) -> None:
        _log.warning("a handoff call failed: %s", error)
        await abort_with(context, error)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            call = self._calls.get(event.call_id)
            if call is not None:  # otherwise it was closed, and CloseCall is on its way to the engine
                self._give_back(call, call.take(event))


def _pool_load(counts: PoolCounts) -> types_pb2.PoolLoad:
    return types_pb2.PoolLoad(**dataclasses.asdict(counts))
