"""The worker of the decode engine: runs steps, which verify a drafter's proposals. Without drafts, a step only decodes.

stream:   resolve ─▶ draft ─▶ verify ─▶ publish ─▶ read ─▶ (stash, by the scheduler)
                                 │         └─▶ the schedule side prepares the next step while the drafter reads
                                 └─▶ grammars: the schedule side computes the masks while the target computes; then
                                     the tokens are drawn

The target draws its own token after every draft. The noise of a draw depends only on the request and the position, so
verification needs no rejection rule: a draft is accepted exactly when it equals the target's token, and the target's
tokens are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import Cell, Device, Event, Measured, Scope, Stream
from common.device.upload import upload, upload_array
from common.kv.pool import KvPool
from common.model.target import Target, TargetOutput
from common.sampling.operators import Sampled, draw, sample
from common.sampling.state import SamplingState
from decode_service.forward.drafter import Drafter, Reading, Verified, forced_or
from decode_service.forward.forward_batch import ForwardBatch, forward_input_of
from decode_service.forward.future_map import FutureMap, RelayedInputs, RelayPayload
from decode_service.speculate.spec_info import DraftTree

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

    The schedule side computes `masks`, as `draw` takes them, while the target computes. For them it needs the previous
    step's tokens, and this step's `drafts`, which are on the host when the step's inputs are ready. `marks` are the
    events where the forward ends and where the draw begins. If the step has drafts, the tokens `gained` are on the host
    when the lengths are published.
    """

    masks: Cell[Tensor] = field(default_factory=Cell)
    drafts: Cell[HostDrafts] = field(default_factory=Cell)
    marks: Cell[tuple[Event, Event]] = field(default_factory=Cell)
    gained: Cell[HostTokens] = field(default_factory=Cell)


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """The results of a step, in cells that its pieces (units of work on the stream) fill.

    `payload` is stashed for the next step. `sampled` holds the step's tokens: for each entry as many as it can gain.
    `accept_lens` [B] int64 says how many of them count; it is None if each entry has one. `is_invalid` [B] bool marks
    rows whose relayed input was unusable. `prepared` is the event at which the inputs are ready and only the forward
    remains. `reading` says how far the drafter reads. `marks` are the events where draft, verify and read begin and
    where read ends; None if no step of the service drafts. `input_ids` is a tensor made at the launch and filled by
    a piece. `kept` holds objects that must live until the step's end.

    If grammars constrain entries, `masked` is not None. Then the draw and what follows are enqueued by `draw`, which
    the schedule side calls when it has set the masks.
    """

    reading: Reading
    masked: MaskedDraw | None
    accept_lens: Cell[Tensor] | None
    marks: Cell[tuple[Event, ...]] | None
    payload: Cell[RelayPayload] = field(default_factory=Cell)
    sampled: Cell[Sampled] = field(default_factory=Cell)
    is_invalid: Cell[Tensor] = field(default_factory=Cell)
    prepared: Event | None = None
    draw: Callable[[], None] | None = None
    input_ids: Tensor | None = None
    kept: Sequence[object] = ()


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The drafts of a step, and the `positions` [B * nodes] of each row's last committed token and of its drafts."""

    tree: DraftTree
    positions: Tensor


