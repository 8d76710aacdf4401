"""Both engines in one process, stepped by the test: the reference for "disaggregated equals undisaggregated".

    submit ─▶ DecodeEngine ⇄ PrefillReplica ⇄ PrefillEngine     (one for each prefill replica)

Nothing here runs by itself: `step` gives each engine the commands posted since its last step, and steps it once.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from common.attention.choice import new_draw_kernels
from common.device.stream import Device
from common.draft.head import DraftHead
from common.errors import BatonError, EngineFault, PrefillUnavailable
from common.grammar.matcher import Matcher, TokenRulesMatcher
from common.kv.shared_pool import SharedPool
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.stats import StepStats
from common.text.tokenizer import TextTokenizer
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, unsent_bytes
from decode_service import messages as decode
from decode_service.forward.drafter import Drafter
from decode_service.handoff.receive_budget import ReceiveBudget
from decode_service.handoff.transport import Post, TransportReport
from decode_service.schedule.scheduler import DecodeEngine
from decode_service.speculate.depth import Depth, FixedDepth
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo
from prefill_service import messages as prefill
from prefill_service.schedule.scheduler import PrefillEngine
from tests.support.engines import Received, cpu_device, new_decode_engine, new_prefill_engine
from tests.support.models import END_ID, make_tokenizer

if TYPE_CHECKING:
    from common.sampling.triton_draws import TritonDraws
    from common.text.grammars import Grammars

_IDLE_STEP_S = 0.001

NewMatcher = Callable[[ResolvedSampling, Sequence[int]], Matcher]
"""A function that makes the matcher of a constrained request. The matcher has already accepted the given output
tokens.
"""

Tamper = Callable[[Frame], Sequence[Frame]]
"""A function that replaces one frame of a prefill engine by the frames that arrive in its place."""


@dataclass
class Outcome:
    """Everything that one request's stream has carried so far. `num_deliveries` counts the events with tokens."""

    token_ids: list[int] = field(default_factory=list)
    num_deliveries: int = 0
    phases: list[decode.PhaseBegan] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finished: decode.Finished | None = None
    error: BatonError | None = None

    @property
    def has_ended(self) -> bool:
        return self.finished is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Sizes and settings of a test pair. The sizes are small, so that tests reach the limits."""

    prefill_rows: int = 16
    prefill_tokens: int = 2048
    prefill_window_tokens: int | None = None
    decode_rows: int = 16
    decode_tokens: int = 2048
    decode_window_tokens: int | None = None
    context_tokens: int = 512
    chunk_tokens: int = 64
    max_batch_tokens: int = 256
    overlap: bool = True
    replays_forwards: bool = True
    debug_checks: bool = True
    send_budget_bytes: int = 1 << 20
    receive_budget_bytes: int = 1 << 20
    max_segment_bytes: int = 1 << 16
    max_handoff_attempts: int = 3
    num_replicas: int = 1
    num_draft_tokens: int = 4
    draft_topk: int = 1
    num_draft_steps: int | None = None
    prefill_caches: bool = True
    decode_caches: bool = True
    prefix_routing: bool = True
    shares_memory: bool = False
    local_prefill_tokens: int = 0
    prefill_fallback: bool = False
    new_depth: Callable[[SpecInfo], Depth] = FixedDepth
    drafter: Drafter | None = None  # instead of the draft head

    @property
    def spec_info(self) -> SpecInfo:
        return SpecInfo(self.num_draft_steps or self.num_draft_tokens, self.num_draft_tokens, self.draft_topk)


class PrefillReplica:
    """A prefill engine, and a handoff without a wire between it and decode.

    Frames wait here while decode's receive budget is full, and count as sent once they are posted to decode. Decode
    reads KV in `memory`; if that is None, frames carry it. `commands` are those of the engine's next step.
    """

    def __init__(
        self,
        address: str,
        engine: PrefillEngine,
        memory: SharedPool | None,
        *,
        outbox: Received[prefill.Event],
        post: Post,
        new_matcher: NewMatcher,
        receive_budget_bytes: int,
    ) -> None:
        self.address = address
        self.engine = engine
        self.memory = memory
        self.commands: list[prefill.Command] = []
        self._outbox = outbox
        self._post = post
        self._new_matcher = new_matcher
        self._budget = ReceiveBudget(receive_budget_bytes)
        self._frames: dict[str, deque[Frame | None]] = {}  # of each open call; None stands for its end
        self._owed_bytes: Counter[str] = Counter()
        self._lost: BatonError | None = None

    def step(self, tamper: Tamper | None) -> None:
        commands, self.commands = self.commands, []
        self.engine.step(commands)
        for event in self._outbox.take():
            if isinstance(event, prefill.FrameReady):
                self._carry(event.call_id, event.frame, tamper)
            else:
                self._take(event.call_id, [None])

    def start(self, command: decode.StartHandoff) -> None:
        call_id = command.call_id
        if self._lost is not None:
            self._post(decode.CallEnded(call_id, self._lost))
            return
        self._frames[call_id] = deque()
        self._post(decode.FrameArrived(call_id, Accepted(instance_id=self.address)))
        self.commands.append(prefill.OpenCall(call_id, command.rows, shares_memory=self.memory is not None))
        for index, row in enumerate(command.rows):
            if row.sampling.is_constrained:
                matcher = self._new_matcher(row.sampling, row.token_ids[row.prompt_len :])
                self.commands.append(prefill.GiveMatcher(call_id, index, matcher))

    def cancel_rows(self, command: decode.CancelHandoffRows) -> None:
        if command.call_id in self._frames:
            self.commands.append(prefill.CancelCallRows(command.call_id, command.rows))

    def break_call(self, command: decode.BreakCall) -> None:
        self._end(command.call_id, EngineFault(f"the call was broken: {command.reason}"))
        self._hand_over_waiting()

    def landed(self, command: decode.SegmentsLanded) -> None:
        self._budget.give_back(command.num_bytes)
        self._hand_over_waiting()
        if command.shared:
            self.commands.append(prefill.SegmentsReturned(command.call_id, command.shared))

    def lose(self) -> None:
        """Ends every call, and refuses later ones, as if the replica's process had died."""
        self._lost = PrefillUnavailable("killed")
        self._post(decode.ReplicasChanged((decode.Replica(self.address, is_ready=False, error=self._lost),)))
        for call_id in list(self._frames):
            self._end(call_id, self._lost)

    def _carry(self, call_id: str, frame: Frame, tamper: Tamper | None) -> None:
        """Takes a frame, or what `tamper` makes of it. Bytes that it cuts off count as sent, and those that it adds
        do not: the engine never sent them.
        """
        arriving = [frame] if tamper is None else list(tamper(frame))
        self._owed_bytes[call_id] += unsent_bytes(frame)
        if arriving:
            self._say_sent(call_id, unsent_bytes(frame) - sum(map(unsent_bytes, arriving)))
        self._take(call_id, arriving)

    def _take(self, call_id: str, frames: Sequence[Frame | None]) -> None:
        if call_id in self._frames:
            self._frames[call_id].extend(frames)
            self._hand_over(call_id)

    def _hand_over(self, call_id: str) -> None:
        """Posts the call's frames in order, up to the first segment for which the budget has no room."""
        frames = self._frames[call_id]
        while frames:
            frame = frames[0]
            if isinstance(frame, KvSegment) and not self._budget.try_take(call_id, frame.num_bytes):
                return
            frames.popleft()
            if frame is None:
                del self._frames[call_id]
                self._post(decode.CallEnded(call_id, None))
                return
            self._post(decode.FrameArrived(call_id, frame))
            self._say_sent(call_id, unsent_bytes(frame))

    def _hand_over_waiting(self) -> None:
        while (call_id := self._budget.next_waiting) is not None:
            self._hand_over(call_id)
            if self._budget.next_waiting == call_id:
                return

    def _say_sent(self, call_id: str, num_bytes: int) -> None:
        num_bytes = min(num_bytes, self._owed_bytes[call_id])
        if num_bytes > 0:
            self._owed_bytes[call_id] -= num_bytes
            self.commands.append(prefill.BytesSent(call_id, num_bytes))

    def _end(self, call_id: str, error: BatonError) -> None:
        if self._frames.pop(call_id, None) is not None:
            self._budget.forget(call_id)
            self.commands.append(prefill.CloseCall(call_id))
            self._post(decode.CallEnded(call_id, error))


