"""One step of speculative decoding: draft, verify with the target, extend the draft head's KV.

stream:   resolve ─▶ draft ─▶ verify ─▶ publish ─▶ extend ─▶ (stash, by the scheduler)
                       │                  └─▶ the schedule side prepares the next step while extend runs
                       └─▶ grammars: the schedule side computes the masks while the target computes; then verify draws

The target draws its own token after every draft. The noise of a draw depends only on the request and the position, so
verification needs no rejection rule: a draft is accepted exactly when it equals the target's token, and the target's
tokens are committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.device.cell import Cell
from common.device.stream import Device, Measured, Scope, Stream
from common.device.upload import upload, upload_array
from common.draft.extend import NextTokens, extend_draft
from common.draft.head import DraftHead
from common.draft.seed import seed_columns
from common.kv.pool import KvPool
from common.model.target import Target, TargetOutput
from common.sampling.operators import Sampled, draw
from common.sampling.state import NO_SAMPLING, SamplingState
from decode_service.forward.draft_backlog import DraftBacklog, UnreadTokens
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap, RelayedInputs, RelayPayload
from decode_service.forward.worker import HostDrafts, HostTokens, OnPublish, WorkerOutput, step_figures, window_input
from decode_service.speculate.draft_tree import DraftTree
from decode_service.speculate.spec_info import SpecInfo


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A verification whose inputs are ready: D drafts for each row, and `compute`, the function that runs the target.

    `tree` holds the drafts. `positions` [B * (D + 1)] are those of each row's last committed token and its drafts.
    """

    tree: DraftTree
    positions: Tensor
    compute: Callable[[], TargetOutput]


@dataclass(frozen=True, slots=True)
class _Verified:
    """The target's results at W nodes of each entry, of which only the first `accept_lens` [B] are accepted.

    The first node is the entry's last committed token, which is always accepted; the others are drafts. `tokens`
    [B, W] are the tokens that the target drew after each node, and `captured` [B, W, states * H] its hidden states
    there (several of size H for each node). `new_seq_lens` [B] are the entries' lengths with the accepted tokens.
    """

    tokens: Tensor
    captured: Tensor
    accept_lens: Tensor
    new_seq_lens: Tensor


