"""The interface of a worker, which runs steps for the scheduler, and the plain worker, which does not speculate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.cell import Cell
from common.device.stream import Event, Measured, Scope, Stream
from common.kv.layer_group import SeedColumnSpec
from common.kv.pool import KvPool
from common.model.target import Target, TargetOutput
from common.sampling.operators import Sampled, sample
from common.sampling.state import SamplingState
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap, RelayPayload

OnPublish = Callable[[Cell[Tensor]], None]
"""Called at most once, while the step is enqueued, with the cell that will hold the new lengths [B] of the step's rows.
"""


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """A step's drafts on the host, as DraftTree has them: `token_ids` and `parents` [B, D] int64."""

    token_ids: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True)
class HostTokens:
    """A step's tokens on the host: entry b gains the first `accept_lens[b]` of `token_ids[b]` [B, W]."""

    token_ids: Tensor
    accept_lens: Tensor


@dataclass(frozen=True, slots=True)
class MaskedDraw:
    """Cells by which the schedule side and a step's pieces pass values if grammars constrain the step's draws.

    The schedule side computes `masks`, as `draw` takes them, while the target computes: it needs the last step's
    tokens, and the step's `drafts`, which are on the host when its inputs are ready. `marks` are the events where the
    forward ends and where the draw begins. If the step has drafts, the tokens `gained` are on the host when the lengths
    are published.
    """

    masks: Cell[Tensor] = field(default_factory=Cell)
    drafts: Cell[HostDrafts] = field(default_factory=Cell)
    marks: Cell[tuple[Event, Event]] = field(default_factory=Cell)
    gained: Cell[HostTokens] = field(default_factory=Cell)


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """The results of a step, in cells that its pieces (units of work on the stream) fill.

    `payload` is stashed for the next step. `sampled` holds the step's tokens: for each entry as many as it can gain.
    `accept_lens` [B] int64 says how many of them count; it is not set if `has_one_each`. `is_invalid` [B] bool marks
    rows whose relayed input was unusable. `marks` are the events where draft, verify and extend begin and where extend
    ends; they are not set without speculation. `prepared` is the event at which the inputs are ready and only the
    forward remains. `input_ids` is a tensor made at the launch and filled by a piece. `kept` holds objects that must
    live until the step's end.

    If grammars constrain entries, `masked` is not None. Then the draw and what follows are enqueued by `draw`, which
    the schedule side calls when it has set the masks.
    """

    payload: Cell[RelayPayload] = field(default_factory=Cell)
    sampled: Cell[Sampled] = field(default_factory=Cell)
    accept_lens: Cell[Tensor] = field(default_factory=Cell)
    is_invalid: Cell[Tensor] = field(default_factory=Cell)
    marks: Cell[tuple[Event, ...]] = field(default_factory=Cell)
    masked: MaskedDraw | None = None
    prepared: Event | None = None
    draw: Callable[[], None] | None = None
    input_ids: Tensor | None = None
    has_one_each: bool = False
    kept: Sequence[object] = ()

    @classmethod
    def of(cls, batch: ForwardBatch) -> WorkerOutput:
        """Returns the output of a step whose pieces are not enqueued yet."""
        return cls(masked=MaskedDraw() if batch.sampling.constrained.size else None)


class Worker(Protocol):
    """Enqueues the steps that the scheduler launches. It runs on the engine thread and computes nothing there.

    The enqueued work waits for work that the schedule side enqueued before the launch, and for none enqueued later.
    """

    @property
    def relays_lengths(self) -> bool:
        """Whether the worker publishes lengths that only the device knows."""

    @property
    def seed_columns(self) -> tuple[SeedColumnSpec, ...]: ...

    def forward(
        self, batch: ForwardBatch, *, future_map: FutureMap, scope: Scope, on_publish: OnPublish
    ) -> WorkerOutput: ...


