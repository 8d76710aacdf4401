"""Runs the decode engine on a scripted device. Its model, draft head and prefill are stand-ins whose KV consists of
tags (tags.py, tag_head.py), so that any wrong read shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from common.attention.backend import ForwardInput
from common.device.stream import Scope, Stream
from common.engine import Outbox
from common.errors import BatonError, RowFailure
from common.kv.layer_group import WindowLayers
from common.model.forward_program import OnLayerKv
from common.model.target import TargetOutput
from common.sampling.params import ResolvedSampling
from common.telemetry.stats import EngineLoad
from common.wire.handoff import Frame, KvSegment, PrebuiltBatch, RowFailed
from decode_service.messages import (
    Abort,
    CallEnded,
    Command,
    Event,
    Failed,
    Finished,
    FinishReason,
    FrameArrived,
    Replica,
    ReplicasChanged,
    StartHandoff,
    Submit,
    Tokens,
)
from decode_service.speculate.depth import Depth, FixedDepth
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo
from tests.engine.tag_head import DRAFT, Drafting, TagHead, draft_kv_of, drafting_of, first_seed
from tests.engine.tags import CONTEXT_TOKENS, GROUP, TAG_GRAMMAR, TagMatcher, TagModel, kv_of, oracle
from tests.support.engines import Received, new_decode_engine
from tests.support.scripted_device import ScriptedDevice, ScriptedEvent, ScriptedStream

REPLICA = "replica"
CHAIN_UNREAD, TREE_UNREAD = 16, 5
"""How many unread tokens of a row are too many for a draft head: few, so that a test can reach the limit."""


class _LaggingSchedule(ScriptedStream):
    """A schedule stream that lags, as a GPU's does: work that the engine's thread enqueues there runs only after the
    call has returned.
    """

    def record(self, scope: Scope | None = None, name: str = "") -> ScriptedEvent:
        def schedule_side_writes() -> None:
            pass

        self.enqueue(schedule_side_writes, scope)
        return cast(ScriptedEvent, super().record(scope, name))


class LaggingScheduleDevice(ScriptedDevice):
    """A scripted device whose schedule stream (named "schedule") lags: nothing on it runs by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = _LaggingSchedule(self, "schedule")
        self.streams.append(self.schedule)

    @property
    def schedule_stream(self) -> Stream:
        return self.schedule


@dataclass
class Outcome:
    prompt: tuple[int, ...]
    sampling: ResolvedSampling
    cache_salt: str | None = None
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    error: BatonError | None = None
    is_abandoned: bool = False

    @property
    def has_ended(self) -> bool:
        return self.finished is not None or self.error is not None or self.is_abandoned

    @property
    def expected(self) -> list[int]:
        return oracle(self.prompt, self.sampling.max_tokens, self.sampling)

    @property
    def wanted(self) -> list[int]:
        """The tokens to expect so far. They are fewer than `expected` if the request was abandoned, or ended at a stop
        token or string.
        """
        is_cut = self.is_abandoned or (self.finished is not None and self.finished.reason is not FinishReason.LENGTH)
        return self.expected[: len(self.token_ids)] if is_cut else self.expected

    @property
    def drafting(self) -> Drafting | None:
        """The counts of verify steps and accepted tokens of a finished request. None if it has not finished, or used no
        drafts.
        """
        counts = self.finished.speculation if self.finished else None
        return None if counts is None else Drafting(counts.num_verify_steps, counts.num_accepted_tokens)

    def expected_drafting(self, spec_info: SpecInfo) -> Drafting:
        """Returns the counts to expect if every step drafts `spec_info` and the request is never retracted."""
        return drafting_of(self.prompt, self.sampling, itertools.repeat(spec_info))


@dataclass(frozen=True, slots=True)
class Handoff:
    """A row whose KV the engine has requested from prefill, and which the test has not delivered yet.

    The engine holds the KV of the first `num_held` tokens already, but may have none in a group with a window:
    `num_held_of` has the number for each layer group.
    """

    call_id: str
    row: int
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: ResolvedSampling
    num_held_of: dict[str, int]
    cache_salt: str | None

    @property
    def num_held(self) -> int:
        return self.num_held_of[GROUP.name]


def assert_right(*outcomes: Outcome) -> None:
    """Asserts that each of these requests finished, or was abandoned, with the right tokens."""
    for number, outcome in enumerate(outcomes):
        assert outcome.is_abandoned or outcome.finished is not None, f"request {number} failed: {outcome.error}"
        assert outcome.token_ids == outcome.wanted, f"request {number} was decoded wrongly"