class Worker:
    """Enqueues the steps that the scheduler launches. It runs on the engine thread and computes nothing there.

    The enqueued work waits for work that the schedule side enqueued before the launch, and for none enqueued later. A
    step with drafts publishes its lengths, which only its forward knows (invariant I3). One without drafts publishes
    none: it adds one token to each row, which the schedule side has counted already (invariant I5).
    """

    def __init__(
        self,
        *,
        model: Target,
        drafter: Drafter,
        device: Device,
        pool: KvPool,
        sampling_state: SamplingState,
        stream: Stream,
        speculates: bool,
    ) -> None:
        """Creates a worker. `speculates` means that some step may draft; then the times of all steps are marked."""
        self.drafter = drafter
        self._speculates = speculates
        self._model = model
        self._device = device
        self._pool = pool
        self._state = sampling_state
        self._stream = stream

    def forward(
        self, batch: ForwardBatch, *, future_map: FutureMap, scope: Scope, on_publish: OnPublish
    ) -> WorkerOutput:
        drafter, reading = self.drafter, self.drafter.launch(batch)
        output = WorkerOutput(
            reading=reading,
            masked=MaskedDraw() if batch.sampling.constrained.size else None,
            accept_lens=Cell() if batch.has_drafts else None,
            marks=Cell() if self._speculates else None,
        )
        masked, tokens = output.masked, None
        compute: Cell[Callable[[], TargetOutput]] = Cell()
        relayed: Cell[RelayedInputs] = Cell()
        drafted: Cell[_Drafted] = Cell()
        computed: Cell[TargetOutput] = Cell()
        verified: Cell[Verified] = Cell()
        new_seq_lens: Cell[Tensor] = Cell()
        if not batch.has_drafts:  # the target's input is known, except the tokens' values
            tokens = torch.empty_like(batch.req_pool_indices)
            compute.set(self._prepared(forward_input_of(batch, tokens, self._pool, self._group)))

        def resolve() -> None:
            inputs = future_map.resolve_forward_inputs(batch.req_pool_indices, with_seeds=batch.has_drafts)
            output.is_invalid.set(inputs.is_invalid)
            if tokens is None:
                relayed.set(inputs)
            else:
                tokens.copy_(inputs.tokens)

        def draft() -> None:
            inputs = relayed.get()
            with torch.inference_mode():
                tree = drafter.draft(batch, inputs)
                if batch.forced is not None and tree.is_chain:
                    tree = DraftTree.chain(forced_or(batch.forced, tree.token_ids))
                forward_input = self._verify_input(batch, inputs, tree)
                drafted.set(_Drafted(tree, forward_input.positions))
                compute.set(self._model.prepare(forward_input))
            if masked is not None:
                to_host = self._device.to_host
                masked.drafts.set(HostDrafts(to_host(tree.token_ids), to_host(tree.parents)))

        def verify() -> None:
            computed.set(compute.get()())
            if masked is None:
                accept()

        def accept() -> None:
            target, masks = computed.get(), None if masked is None else masked.masks.get()
            if batch.has_drafts:
                result = self._accept(batch, drafted.get(), target, masks, output)
                new_seq_lens.set(result.new_seq_lens)
            else:
                result = self._decode(batch, target, masks, output)
            verified.set(result)
            if not reading.computes:
                read()

        def read() -> None:
            result = verified.get()
            with torch.inference_mode():
                output.payload.set(RelayPayload(result.last_tokens(), drafter.read(batch, reading, result)))

        begin = None if output.marks is None else self._stream.record(scope)
        self._stream.enqueue(resolve, scope)
        if batch.has_drafts:
            self._stream.enqueue(draft, scope)
        prepared = self._stream.record(scope)
        self._stream.enqueue(Measured(verify, step_figures(batch)), scope)
        computed_at = None if masked is None else self._stream.record(scope)

        def follow() -> None:
            if batch.has_drafts:
                on_publish(new_seq_lens)
            if output.marks is None:
                return
            assert begin is not None
            read_at = verified_at = self._stream.record(scope)
            if reading.computes:
                self._stream.enqueue(read, scope)
                read_at = self._stream.record(scope)
            output.marks.set((begin, prepared if batch.has_drafts else begin, verified_at, read_at))

        def draw_later() -> None:
            assert masked is not None and computed_at is not None
            masked.marks.set((computed_at, self._stream.record(scope)))
            self._stream.enqueue(accept, scope)
            follow()

        if masked is None:
            follow()
        return replace(
            output,
            prepared=prepared,
            draw=None if masked is None else draw_later,
            input_ids=tokens,
            kept=(relayed, compute, drafted, computed, verified),
        )

    @property
    def _group(self) -> str:
        return self._model.layer_group.name

    def _prepared(self, forward_input: ForwardInput) -> Callable[[], TargetOutput]:
        """Prepares the forward, and returns the function that runs it.

        If the preparation fails, that function raises the error, so that only its step fails.
        """
        try:
            return self._model.prepare(forward_input)
        except Exception as error:
            return partial(_fail, error)

    def _verify_input(self, batch: ForwardBatch, inputs: RelayedInputs, tree: DraftTree) -> ForwardInput:
        """Returns the target's input: each row's last token, and the drafts after it."""
        return forward_input_of(
            batch,
            torch.cat([inputs.tokens.unsqueeze(1), tree.token_ids], dim=1),
            self._pool,
            self._group,
            positions=None if tree.is_chain else batch.prefix_lens.unsqueeze(1) + tree.depths(),
            tree_mask=None if tree.is_chain else tree.mask,
        )

    def _decode(
        self, batch: ForwardBatch, target: TargetOutput, masks: Tensor | None, output: WorkerOutput
    ) -> Verified:
        """Draws the one token of each entry, and counts it for penalties."""
        sampled = sample(
            target.logits,
            batch.req_pool_indices,
            batch.seq_lens,
            self._state,
            batch.sampling,
            masks=masks,
            found=target.largest,
        )
        output.sampled.set(sampled)
        captured = None if target.hidden is None else target.hidden.view(batch.batch_size, 1, -1)
        return Verified(sampled.token_ids.unsqueeze(1), batch.seq_lens, captured)

    @torch.inference_mode()
    def _accept(
        self, batch: ForwardBatch, drafted: _Drafted, target: TargetOutput, masks: Tensor | None, output: WorkerOutput
    ) -> Verified:
        """Draws the target's token after each node, and accepts the drafts that equal it."""
        tree, num_rows, num_nodes = drafted.tree, batch.batch_size, drafted.tree.num_nodes
        sampled = draw(
            target.logits,
            batch.req_pool_indices.repeat_interleave(num_nodes),
            drafted.positions + 1,
            self._state,
            batch.sampling.repeated(num_nodes),
            tree.ancestors() if batch.sampling.penalised.size else None,
            masks=masks,
            found=target.largest,
        )
        accepted = tree.accept(sampled.token_ids.view(num_rows, num_nodes))
        path, accept_lens = accepted.path, accepted.accept_lens
        if batch.undrafted:
            accept_lens = accept_lens.index_fill(0, upload(batch.undrafted, torch.int64, accept_lens.device), 1)
        captured = None if target.hidden is None else target.hidden.view(num_rows, num_nodes, -1)
        if not tree.is_chain:
            if captured is not None:
                captured = captured.gather(1, path.unsqueeze(2).expand(-1, -1, captured.shape[2]))
            sampled = _along(path, sampled, batch, num_nodes)
            slots = batch.out_cache_loc.view(num_rows, -1)  # the KV of accepted nodes moves to their positions' slots
            sources, destinations = slots.gather(1, path), slots[:, : path.shape[1]]
            self._pool.move_kv(sources.flatten(), destinations.flatten())
        tokens = sampled.token_ids.view(num_rows, -1)
        if batch.sampling.penalised.size:
            is_accepted = torch.arange(tokens.shape[1], device=tokens.device) < accept_lens.unsqueeze(1)
            entries = upload_array(batch.sampling.penalised, tokens.device)
            self._state.count_runs(batch.req_pool_indices[entries], tokens[entries], is_accepted[entries])
        output.sampled.set(sampled)
        assert output.accept_lens is not None
        output.accept_lens.set(accept_lens)
        if output.masked is not None:
            output.masked.gained.set(HostTokens(self._device.to_host(tokens), self._device.to_host(accept_lens)))
        return Verified(tokens, batch.prefix_lens + accept_lens, captured, accept_lens)