class PlainWorker:
    """Decodes one token per row and step, without drafts. It publishes no lengths: each step adds one to a row's
    length, which the schedule side does itself (invariant I5).
    """

    relays_lengths = False
    seed_columns: tuple[SeedColumnSpec, ...] = ()

    def __init__(self, *, model: Target, pool: KvPool, sampling_state: SamplingState, stream: Stream) -> None:
        self._model = model
        self._pool = pool
        self._sampling_state = sampling_state
        self._stream = stream

    def forward(
        self, batch: ForwardBatch, *, future_map: FutureMap, scope: Scope, on_publish: OnPublish
    ) -> WorkerOutput:
        output = WorkerOutput.of(batch)
        masked = output.masked
        tokens = torch.empty_like(batch.req_pool_indices)
        window = window_input(batch, tokens, self._pool, self._model.layer_group.name)
        compute = self._prepared(window)
        computed: Cell[TargetOutput] = Cell()

        def resolve() -> None:
            inputs = future_map.resolve_forward_inputs(batch.req_pool_indices, with_seeds=False)
            tokens.copy_(inputs.tokens)
            output.is_invalid.set(inputs.is_invalid)

        def decode() -> None:
            computed.set(compute())
            if masked is None:
                draw()

        def draw() -> None:
            target = computed.get()
            sampled = sample(
                target.logits,
                batch.req_pool_indices,
                batch.seq_lens,
                self._sampling_state,
                batch.sampling,
                masks=None if masked is None else masked.masks.get(),
                found=target.largest,
            )
            output.sampled.set(sampled)
            output.payload.set(RelayPayload(sampled.token_ids))

        self._stream.enqueue(resolve, scope)
        prepared = self._stream.record(scope)
        self._stream.enqueue(Measured(decode, step_figures(batch)), scope)
        computed_at = None if masked is None else self._stream.record(scope)

        def draw_later() -> None:
            assert masked is not None and computed_at is not None
            masked.marks.set((computed_at, self._stream.record(scope)))
            self._stream.enqueue(draw, scope)

        return replace(
            output,
            prepared=prepared,
            draw=None if masked is None else draw_later,
            input_ids=tokens,
            has_one_each=True,
            kept=(window, compute, computed),
        )

    def _prepared(self, window: ForwardInput) -> Callable[[], TargetOutput]:
        """Prepares the forward, and returns the function that runs it.

        If the preparation fails, that function raises the error, so that only its step fails.
        """
        try:
            return self._model.prepare(window)
        except Exception as error:
            return partial(_fail, error)


def _fail(error: Exception) -> TargetOutput:
    raise error


def step_figures(batch: ForwardBatch) -> dict[str, int]:
    """Returns a forward's figures for the timeline: rows, tokens that it computes, and the sum of sequence lengths."""
    num_tokens = batch.batch_size * batch.num_tokens
    return {"rows": batch.batch_size, "tokens": num_tokens, "context_tokens": batch.seq_lens_sum}


def window_input(
    batch: ForwardBatch,
    tokens: Tensor,
    pool: KvPool,
    group: str,
    *,
    num_before: int = 0,
    positions: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> ForwardInput:
    """Builds the input of a forward over `tokens` [B, M], which follow each entry's prefix. They may be [B] if M is 1.

    `num_before` tokens of the same step come between the prefix and `tokens`. `group` names the layer group whose KV
    the forward uses. For a chain `positions` and `tree_mask` are None. For a tree `positions` [B, M] are those of the
    tokens, and `tree_mask` [B, M, num_before + M] says which of the step's tokens each one attends.
    """
    num_rows, num_tokens = tokens.shape[0], 1 if tokens.dim() == 1 else tokens.shape[1]
    seq_lens, slots = batch.seq_lens, batch.out_cache_loc
    if num_before or num_tokens != batch.num_tokens:
        seq_lens = batch.prefix_lens + (num_before + num_tokens)
    if slots.shape[0] != num_rows * num_tokens:
        slots = slots.view(num_rows, -1)[:, num_before : num_before + num_tokens].flatten()
    if positions is None:
        positions = _chain_positions(batch, num_before, num_tokens)
    is_decode = num_tokens == 1 and tree_mask is None
    prefix_lens_cpu = batch.seq_lens_cpu + (num_before - batch.num_tokens)
    return ForwardInput(
        input_ids=_flat(tokens),
        positions=_flat(positions),
        out_cache_loc=slots,
        req_to_token=pool.rows.req_to_token,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=seq_lens,
        prefix_lens=None if is_decode else tuple(prefix_lens_cpu.tolist()),
        extend_lens=None if is_decode else (num_tokens,) * num_rows,
        max_seq_len=int(prefix_lens_cpu.max(initial=0)) + num_tokens,
        kv=pool.buffers[group],
        windows=pool.windows_beside(group),
        logits_rows=None,
        tree_mask=None if tree_mask is None else tree_mask.flatten(0, 1),
    )


def _flat(tokens: Tensor) -> Tensor:
    return tokens if tokens.dim() == 1 else tokens.flatten()


def _chain_positions(batch: ForwardBatch, num_before: int, num_tokens: int) -> Tensor:
    if not num_before and num_tokens == batch.num_tokens:
        return batch.positions
    window = torch.arange(num_before, num_before + num_tokens, device=batch.prefix_lens.device)
    return batch.prefix_lens.unsqueeze(1) + window
