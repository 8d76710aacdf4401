"""Both engines in one process, stepped by the test: the reference for "disaggregated equals undisaggregated".

    submit ─▶ DecodeEngine ⇄ InProcessTransport ⇄ PrefillEngine

Nothing here runs by itself: `step` gives each engine one step with what was posted to it since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.device.stream import Device
from common.errors import BatonError
from common.model.sampling_params import ResolvedSampling, TokenLogprobs
from common.model.target import TargetModel
from common.telemetry.step_stats import StepStats
from common.wire.handoff import HandoffRow
from decode_service import messages as decode
from decode_service.handoff.in_process import InProcessTransport
from decode_service.scheduler import DecodeEngine
from prefill_service import messages as prefill
from prefill_service.scheduler import PrefillEngine

REPLICA = "in-process"


@dataclass
class Outcome:
    """What one request's stream has carried so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: decode.Finished | None = None
    error: BatonError | None = None

    @property
    def has_ended(self) -> bool:
        return self.finished is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Sizes of a test pair; small, so that limits are met."""

    prefill_rows: int = 16
    prefill_tokens: int = 2048
    decode_rows: int = 16
    decode_tokens: int = 2048
    context_tokens: int = 512
    chunk_tokens: int = 64
    max_batch_tokens: int = 256
    overlap: bool = True
    send_budget_bytes: int = 1 << 20
    receive_budget_bytes: int = 1 << 20
    max_segment_bytes: int = 1 << 16
    max_handoff_attempts: int = 3


class _PrefillInbox:
    """Turns what the transport tells the prefill engine into commands for its next step."""

    def __init__(self, inbox: list[prefill.Command]) -> None:
        self._inbox = inbox

    def open_call(self, call_id: str, rows: tuple[HandoffRow, ...]) -> None:
        self._inbox.append(prefill.OpenCall(call_id, rows))

    def cancel(self, call_id: str, rows: tuple[int, ...]) -> None:
        self._inbox.append(prefill.CancelCallRows(call_id, rows))

    def close(self, call_id: str) -> None:
        self._inbox.append(prefill.CloseCall(call_id))

    def sent(self, call_id: str, num_bytes: int) -> None:
        self._inbox.append(prefill.SegmentBytesSent(call_id, num_bytes))


class InProcessPair:
    def __init__(
        self, model: TargetModel, *, prefill_device: Device, decode_device: Device, options: PairOptions | None = None
    ) -> None:
        options = options or PairOptions()
        self.prefill_steps: list[StepStats] = []
        self.decode_steps: list[StepStats] = []
        self.prefill = PrefillEngine(
            model=model,
            device=prefill_device,
            max_rows=options.prefill_rows,
            max_kv_tokens=options.prefill_tokens,
            max_context_tokens=options.context_tokens,
            chunk_tokens=options.chunk_tokens,
            max_batch_tokens=options.max_batch_tokens,
            send_budget_bytes=options.send_budget_bytes,
            max_segment_bytes=options.max_segment_bytes,
            overlap=options.overlap,
            on_step=self.prefill_steps.append,
            debug_checks=True,
        )
        self.decode = DecodeEngine(
            model=model,
            device=decode_device,
            max_rows=options.decode_rows,
            max_kv_tokens=options.decode_tokens,
            max_context_tokens=options.context_tokens,
            overlap=options.overlap,
            max_handoff_attempts=options.max_handoff_attempts,
            on_step=self.decode_steps.append,
            debug_checks=True,
        )
        self._to_prefill: list[prefill.Command] = []
        self._to_decode: list[decode.Command] = []
        self.transport = InProcessTransport(
            post=self._to_decode.append,
            prefill=_PrefillInbox(self._to_prefill),
            address=REPLICA,
            receive_budget_bytes=options.receive_budget_bytes,
        )
        asyncio.run(self.transport.open())
        self.outcomes: dict[str, Outcome] = {}

    def submit(
        self, request_id: str, token_ids: Sequence[int], sampling: ResolvedSampling, *, prompt_len: int | None = None
    ) -> Outcome:
        """`token_ids` past `prompt_len` are output of an earlier stream."""
        self._to_decode.append(decode.Submit(request_id, tuple(token_ids), prompt_len or len(token_ids), sampling))
        self.outcomes[request_id] = Outcome()
        return self.outcomes[request_id]

    def post(self, command: decode.Command) -> None:
        self._to_decode.append(command)

    def step(self) -> None:
        """One step of each engine; what one says to the other arrives at its next step."""
        self.step_prefill()
        self.step_decode()

    def step_prefill(self) -> None:
        commands, self._to_prefill[:] = list(self._to_prefill), []
        for event in self.prefill.step(commands):
            if isinstance(event, prefill.FrameReady):
                self.transport.frame_ready(event.call_id, event.frame)
            else:
                self.transport.call_done(event.call_id)

    def step_decode(self) -> None:
        commands, self._to_decode[:] = list(self._to_decode), []
        for event in self.decode.step(commands):
            self._route(event)

    def run(self, *, bound_s: float = 60.0, until: Callable[[], bool] | None = None) -> None:
        """Step until every request has ended, or `until` holds. AssertionError when that takes longer than `bound_s`."""
        is_over = until or (lambda: all(outcome.has_ended for outcome in self.outcomes.values()))
        give_up_s = time.monotonic() + bound_s
        while not is_over():
            assert time.monotonic() < give_up_s, f"not over: {self.decode.load()}, {self.prefill.load()}"
            self.step()

    def settle(self) -> None:
        """Step until nothing is in use, then check that nothing was lost."""

        def is_empty() -> bool:
            loads = (self.decode.load(), self.prefill.load())
            return all(load.rows.free == load.rows.total and load.slots.free == load.slots.total for load in loads)

        self.run(until=is_empty)
        self.decode.pool.check_conservation()
        self.prefill.pool.check_conservation()

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()

    def _route(self, event: decode.Event) -> None:
        match event:
            case decode.StartHandoff():
                self.transport.start(event)
            case decode.CancelHandoffRows():
                self.transport.cancel_rows(event)
            case decode.BreakCall():
                self.transport.break_call(event)
            case decode.SegmentsLanded():
                self.transport.landed(event)
            case decode.Tokens(request_id, token_ids, logprobs):
                self.outcomes[request_id].token_ids.extend(token_ids)
                self.outcomes[request_id].logprobs.extend(logprobs)
            case decode.Finished():
                assert not self.outcomes[event.request_id].has_ended, "a second terminal event"
                self.outcomes[event.request_id].finished = event
            case decode.Failed():
                assert not self.outcomes[event.request_id].has_ended, "a second terminal event"
                self.outcomes[event.request_id].error = event.error