def _compiles(vocab_size: int) -> NewMatcher:
    def new_matcher(sampling: ResolvedSampling, output_ids: Sequence[int]) -> Matcher:
        matcher: Matcher | None = None
        if sampling.constrains_text:
            matcher = grammars_of(vocab_size).matcher(sampling.grammar, output_ids, sampling.reasoning)
        if sampling.token_rules is not None:
            matcher = TokenRulesMatcher(matcher, sampling.token_rules, output_ids, vocab_size=vocab_size)
        assert matcher is not None
        return matcher

    return new_matcher


@cache
def grammars_of(vocab_size: int) -> Grammars:
    """Returns an object that makes matchers for the tiny tokenizer with this vocabulary size."""
    from common.text.grammars import Grammars  # its library is not installed where only tests/gpu runs

    return Grammars(lambda: TextTokenizer(make_tokenizer(vocab_size)), vocab_size=vocab_size, eos_token_ids=[END_ID])


class InProcessPair:
    """One decode engine and `options.num_replicas` prefill engines. `prefill` is the first of these.

    The prefill engines run `prefill_model` and `prefill_draft`, or by default the models of the decode engine. A fused
    model belongs to one engine, so it cannot be shared. `draw_kernels` and `prefill_draw_kernels` sample tokens; by
    default each engine uses those of its device.

    `new_device` makes each engine's device. `tamper` maps each frame to the frames that arrive instead; an empty
    sequence holds it back. All engines share `clock`. `new_matcher` makes the matchers, by default with the library
    that the services use.
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        new_device: Callable[[], Device] = cpu_device,
        draft: DraftHead | None = None,
        prefill_model: TargetModel | None = None,
        prefill_draft: DraftHead | None = None,
        draw_kernels: TritonDraws | None = None,
        prefill_draw_kernels: TritonDraws | None = None,
        options: PairOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_matcher: NewMatcher | None = None,
    ) -> None:
        self._options = options = options or PairOptions()
        self._new_matcher = new_matcher or _compiles(model.vocab_size)
        self._prefill_draft = prefill_draft or draft
        self._prefill_draw_kernels = prefill_draw_kernels
        device = new_device()
        self._devices = [device]
        self.prefill_steps: list[StepStats] = []
        self.decode_steps: list[StepStats] = []
        self.outcomes: dict[str, Outcome] = {}
        self.handed_over: list[HandoffRow] = []
        self.tamper: Tamper | None = None
        self._aborted: set[str] = set()
        self._to_decode: list[decode.Command] = []
        self._from_decode: Received[decode.Event] = Received()
        self._reported: dict[str, decode.Replica] = {}
        self._replica_of_call: dict[str, PrefillReplica] = {}
        self.decode = new_decode_engine(
            model,
            device,
            outbox=self._from_decode,
            draw_kernels=draw_kernels or new_draw_kernels("kernels", torch_device=device.torch_device),
            max_rows=options.decode_rows,
            max_kv_tokens=options.decode_tokens,
            max_window_tokens=options.decode_window_tokens,
            max_context_tokens=options.context_tokens,
            draft=draft,
            spec_info=options.spec_info if draft or options.drafter else NO_DRAFTS,
            new_depth=options.new_depth,
            drafter=options.drafter,
            prefix_cache=options.decode_caches,
            prefix_routing=options.prefix_routing,
            local_prefill_tokens=options.local_prefill_tokens,
            prefill_fallback=options.prefill_fallback,
            overlap=options.overlap,
            replays_forwards=options.replays_forwards,
            max_handoff_attempts=options.max_handoff_attempts,
            clock=clock,
            on_step=self.decode_steps.append,
            debug_checks=options.debug_checks,
        )
        self.replicas = [
            self._new_replica(f"replica-{number}", prefill_model or model, new_device(), clock)
            for number in range(options.num_replicas)
        ]

    def _new_replica(
        self, address: str, model: TargetModel, device: Device, clock: Callable[[], float]
    ) -> PrefillReplica:
        options = self._options
        self._devices.append(device)
        memory: SharedPool | None = None
        if options.shares_memory:
            draft = self._prefill_draft
            memory = SharedPool(
                groups=[*model.layer_groups, *([draft.layer_group] if draft else [])],
                num_slots=options.prefill_tokens,
                num_window_slots=options.prefill_window_tokens or options.prefill_tokens,
                directory=None,
            )
        outbox: Received[prefill.Event] = Received()
        engine = new_prefill_engine(
            model,
            device,
            outbox=outbox,
            draw_kernels=self._prefill_draw_kernels or new_draw_kernels("kernels", torch_device=device.torch_device),
            max_rows=options.prefill_rows,
            max_kv_tokens=options.prefill_tokens,
            max_window_tokens=options.prefill_window_tokens,
            max_context_tokens=options.context_tokens,
            draft=self._prefill_draft,
            draft_topk=options.draft_topk,
            chunk_tokens=options.chunk_tokens,
            max_batch_tokens=options.max_batch_tokens,
            send_budget_bytes=options.send_budget_bytes,
            max_segment_bytes=options.max_segment_bytes,
            prefix_cache=options.prefill_caches,
            overlap=options.overlap,
            clock=clock,
            on_step=self.prefill_steps.append,
            shared_pool=memory,
            debug_checks=options.debug_checks,
        )
        ready = decode.Replica(
            address,
            is_ready=True,
            instance_id=address,
            max_cached_tokens=options.prefill_tokens if options.prefill_caches else 0,
        )
        self._post_report(decode.ReplicasChanged((ready,)))
        return PrefillReplica(
            address,
            engine,
            memory,
            outbox=outbox,
            post=self._post_report,
            new_matcher=self._new_matcher,
            receive_budget_bytes=options.receive_budget_bytes,
        )

    @property
    def prefill(self) -> PrefillEngine:
        return self.replicas[0].engine

    def submit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: ResolvedSampling,
        *,
        prompt_len: int | None = None,
        choice_index: int = 0,
        wants_drafts: bool = True,
        is_traced: bool = False,
        cache_salt: str | None = None,
    ) -> Outcome:
        """Posts a request to the decode engine's next step. `token_ids` after the first `prompt_len` are output of an
        earlier stream.
        """
        prompt_len = prompt_len or len(token_ids)
        matcher = self._new_matcher(sampling, token_ids[prompt_len:]) if sampling.is_constrained else None
        self._to_decode.append(
            decode.Submit(
                request_id,
                tuple(token_ids),
                prompt_len,
                sampling,
                choice_index,
                wants_drafts=wants_drafts,
                is_traced=is_traced,
                cache_salt=cache_salt,
                matcher=matcher,
            )
        )
        self.outcomes[request_id] = Outcome()
        return self.outcomes[request_id]

    def abort(self, request_id: str) -> Outcome:
        """Aborts the request and returns what its stream carried until now. A later event of the request is an
        AssertionError.
        """
        self._to_decode.append(decode.Abort(request_id))
        self._aborted.add(request_id)
        return self.outcomes.pop(request_id)

    def post(self, command: decode.Command) -> None:
        self._to_decode.append(command)

    def step(self) -> None:
        """Steps each engine once. A message from one engine arrives at the other's next step."""
        self._rest(min(self._decode_rest_s(), self._prefill_rest_s()))
        self._step_prefill()
        self._step_decode()

    def step_prefill(self) -> None:
        self._rest(self._prefill_rest_s())
        self._step_prefill()

    def finish_prefill(self, *, bound_s: float = 60.0) -> None:
        """Hands off all submitted requests, lets prefill compute them, and lets decode take their KV, as far as budgets
        let it through. Decode's next step merges all of them.
        """
        self.step_decode()
        give_up_s = time.monotonic() + bound_s

        def is_at_work(replica: PrefillReplica) -> bool:
            load, rest_s = replica.engine.load(), replica.engine.idle_timeout_s()
            return bool(replica.commands or load.num_queued or load.num_running) or rest_s <= _IDLE_STEP_S

        def is_any_busy() -> bool:
            return any(stream.is_busy for device in self._devices for stream in device.progress())

        while any(is_at_work(replica) for replica in self.replicas) or is_any_busy():
            assert time.monotonic() < give_up_s, f"not over: {self.prefill.load()}"
            self.step_prefill()
        self.step_decode()
        while is_any_busy():
            assert time.monotonic() < give_up_s, f"not over: {self.decode.load()}"
            time.sleep(_IDLE_STEP_S)

    def step_decode(self) -> None:
        self._rest(self._decode_rest_s())
        self._step_decode()

    def _rest(self, idle_s: float) -> None:
        """Sleeps for at most `idle_s`, where the engines' own threads would wait. A spinning caller would keep the
        interpreter from the streams' threads.
        """
        time.sleep(min(_IDLE_STEP_S, idle_s))

    def _decode_rest_s(self) -> float:
        return 0.0 if self._to_decode else self.decode.idle_timeout_s()

    def _prefill_rest_s(self) -> float:
        if any(replica.commands for replica in self.replicas):
            return 0.0
        return min(replica.engine.idle_timeout_s() for replica in self.replicas)

    def _step_prefill(self) -> None:
        for replica in self.replicas:
            replica.step(self.tamper)

    def _step_decode(self) -> None:
        commands, self._to_decode[:] = list(self._to_decode), []
        self.decode.step(commands)
        for event in self._from_decode.take():
            self._route(event)

    def run(self, *, bound_s: float = 60.0, until: Callable[[], bool] | None = None) -> None:
        """Steps until every request has ended, or until `until()` is True. Raises AssertionError after `bound_s`."""
        is_over = until or (lambda: all(outcome.has_ended for outcome in self.outcomes.values()))
        give_up_s = time.monotonic() + bound_s
        while not is_over():
            assert time.monotonic() < give_up_s, f"not over: {self.decode.load()}, {self.prefill.load()}"
            self.step()

    def settle(self, *, bound_s: float = 60.0) -> None:
        """Steps until no row or slot is in use and no segment is unsent, then checks that none was lost."""
        engines: list[DecodeEngine | PrefillEngine] = [self.decode, *(replica.engine for replica in self.replicas)]

        def is_empty() -> bool:
            loads = [engine.load() for engine in engines]
            return all(
                load.rows.free == load.rows.total and not load.slots.held and not load.unsent_bytes for load in loads
            )

        self.run(until=is_empty, bound_s=bound_s)
        for engine in engines:
            engine.pool.check_conservation()

    def close(self) -> None:
        self.decode.close()
        for replica in self.replicas:
            replica.engine.close()
            if replica.memory is not None:
                replica.memory.close()

    def _post_report(self, report: TransportReport) -> None:
        """Passes a report on to decode. A replica reports itself alone, but decode expects the list of all."""
        if isinstance(report, decode.ReplicasChanged):
            self._reported.update({replica.address: replica for replica in report.replicas})
            report = decode.ReplicasChanged(tuple(self._reported.values()), report.others_may_come)
        self._to_decode.append(report)

    def _route(self, event: decode.Event) -> None:
        match event:
            case decode.StartHandoff():
                replica = next(replica for replica in self.replicas if replica.address == event.replica)
                self._replica_of_call[event.call_id] = replica
                self.handed_over.extend(event.rows)
                replica.start(event)
            case decode.CancelHandoffRows():
                self._replica_of_call[event.call_id].cancel_rows(event)
            case decode.BreakCall():
                self._replica_of_call[event.call_id].break_call(event)
            case decode.SegmentsLanded():
                self._replica_of_call[event.call_id].landed(event)
            case decode.DegradedChanged():
                pass
            case _:
                self._deliver(event)

    def _deliver(self, event: decode.RequestEvent) -> None:
        if not isinstance(event, decode.Tokens):
            assert event.request_id not in self._aborted, f"an event after the abort: {event}"
        match event:
            case decode.PhaseBegan():
                self.outcomes[event.request_id].phases.append(event)
            case decode.PromptScored():
                assert not self.outcomes[event.request_id].token_ids, "tokens of the prompt after output"
                self.outcomes[event.request_id].prompt_logprobs.append(event.logprobs)
            case decode.Tokens():
                for request_id, token_ids, logprobs in event.each():
                    assert request_id not in self._aborted, f"tokens after the abort: {event}"
                    self.outcomes[request_id].token_ids.extend(token_ids)
                    self.outcomes[request_id].num_deliveries += 1
                    self.outcomes[request_id].logprobs.extend(logprobs)
            case decode.Finished():
                assert not self.outcomes[event.request_id].has_ended, "a second terminal event"
                self.outcomes[event.request_id].finished = event
            case decode.Failed():
                assert not self.outcomes[event.request_id].has_ended, "a second terminal event"
                self.outcomes[event.request_id].error = event.error


MakePair = Callable[..., InProcessPair]


@contextmanager
def pairs_that_keep_all(*, bound_s: float = 60.0) -> Iterator[MakePair]:
    """Yields a function that makes pairs; it takes InProcessPair's arguments, with the options second.

    At the end every row and slot of each pair must be free again within `bound_s` (docs/field_rules.md, A6); otherwise
    it raises AssertionError.
    """
    made: list[InProcessPair] = []

    def make(model: TargetModel, options: PairOptions | None = None, **others: Any) -> InProcessPair:
        made.append(InProcessPair(model, options=options, **others))
        return made[-1]

    try:
        yield make
        for pair in made:
            pair.settle(bound_s=bound_s)
    finally:
        for pair in made:
            pair.close()
