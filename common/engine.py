"""Both engines are made of these: their parts and options, the lifecycle of requests and prompts, the outbox by which
events leave, and the forwards of padding that compile GPU kernels before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from common.attention.backend import ForwardInput, KernelShape
from common.device.stream import Device, Scope, Stream
from common.draft.head import DraftHead
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import KvPool, LeaseState, RowLease
from common.kv.rows import PADDING_ROW
from common.kv.slot_allocator import PADDING_SLOT
from common.model.target import TargetModel
from common.priority import DEFAULT_AGEING, Ageing
from common.sampling.state import DrawKernels, SamplingState
from common.telemetry.timeline import ENGINE, Timeline

PhaseT = TypeVar("PhaseT", bound=Enum)
EventT = TypeVar("EventT")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The model, the device and the like with which an engine computes.

    `draft` is None if the engine uses no draft head. Tokens are drawn by `draw_kernels`, or by PyTorch's operators
    without them.
    """

    model: TargetModel
    device: Device
    draft: DraftHead | None = None
    draw_kernels: DrawKernels | None = None
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def layer_groups(self) -> list[LayerGroupSpec]:
        """The layers that attend all tokens: the model's, and then the draft head's."""
        return [self.model.layer_group, *([self.draft.layer_group] if self.draft is not None else [])]

    @property
    def num_draft_layers(self) -> int:
        """The number of the draft head's layers, 0 without a head."""
        return 0 if self.draft is None else self.draft.layer_group.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine of either kind.

    `overlap=False` finishes each step before the next is scheduled. With `prefix_cache` a prompt begins after its
    longest prefix whose KV an earlier one left in the pool. `ageing` changes priorities while prompts wait.
    """

    overlap: bool = True
    prefix_cache: bool = True
    ageing: Ageing = DEFAULT_AGEING
    debug_checks: bool = False


class Place(Enum):
    """Where a decode engine's request, or a prefill engine's prompt, is during a phase."""

    WAITING = auto()  # in the queue, without a row
    COMPUTING = auto()  # among the prompts that this service computes
    HANDOFF = auto()  # its KV is on its way from the prefill to the decode service
    ROWS = auto()  # among the running rows of a decode engine
    NOWHERE = auto()  # it has ended


@dataclass(frozen=True, slots=True)
class PhaseRule(Generic[PhaseT]):
    """The rule of one phase: the place, the lease's state, None if no row is held, and the phases that may follow."""

    place: Place
    lease: LeaseState | None
    following: tuple[PhaseT, ...]


class Lived(Protocol):
    """A request or a prompt. `phase` is one of its engine's phases."""

    request_id: str
    phase: Any
    lease: RowLease | None


LivedT = TypeVar("LivedT", bound=Lived)


class Lifecycle(Generic[LivedT, PhaseT]):
    """Moves requests or prompts from phase to phase, by a table of rules. It alone writes their phase and lease."""

    def __init__(self, rules: Mapping[PhaseT, PhaseRule[PhaseT]], pool: KvPool) -> None:
        self._rules = rules
        self._pool = pool

    def enter(self, lived: LivedT, phase: PhaseT, *, lease: RowLease | None = None) -> None:
        """Moves a request or prompt to `phase` and the place of that phase. Releases its row if the phase holds none.

        `lease` is the row that it gets now, if it gets one. Raises AssertionError if `phase` cannot follow.
        """
        before, after = self._rules[lived.phase], self._rules[phase]
        who = f"{lived.request_id} in {lived.phase}"
        assert phase in before.following, f"{who}: {phase} does not follow"
        if after.place is not before.place:
            self._leave(lived, before.place, after.place)
        if lease is not None:
            assert lived.lease is None, f"{who} holds a row already"
            lived.lease = lease
        lived.phase = phase
        if after.lease is not None:
            assert lived.lease is not None, f"{who} holds no row"
            lived.lease.state = after.lease
        elif lived.lease is not None:
            self._pool.release(lived.lease)
            lived.lease = None
        if after.place is not before.place:
            self._arrive(lived, after.place)

    def _leave(self, lived: LivedT, place: Place, following: Place) -> None:
        """Takes it out of `place`, on its way to `following`. It still has its old phase and lease."""

    def _arrive(self, lived: LivedT, place: Place) -> None:
        """Puts it into `place`. It has its new phase and lease."""


