"""Both engines in one process, stepped by the test: the reference for "disaggregated equals undisaggregated".

    submit ─▶ DecodeEngine ⇄ InProcessTransport ⇄ PrefillEngine     (one transport for each prefill replica)

Nothing here runs by itself: `step` gives each engine the commands posted since its last step, and steps it once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from common.attention.choice import new_draw_kernels
from common.device.stream import Device
from common.draft.head import DraftHead
from common.errors import BatonError
from common.grammar.matcher import Matcher
from common.grammar.token_rules_matcher import TokenRulesMatcher
from common.kv.shared_pool import SharedPool
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.step_stats import StepStats
from common.text.tokenizer import TextTokenizer
from common.wire.handoff import Frame, HandoffRow, unsent_bytes
from decode_service import messages as decode
from decode_service.handoff.in_process import InProcessTransport
from decode_service.handoff.transport import TransportReport
from decode_service.schedule.scheduler import DecodeEngine
from decode_service.speculate.depth import Depth, depth_of
from decode_service.speculate.spec_info import SpecInfo
from prefill_service import messages as prefill
from prefill_service.schedule.scheduler import PrefillEngine
from tests.support.engines import cpu_device, new_decode_engine, new_prefill_engine
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
    adapts_depth: bool = False
    prefill_caches: bool = True
    decode_caches: bool = True
    prefix_routing: bool = True
    shares_memory: bool = False
    local_prefill_tokens: int = 0
    prefill_fallback: bool = False
    depth: Depth | None = None  # instead of the one that `adapts_depth` chooses

    @property
    def spec_info(self) -> SpecInfo:
        return SpecInfo(self.num_draft_steps or self.num_draft_tokens, self.num_draft_tokens, self.draft_topk)


class _PrefillInbox:
    """Turns a transport's calls into commands for the next step of its prefill engine."""

    def __init__(self, new_matcher: NewMatcher, *, shares_memory: bool) -> None:
        self._new_matcher = new_matcher
        self._shares_memory = shares_memory
        self.commands: list[prefill.Command] = []
        self.owed_bytes: dict[str, int] = {}

    def open_call(self, call_id: str, rows: tuple[HandoffRow, ...]) -> None:
        self.commands.append(prefill.OpenCall(call_id, rows, shares_memory=self._shares_memory))
        for index, row in enumerate(rows):
            if row.sampling.is_constrained:
                matcher = self._new_matcher(row.sampling, row.token_ids[row.prompt_len :])
                self.commands.append(prefill.GiveMatcher(call_id, index, matcher))

    def cancel(self, call_id: str, rows: tuple[int, ...]) -> None:
        self.commands.append(prefill.CancelCallRows(call_id, rows))

    def close(self, call_id: str) -> None:
        self.commands.append(prefill.CloseCall(call_id))

    def sent(self, call_id: str, num_bytes: int) -> None:
        """Reports bytes as sent, but no more than the engine has to report. Bytes that tampering added are left out:
        the engine never sent them.
        """
        num_bytes = min(num_bytes, self.owed_bytes[call_id])
        self.owed_bytes[call_id] -= num_bytes
        if num_bytes:
            self.commands.append(prefill.BytesSent(call_id, num_bytes))


