"""EAGLE speculation with a chain of drafts: the target computes its own token at every drafted position.

stream:   resolve ─▶ draft ─▶ verify ─▶ publish ─▶ extend ─▶ (stash, by the scheduler)
                                          └─▶ the schedule side prepares the next step while extend runs

The noise that draws a token is a function of its position, so verification needs no rule of its own: a draft is
accepted exactly when it equals the target's token, and what is committed are the target's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.device.cell import Cell
from common.device.stream import Scope, Stream
from common.draft.head import DraftHead
from common.draft.seed import HIDDEN_STATES, TOPK_INDEX, make_seed, seed_columns
from common.kv.pool import KvPool
from common.model.attention import ForwardInput
from common.model.sampling import Ancestors, draw, propose
from common.model.sampling_state import SamplingState
from common.model.target import TargetModel
from decode_service.future_map import FutureMap, RelayedInputs, RelayPayload
from decode_service.schedule_batch import ForwardBatch, SpecInfo
from decode_service.worker import OnPublish, WorkerOutput, target_input


@dataclass(frozen=True, slots=True)
class _Verified:
    """`tokens` [B, M]: the target's own at each position of the window. `accept_lens` [B]: how many count."""

    tokens: Tensor
    hidden: Tensor
    accept_lens: Tensor
    new_seq_lens: Tensor


class EagleWorker:
    """A chain of `num_draft_tokens` from one head layer. Publishes lengths that only the forward knows (I3)."""

    relays_lengths = True

    def __init__(
        self,
        *,
        model: TargetModel,
        draft: DraftHead,
        num_draft_tokens: int,
        pool: KvPool,
        sampling_state: SamplingState,
        stream: Stream,
    ) -> None:
        assert num_draft_tokens >= 1 and draft.layer_group.num_layers == 1
        self._model = model
        self._draft = draft
        self._pool = pool
        self._state = sampling_state
        self._stream = stream
        self.seed_columns = seed_columns(draft)
        self.spec_info: SpecInfo | None = SpecInfo(num_draft_tokens)

    def forward(
        self, batch: ForwardBatch, *, future_map: FutureMap, scope: Scope, on_publish: OnPublish
    ) -> WorkerOutput:
        relayed: Cell[RelayedInputs] = Cell()
        drafted: Cell[Tensor] = Cell()
        verified: Cell[_Verified] = Cell()
        new_seq_lens: Cell[Tensor] = Cell()
        output = WorkerOutput.empty()

        def resolve() -> None:
            relayed.set(future_map.resolve_forward_inputs(batch.req_pool_indices))

        @torch.inference_mode()
        def draft() -> None:
            drafted.set(self._draft_chain(batch, relayed.get()))

        @torch.inference_mode()
        def verify() -> None:
            inputs = relayed.get()
            result = self._verify(batch, inputs, drafted.get(), output)
            verified.set(result)
            new_seq_lens.set(result.new_seq_lens)

        @torch.inference_mode()
        def extend() -> None:
            output.payload.set(self._extend(batch, verified.get()))

        for piece in (resolve, draft, verify):
            self._stream.enqueue(piece, scope)
        on_publish(new_seq_lens)
        self._stream.enqueue(extend, scope)
        return output

    def _draft_chain(self, batch: ForwardBatch, inputs: RelayedInputs) -> Tensor:
        """[B, k] target ids. Step j feeds draft j at the position before its own, where the head's KV of it goes."""
        assert batch.spec_info is not None
        token = inputs.seeds[TOPK_INDEX][:, 0]
        hidden = inputs.seeds[HIDDEN_STATES]
        slots = batch.out_cache_loc.view(batch.batch_size, -1)
        tokens = [token]
        for step in range(1, batch.spec_info.num_draft_tokens):
            positions = batch.prefix_lens + (step - 1)
            step_input = ForwardInput(
                input_ids=token,
                positions=positions,
                out_cache_loc=slots[:, step - 1],
                req_to_token=self._pool.rows.req_to_token,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=positions + 1,
                prefix_lens=None,
                extend_lens=None,
                max_seq_len=batch.max_seq_len,
                kv=self._pool.buffers[self._draft.layer_group.name],
                logits_rows=None,
            )
            hidden = self._draft.forward(step_input, hidden)
            token = propose(
                self._draft.logits(hidden),
                self._draft.token_ids,
                batch.req_pool_indices,
                positions + 2,
                self._state,
                batch.sampling,
            )
            tokens.append(token)
        return torch.stack(tokens, dim=1)

    def _verify(self, batch: ForwardBatch, inputs: RelayedInputs, drafted: Tensor, output: WorkerOutput) -> _Verified:
        num_rows, num_drafted = drafted.shape
        num_tokens = num_drafted + 1
        window = torch.cat([inputs.tokens.unsqueeze(1), drafted], dim=1)
        target = self._model.forward(target_input(batch, window.flatten(), self._pool, self._model.layer_group.name))
        assert target.hidden is not None, "the target captures what the head reads"
        sampled = draw(
            target.logits,
            batch.req_pool_indices.repeat_interleave(num_tokens),
            batch.positions + 1,
            self._state,
            batch.sampling.repeated(num_tokens),
            _chain_ancestors(drafted) if batch.sampling.penalised else None,
        )
        tokens = sampled.token_ids.view(num_rows, num_tokens)
        accept_lens = 1 + (drafted == tokens[:, :-1]).to(torch.int64).cumprod(dim=1).sum(dim=1)
        is_accepted = torch.arange(num_tokens, device=tokens.device) < accept_lens.unsqueeze(1)
        if batch.sampling.penalised:
            entries = torch.tensor(batch.sampling.penalised, device=tokens.device)
            self._state.count_runs(batch.req_pool_indices[entries], tokens[entries], is_accepted[entries])
        output.sampled.set(sampled)
        output.accept_lens.set(accept_lens)
        is_unusable = (sampled.is_invalid.view(num_rows, num_tokens) & is_accepted).any(dim=1)
        output.is_invalid.set(inputs.is_invalid | is_unusable)
        return _Verified(tokens, target.hidden, accept_lens, batch.prefix_lens + accept_lens)

    def _extend(self, batch: ForwardBatch, verified: _Verified) -> RelayPayload:
        """The head over the window, with the target's own states and tokens: its KV, and the next step's seed."""
        num_rows, num_tokens = verified.tokens.shape
        group = self._draft.layer_group.name
        window = target_input(batch, verified.tokens.flatten(), self._pool, group)
        hidden = self._draft.forward(window, self._draft.fuse(verified.hidden))
        rows = torch.arange(num_rows, device=hidden.device)
        last = verified.accept_lens - 1
        seed = make_seed(
            self._draft,
            hidden.view(num_rows, num_tokens, -1)[rows, last],
            rows=batch.req_pool_indices,
            positions=verified.new_seq_lens + 1,
            state=self._state,
            batch=batch.sampling,
        )
        return RelayPayload(verified.tokens[rows, last], seed.columns())


def _chain_ancestors(drafted: Tensor) -> Ancestors:
    """Of each token of the windows: token i is drawn after drafts 1 .. i."""
    num_rows, num_drafted = drafted.shape
    counted = torch.tril(torch.ones((num_drafted + 1, num_drafted), dtype=torch.int32, device=drafted.device), -1)
    return Ancestors(token_ids=drafted.repeat_interleave(num_drafted + 1, dim=0), counted=counted.repeat(num_rows, 1))