def _fail(error: Exception) -> TargetOutput:
    raise error


def step_figures(batch: ForwardBatch) -> dict[str, int]:
    """Returns a forward's figures for the timeline: rows, tokens that it computes, and the sum of sequence lengths."""
    num_tokens = batch.batch_size * batch.num_tokens
    return {"rows": batch.batch_size, "tokens": num_tokens, "context_tokens": batch.seq_lens_sum}


def _along(path: Tensor, sampled: Sampled, batch: ForwardBatch, num_nodes: int) -> Sampled:
    """Selects the tokens that were drawn after the nodes of `path` [B, W].

    `sampled` has the tokens drawn after all `num_nodes` nodes of each entry.
    """

    def nodes_of(entries: Tensor, first_nodes: Tensor) -> Tensor:
        return (first_nodes.unsqueeze(1) * num_nodes + path[entries]).flatten()

    every = torch.arange(batch.batch_size, device=path.device)
    nodes = nodes_of(every, every)
    token_ids, is_invalid = sampled.token_ids[nodes], sampled.is_invalid[nodes]
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return Sampled(token_ids, is_invalid)
    entries = upload_array(batch.sampling.with_logprobs, path.device)
    nodes = nodes_of(entries, torch.arange(entries.shape[0], device=path.device))
    return Sampled(token_ids, is_invalid, sampled.logprobs[nodes], sampled.top_ids[nodes], sampled.top_logprobs[nodes])
