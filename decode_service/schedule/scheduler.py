"""The decode engine. Each step is one overlap iteration.

step:    commands ─▶ ready rows ─▶ handoffs ─▶ prompts ─▶ merge, retract ─▶ launch N+1 ─▶ events ─▶ finish N
forward: ......................... forward N ...................................................... ][ forward N+1 ...

If grammars constrain rows of N+1, their tokens are drawn only after "finish N", when the masks are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.device.stream import NOT_YET, PieceFailed, Scope, WakeUp, naming_a_lost_device, wait_in_order
from common.device.stream import Event as StreamEvent
from common.device.upload import device_copy
from common.drain import Drain
from common.engine import EngineParts, Outbox, Place
from common.errors import BatonError, Draining, EngineFault, InvalidRequest
from common.kv.pool import CopyKv, KvPool
from common.kv.pool_size import PoolSize
from common.kv.prefix_tree import PrefixTree
from common.sampling.state import RowStart
from common.telemetry.stats import EngineLoad, OnStep, StepStats
from common.telemetry.timeline import ENGINE, recorded
from decode_service.forward.drafter import Drafter
from decode_service.forward.forward_side import ForwardSide
from decode_service.messages import (
    Abort,
    CallEnded,
    Command,
    Event,
    Failed,
    FinishAtStop,
    FinishReason,
    FrameArrived,
    Phase,
    ReplicasChanged,
    Submit,
)
from decode_service.schedule.config import DecodeConfig
from decode_service.schedule.dispatcher import PrefillDispatcher
from decode_service.schedule.grammars import forced_tokens, masks_of
from decode_service.schedule.landing import LandingZone
from decode_service.schedule.life import RULES, Lives
from decode_service.schedule.local_prefill import LocalPrefill
from decode_service.schedule.replica_set import ReplicaSet
from decode_service.schedule.request import Request
from decode_service.schedule.results import (
    AheadMatcher,
    ResultTaker,
    first_token_payload,
    first_tokens,
)
from decode_service.schedule.retraction import Retraction
from decode_service.schedule.running_rows import RunningRows
from decode_service.schedule.schedule_batch import ReadyRows, ScheduleBatch
from decode_service.schedule.step import LaunchedStep, SealedStep
from decode_service.schedule.waiting_queue import Shares, WaitingQueue

_STEP_TIMEOUT_S = 300.0


class DecodeEngine:
    """Owns every request, row and slot of the decode service. Only its own thread may call it.

    `drafter` proposes the drafts; None is the model's draft head, if `parts` has one. Together, at most `size.max_rows`
    rows are reserved, receive KV or run. Figures and time-outs use `clock` (monotonic seconds). Events leave by
    `outbox` when the engine is about to wait or ends.
    """

    def __init__(
        self,
        config: DecodeConfig,
        size: PoolSize,
        parts: EngineParts,
        *,
        outbox: Outbox[Event],
        copy_kv: CopyKv = Tensor.copy_,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_step: OnStep = lambda stats: None,
    ) -> None:
        assert config.least_chunk_tokens >= parts.num_draft_layers, "the options are those of another draft head"
        device = parts.device
        self._config = config
        self._max_context_tokens = size.max_context_tokens
        self._device = device
        self._wake_up = WakeUp(device)
        self._clock = clock
        self._on_step = on_step
        self.track = parts.timeline.track(ENGINE)
        self._outbox = outbox
        self._vocab_size = parts.model.vocab_size
        self._depth = config.new_depth(config.spec_info)
        self.pool = KvPool(
            groups=parts.layer_groups,
            windows=parts.model.windows,
            max_rows=size.max_rows,
            max_kv_tokens=size.max_kv_tokens,
            max_window_tokens=size.max_window_tokens,
            num_in_flight=config.tokens_in_flight,
            max_tokens_per_row=size.max_context_tokens + config.tokens_ahead,
            tensors=parts.model.pool_tensors,
            prefixes=PrefixTree(parts.num_draft_layers) if config.prefix_cache else None,
        )
        forward_side = ForwardSide.open(
            parts,
            spec_infos=self._depth.spec_infos,
            max_unread=config.max_unread(size.max_rows),
            pool=self.pool,
            drafter=drafter,
            replays_forwards=config.replays_forwards,
            poisons_consumed_rows=config.debug_checks,
            wait_timeout_s=_STEP_TIMEOUT_S,
        )
        self.recorded = forward_side.recorded
        self.future_map = forward_side.future_map
        self._forward_stream = forward_side.stream
        self._worker = forward_side.worker
        self._sampling_state = forward_side.sampling_state
        self._landing = LandingZone(
            device=device,
            pool=self.pool,
            vocab_size=parts.model.vocab_size,
            copy_kv=copy_kv,
            on_event=self._wake_up.told,
        )
        self._rows = RunningRows(
            max_rows=size.max_rows,
            max_context_tokens=size.max_context_tokens,
            max_depth=config.max_depth,
        )
        shares = Shares(config.client_weights, max_rows=size.max_rows, num_slots=self.pool.num_slots)
        waiting = WaitingQueue(ageing=config.ageing, best_priority=config.best_priority, shares=shares)
        self._local = LocalPrefill(
            parts,
            draft_topk=config.spec_info.topk,
            pool=self.pool,
            sampling_state=forward_side.sampling_state,
            stream=forward_side.stream,
            chunk_tokens=config.max_chunk_tokens,
        )
        self.lives = Lives(
            pool=self.pool,
            waiting=waiting,
            landing=self._landing,
            local=self._local,
            rows=self._rows,
            ageing=config.ageing,
            clock=clock,
            post=self._outbox.post,
        )
        self._replicas = ReplicaSet(
            now_s=clock(), lookahead=parts.num_draft_layers, routes_by_prefix=config.prefix_routing
        )
        self._dispatcher = PrefillDispatcher(
            pool=self.pool,
            waiting=waiting,
            landing=self._landing,
            lives=self.lives,
            local=self._local,
            replicas=self._replicas,
            config=config,
            clock=clock,
            post=self._outbox.post,
            fail=self._fail,
        )
        self._retraction = Retraction(
            pool=self.pool,
            rows=self._rows,
            lives=self.lives,
            shares=shares,
            level=waiting.level,
            reclaim_after_s=config.reclaim_after_s,
            clock=clock,
        )
        self._taker = ResultTaker(
            rows=self._rows,
            lives=self.lives,
            clock=clock,
            post=self._outbox.post,
            lose=self._dispatcher.handle_lost,
        )
        self._running = ScheduleBatch.empty(device.torch_device)
        self._starts: dict[Request, RowStart] = {}  # of requests that no step has carried in their row yet
        self._in_flight: SealedStep | None = None
        self._ahead: dict[Request, AheadMatcher] = {}  # the matchers that have accepted tokens of the step in flight
        self._is_draining = False
        self._is_stalled = False  # too few slots are free, and those that become free are still in use
        self._has_freed = False  # whether the last step's end freed rows; then requests short of slots are tried
        self._num_steps = 0

    # ---- the loop -----------------------------------------------------------------------------------------------

    def step(self, commands: Sequence[Command]) -> None:
        """Runs one overlap iteration: launches the next batch, then finishes the previous one.

        `commands` are applied first.
        """
        with naming_a_lost_device(self._device):
            try:
                for command in commands:
                    self._apply(command)
                with self.track.span("collect"):
                    ready = self._dispatcher.collect()
                self.pool.reclaim()
                self._dispatcher.hand_off()
                self._retraction.make_way(self._running, self._dispatcher.short)
                has_chunks = self._local.launch()
                batch = self._next_batch(ready)
                launched = self._launch(batch) if batch is not None else None
                sealed = None
                if launched is not None and (launched.output.draw is None or self._in_flight is None):
                    sealed = self._seal(launched)
                if launched is not None or self._in_flight is not None:
                    self._num_steps += 1
                ends = [step.end for step in (self._in_flight, sealed) if step is not None]
                self._use_wait(ends[0] if ends else None)
                # Chunks that run before the next step would hold up this step's results.
                waits_for_next = self._device.runs_pieces_beside and not has_chunks
                self._finish(self._in_flight, followed_by=launched if waits_for_next else None)
                if launched is not None and sealed is None:
                    sealed = self._seal(launched)
                self._in_flight = sealed
                if sealed is None:
                    self._local.await_chunks(_STEP_TIMEOUT_S)
                if not self._config.overlap:
                    self._finish(self._in_flight)
                    self._in_flight = None
                self._has_freed = self.pool.reclaim() > 0
                if self._config.debug_checks:
                    self.pool.check_conservation()
                    self._running.check_lengths()
            except BaseException:
                self._outbox.hand_over()  # no later step would: final events must not be lost with the engine
                raise
        if self._in_flight is None:  # else the next step comes at once, and hands them over
            self._outbox.hand_over()

    def _use_wait(self, until: StreamEvent | None) -> None:
        """Does work that must not delay a launch, before the engine waits for `until`.

        It hands events over, because the edge's thread then competes for the interpreter. It starts the copy of one
        waiting segment, and of more until the event `until` is done; with None, of only one.
        """
        self._outbox.hand_over()
        if self._landing.has_waiting:
            with self.track.span("start_copies"):
                self._landing.start_copies(until)

    def idle_timeout_s(self) -> float:
        has_queued = self._dispatcher.num_waiting > 0
        is_busy = self._in_flight is not None or self._local.is_busy
        is_busy = is_busy or self._landing.has_waiting or self._landing.has_freed
        wants_step = not is_busy and not self._running.is_empty
        wants_step = wants_step and bool(self._rows.want_launch(self._running.rows).any())
        is_stalled = wants_step and self._is_stalled and not self._has_freed
        return self._wake_up.idle_wait_s(
            has_work=is_busy or (wants_step and not is_stalled) or (self._has_freed and has_queued),
            awaits_device=is_stalled or self._dispatcher.is_landing or self.pool.has_quarantined,
            has_queued=has_queued,
        )

    def be_woken_by(self, wake: Callable[[], None]) -> None:
        self._wake_up.wake = wake

    def load(self) -> EngineLoad:
        return EngineLoad(
            rows=self.pool.row_counts(),
            slots=self.pool.slot_counts(),
            window_slots=self.pool.window_counts(),
            num_queued=self._dispatcher.num_waiting,
            num_running=self._running.batch_size,
            num_steps=self._num_steps,
            prefixes=self.pool.prefix_counts,
            num_row_retries=self._dispatcher.num_row_retries,
            num_retractions=self._retraction.num_retractions,
            num_expected_cached=self._dispatcher.num_expected_cached,
            num_known_tokens=self._replicas.num_known_tokens,
            held_bytes=self._dispatcher.held_bytes,
            is_degraded=self._dispatcher.is_degraded,
        )

    def close(self) -> None:
        """Delivers the remaining events, finishes the step in flight and stops the streams. Live requests get no final
        event.
        """
        with ExitStack() as streams:  # also if the step does not end
            streams.callback(self._forward_stream.close, _STEP_TIMEOUT_S)
            streams.callback(self._landing.close, _STEP_TIMEOUT_S)
            self._outbox.hand_over()
            self._finish(self._in_flight)
            self._in_flight = None

    # ---- commands -----------------------------------------------------------------------------------------------

    @recorded("apply")
    def _apply(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Abort(request_id):
                if (req := self.lives.requests.get(request_id)) is not None:
                    self.lives.enter(req, Phase.ENDED)
            case FinishAtStop():
                self._finish_at_stop(command)
            case FrameArrived(call_id, frame):
                self._dispatcher.take_frame(call_id, frame)
            case CallEnded(call_id, error):
                self._dispatcher.end_call(call_id, error)
            case ReplicasChanged():
                self._dispatcher.update_replicas(command)
            case Drain():
                self._is_draining = True

    def _submit(self, submit: Submit) -> None:
        total = submit.prompt_len + submit.sampling.max_tokens
        if self._is_draining:
            self._outbox.post(Failed(submit.request_id, Draining("the service is stopping")))
            return
        if total > self._max_context_tokens:
            message = f"prompt + max_tokens is {total} tokens, the limit is {self._max_context_tokens}"
            self._outbox.post(Failed(submit.request_id, InvalidRequest("max_tokens", message)))
            return
        self.lives.admit(submit)

    def _finish_at_stop(self, command: FinishAtStop) -> None:
        req = self.lives.requests.get(command.request_id)
        if req is None:
            return
        self.lives.enter(req, Phase.DELIVERY)
        self._outbox.post(
            req.finished(FinishReason.STOP_STRING, command.num_output_tokens, stop_string=command.stop_string)
        )

    # ---- scheduling ---------------------------------------------------------------------------------------------

    @recorded("next_batch")
    def _next_batch(self, ready: Sequence[ReadyRows]) -> ScheduleBatch | None:
        """Merges the `ready` rows and returns the prepared batch to launch.

        Returns None if no request runs, or if the slots that the batch needs become free only later.
        """
        running = self._running
        if running.is_empty and not ready:  # while prompts land, the engine steps for each of their segments
            self._is_stalled = False
            return None
        running.filter_batch(self._rows.want_launch(running.rows).nonzero()[0])
        if (publish_ready := self.future_map.lengths_to_come()) is not None:
            self._use_wait(publish_ready)
        with self.track.span("resolve_seq_lens"):
            published = self.future_map.resolve_seq_lens(running.req_pool_indices)
            if published is not None:
                running.set_seq_lens(published)
        if published is not None:
            self._fail_wrong_lengths(running)
            lengths = running.seq_lens_cpu.numpy()
            running.filter_batch(self._rows.have_room_after(running.rows, lengths).nonzero()[0])
        if ready:
            self._merge_prebuilt(ready)
        running.forced = self._forced_tokens(running, has_published=published is not None)
        if self._config.max_depth:
            running.choose_depth(self._depth, self.pool, self._worker.drafter.unread(running.rows))
        self._is_stalled = not (running.is_empty or self._retraction.prepare(running))
        return None if running.is_empty or self._is_stalled else running

    def _forced_tokens(self, running: ScheduleBatch, *, has_published: bool) -> dict[Request, Sequence[int]]:
        """Returns, for each request of the batch, the tokens that its grammar forces next, at most as many as a step
        drafts.

        `has_published` says whether the step in flight has published its lengths, so that its tokens are known.
        """
        if not self._config.max_depth or not running.sampling.constrained.size:
            return {}
        step = self._in_flight
        with self.track.span("forced_tokens"):
            if has_published and step is not None and step.batch.sampling.constrained.size:
                self._ahead = self._taker.look_ahead(step)
            num_in_flight = self._rows.num_in_flight
            return forced_tokens(running, num_in_flight, step, self._ahead, max_forced=self._config.max_depth)

    def _fail_wrong_lengths(self, running: ScheduleBatch) -> None:
        """Fails rows whose published length is impossible. If launched, they would read and write outside their slots.

        Such a length means that the device or a kernel is at fault, so the rows' KV is forgotten. This is checked even
        without `debug_checks`.
        """
        lengths = running.seq_lens_cpu.numpy()
        max_accept_len = 0 if self._in_flight is None else self._in_flight.batch.max_accept_len
        can_be = self._rows.can_have(running.rows, lengths, max_accept_len=max_accept_len)
        if can_be.all():
            return
        for i in np.flatnonzero(~can_be).tolist():
            self.lives.forget_kv(running.reqs[i])
            self._fail(running.reqs[i], EngineFault(f"a decode step published a length of {lengths[i]}"))
        running.filter_batch(np.flatnonzero(can_be))

    def _merge_prebuilt(self, ready: Sequence[ReadyRows]) -> None:
        prebuilt = ScheduleBatch.prepare_for_prebuilt(ready, self._device.torch_device)
        payload = first_token_payload(ready, self.future_map.seeds, self._device.torch_device)
        self.future_map.bootstrap(prebuilt.req_pool_indices, prebuilt.seq_lens, payload)
        self._process_prebuilt(prebuilt, ready)
        prebuilt.filter_batch(self._rows.want_launch(prebuilt.rows).nonzero()[0])
        starts = [self._rows.row_start(req) for req in prebuilt.reqs]
        self._worker.drafter.begin(starts)
        self._starts.update(zip(prebuilt.reqs, starts, strict=True))
        self._running.merge_batch(prebuilt)

    def _process_prebuilt(self, prebuilt: ScheduleBatch, ready: Sequence[ReadyRows]) -> None:
        """Delivers the first tokens. A request that ends with its first token never enters the batch."""
        self._taker.take_first_tokens(prebuilt, first_tokens(ready))
        for req in prebuilt.reqs:
            if not req.has_ended:
                self.lives.enter(req, Phase.DECODE if req.has_decoded else Phase.FIRST_DECODE)

    # ---- launching and finishing --------------------------------------------------------------------------------

    @recorded("launch")
    def _launch(self, batch: ScheduleBatch) -> LaunchedStep:
        """Enqueues the step's forward and, unless grammars constrain its draws, what comes after it."""
        scope = Scope(f"step {self._num_steps}")
        forward_batch = batch.snapshot()
        self._forward_stream.wait(self._device.schedule_stream.record())
        if starts := [start for req, start in self._starts.items() if RULES[req.phase].place is Place.ROWS]:
            self._forward_stream.enqueue(partial(self._sampling_state.reset, starts), scope)
        self._starts.clear()
        on_publish = partial(self.future_map.publish, forward_batch.req_pool_indices, scope=scope)
        if not forward_batch.has_drafts:
            self.future_map.publish_nothing()
        output = self._worker.forward(forward_batch, future_map=self.future_map, scope=scope, on_publish=on_publish)
        self._depth.launched(forward_batch.spec_info)
        if output.draw is not None:
            self.pool.use_until(batch.rows, NOT_YET, self._forward_stream)  # until `_seal` knows the end
        self._rows.num_in_flight[batch.rows] += 1
        return LaunchedStep(
            scope=scope,
            batch=forward_batch,
            reqs=tuple(batch.reqs),
            request_ids=batch.request_ids,
            serials=self._rows.serials[batch.rows],
            output=output,
            launched_s=self._clock(),
        )

    @recorded("seal")
    def _seal(self, launched: LaunchedStep) -> SealedStep:
        """Enqueues the rest of a step: the draws under grammars, the stash, and the copy of the results.

        The masks of the draws follow from the tokens of the step before, so that step must be finished. The rows of
        requests that ended with that step are not reclaimed before this call.
        """
        output, mask_s = launched.output, 0.0
        if output.draw is not None:
            mask_s = self._set_masks(launched)
            output.draw()
        self.future_map.stash(launched.batch.req_pool_indices, output.payload, launched.scope)
        previous_end = None if self._in_flight is None else self._in_flight.end
        sealed = launched.seal(
            device=self._device, stream=self._forward_stream, previous_end=previous_end, mask_s=mask_s
        )
        self.pool.use_until(sealed.rows, sealed.end, self._forward_stream)
        return sealed

    def _set_masks(self, launched: LaunchedStep) -> float:
        """Computes the masks of the step's draws, unless the step failed before its inputs were ready. Returns the
        seconds that this took.
        """
        prepared, masked = launched.output.prepared, launched.output.masked
        assert prepared is not None and masked is not None
        wait_in_order(prepared, _STEP_TIMEOUT_S)
        if prepared.error is not None:
            return 0.0
        start_s = self._clock()
        with self.track.span("masks", rows=int(launched.batch.sampling.constrained.size)):
            masks, failed = masks_of(launched, self._taker.still_held(launched), vocab_size=self._vocab_size)
        mask_s = self._clock() - start_s
        for req in failed:
            assert req.matcher is not None
            self._fail(req, req.sampling.constraint_error(req.matcher.failure))
        masked.masks.set(device_copy(torch.from_numpy(masks), self._device.torch_device))
        self._forward_stream.wait(self._device.schedule_stream.record())
        return mask_s

    @recorded("finish")
    def _finish(self, step: SealedStep | None, *, followed_by: LaunchedStep | None = None) -> None:
        """Waits for the step's end and hands its results to the requests that still hold the rows they ran in.

        If the step failed, these requests fail. Does nothing if `step` is None.
        """
        ahead, self._ahead = self._ahead, {}
        if step is None:
            return
        try:
            with self.track.span("wait"):
                ended = step.await_end(_STEP_TIMEOUT_S, followed_by=followed_by)
        except PieceFailed as failure:
            if failure.is_of_device:
                raise  # no later step can succeed: the engine and all its requests end
            for i in np.flatnonzero(self._taker.still_held(step)).tolist():
                self._fail(step.reqs[i], EngineFault(f"a decode step failed: {failure.__cause__}"))
            return
        if self.pool.windows:
            is_held = self._taker.still_held(ended)
            num_computed = ended.batch.seq_lens_cpu - ended.batch.num_tokens + 1  # at least: without accepted drafts
            self.pool.leave_behind(ended.rows[is_held], num_computed[is_held], at_least=self._config.left_together)
        self._taker.take(ended, ahead)
        self._retraction.requeue_left()
        if (speculation := ended.speculation) is not None:
            self._depth.observe(ended.batch.spec_info, unread=ended.output.reading.unread, stats=speculation)
        num_rows, step_s = len(ended.reqs), self._clock() - ended.launched_s
        self._on_step(StepStats(num_rows, num_rows * ended.batch.num_tokens, step_s, speculation, ended.masks))

    def _fail(self, req: Request, error: BatonError) -> None:
        if not req.has_ended:
            self._outbox.post(Failed(req.request_id, error))
            self.lives.enter(req, Phase.ENDED)
