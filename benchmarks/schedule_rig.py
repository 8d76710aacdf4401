"""Runs the decode engine and its edge (the event routing before gRPC) without model, prefill, network or second thread.

    rig.step() ─▶ DecodeEngine.step ─▶ EventRouter.deliver ─▶ LiveRequests ─▶ each stream's reader

The forwards only set tensors that were made beforehand. They run on the same thread as soon as they are enqueued. The
`Stopwatch` is stopped while they run, but not while they are enqueued, so it measures the scheduling alone.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from common.attention.torch_attention import TorchAttention
from common.device.cpu import CpuDevice, InlineStream
from common.device.stream import Cell, OnEvent, Scope, Stream, StreamKind, Work
from common.draft.head import DraftHead
from common.engine import EngineParts, Outbox
from common.grammar.grammar import GrammarKind
from common.kv.kv_shard import OneDevice
from common.kv.layer_group import DRAFT_GROUP, TARGET_GROUP, LayerGroupSpec
from common.kv.pool import CacheKey
from common.kv.pool_size import PoolSize
from common.model.target import TargetModel
from common.sampling.operators import Sampled
from common.sampling.params import ResolvedSampling
from common.telemetry.metrics import EngineMetrics, RequestMetrics, SpeculationMetrics
from common.telemetry.stats import EngineLoad, StepStats
from common.wire.handoff import HandoffRow, KvSegment, PrebuiltBatch
from decode_service.edge.decode_edge import EventRouter
from decode_service.edge.live_request import Ending, LiveRequest
from decode_service.edge.live_requests import LiveRequests
from decode_service.edge.observer import RequestObserver
from decode_service.edge.replicas import ReplicaBoard
from decode_service.edge.text.output import OutputProcessor
from decode_service.forward import forward_side
from decode_service.forward.drafter import NoDrafter
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap, RelayedInputs, RelayPayload
from decode_service.forward.worker import OnPublish, WorkerOutput
from decode_service.handoff.transport import HandoffTransport
from decode_service.messages import (
    CallEnded,
    Command,
    FinishReason,
    FrameArrived,
    Replica,
    ReplicasChanged,
    StartHandoff,
)
from decode_service.schedule import scheduler
from decode_service.schedule.config import DecodeConfig
from decode_service.speculate.spec_info import SpecInfo
from tests.decode_edge.tokenizers_for_tests import byte_level

PROMPT_TOKENS = 64
CONTEXT_TOKENS = 4096
VOCAB_SIZE = 256
NUM_VARIANTS = 61  # different preset results of forwards, used in turn
STEPS_A_TURN = 2
"""The edge runs once in this many steps, before the engine is so far ahead that it waits for the edge.

If it ran after each, it would evict the engine's data from the core's caches still more often. A service's edge, which
runs on another core, does not do so.
"""
_REPLICA = "replica"
_NAMESPACE = ""
_CACHED_SEQUENCE_TOKENS = 2000
_ROW_BYTES = 4


class Stopwatch:
    """Measures how many seconds the named parts of a program take, on the wall clock or the thread's CPU clock.

    Calls through `timed` are measured; the time of work that `stopped` wraps does not count.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._stopped_s = {time.perf_counter: 0.0, time.thread_time: 0.0}

    def timed(self, part: str, function: Callable[..., Any], clock: Callable[[], float] = time.perf_counter) -> Any:
        seconds = self.seconds.setdefault(part, [])

        def measured(*arguments: Any, **named: Any) -> Any:
            stopped_s, begun_s = self._stopped_s[clock], clock()
            result = function(*arguments, **named)
            seconds.append(clock() - begun_s - (self._stopped_s[clock] - stopped_s))
            return result

        return measured

    def stopped(self, work: Work) -> Work:
        def unmeasured() -> None:
            begun = [(clock, clock()) for clock in self._stopped_s]
            work()
            for clock, begun_s in reversed(begun):
                self._stopped_s[clock] += clock() - begun_s

        return unmeasured

    def forget(self) -> None:
        for seconds in self.seconds.values():
            seconds.clear()


class _UncountedStream(InlineStream):
    """A stream that runs work as soon as it is enqueued. The stopwatch counts the enqueueing, but not the work."""

    def __init__(self, name: str, watch: Stopwatch) -> None:
        super().__init__(name, wait_timeout_s=1.0)
        self._watch = watch

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        super().enqueue(self._watch.stopped(work), scope)