class Clock:
    """A clock that moves only when the test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def places(events: Sequence[Event]) -> dict[str, str]:
    """Returns the replica to which each request was sent."""
    return {row.request_id: each.replica for each in events if isinstance(each, StartHandoff) for row in each.rows}


def assert_conserved(load: EngineLoad) -> None:
    """Asserts that no row or slot was lost, or counted twice."""
    for all_ in (load.rows, load.slots):
        num_counted = all_.free + all_.reserved + all_.transferring + all_.running + all_.quarantined + all_.cached
        assert num_counted == all_.total, f"not conserved: {all_}"


def _halves(row: int, group: str, kv: NDArray[np.float32], first: int) -> list[KvSegment]:
    """Returns the KV of one layer group, `kv` of all tokens, as two segments that leave out the tokens before
    `first`.
    """
    num_layers, num_tokens = kv.shape[0], kv.shape[2]
    middle = (first + num_tokens) // 2
    return [
        KvSegment(row, group, 0, num_layers, start, stop - start, kv[:, :, start:stop].tobytes())
        for start, stop in ((middle, num_tokens), (first, middle))
        if stop > start
    ]


def _land(device: ScriptedDevice) -> None:
    device.stream("landing").run_all()


class ScriptedEngine:
    """A decode engine that the test steps. Work on its streams runs only when the test, or the device's policy for
    waits, runs it. `options` are further ones of the engine.

    Every `step` checks that no row or slot was lost, and returns the events. With `delivers` they come into `delivered`
    instead, as soon as the engine hands them over.
    """

    def __init__(
        self,
        *,
        device: ScriptedDevice | None = None,
        max_rows: int = 4,
        max_kv_tokens: int = 256,
        spec_info: SpecInfo | None = None,
        depth: Depth | None = None,
        head: TagHead | None = None,
        clock: Callable[[], float] | None = None,
        replicas: ReplicasChanged | None = None,
        delivers: bool = False,
        windows: tuple[WindowLayers, ...] = (),
        **options: Any,
    ) -> None:
        self.device = device or ScriptedDevice()
        self.model = TagModel(windows)
        self.head = (head or TagHead()) if spec_info else None
        self._spec_info = spec_info
        self.delivered: list[Event] = []
        self._received: Received[Event] = Received()
        ticks = itertools.count()
        max_unread = CHAIN_UNREAD if spec_info is None or spec_info.topk == 1 else TREE_UNREAD
        self.engine = new_decode_engine(
            self.model,
            self.device,
            max_rows=max_rows,
            max_kv_tokens=max_kv_tokens,
            max_context_tokens=CONTEXT_TOKENS,
            draft=self.head,
            spec_info=spec_info or NO_DRAFTS,
            max_catch_up_tokens=max_unread * max_rows,
            new_depth=FixedDepth if depth is None else lambda spec_info: depth,
            clock=clock or (lambda: float(next(ticks))),
            outbox=Outbox(self._take_delivered) if delivers else self._received,
            **{"reclaim_after_s": 0.0, **options},
        )
        self.outcomes: dict[str, Outcome] = {}
        self.handoffs: dict[str, Handoff] = {}
        self._open_rows: dict[str, int] = {}
        self._posted: list[Command] = [replicas or ReplicasChanged((Replica(REPLICA, True),))]

    @property
    def forward(self) -> ScriptedStream:
        return self.device.stream("forward")

    @property
    def landing(self) -> ScriptedStream:
        return self.device.stream("landing")

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        client: str = "",
        tenant: str = "",
        priority: int = 0,
        cache_salt: str | None = None,
        is_constrained: bool = False,
    ) -> Outcome:
        sampling = ResolvedSampling(
            seed=seed,
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            grammar=TAG_GRAMMAR if is_constrained else None,
        )
        self._posted.append(
            Submit(
                request_id,
                tuple(prompt),
                len(prompt),
                sampling,
                client=client,
                tenant=tenant,
                priority=priority,
                cache_salt=cache_salt,
                matcher=TagMatcher(prompt[-1]) if is_constrained else None,
            )
        )
        self.outcomes[request_id] = Outcome(tuple(prompt), sampling, cache_salt)
        return self.outcomes[request_id]

    def post(self, command: Command) -> None:
        self._posted.append(command)

    def abort(self, request_id: str) -> None:
        """Aborts the request, as when its client leaves. `run` expects no further event of it."""
        self.outcomes[request_id].is_abandoned = True
        self.handoffs.pop(request_id, None)
        self._posted.append(Abort(request_id))

    def hand_over(self, request_id: str, *, last: str = GROUP.name, num_cached: int = 0) -> None:
        """Delivers the KV that the engine does not hold, and the first token, of a request's handoff. Each layer
        group's KV comes in two segments, with the PrebuiltBatch between them.

        The segments of the group `last` come last. Prefill says that it had `num_cached` tokens cached.
        """
        handoff = self.handoffs.pop(request_id)
        first = oracle(handoff.token_ids, 1, handoff.sampling)
        kv = {group.name: kv_of(handoff.token_ids) for group in self.model.layer_groups}
        if self._spec_info is not None:
            kv[DRAFT.name] = draft_kv_of([*handoff.token_ids[1:], *first])
        num_tokens, pool = len(handoff.token_ids), self.engine.pool
        starts = {name: max(held, pool.first_kept(name, num_tokens)) for name, held in handoff.num_held_of.items()}
        prebuilt = PrebuiltBatch(
            rows=np.array([handoff.row]),
            seq_lens=np.array([len(handoff.token_ids)]),
            first_token_ids=np.array(first),
            bytes_sent={name: np.array([group_kv[:, :, starts[name] :].nbytes]) for name, group_kv in kv.items()},
            queue_s=np.zeros(1),
            compute_s=np.zeros(1),
            num_cached_tokens=np.array([num_cached]),
            first_token_logprobs=(None,),
            seed_columns=self._first_seed((*handoff.token_ids, *first), handoff.sampling),
        )
        segments = [
            segment
            for name in sorted(kv, key=lambda name: name == last)
            for segment in _halves(handoff.row, name, kv[name], starts[name])
        ]
        frames: list[Frame] = [segments[0], prebuilt, *segments[1:]]
        self._answer(handoff, *frames)

    def refuse(self, request_id: str, reason: RowFailure, *, retryable: bool = True) -> None:
        """Fails the request's handoff. A retryable failure asks the engine to retry after 250 ms."""
        handoff = self.handoffs.pop(request_id)
        self._answer(handoff, RowFailed(handoff.row, reason, retryable, 250 if retryable else 0, "planted"))

    def _answer(self, handoff: Handoff, *frames: Frame) -> None:
        for frame in frames:
            self._posted.append(FrameArrived(handoff.call_id, frame))
        self._open_rows[handoff.call_id] -= 1
        if self._open_rows[handoff.call_id] == 0:
            self._posted.append(CallEnded(handoff.call_id, None))

    def hold_back(self, num_commands: int) -> list[Command]:
        """Takes back the last commands posted for the engine's next step, and returns them. The test posts them
        later.
        """
        held = self._posted[-num_commands:]
        del self._posted[-num_commands:]
        return held

    def _first_seed(self, token_ids: Sequence[int], sampling: ResolvedSampling) -> dict[str, NDArray[np.generic]]:
        if self._spec_info is None:
            return {}
        seed = first_seed(token_ids, sampling, topk=self._spec_info.topk)
        return {name: column.numpy() for name, column in seed.columns().items()}

    def step(self) -> list[Event]:
        commands, self._posted = self._posted, []
        self.engine.step(commands)
        events = self._received.take()
        for event in events:
            self._note(event)
        assert_conserved(self.engine.load())
        return events

    def step_and_hand_over(self) -> None:
        """Steps, and delivers every handoff that the engine asks for."""
        self.step()
        for request_id in list(self.handoffs):
            self.hand_over(request_id)

    def start(self, *request_ids: str) -> None:
        """Steps until these requests run and one of their forwards is launched. No part of that forward has run when
        this returns.
        """
        self.step()
        for request_id in request_ids:
            self.hand_over(request_id)
        self.step()
        self.landing.run_all()
        self.step()
        assert self.forward.pending(), "nothing was launched"

    def run(self, *, advance: Callable[[ScriptedDevice], None] = _land, max_steps: int = 400) -> None:
        """Steps, and delivers every handoff the engine asks for, until every request has ended and all rows and slots
        are free.
        """
        for _ in range(max_steps):
            if self._is_over():
                self.engine.pool.check_conservation()
                return
            self.step_and_hand_over()
            advance(self.device)
        raise AssertionError(f"not over after {max_steps} steps: {self.engine.load()}")

    def _is_over(self) -> bool:
        load = self.engine.load()
        all_free = load.rows.free == load.rows.total and not load.slots.held
        return all_free and all(outcome.has_ended for outcome in self.outcomes.values()) and not self._posted

    def _take_delivered(self, events: Sequence[Event]) -> None:
        self.delivered.extend(events)
        for event in events:
            self._note(event)

    def _note(self, event: Event) -> None:
        match event:
            case StartHandoff(call_id, _, rows):
                self._open_rows[call_id] = len(rows)
                for index, row in enumerate(rows):
                    held = dict(row.num_held_tokens)
                    most_held = held[GROUP.name]
                    for name, num_tokens in held.items():
                        may_lack = name in self.engine.pool.windows and not num_tokens
                        assert num_tokens == most_held or may_lack, f"layer groups hold different tokens: {held}"
                    self.handoffs[row.request_id] = Handoff(
                        call_id, index, row.token_ids, row.prompt_len, row.sampling, held, row.cache_salt
                    )
            case Tokens():
                for request_id, token_ids, _ in event.each():
                    self._note_tokens(request_id, token_ids)
            case Finished():
                self.outcomes[event.request_id].finished = event
            case Failed(request_id, error):
                self.outcomes[request_id].error = error
            case _:
                pass

    def _note_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.outcomes[request_id].token_ids.extend(token_ids)


class Damage:
    """Lets the engine's next forward give logits that are not finite."""

    def __init__(self, scripted: ScriptedEngine) -> None:
        self.is_due = False
        self._forward = scripted.model.forward
        scripted.model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        output = self._forward(batch, on_layer_kv=on_layer_kv)
        if self.is_due:
            self.is_due = False
            output.logits.fill_(torch.nan)
        return output