class Outbox(Generic[EventT]):
    """Collects an engine's events until the engine hands them over to the edge. Only the engine's thread calls it.

    `deliver` gets them, in order; it must only pass them on.
    """

    def __init__(self, deliver: Callable[[Sequence[EventT]], None], timeline: Timeline | None = None) -> None:
        self._deliver = deliver
        self._track = (timeline or Timeline()).track(ENGINE)
        self._events: list[EventT] = []

    def post(self, event: EventT) -> None:
        self._events.append(event)

    def post_all(self, events: Iterable[EventT]) -> None:
        self._events += events

    def hand_over(self) -> None:
        """Passes the collected events to `deliver`. The edge's thread then competes for the interpreter."""
        if self._events:
            events, self._events = self._events, []
            with self._track.span("deliver", events=len(events)):
                self._deliver(events)


def warm_kernels(
    parts: EngineParts,
    *,
    draft_topk: int,
    pool: KvPool,
    sampling_state: SamplingState,
    stream: Stream,
    timeout_s: float,
) -> None:
    """Runs forwards of padding on `stream`, to compile all kernels of the target, the draft head and sampling.

    It runs one forward for each shape for which attention has a kernel, also with tree masks if `draft_topk` is above
    1 (tree drafting). Blocks until all are done. Raises PieceFailed if one fails, and DeviceTimeout after `timeout_s`.
    """
    model, draft, device = parts.model, parts.draft, parts.device
    shapes = model.attention.kernel_shapes(with_masks=draft_topk > 1)
    draws = sampling_state.kernels

    @torch.inference_mode()
    def compile_kernels() -> None:
        for shape in shapes:
            padding = _padding_forward(shape, pool, model.layer_group.name)
            output = model.forward(padding)
            if draft is None:
                continue
            assert output.hidden is not None, "the target captures what the head reads"
            padding = replace(padding, kv=pool.buffers[draft.layer_group.name], windows=())
            hidden = draft.fuse(output.hidden)
            for layer in range(draft.layer_group.num_layers):
                draft.forward(padding, hidden, layer=layer)

        if draws is not None:
            compile_draws(draws)

    def compile_draws(draws: DrawKernels) -> None:
        """Runs each sampling kernel once, on row 0, which is padding."""
        row = torch.full((1,), PADDING_ROW, dtype=torch.int64, device=device.torch_device)
        logits = torch.zeros((1, sampling_state.vocab_size), device=device.torch_device)
        draws.draw(logits, row, row, sampling_state, None, is_counted=False)
        if draft is not None:
            logits = torch.zeros((1, draft.token_ids.shape[0]), device=device.torch_device)
            draws.propose(logits, draft.token_ids, row, row, sampling_state)
            draws.couple(logits, draft.token_ids, row, row, sampling_state)

    if shapes or draws is not None:
        scope = Scope("compiling kernels")
        stream.wait(device.schedule_stream.record())
        stream.enqueue(compile_kernels, scope)
        stream.record(scope).synchronize(timeout_s)


def _padding_forward(shape: KernelShape, pool: KvPool, group: str) -> ForwardInput:
    """Returns the input of a forward of this shape, over row 0 and slot 0, which are padding.

    `group` is the name of the layer group in `pool` whose KV the forward reads and writes.
    """
    table = pool.rows.req_to_token

    def column(length: int, value: int) -> Tensor:
        return torch.full((length,), value, dtype=torch.int64, device=table.device)

    num_new = shape.num_new
    return ForwardInput(
        input_ids=column(num_new, 0),
        positions=column(num_new, 0),
        out_cache_loc=column(num_new, PADDING_SLOT),
        req_to_token=table,
        req_pool_indices=column(1, PADDING_ROW),
        seq_lens=column(1, min(num_new, table.shape[1])),
        prefix_lens=(0,),
        extend_lens=(num_new,),
        max_seq_len=shape.max_seq_len,
        kv=pool.buffers[group],
        windows=pool.windows_beside(group),
        logits_rows=column(1, num_new - 1),
        tree_mask=torch.ones((num_new, num_new), dtype=torch.bool, device=table.device) if shape.has_mask else None,
    )