class _UncountedDevice(CpuDevice):
    def __init__(self, watch: Stopwatch) -> None:
        super().__init__(num_threads=1)
        self._watch = watch

    def new_stream(self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None) -> Stream:
        return _UncountedStream(name, self._watch)


class PresetWorker:
    """A Worker whose forward returns random tokens that were drawn beforehand.

    With drafts, the numbers of accepted tokens are also drawn beforehand.
    """

    def __init__(self, *, max_rows: int, spec_info: SpecInfo, stream: Stream) -> None:
        self.drafter = NoDrafter()
        self._speculates = spec_info.has_drafts
        self._stream = stream
        numbers = torch.Generator().manual_seed(0)
        width = spec_info.max_accept_len
        # Printable characters that contain no stop string, so that the edge decodes them like text.
        self._tokens = torch.randint(97, 123, (NUM_VARIANTS, max_rows, width), generator=numbers)
        self._accept_lens = torch.randint(1, width + 1, (NUM_VARIANTS, max_rows), generator=numbers)
        self._steps = itertools.cycle(range(NUM_VARIANTS))

    def forward(
        self, batch: ForwardBatch, *, future_map: FutureMap, scope: Scope, on_publish: OnPublish
    ) -> WorkerOutput:
        step, num_rows = next(self._steps), batch.batch_size
        relayed: Cell[RelayedInputs] = Cell()
        new_seq_lens: Cell[Tensor] = Cell()
        output = WorkerOutput(
            reading=self.drafter.launch(batch),
            masked=None,
            accept_lens=Cell() if batch.has_drafts else None,
            marks=Cell() if self._speculates else None,
        )
        tokens = self._tokens[step, :num_rows, : batch.max_accept_len]
        accept_lens = self._accept_lens[step, :num_rows].clamp(max=batch.max_accept_len)

        def resolve() -> None:
            relayed.set(future_map.resolve_forward_inputs(batch.req_pool_indices, with_seeds=False))

        def verify() -> None:
            output.sampled.set(Sampled(tokens.flatten(), torch.zeros(tokens.numel(), dtype=torch.bool)))
            if output.accept_lens is not None:
                output.accept_lens.set(accept_lens)
            output.is_invalid.set(relayed.get().is_invalid)
            new_seq_lens.set(batch.prefix_lens + accept_lens)

        def read() -> None:
            output.payload.set(RelayPayload(tokens[:, 0].clone()))

        marks = [self._stream.record(scope)]
        self._stream.enqueue(resolve, scope)
        marks.append(self._stream.record(scope))
        self._stream.enqueue(verify, scope)
        if batch.has_drafts:
            on_publish(new_seq_lens)
        marks.append(self._stream.record(scope))
        self._stream.enqueue(read, scope)
        marks.append(self._stream.record(scope))
        if output.marks is not None:
            output.marks.set(tuple(marks))
        return output


@dataclass
class _Port:
    """An EnginePort that collects posted commands until the rig's next step."""

    posted: list[Command] = field(default_factory=list)
    is_alive: bool = True

    def post(self, command: Command) -> None:
        self.posted.append(command)

    @property
    def load(self) -> EngineLoad:
        raise NotImplementedError


@dataclass
class _Loop:
    """A substitute for an event loop, with what EventRouter uses of it. Callbacks wait in `due` until the rig runs
    them.
    """

    due: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> None:
        self.due.append((callback, arguments))


@dataclass
class _Transport:
    """A transport that answers a handoff before the engine's next step, with all KV of each row and a PrebuiltBatch,
    and then ends the call.
    """

    port: _Port
    groups: Sequence[str]

    def start(self, handoff: StartHandoff) -> None:
        for index, row in enumerate(handoff.rows):
            for frame in self._frames(index, row):
                self.port.post(FrameArrived(handoff.call_id, frame))
        self.port.post(CallEnded(handoff.call_id, None))

    def landed(self, event: object) -> None:
        pass

    def _frames(self, index: int, row: HandoffRow) -> Sequence[KvSegment | PrebuiltBatch]:
        num_tokens, num_held = len(row.token_ids), row.num_held_tokens[0][1]
        kv = bytes(_ROW_BYTES * (num_tokens - num_held))
        prebuilt = PrebuiltBatch(
            rows=np.array([index]),
            seq_lens=np.array([num_tokens]),
            first_token_ids=np.array([97]),
            bytes_sent={group: np.array([len(kv)]) for group in self.groups},
            queue_s=np.zeros(1),
            compute_s=np.zeros(1),
            num_cached_tokens=np.zeros(1, np.int64),
            first_token_logprobs=(None,),
        )
        segments = [KvSegment(index, group, 0, 1, num_held, num_tokens - num_held, kv) for group in self.groups]
        return [*segments, prebuilt]


