"""The prefill engine: each forward computes chunks of many prompts, and KV is sent while later layers and chunks
compute.

step:   commands ─▶ admit ─▶ launch chunks N+1 ─▶ finish chunks N ─▶ first tokens and segments ─▶ events
stream:            [ ....... chunks N ....... ][ ...... chunks N+1 ...... ]
sending:                 [ first layers ][ later ][ first layers ]
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from common.device.stream import Event as StreamEvent
from common.device.stream import PieceFailed, WakeUp, naming_a_lost_device
from common.drain import Drain
from common.engine import EngineParts, Outbox, Place
from common.errors import RowFailure
from common.kv.pool import KvPool
from common.kv.pool_size import PoolSize
from common.kv.prefix_tree import PrefixTree
from common.kv.shared_pool import SharedPool
from common.prompts.awaited_kv import AwaitedKv, awaited_kv
from common.prompts.chunk_batch import Chunk, ChunkBatch
from common.prompts.computing import ChunksInFlight, FirstTokens, PromptChunks
from common.prompts.worker import Meanwhile
from common.sampling.state import SamplingState
from common.telemetry.stats import EngineLoad, OnStep, StepStats
from common.telemetry.timeline import ENGINE, recorded
from common.wire.handoff import NewFramedKv, RowFailed, RowLogprobs
from prefill_service.handoff.segments import SentKv, sent_bytes, sent_tokens
from prefill_service.handoff.sender import KvSender
from prefill_service.messages import (
    BytesSent,
    CallDone,
    CancelCallRows,
    ChunkComputed,
    CloseCall,
    Command,
    Event,
    FailRow,
    FrameReady,
    GiveMatcher,
    OpenCall,
    RowStarted,
    SegmentsReturned,
)
from prefill_service.prompt import Prompt, PromptLives, PromptPhase
from prefill_service.schedule.config import PrefillConfig

_STEP_TIMEOUT_S = 300.0
_RETRY_AFTER_MS = 200


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched forward of chunks. `launched_s` is when its launch ended, by the engine's clock."""

    chunks: ChunksInFlight[Prompt]
    launched_s: float