class SpeculativeWorker(ABC):
    """The base of speculating workers: runs draft, verify and extend. Subclasses define how to draft.

    It publishes the lengths of steps with drafts, which only their forwards know (invariant I3).
    """

    relays_lengths = True

    def __init__(
        self,
        *,
        model: Target,
        draft: DraftHead,
        spec_info: SpecInfo,
        device: Device,
        pool: KvPool,
        sampling_state: SamplingState,
        stream: Stream,
    ) -> None:
        self._model = model
        self._device = device
        self._draft = draft
        self._pool = pool
        self._state = sampling_state
        self._stream = stream
        self._backlog = DraftBacklog(
            max_rows=pool.rows.max_rows,
            max_lag=spec_info.max_draft_lag,
            num_values=draft.capture.num_states * model.hidden_size,
            dtype=model.dtype,
            torch_device=model.torch_device,
        )
        self._topk = spec_info.topk
        self.seed_columns = seed_columns(draft, topk=spec_info.topk)

    @abstractmethod
    def draft_tree(self, batch: ForwardBatch, spec_info: SpecInfo, inputs: RelayedInputs) -> DraftTree:
        """Drafts the forced tokens, and after them from the relayed draft seeds. Runs on the forward stream."""

    def forward(
        self, batch: ForwardBatch, *, future_map: FutureMap, scope: Scope, on_publish: OnPublish
    ) -> WorkerOutput:
        spec_info = batch.spec_info
        assert spec_info is not None
        relayed: Cell[RelayedInputs] = Cell()
        prepared: Cell[_Prepared] = Cell()
        verified: Cell[_Verified] = Cell()
        new_seq_lens: Cell[Tensor] = Cell()
        computed: Cell[TargetOutput] = Cell()
        output = WorkerOutput.of(batch)
        masked = output.masked

        def resolve() -> None:
            inputs = future_map.resolve_forward_inputs(batch.req_pool_indices, with_seeds=batch.has_drafts)
            relayed.set(inputs)
            output.is_invalid.set(inputs.is_invalid)
            if not batch.has_drafts:
                prepare(inputs, DraftTree.chain(inputs.tokens.new_empty((batch.batch_size, 0))))

        def draft() -> None:
            inputs = relayed.get()
            with torch.inference_mode():
                prepare(inputs, self.draft_tree(batch, spec_info, inputs))

        def prepare(inputs: RelayedInputs, tree: DraftTree) -> None:
            prepared.set(self._prepare(batch, inputs, tree))
            if masked is not None:
                to_host = self._device.to_host
                masked.drafts.set(HostDrafts(to_host(tree.token_ids), to_host(tree.parents)))

        def verify() -> None:
            with torch.inference_mode():
                computed.set(prepared.get().compute())
            if masked is None:
                accept()

        def accept() -> None:
            with torch.inference_mode():
                masks = None if masked is None else masked.masks.get()
                result = self._accept(batch, prepared.get(), computed.get(), masks, output)
                new_seq_lens.set(result.new_seq_lens)
                if batch.leaves_head_behind:
                    output.payload.set(self._leave_behind(batch, result))
                else:
                    verified.set(result)

        def extend() -> None:
            with torch.inference_mode():
                output.payload.set(self._extend(batch, spec_info, verified.get()))

        # Each piece of stream work takes the interpreter's lock from the engine's thread, so steps without drafts have
        # few.
        drafted_at = begin = self._stream.record(scope)
        self._stream.enqueue(resolve, scope)
        if batch.has_drafts:
            self._stream.enqueue(draft, scope)
        prepared_at = self._stream.record(scope)
        if batch.has_drafts:
            drafted_at = prepared_at
        self._stream.enqueue(Measured(verify, step_figures(batch)), scope)
        computed_at = None if masked is None else self._stream.record(scope)

        def follow() -> None:
            if batch.has_drafts:
                on_publish(new_seq_lens)
            extended_at = verified_at = self._stream.record(scope)
            if not batch.leaves_head_behind:
                self._stream.enqueue(extend, scope)
                extended_at = self._stream.record(scope)
            output.marks.set((begin, drafted_at, verified_at, extended_at))

        def draw() -> None:
            assert masked is not None and computed_at is not None
            masked.marks.set((computed_at, self._stream.record(scope)))
            self._stream.enqueue(accept, scope)
            follow()

        if masked is None:
            follow()
        return replace(
            output,
            prepared=prepared_at,
            draw=None if masked is None else draw,
            kept=(relayed, prepared, computed, verified),
        )

    def _prepare(self, batch: ForwardBatch, inputs: RelayedInputs, tree: DraftTree) -> _Prepared:
        nodes = torch.cat([inputs.tokens.unsqueeze(1), tree.token_ids], dim=1)
        window = window_input(
            batch,
            nodes,
            self._pool,
            self._model.layer_group.name,
            positions=None if tree.is_chain else batch.prefix_lens.unsqueeze(1) + tree.depths(),
            tree_mask=None if tree.is_chain else tree.mask,
        )
        return _Prepared(tree, window.positions, self._model.prepare(window))

    def _accept(
        self, batch: ForwardBatch, prepared: _Prepared, target: TargetOutput, masks: Tensor | None, output: WorkerOutput
    ) -> _Verified:
        """Draws the target's token after each node, and accepts the drafts that equal it."""
        tree, num_rows, num_nodes = prepared.tree, batch.batch_size, prepared.tree.num_nodes
        assert target.hidden is not None, "the target captures what the head reads"
        sampled = draw(
            target.logits,
            batch.req_pool_indices.repeat_interleave(num_nodes),
            prepared.positions + 1,
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
        captured = target.hidden.view(num_rows, num_nodes, -1)
        if not tree.is_chain:
            captured = captured.gather(1, path.unsqueeze(2).expand(-1, -1, captured.shape[2]))
            sampled = _along(path, sampled, batch, num_nodes)
            slots = batch.out_cache_loc.view(num_rows, -1)  # the KV of accepted nodes goes to where their positions are
            sources, destinations = slots.gather(1, path), slots[:, : path.shape[1]]
            self._pool.move_kv(sources.flatten(), destinations.flatten())
        tokens = sampled.token_ids.view(num_rows, -1)
        if batch.sampling.penalised.size:
            is_accepted = torch.arange(tokens.shape[1], device=tokens.device) < accept_lens.unsqueeze(1)
            entries = upload_array(batch.sampling.penalised, tokens.device)
            self._state.count_runs(batch.req_pool_indices[entries], tokens[entries], is_accepted[entries])
        output.sampled.set(sampled)
        output.accept_lens.set(accept_lens)
        if batch.has_drafts and output.masked is not None:
            output.masked.gained.set(HostTokens(self._device.to_host(tokens), self._device.to_host(accept_lens)))
        return _Verified(tokens, captured, accept_lens, batch.prefix_lens + accept_lens)

    def _extend(self, batch: ForwardBatch, spec_info: SpecInfo, verified: _Verified) -> RelayPayload:
        """Runs the head over all tokens that it has not read, the step's own included, and writes the head's KV.

        Returns each row's newest committed token, and the next step's draft seed if `spec_info.leaves_seed`. Without it
        a one-layer head computes no drafts. A head of several layers computes them nevertheless, because its layers
        read each other's drafts, and its seed is returned.
        """
        if batch.has_drafts:
            unread = self._accepted(batch, verified)
        else:
            self._leave_behind(batch, verified)
            unread = self._backlog.unread(batch, self._pool, self._draft.layer_group.name)
        num_ahead = self._draft.layer_group.num_layers - 1
        num_seeded = batch.batch_size if spec_info.leaves_seed or num_ahead else 0
        seed = extend_draft(
            self._draft,
            unread.window,
            unread.captured,
            next_tokens=NextTokens.of(unread.next_ids, unread.window, num_ahead=num_ahead),
            last=unread.last[:num_seeded],
            rows=batch.req_pool_indices[:num_seeded],
            positions=(verified.new_seq_lens + 1)[:num_seeded],
            state=self._state,
            batch=batch.sampling if num_seeded else NO_SAMPLING,
            topk=self._topk,
        )
        last_tokens = unread.next_ids[unread.last] if batch.has_drafts else verified.tokens[:, 0]
        return RelayPayload(last_tokens, seed.columns() if num_seeded else {})

    def _leave_behind(self, batch: ForwardBatch, verified: _Verified) -> RelayPayload:
        """Stores the results of a step without drafts for the head to read later. Returns the tokens, and no seed."""
        self._backlog.put(batch, verified.captured[:, 0], verified.tokens[:, 0])
        return RelayPayload(verified.tokens[:, 0])

    def _accepted(self, batch: ForwardBatch, verified: _Verified) -> UnreadTokens:
        """Returns the head's input after a step with drafts: the step's own tokens, of which `last` marks the last
        accepted one.

        An impossible number of accepted tokens is clamped here, so that it indexes only its own row's tokens. The host
        checks the number later and fails the row.
        """
        assert not batch.draft_lag.any(), "a step that drafts has seeds, and so a head that has read everything"
        num_rows, num_tokens = verified.tokens.shape
        starts = torch.arange(0, num_rows * num_tokens, num_tokens, device=verified.tokens.device)
        return UnreadTokens(
            window_input(batch, verified.tokens, self._pool, self._draft.layer_group.name),
            verified.captured.flatten(0, 1),
            verified.tokens.flatten(),
            starts + verified.accept_lens.clamp(1, num_tokens) - 1,
        )


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