class ScheduleRig:
    """A decode engine with `num_rows` requests, half of them greedy, and a stopwatch on its parts.

    With `output_tokens` each request ends after so many tokens and is replaced by a new one; the first ones end at
    different times. With None no request ends. With `num_cached_tokens` the engine has so many tokens cached from the
    start, and no slot is free: requests share the first half of their prompt, leave their own KV in the cache, and
    evict that of earlier ones. The `watch` measures:

        total    an engine step; its parts are `next_batch`, `launch`, `finish`, `deliver` and the rest
        cpu      the thread's CPU time for `total`
        edge     the work of the edge's thread on events, before gRPC
    """

    def __init__(
        self, *, num_rows: int, spec_info: SpecInfo, output_tokens: int | None, num_cached_tokens: int = 0
    ) -> None:
        self.watch = Stopwatch()
        self.num_tokens = 0
        self._num_steps = 0
        self._num_rows = num_rows
        self._output_tokens = output_tokens
        self._num_cached_tokens = num_cached_tokens
        self._numbers = itertools.count()
        self._port, self._loop = _Port(), _Loop()
        self._decoder = byte_level()
        self._readers: dict[str, LiveRequest] = {}
        groups = [_group(TARGET_GROUP), *([_group(DRAFT_GROUP)] if spec_info.has_drafts else [])]
        self._device = _UncountedDevice(self.watch)
        registry = CollectorRegistry()
        self._live = LiveRequests(
            engine=self._port,
            max_live=2 * num_rows,
            observer=RequestObserver(RequestMetrics(registry, finish_reasons=FinishReason, grammar_kinds=GrammarKind)),
        )
        self._router = EventRouter(
            loop=cast(asyncio.AbstractEventLoop, self._loop),
            live_requests=self._live,
            transport=cast(HandoffTransport, _Transport(self._port, [group.name for group in groups])),
            replicas=ReplicaBoard(),
        )
        self._engine = self._new_engine(groups, spec_info)
        self._port.post(ReplicasChanged((Replica(_REPLICA, True),)))
        for name in ("_next_batch", "_launch", "_finish"):
            setattr(self._engine, name, self.watch.timed(name.strip("_"), getattr(self._engine, name)))
        self._iterate = self.watch.timed("total", self.watch.timed("cpu", self._step_engine, time.thread_time))
        self._turn_edge = self.watch.timed("edge", self._turn)

    def _new_engine(self, groups: Sequence[LayerGroupSpec], spec_info: SpecInfo) -> scheduler.DecodeEngine:
        def preset(*, stream: Stream, **_: object) -> PresetWorker:
            return PresetWorker(max_rows=self._num_rows, spec_info=spec_info, stream=stream)

        registry = CollectorRegistry()
        engine_metrics, speculation_metrics = EngineMetrics(registry), SpeculationMetrics(registry)

        def on_step(stats: StepStats) -> None:
            self.num_tokens += stats.batch_size
            engine_metrics.on_step(stats)
            speculation_metrics.on_step(stats)

        attention = TorchAttention()  # has no kernels to compile
        with mock.patch.object(forward_side, "Worker", preset):
            model = SimpleNamespace(
                layer_group=groups[0],
                windows=(),
                vocab_size=VOCAB_SIZE,
                attention=attention,
                pool_tensors=OneDevice(self._device.torch_device),
                recorder=lambda recorder: recorder,
            )
            draft = SimpleNamespace(layer_group=groups[1]) if spec_info.has_drafts else None
            max_kv_tokens = self._num_cached_tokens or self._num_rows * CONTEXT_TOKENS + CONTEXT_TOKENS
            config = DecodeConfig(spec_info=spec_info)
            return scheduler.DecodeEngine(
                config,
                PoolSize(
                    max_rows=self._num_rows,
                    max_kv_tokens=max_kv_tokens,
                    max_window_tokens=max_kv_tokens,
                    max_context_tokens=min(CONTEXT_TOKENS, max_kv_tokens - config.tokens_ahead),
                    decided_by="the benchmark",
                ),
                EngineParts(model=cast(TargetModel, model), draft=cast(DraftHead | None, draft), device=self._device),
                outbox=Outbox(self.watch.timed("deliver", self._router.deliver)),
                drafter=NoDrafter(),
                on_step=on_step,
            )

    def start(self) -> None:
        """Fills the cache, submits a request for each row, steps until they run, and forgets the times measured so far.

        With `output_tokens` it takes that many steps, so that requests have begun to end and to be replaced.
        """
        self._fill_cache()
        for number in range(self._num_rows):
            share = (number + 1) / self._num_rows
            self._submit(CONTEXT_TOKENS - PROMPT_TOKENS if self._output_tokens is None else self._output_tokens * share)
        for _ in range(self._output_tokens or 0):
            self.step()
        while self._output_tokens is None and self.load().num_running < self._num_rows:
            self.step()
        self.watch.forget()

    def step(self) -> None:
        """Runs one engine step, and the edge if it is due, and replaces the requests that ended."""
        commands, self._port.posted = self._port.posted, []
        self._iterate(commands)
        self._num_steps += 1
        if self._num_steps % STEPS_A_TURN == 0:
            self._turn_edge()
        for request_id in [id for id, live in self._readers.items() if live.ending is not None]:
            live = self._readers.pop(request_id)
            assert isinstance(live.ending, Ending), live.ending
            self._live.release(live)
            self._submit(self._output_tokens or 0)

    def load(self) -> EngineLoad:
        return self._engine.load()

    def close(self) -> None:
        self._engine.close()

    def _fill_cache(self) -> None:
        """Fills every slot of the pool with cached KV of requests that have ended."""
        pool, numbers = self._engine.pool, np.random.default_rng(0)
        while self._num_cached_tokens and pool.slot_counts().free:
            tokens = numbers.integers(0, VOCAB_SIZE, min(_CACHED_SEQUENCE_TOKENS, pool.slot_counts().free))
            lease = pool.reserve(len(tokens), key=CacheKey(tokens, _NAMESPACE))
            assert lease is not None
            pool.keep(lease, tokens, len(tokens))
            pool.release(lease)
            pool.reclaim()
            if len(tokens) < _CACHED_SEQUENCE_TOKENS:  # the rest that a draft head's lookahead leaves free
                return

    def _prompt(self, number: int) -> list[int]:
        """Returns the prompt of request `number`. With a cache its second half is new."""
        prompt = list(range(97, 97 + PROMPT_TOKENS))
        if self._num_cached_tokens:
            prompt[PROMPT_TOKENS // 2 :] = np.random.default_rng(number).integers(97, 123, PROMPT_TOKENS // 2).tolist()
        return prompt

    def _step_engine(self, commands: Sequence[Command]) -> None:
        """Does one iteration of the loop in `EngineThread`."""
        self._engine.step(commands)
        self._engine.load()

    def _turn(self) -> None:
        """Runs the edge once: events reach their streams, and each stream reads them."""
        due, self._loop.due = self._loop.due, []
        for callback, arguments in due:
            callback(*arguments)
        for live in self._readers.values():
            if live._has_news.is_set():
                _run_at_once(live)

    def _submit(self, max_tokens: float) -> None:
        number = next(self._numbers)
        live = self._live.admit(None)
        self._readers[live.request_id] = live
        self._live.submit(
            live,
            output=OutputProcessor(decoder=self._decoder),
            prompt_token_ids=self._prompt(number),
            generated_token_ids=(),
            sampling=ResolvedSampling(
                seed=number,
                max_tokens=max(2, int(max_tokens)),
                temperature=float(number % 2),
                eos_token_ids=(1,),
                stop_token_ids=(2, 3),
            ),
            choice_index=0,
            deadline_s=math.inf,
            wants_drafts=True,
            cache_salt=_NAMESPACE if self._num_cached_tokens else None,
        )


def _group(name: str) -> LayerGroupSpec:
    return LayerGroupSpec(name=name, num_layers=1, num_planes=1, num_heads=1, head_dim=1, dtype="float32")


def _run_at_once(live: LiveRequest) -> None:
    """Runs a stream's reader once. There must be news for it, so that it returns without waiting."""
    try:
        live.read().send(None)
    except StopIteration:
        return
    raise AssertionError("there was no news")