class PrefillEngine:
    """Owns every prompt, row and slot of the prefill service. Only its own thread may call it.

    `shared_pool` is memory for the pool that receivers can read. `new_framed_kv` allocates memory for copies that are
    sent; None means the device's own host buffers. `clock` gives monotonic seconds. Events leave by `outbox` at a
    step's end and during a long launch. `returned` returns the BytesSent that came since the step began, so that such a
    launch can send more.
    """

    def __init__(
        self,
        config: PrefillConfig,
        size: PoolSize,
        parts: EngineParts,
        *,
        outbox: Outbox[Event],
        returned: Callable[[], Sequence[BytesSent]] = tuple,
        shared_pool: SharedPool | None = None,
        new_framed_kv: NewFramedKv | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_step: OnStep = lambda stats: None,
    ) -> None:
        model, device = parts.model, parts.device
        self._config = config
        self._model = model
        self._device = device
        self._wake_up = WakeUp(device)
        self._clock = clock
        self._on_step = on_step
        self._outbox = outbox
        self._returned = returned
        self.track = parts.timeline.track(ENGINE)
        self._max_context_tokens = size.max_context_tokens
        if shared_pool is not None:
            model.share(torch.from_numpy(shared_pool.memory), shared_pool.file)
        self.pool = KvPool(
            groups=parts.layer_groups,
            windows=model.windows,
            max_rows=size.max_rows,
            max_kv_tokens=size.max_kv_tokens,
            max_window_tokens=size.max_window_tokens,
            num_in_flight=config.tokens_in_flight,
            max_tokens_per_row=size.max_context_tokens,
            tensors=model.pool_tensors,
            memory=shared_pool,
            prefixes=PrefixTree(parts.num_draft_layers) if config.prefix_cache else None,
        )
        sampling_state = SamplingState(
            max_rows=size.max_rows,
            vocab_size=model.vocab_size,
            torch_device=device.torch_device,
            kernels=parts.draw_kernels,
        )
        self._forward_stream = device.new_stream("forward", on_event=self._wake_up.told)
        self._chunks = PromptChunks[Prompt](
            parts,
            name="prefill step",
            pool=self.pool,
            sampling_state=sampling_state,
            stream=self._forward_stream,
            draft_topk=config.draft_topk,
            chunk_tokens=config.chunk_tokens,
            max_batch_tokens=config.max_batch_tokens,
        )
        self._chunks.worker.compile_kernels(_STEP_TIMEOUT_S)
        self._sender = KvSender(
            device=device,
            pool=self.pool,
            memory=shared_pool,
            budget_bytes=config.send_budget_bytes,
            max_segment_bytes=config.max_segment_bytes,
            new_framed_kv=new_framed_kv,
            on_event=self._wake_up.told,
        )
        self._calls: dict[str, dict[int, Prompt]] = {}
        self._lives = PromptLives(self.pool, ageing=config.ageing, ended=self._ended)
        self._in_flight: deque[_Step] = deque()
        self._failed_copies: list[SentKv] = []
        self._is_draining = False
        self._has_freed = False  # at the last step's end; then a queued prompt is tried at once
        self._lacks_room = False  # whether the last step found a queued prompt that must wait for a row or slots
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._last_end_s = 0.0  # end of the last forward

    # ---- the loop -----------------------------------------------------------------------------------------------

    def step(self, commands: Sequence[Command]) -> None:
        """Runs one iteration: launches the next chunks, then finishes the forwards that have ended.

        It never waits for a forward, so cancellations and sent segments are handled while chunks compute.
        """
        with naming_a_lost_device(self._device):
            for command in commands:
                self._apply(command)
            self.pool.reclaim()
            self._admit()
            for _ in range(self._config.max_in_flight - len(self._in_flight)):  # some may end while others are launched
                if (launched := self._launch()) is not None:
                    self._in_flight.append(launched)
            self._finish_done()
            self._send()
            self._has_freed = self.pool.reclaim() > 0
            if self._config.debug_checks:
                self.pool.check_conservation()
        self._outbox.hand_over()

    def idle_timeout_s(self) -> float:
        has_room = len(self._in_flight) < self._config.max_in_flight
        computing, queued = map(self._lives.at, (Place.COMPUTING, Place.WAITING))
        return self._wake_up.idle_wait_s(
            has_work=(has_room and any(prompt.num_left and self._may_go_on(prompt) for prompt in computing))
            or (self._has_freed and bool(queued))
            or (not self._lacks_room and any(map(_has_waited, queued))),
            awaits_device=bool(self._in_flight) or self._sender.is_busy or self.pool.has_quarantined,
            has_queued=bool(queued),
        )

    def be_woken_by(self, wake: Callable[[], None]) -> None:
        self._wake_up.wake = wake

    def load(self) -> EngineLoad:
        return EngineLoad(
            rows=self.pool.row_counts(),
            slots=self.pool.slot_counts(),
            window_slots=self.pool.window_counts(),
            num_queued=len(self._lives.at(Place.WAITING)),
            num_running=len(self._lives.at(Place.COMPUTING)),
            num_steps=self._num_steps,
            prefixes=self.pool.prefix_counts,
            unsent_bytes=self._sender.unsent_bytes,
            num_computed_tokens=self._num_computed_tokens,
            num_uncomputed_tokens=sum(
                prompt.num_uncomputed for place in (Place.WAITING, Place.COMPUTING) for prompt in self._lives.at(place)
            ),
        )

    def close(self) -> None:
        """Lets the forwards in flight end and stops the streams. Calls still open get no further frame."""
        with ExitStack() as streams:  # also if a forward does not end
            streams.callback(self._forward_stream.close, _STEP_TIMEOUT_S)
            streams.callback(self._sender.close, _STEP_TIMEOUT_S)
            while self._in_flight:
                with suppress(PieceFailed):
                    self._in_flight.popleft().chunks.end.synchronize(_STEP_TIMEOUT_S)

    # ---- commands -----------------------------------------------------------------------------------------------

    @recorded("apply")
    def _apply(self, command: Command) -> None:
        match command:
            case OpenCall():
                self._open_call(command)
            case GiveMatcher(call_id, row, matcher):
                if (prompt := self._calls.get(call_id, {}).get(row)) is not None:  # else it has ended
                    prompt.matcher = matcher
            case FailRow(call_id, failed):
                if (prompt := self._calls.get(call_id, {}).get(failed.row)) is not None:
                    self._fail(prompt, failed.reason, failed.message, retryable=failed.retryable)
                    self._end_call_if_done(call_id)
            case CancelCallRows(call_id, rows):
                prompts = self._calls.get(call_id, {})
                for index in rows:
                    if (prompt := prompts.get(index)) is None:  # it has ended; a row may be named twice
                        continue
                    if prompt.phase is PromptPhase.SENDING:  # its outcome is told already
                        self._lives.enter(prompt, PromptPhase.ENDED)
                    else:
                        self._fail(prompt, RowFailure.CANCELLED, "cancelled by the decode service", retryable=False)
                self._end_call_if_done(call_id)
            case CloseCall(call_id):
                for prompt in list(self._calls.get(call_id, {}).values()):
                    self._lives.enter(prompt, PromptPhase.ENDED)
                self._calls.pop(call_id, None)
                self._sender.forget_call(call_id)
            case BytesSent() | SegmentsReturned():
                self._sender.give_back(command)
            case Drain():
                self._is_draining = True

    def _open_call(self, command: OpenCall) -> None:
        assert command.call_id not in self._calls, "call ids are new"
        self._sender.open_call(command.call_id, shares_memory=command.shares_memory)
        prompts = self._calls[command.call_id] = {}
        calls = {command.call_id: None}  # calls that may be over
        for index, row in enumerate(command.rows):
            is_traced = index in command.traced_rows
            arrived_s = self._clock()
            due_s = self._config.ageing.due_s(row.priority, arrived_s)
            prompt = Prompt(command.call_id, index, row, arrived_s, due_s, min(row.priority, 0), is_traced)
            prompts[index] = prompt
            self._lives.admit(prompt)
            if self._is_draining:
                self._fail(prompt, RowFailure.DRAINING, "the replica is stopping", retryable=True)
            elif prompt.num_tokens > self._max_context_tokens:
                message = f"{prompt.num_tokens} tokens do not fit this replica's {self._max_context_tokens}"
                self._fail(prompt, RowFailure.CAPACITY, message, retryable=True)
            else:
                prompt.num_kept_tokens = self.pool.num_cached(prompt.usable_key)
        for prompt in self._excess():
            self._fail(prompt, RowFailure.CAPACITY, "too many rows are queued", retryable=True)
            calls[prompt.call_id] = None
        for call_id in calls:
            self._end_call_if_done(call_id)

    def _excess(self) -> Sequence[Prompt]:
        """Returns the queued prompts that are last in turn, as many as are too many."""
        if len(self._lives.at(Place.WAITING)) <= (most := self._config.max_queued_rows):
            return ()
        return list(self._lives.in_turn(Place.WAITING, self._clock()))[most:]

    # ---- computing ----------------------------------------------------------------------------------------------

    @recorded("admit")
    def _admit(self) -> None:
        now_s = self._clock()
        for prompt in list(self._lives.at(Place.WAITING)):
            if prompt.deadline_s <= now_s:
                self._fail(prompt, RowFailure.DEADLINE, "the deadline passed in the queue", retryable=False)
                self._end_call_if_done(prompt.call_id)
        self._lacks_room = False
        for prompt, tag in self._lives.in_turn(Place.WAITING, self._clock()).items():
            if prompt.sampling.is_constrained and prompt.matcher is None:
                continue
            self._lives.wait_for(prompt, self._kv_to_await(prompt), tag=tag)
            if prompt.awaited is not None:
                continue
            lease = self.pool.reserve(prompt.num_tokens, key=prompt.cache_key, uses_cached=not prompt.is_scored)
            if lease is None:
                # No prompt after it in turn gets room before it. So a prompt that waited for KV is overtaken only until
                # the KV is there.
                self._lacks_room = True
                return
            self._lives.begin(prompt, lease, tag=tag)
            prompt.started_s = self._clock()
            if prompt.is_traced:
                self._outbox.post(RowStarted(prompt.call_id, prompt.index, prompt.started_s))

    def _kv_to_await(self, prompt: Prompt) -> AwaitedKv[Prompt] | None:
        """Returns the KV that the prompt should wait for, because another one computes it now; None if it need not."""
        if prompt.awaited is not None and not prompt.awaited.is_over:
            return prompt.awaited
        if not self.pool.num_free_rows:
            return None
        return awaited_kv(self.pool, prompt.usable_key, self._lives.at(Place.COMPUTING))

    @recorded("launch")
    def _launch(self) -> _Step | None:
        computing = self._lives.in_turn(Place.COMPUTING, self._clock())
        chunks = self._chunks.cut([prompt for prompt in computing if self._may_go_on(prompt)])
        if not chunks:
            return None
        layers_per_event = self._layers_per_event(chunks)
        meanwhile = _Sending(partial(self._queue_layers, chunks), self._send_while_launching)
        in_flight = self._chunks.launch(chunks, layers_per_event=layers_per_event, meanwhile=meanwhile)
        step = _Step(in_flight, self._clock())
        for layers, written in in_flight.launched.layers_written[meanwhile.num_queued :]:
            self._queue_layers(chunks, layers, written)
        queued = {group.name for group in self._model.layer_groups} if layers_per_event else set[str]()
        self._sender.queue(chunks, in_flight.end, queued=queued)
        if meanwhile.error is not None:
            raise meanwhile.error
        return step

    def _queue_layers(self, chunks: Sequence[Chunk[Prompt]], layers: range, written: StreamEvent) -> None:
        for group, part in self._model.parts_of(layers):
            self._sender.queue_layers(chunks, group, part, written)

    def _may_go_on(self, prompt: Prompt) -> bool:
        """Returns whether the prompt's next chunk may be computed: its log-probabilities, if wanted, have room in the
        send budget.

        Its KV needs no room: it waits in the pool.
        """
        return not prompt.is_scored or self._sender.may_add_logprobs(prompt.call_id)

    def _send_while_launching(self) -> None:
        """Sends KV that is ready. It is called after each layer while a forward is being launched.

        When the driver's queue is full, launches are as slow as the device, and the engine thread uses that time.
        Failures are handled after the launch, because the forward may compute a chunk of the same prompt.
        """
        while self._in_flight and (end := self._in_flight[0].chunks.end).is_done() and end.error is None:
            self._finish(self._in_flight.popleft())
            self._num_steps += 1
        for command in self._returned():
            self._apply(command)
        self._sender.start_copies()
        self._post_segments()
        self._outbox.hand_over()

    def _layers_per_event(self, chunks: Sequence[Chunk[Prompt]]) -> int:
        """Returns after how many layers an event is recorded: as many layers of the longest chunk as fill a segment.

        Returns 0 if KV is to be sent only after the forward's end.
        """
        if not self._config.early_sending:
            return 0
        num_tokens = max(len(sent_tokens(chunk, chunk.prompt.num_held)) for chunk in chunks)
        return self._sender.layers_per_segment(self._model.layer_group, num_tokens) if num_tokens else 0

    def _finish_done(self) -> None:
        while self._in_flight and self._in_flight[0].chunks.end.is_done():
            self._finish(self._in_flight.popleft())
            self._num_steps += 1

    def _begin_s(self, step: _Step) -> float:
        """Returns when the oldest forward in flight could begin, by the engine's clock.

        That is the time of its launch, or the end of the forward before it if that came later.
        """
        return max(step.launched_s, self._last_end_s)

    @recorded("finish")
    def _finish(self, step: _Step) -> None:
        start_s = self._begin_s(step)
        self._last_end_s = now_s = self._clock()
        self._sender.forward_ended()
        ended = self._chunks.take(step.chunks, lambda prompt: prompt.phase is PromptPhase.COMPUTING)
        for chunk in ended.chunks:
            chunk.prompt.num_kept_tokens = chunk.stop
        batch = step.chunks.batch
        if step.chunks.end.error is None:
            self._num_computed_tokens += batch.num_tokens
            self._outbox.post_all(_traced_chunks(batch, start_s=start_s, end_s=now_s))
        for prompt, logprobs in ended.scored:
            self._outbox.post(FrameReady(prompt.call_id, RowLogprobs(prompt.index, logprobs)))
            self._sender.add_logprobs(prompt.call_id, logprobs.num_bytes)
        for each in ended.failed:
            self._fail(each.prompt, each.reason, each.message, retryable=each.is_retryable)
            self._end_call_if_done(each.prompt.call_id)
        if ended.first is not None:
            self._post_first_tokens(ended.first)
        if step.chunks.end.error is None:
            self._on_step(StepStats(len(batch.chunks), batch.num_tokens, self._clock() - step.launched_s))

    def _post_first_tokens(self, first: FirstTokens[Prompt]) -> None:
        by_call: dict[str, list[int]] = {}
        for place, prompt in enumerate(first.prompts):
            self._lives.enter(prompt, PromptPhase.SENDING)
            by_call.setdefault(prompt.call_id, []).append(place)
        now_s = self._clock()
        for call_id, places in by_call.items():
            own = first.at(places)
            prompts = own.prompts
            frame = own.frame(
                rows=np.array([prompt.index for prompt in prompts]),
                bytes_sent={
                    name: np.array([sent_bytes(prompt, self.pool, name) for prompt in prompts], np.int64)
                    for name in self.pool.groups
                },
                queue_s=np.array([prompt.started_s - prompt.arrived_s for prompt in prompts]),
                compute_s=np.array([now_s - prompt.started_s for prompt in prompts]),
            )
            self._outbox.post(FrameReady(call_id, frame))

    # ---- sending ------------------------------------------------------------------------------------------------

    @recorded("send")
    def _send(self) -> None:
        self._sender.start_copies()
        self._post_segments()
        failed, self._failed_copies = self._failed_copies, []
        for sent in failed:
            if sent.prompt.phase is not PromptPhase.ENDED:
                self._fail(sent.prompt, RowFailure.COMPUTE, f"copying KV failed: {sent.error}", retryable=True)
                self._end_call_if_done(sent.prompt.call_id)
        for prompt in list(self._lives.at(Place.HANDOFF)):
            if not self._sender.num_unsent(prompt):
                self._lives.enter(prompt, PromptPhase.ENDED)
                self._end_call_if_done(prompt.call_id)

    def _post_segments(self) -> None:
        for sent in self._sender.poll():
            if sent.segment is not None:
                self._outbox.post(FrameReady(sent.prompt.call_id, sent.segment))
            else:
                self._failed_copies.append(sent)

    # ---- endings ------------------------------------------------------------------------------------------------

    def _fail(self, prompt: Prompt, reason: RowFailure, message: str, *, retryable: bool) -> None:
        failed = RowFailed(prompt.index, reason, retryable, _RETRY_AFTER_MS if retryable else 0, message)
        self._outbox.post(FrameReady(prompt.call_id, failed))
        self._lives.enter(prompt, PromptPhase.ENDED)

    def _ended(self, prompt: Prompt) -> None:
        self._calls[prompt.call_id].pop(prompt.index)
        self._sender.forget(prompt)

    def _end_call_if_done(self, call_id: str) -> None:
        if call_id in self._calls and not self._calls[call_id]:
            del self._calls[call_id]
            self._sender.end_call(call_id)
            self._outbox.post(CallDone(call_id))