@dataclass
class PrefillReplica:
    """A prefill engine, and the transport through which decode reaches it. Decode reads KV in `memory`; if that is
    None, frames carry it.
    """

    address: str
    engine: PrefillEngine
    transport: InProcessTransport
    inbox: _PrefillInbox
    memory: SharedPool | None


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
        self.prefill_steps: list[StepStats] = []
        self.decode_steps: list[StepStats] = []
        self.outcomes: dict[str, Outcome] = {}
        self.handed_over: list[HandoffRow] = []
        self.tamper: Tamper | None = None
        self._aborted: set[str] = set()
        self._to_decode: list[decode.Command] = []
        self._reported: dict[str, decode.Replica] = {}
        self._replica_of_call: dict[str, PrefillReplica] = {}
        self.decode = new_decode_engine(
            model,
            device,
            draw_kernels=draw_kernels or new_draw_kernels("kernels", torch_device=device.torch_device),
            max_rows=options.decode_rows,
            max_kv_tokens=options.decode_tokens,
            max_window_tokens=options.decode_window_tokens,
            max_context_tokens=options.context_tokens,
            draft=draft,
            depth=(options.depth or depth_of(options.spec_info, adapts=options.adapts_depth)) if draft else None,
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
        memory: SharedPool | None = None
        if options.shares_memory:
            draft = self._prefill_draft
            memory = SharedPool(
                groups=[*model.layer_groups, *([draft.layer_group] if draft else [])],
                num_slots=options.prefill_tokens,
                num_window_slots=options.prefill_window_tokens or options.prefill_tokens,
                directory=None,
            )
        engine = new_prefill_engine(
            model,
            device,
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
        inbox = _PrefillInbox(self._new_matcher, shares_memory=options.shares_memory)
        transport = InProcessTransport(
            post=self._post_report,
            prefill=inbox,
            address=address,
            receive_budget_bytes=options.receive_budget_bytes,
            max_cached_tokens=options.prefill_tokens if options.prefill_caches else 0,
        )
        asyncio.run(transport.open())
        return PrefillReplica(address, engine, transport, inbox, memory)

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

    def lose(self, replica: PrefillReplica) -> None:
        """Lets a replica be lost: its transport is told that the process died."""
        replica.transport.peer_lost("killed")

    def step(self) -> None:
        """Steps each engine once. A message from one engine arrives at the other's next step."""
        self._rest(min(self._decode_rest_s(), self._prefill_rest_s()))
        self._step_prefill()
        self._step_decode()

    def step_prefill(self) -> None:
        self._rest(self._prefill_rest_s())
        self._step_prefill()

    def finish_prefill(self, *, bound_s: float = 60.0) -> None:
        """Hands off all submitted requests, and lets prefill compute them before decode takes its next step."""
        self.step_decode()
        give_up_s = time.monotonic() + bound_s

        def is_computing(replica: PrefillReplica) -> bool:
            load = replica.engine.load()
            return bool(replica.inbox.commands or load.num_queued or load.num_running)

        while any(is_computing(replica) for replica in self.replicas):
            assert time.monotonic() < give_up_s, f"not over: {self.prefill.load()}"
            self.step_prefill()

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
        if any(replica.inbox.commands for replica in self.replicas):
            return 0.0
        return min(replica.engine.idle_timeout_s() for replica in self.replicas)

    def _step_prefill(self) -> None:
        for replica in self.replicas:
            commands, replica.inbox.commands = replica.inbox.commands, []
            for event in replica.engine.step(commands):
                if isinstance(event, prefill.FrameReady):
                    self._carry(replica, event.call_id, event.frame)
                else:
                    replica.transport.call_done(event.call_id)

    def _step_decode(self) -> None:
        commands, self._to_decode[:] = list(self._to_decode), []
        for event in self.decode.step(commands):
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
        """Passes a transport's report on to decode. A transport reports only its own replica, but decode expects the
        list of all.
        """
        if isinstance(report, decode.ReplicasChanged):
            self._reported.update({replica.address: replica for replica in report.replicas})
            report = decode.ReplicasChanged(tuple(self._reported.values()), report.others_may_come)
        self._to_decode.append(report)

    def _carry(self, replica: PrefillReplica, call_id: str, frame: Frame) -> None:
        arriving = [frame] if self.tamper is None else list(self.tamper(frame))
        if num_bytes := unsent_bytes(frame):
            owed_bytes = replica.inbox.owed_bytes
            owed_bytes[call_id] = owed_bytes.get(call_id, 0) + num_bytes
            num_cut = num_bytes - sum(map(unsent_bytes, arriving))
            if arriving and num_cut > 0:
                replica.inbox.sent(call_id, num_cut)
        for arrived in arriving:
            replica.transport.frame_ready(call_id, arrived)

    def _route(self, event: decode.Event) -> None:
        match event:
            case decode.StartHandoff():
                replica = next(replica for replica in self.replicas if replica.address == event.replica)
                self._replica_of_call[event.call_id] = replica
                self.handed_over.extend(event.rows)
                replica.transport.start(event)
            case decode.CancelHandoffRows():
                self._replica_of_call[event.call_id].transport.cancel_rows(event)
            case decode.BreakCall():
                self._replica_of_call[event.call_id].transport.break_call(event)
            case decode.SegmentsLanded():
                replica = self._replica_of_call[event.call_id]
                replica.transport.landed(event)
                if event.shared:
                    replica.inbox.commands.append(prefill.SegmentsReturned(event.call_id, event.shared))
            case decode.DegradedChanged():
                pass
            case _:
                self._deliver(event)

    def _deliver(
        self, event: decode.PhaseBegan | decode.PromptScored | decode.Tokens | decode.Finished | decode.Failed
    ) -> None:
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
def pairs_that_keep_all() -> Iterator[MakePair]:
    """Yields a function that makes pairs; it takes InProcessPair's arguments, with the options second.

    At the end every row and slot of each pair must be free again (docs/field_rules.md, A6); otherwise it raises
    AssertionError.
    """
    made: list[InProcessPair] = []

    def make(model: TargetModel, options: PairOptions | None = None, **others: Any) -> InProcessPair:
        made.append(InProcessPair(model, options=options, **others))
        return made[-1]

    try:
        yield make
        for pair in made:
            pair.settle()
    finally:
        for pair in made:
            pair.close()
