"""Runs one forward over chunks of prompts: the target, the first tokens, then the draft head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from common.device.stream import Cell, Event, Measured, Scope, Stream
from common.draft.extend import NextTokens, extend_draft
from common.draft.head import DraftHead
from common.draft.seed import DraftSeed
from common.engine import EngineParts, warm_kernels
from common.kv.pool import KvPool
from common.prompts.chunk_batch import ChunkBatch, PromptT, Scores
from common.sampling.operators import Sampled, sample, sampled_to_host
from common.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Computed:
    """A forward's results, on the host: first tokens and draft seeds of the prompts whose last chunk is in it, and the
    scores of the batch's `scored_ids`, or None if there are none.

    `seeds` maps the name of each column of the draft seeds to its values.
    """

    sampled: Sampled
    seeds: Mapping[str, Tensor]
    scores: Scores | None


@dataclass(frozen=True, slots=True)
class LaunchedChunks:
    """A launched forward. Read `computed` only after an event that was recorded on the stream after the launch.

    `layers_written` has one pair (layers, event) for each range of the target's layers, in order. The KV of these
    layers is in the pool after the event. There are no pairs if the caller asked for no events.
    """

    computed: Cell[Computed]
    layers_written: Sequence[tuple[range, Event]]


class Meanwhile(Protocol):
    """Callbacks that run while a forward is being launched. They must not raise: an error would fail the forward."""

    def layers_written(self, layers: range, event: Event) -> None:
        """Reports a range of the target's layers, in order. Their KV is in the pool after `event`."""

    def layer_launched(self) -> None:
        """Called after each layer is launched, on devices where the engine thread launches the layers.

        The driver's queue may be full then; in that case work done here delays nothing.
        """


class PromptWorker:
    """Launches forwards over chunks of prompts. `forward` runs on the engine thread, and only enqueues work.

    `draft_topk` is the number of first drafts kept for each prompt.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        draft_topk: int,
        pool: KvPool,
        sampling_state: SamplingState,
        stream: Stream,
    ) -> None:
        self._parts = parts
        self._model = parts.model
        self._draft = parts.draft
        self._draft_topk = draft_topk
        self._device = parts.device
        self._pool = pool
        self._sampling_state = sampling_state
        self._stream = stream

    def compile_kernels(self, timeout_s: float) -> None:
        """Compiles the kernels that prompts need, before the first prompt. Raises PieceFailed or DeviceTimeout."""
        warm_kernels(
            self._parts,
            draft_topk=1,  # no prompt has a draft tree
            pool=self._pool,
            sampling_state=self._sampling_state,
            stream=self._stream,
            timeout_s=timeout_s,
        )

    def forward(
        self, batch: ChunkBatch[PromptT], scope: Scope, *, layers_per_event: int = 0, meanwhile: Meanwhile | None = None
    ) -> LaunchedChunks:
        """Enqueues the forward, which writes the KV of target and draft head to the pool.

        An event is recorded for every `layers_per_event` layers of the target; none if it is 0. Methods of `meanwhile`
        are called during the launch.
        """
        computed: Cell[Computed] = Cell()
        layers = _ranges(self._model.num_layers, layers_per_event) if layers_per_event else []

        @torch.inference_mode()
        def forward(milestones: Sequence[Callable[[], None]]) -> None:
            reached = dict(zip((part.stop - 1 for part in layers), milestones, strict=True))
            if meanwhile is not None and not self._device.runs_pieces_beside:
                reached = {
                    layer: partial(_each, [*([reached[layer]] if layer in reached else ()), meanwhile.layer_launched])
                    for layer in range(self._model.num_layers)
                }
            output = self._model.forward(batch.forward_input, on_layer_kv=reached)
            num_drawn = len(batch.sampled_entries)
            first = sample(
                output.logits[:num_drawn],
                batch.sampled_rows,
                batch.sampled_positions,
                self._sampling_state,
                batch.sampling,
                masks=batch.masks,
                found=None if output.largest is None else output.largest.first(num_drawn),
            )
            columns = {}
            if self._draft is not None:
                assert output.hidden is not None, "the target captures what the head reads"
                columns = self._extend_draft(self._draft, batch, output.hidden, first.token_ids).columns()
            seeds = {name: self._device.to_host(column) for name, column in columns.items()}
            scores = None
            if batch.scored_ids is not None:
                scored = Scores.of(output.logits[num_drawn:], batch.scored_ids, num_top=batch.num_top_scored)
                scores = scored.to_host(self._device)
            computed.set(Computed(sampled_to_host(self._device, first), seeds, scores))

        num_attended = sum(chunk.num_attended for chunk in batch.chunks)
        figures = {"chunks": len(batch.chunks), "tokens": batch.num_tokens, "attended": num_attended}
        events = self._stream.enqueue_with_milestones(
            Measured(forward, figures),
            len(layers),
            scope,
            None if meanwhile is None else lambda number, event: meanwhile.layers_written(layers[number], event),
        )
        return LaunchedChunks(computed, list(zip(layers, events, strict=True)))

    def _extend_draft(
        self, draft: DraftHead, batch: ChunkBatch[PromptT], captured: Tensor, first_token_ids: Tensor
    ) -> DraftSeed:
        """Runs the draft head over the chunks, on the forward stream. The head writes its KV.

        Returns the draft seeds of the R prompts whose last chunk is in this forward. `captured` are the target's hidden
        states at all tokens, and `first_token_ids` [R] the first tokens of those prompts.
        """
        logits_rows, following = batch.forward_input.logits_rows, batch.next_tokens
        assert logits_rows is not None and following.places is not None
        last = logits_rows[: len(batch.sampled_entries)]
        return extend_draft(
            draft,
            replace(batch.forward_input, kv=self._pool.buffers[draft.layer_group.name], windows=()),
            captured,
            next_tokens=NextTokens(
                following.ids.index_copy(0, following.places[last], first_token_ids), following.places
            ),
            last=last,
            rows=batch.sampled_rows,
            positions=batch.sampled_positions + 1,
            state=self._sampling_state,
            batch=batch.sampling,
            topk=self._draft_topk,
        )


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _ranges(num_layers: int, size: int) -> list[range]:
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