def _traced_chunks(batch: ChunkBatch[Prompt], *, start_s: float, end_s: float) -> list[ChunkComputed]:
    """Returns the ChunkComputed events of `batch`, whose forward has ended, for the traces of its prompts.

    A chunk has an event if its prompt is traced and its phase is not ENDED yet. `start_s` and `end_s` are the
    forward's times by the engine's clock.
    """
    return [
        ChunkComputed(
            call_id=chunk.prompt.call_id,
            row=chunk.prompt.index,
            token_start=chunk.start,
            token_stop=chunk.stop,
            num_batch_rows=len(batch.chunks),
            num_batch_tokens=batch.num_tokens,
            start_s=start_s,
            end_s=end_s,
        )
        for chunk in batch.chunks
        if chunk.prompt.is_traced and chunk.prompt.phase is not PromptPhase.ENDED
    ]


def _has_waited(prompt: Prompt) -> bool:
    """Returns whether the prompt has waited for another prompt's KV, and need not wait any more: the KV is computed or
    will not come.
    """
    return prompt.awaited is not None and prompt.awaited.is_over


class _Sending(Meanwhile):
    """Sends KV while a forward is launched, including the forward's own first layers.

    `num_queued` counts the ranges of layers queued so far. `error` is what `send` raised, or None: the engine raises it
    after the launch, because an error raised here would fail the forward.
    """

    def __init__(self, queue: Callable[[range, StreamEvent], None], send: Callable[[], None]) -> None:
        self._queue = queue
        self._send = send
        self.num_queued = 0
        self.error: BaseException | None = None

    def layers_written(self, layers: range, event: StreamEvent) -> None:
        self._queue(layers, event)
        self.num_queued += 1

    def layer_launched(self) -> None:
        if self.error is None:
            try:
                self._send()
            except Exception as error:  # the engine's own error, not this forward's failure
                self.error = error
