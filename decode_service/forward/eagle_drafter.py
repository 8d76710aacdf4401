"""Drafting with EAGLE heads. A head of one layer drafts a chain or a tree; a head of several layers drafts a chain.

After each step the head reads the step's tokens with the target's hidden states (draft-extend): that writes the head's
KV, and leaves the draft seed: the next step's first drafts and the head's hidden state.

A forward of the head over one token per row is wasteful, because most of its time goes into reading the head's weights.
So a step without drafts only stores the target's hidden states and tokens, in the backlog. The head catches up in one
forward when a draft seed is wanted or a row's backlog is full. The engine's thread knows how many tokens of each row
are unread, because a step without drafts commits one token per row.

steps    no seed   no seed   no seed   seed
unread      0         1         2       3   ─▶ the head reads 4 tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.upload import upload_array
from common.draft.extend import NextTokens, extend_draft
from common.draft.head import DraftHead
from common.draft.seed import HIDDEN_STATES, TOPK_INDEX, TOPK_P, seed_columns
from common.grammar.matcher import NOT_FORCED
from common.kv.pool import KvPool
from common.model.target import Target
from common.sampling.operators import propose, propose_branches
from common.sampling.state import NO_SAMPLING, RowStart, SamplingState
from decode_service.forward.drafter import Drafter, Reading, Verified, forced_or
from decode_service.forward.forward_batch import ForwardBatch, forward_input_of
from decode_service.forward.future_map import RelayedInputs
from decode_service.speculate.spec_info import DraftTree, SpecInfo, Unread


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """T tokens for the head to read; the tokens of one row are adjacent.

    `captured` [T, states * H] are the target's hidden states at these tokens: those of several layers side by side,
    each of size H. `next_ids` [T] is the token that follows each, which the head reads together with it. `last` [B] is,
    for each entry of the batch, the index of its last token that counts; the entry's tokens after that one belong to
    rejected drafts.
    """

    forward_input: ForwardInput
    captured: Tensor
    next_ids: Tensor
    last: Tensor


class DraftBacklog:
    """Buffers of unread head inputs, with space for `max_unread` tokens per pool row.

    Only the forward stream uses them. Row 0 absorbs padding.
    """

    def __init__(
        self, *, max_rows: int, max_unread: int, num_values: int, dtype: torch.dtype, torch_device: torch.device
    ) -> None:
        shape = (max_rows + 1, max_unread)
        self._captured = torch.zeros((*shape, num_values), dtype=dtype, device=torch_device)
        self._next_ids = torch.zeros(shape, dtype=torch.int64, device=torch_device)

    def put(self, batch: ForwardBatch, num_unread: NDArray[np.int64], captured: Tensor, next_ids: Tensor) -> None:
        """Stores the single token that each row gained in a step without drafts, for the head to read later.

        `captured` [B, states * H] and `next_ids` [B] are as in `UnreadTokens`.
        """
        places = upload_array(num_unread, next_ids.device)
        self._captured[batch.req_pool_indices, places] = captured
        self._next_ids[batch.req_pool_indices, places] = next_ids

    def unread(self, batch: ForwardBatch, num_unread: NDArray[np.int64], pool: KvPool, group: str) -> UnreadTokens:
        """Returns the head's input for all tokens of the batch's rows that it has not read: the tokens, the target's
        hidden states, and the slots for the head's KV. Call it after `put`.

        `group` names the layer group of `pool` in which the head's KV lies.
        """
        num_tokens = num_unread + 1
        prefix_lens = batch.seq_lens_cpu - num_tokens
        stops = num_tokens.cumsum()
        entry = np.arange(len(num_tokens)).repeat(num_tokens)
        place = np.arange(len(entry)) - (stops - num_tokens).repeat(num_tokens)
        columns = (entry, place, prefix_lens.repeat(num_tokens) + place, stops - 1)
        on_device = upload_array(np.concatenate(columns), self._next_ids.device)
        entries, places, positions, last = on_device.split([len(column) for column in columns])
        rows = batch.req_pool_indices[entries]
        next_ids = self._next_ids[rows, places]
        forward_input = ForwardInput(
            input_ids=next_ids,
            positions=positions,
            out_cache_loc=pool.rows.req_to_token[rows, positions],
            req_to_token=pool.rows.req_to_token,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            prefix_lens=tuple(prefix_lens.tolist()),
            extend_lens=tuple(num_tokens.tolist()),
            max_seq_len=int(batch.seq_lens_cpu.max(initial=0)),
            kv=pool.buffers[group],
            logits_rows=None,
        )
        return UnreadTokens(forward_input, self._captured[rows, places], next_ids, last)


class HeadDrafter(Drafter):
    """The base of drafters with a draft head of the target `model`. Subclasses define `draft`.

    `spec_info` is the deepest speculation that a step may have. The head leaves fewer than `max_unread` tokens of a row
    unread.
    """

    def __init__(
        self,
        *,
        head: DraftHead,
        model: Target,
        spec_info: SpecInfo,
        max_unread: int,
        pool: KvPool,
        sampling_state: SamplingState,
    ) -> None:
        self._head = head
        self._pool = pool
        self._state = sampling_state
        self._topk = spec_info.topk
        self._max_unread = max_unread
        self._num_unread = np.zeros(pool.rows.max_rows + 1, np.int64)
        self._backlog = DraftBacklog(
            max_rows=pool.rows.max_rows,
            max_unread=max_unread,
            num_values=head.capture.num_states * model.hidden_size,
            dtype=model.dtype,
            torch_device=model.torch_device,
        )
        self.seed_columns = seed_columns(head, topk=spec_info.topk)

    def begin(self, starts: Sequence[RowStart]) -> None:
        self._num_unread[[start.row for start in starts]] = 0  # the head's KV and the seed came with the row

    def unread(self, rows: NDArray[np.int64]) -> Unread:
        return Unread(self._num_unread[rows], self._max_unread)

    def launch(self, batch: ForwardBatch) -> Reading:
        unread = self.unread(batch.rows)
        reads = unread.are_read(batch.spec_info)
        num_left = np.zeros_like(batch.rows) if reads else unread.num_tokens + 1
        reading = Reading(unread, num_left, computes=reads)
        self._num_unread[batch.rows] = reading.num_left
        return reading

    def read(self, batch: ForwardBatch, reading: Reading, verified: Verified) -> Mapping[str, Tensor]:
        """Runs the head over all tokens that it has not read, the step's own included, and writes the head's KV. If
        `reading` leaves the step's tokens unread, it only stores them.

        Returns the next step's draft seed if `batch.spec_info.leaves_seed`. Without it a one-layer head computes no
        drafts. A head of several layers computes them nevertheless, because its layers read each other's drafts, and
        its seed is returned.
        """
        assert verified.captured is not None, "the target captures what the head reads"
        group = self._head.layer_group
        if batch.has_drafts:
            unread = self._accepted(batch, reading, verified, verified.captured)
        else:
            self._backlog.put(batch, reading.unread.num_tokens, verified.captured[:, 0], verified.tokens[:, 0])
            if not reading.computes:
                return {}
            unread = self._backlog.unread(batch, reading.unread.num_tokens, self._pool, group.name)
        num_ahead = group.num_layers - 1
        num_seeded = batch.batch_size if batch.spec_info.leaves_seed or num_ahead else 0
        seed = extend_draft(
            self._head,
            unread.forward_input,
            unread.captured,
            next_tokens=NextTokens.of(unread.next_ids, unread.forward_input, num_ahead=num_ahead),
            last=unread.last[:num_seeded],
            rows=batch.req_pool_indices[:num_seeded],
            positions=(verified.new_seq_lens + 1)[:num_seeded],
            state=self._state,
            batch=batch.sampling if num_seeded else NO_SAMPLING,
            topk=self._topk,
        )
        return seed.columns() if num_seeded else {}

    def _accepted(self, batch: ForwardBatch, reading: Reading, verified: Verified, captured: Tensor) -> UnreadTokens:
        """Returns the head's input after a step with drafts: all tokens of the step, with the index of each row's last
        accepted one.
        """
        assert not reading.unread.num_tokens.any(), "a step that drafts has seeds, so the head has read everything"
        num_rows, num_tokens = verified.tokens.shape
        starts = torch.arange(0, num_rows * num_tokens, num_tokens, device=verified.tokens.device)
        return UnreadTokens(
            forward_input_of(batch, verified.tokens, self._pool, self._head.layer_group.name),
            captured.flatten(0, 1),
            verified.tokens.flatten(),
            starts + verified.accept_lens - 1,
        )


@dataclass(frozen=True, slots=True)
class _ChainStep:
    """The input of the head's forward that drafts one level of a chain. The input tokens are filled in later.

    `drafted_positions` [B] are the positions of the drafted tokens.
    """

    forward_input: ForwardInput
    drafted_positions: Tensor


class EagleDrafter(HeadDrafter):
    """Drafts with a one-layer head, which is run once more for each level after the first.

    The tokens of one level are the input that drafts the next. The KV that the head writes meanwhile is temporary:
    draft-extend, the head's forward over the accepted tokens, replaces it.
    """

    def draft(self, batch: ForwardBatch, inputs: RelayedInputs) -> DraftTree:
        if self._topk == 1:
            return DraftTree.chain(self._draft_chain(batch, inputs))
        return self._draft_branches(batch, inputs)

    def _draft_chain(self, batch: ForwardBatch, inputs: RelayedInputs) -> Tensor:
        """Returns the drafts of each row, [B, steps], as token ids of the target's vocabulary.

        The head reads the forced tokens, so what it drafts after them goes on from there.
        """
        num_steps = batch.spec_info.num_steps
        if batch.forced is not None and (batch.num_forced == num_steps).all():
            return batch.forced
        forced = None if batch.forced is None else batch.forced.unbind(1)
        token, hidden = inputs.seeds[TOPK_INDEX][:, 0], inputs.seeds[HIDDEN_STATES]
        if forced is not None:
            token = forced_or(forced[0], token)
        if num_steps == 1:
            return token.unsqueeze(1)
        tokens = [token]
        for level, step in enumerate(self._chain_steps(batch, num_steps - 1), start=1):
            output = self._head.step(replace(step.forward_input, input_ids=token), hidden)
            hidden = output.hidden
            token = propose(
                output.logits,
                self._head.token_ids,
                batch.req_pool_indices,
                step.drafted_positions,
                self._state,
                batch.sampling,
            )
            if forced is not None:
                token = forced_or(forced[level], token)
            tokens.append(token)
        return torch.stack(tokens, dim=1)

    def _chain_steps(self, batch: ForwardBatch, num_steps: int) -> Iterator[_ChainStep]:
        """Yields the inputs of the `num_steps` levels after the first.

        The tensors of all levels are computed together, because each operator call costs time.
        """
        positions = batch.positions.view(batch.batch_size, -1).t()[:num_steps].contiguous()
        slots = batch.out_cache_loc.view(batch.batch_size, -1).t()[:num_steps].contiguous()
        columns = zip(*(column.unbind() for column in (positions, slots, positions + 1, positions + 2)), strict=True)
        before = int(batch.seq_lens_cpu.max(initial=0)) - batch.num_tokens
        for number, (own, own_slots, seq_lens, drafted) in enumerate(columns, start=1):
            forward_input = ForwardInput(
                input_ids=own,  # replaced once the token is known
                positions=own,
                out_cache_loc=own_slots,
                req_to_token=self._pool.rows.req_to_token,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=seq_lens,
                prefix_lens=None,
                extend_lens=None,
                max_seq_len=before + number,
                kv=self._pool.buffers[self._head.layer_group.name],
                logits_rows=None,
            )
            yield _ChainStep(forward_input, drafted)

    def _draft_branches(self, batch: ForwardBatch, inputs: RelayedInputs) -> DraftTree:
        """Drafts a tree and returns it. On each level the `topk` likeliest paths continue.

        The tree that is returned consists of the `num_draft_tokens` likeliest of all drafts. Forced tokens have the
        probability 1, so their path is the first beam of each level.
        """
        num_rows, topk, spec_info = batch.batch_size, self._topk, batch.spec_info
        device = inputs.tokens.device
        # All drafts so far, [B, C]: token, its probability multiplied by its ancestors', and its parent (-1: the root).
        ids, probs = inputs.seeds[TOPK_INDEX], inputs.seeds[TOPK_P]
        if batch.forced is not None:
            ids, probs = _forced_first(batch.forced[:, 0], ids, probs)
        parents = torch.full_like(ids, -1)
        # The level's beams, [B, topk], as indices of drafts; and the mask of earlier beams that each one attends.
        beams = torch.arange(topk, device=device).expand(num_rows, -1)
        hidden = inputs.seeds[HIDDEN_STATES].unsqueeze(1).expand(-1, topk, -1)
        mask = torch.eye(topk, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
        rows = batch.req_pool_indices.repeat_interleave(topk)
        sampling = batch.sampling.repeated(topk)
        for level in range(1, spec_info.num_steps):
            positions = (batch.prefix_lens + (level - 1)).unsqueeze(1).expand(-1, topk)
            step = forward_input_of(
                batch,
                ids.gather(1, beams),
                self._pool,
                self._head.layer_group.name,
                num_before=(level - 1) * topk,
                positions=positions,
                tree_mask=mask,
            )
            output = self._head.step(step, hidden.flatten(0, 1))
            child_ids, child_probs = propose_branches(
                output.logits,
                self._head.token_ids,
                rows,
                step.positions + 2,
                self._state,
                sampling,
                topk=topk,
            )
            child_ids, child_probs = child_ids.view(num_rows, topk, topk), child_probs.view(num_rows, topk, topk)
            if batch.forced is not None:
                first_ids, first_probs = _forced_first(batch.forced[:, level], child_ids[:, 0], child_probs[:, 0])
                child_ids = torch.cat([first_ids.unsqueeze(1), child_ids[:, 1:]], dim=1)
                child_probs = torch.cat([first_probs.unsqueeze(1), child_probs[:, 1:]], dim=1)
            level_probs = (child_probs * probs.gather(1, beams).unsqueeze(2)).flatten(1)
            num_candidates = ids.shape[1]
            ids = torch.cat([ids, child_ids.flatten(1)], dim=1)
            probs = torch.cat([probs, level_probs], dim=1)
            parents = torch.cat([parents, beams.repeat_interleave(topk, dim=1)], dim=1)
            best = level_probs.topk(topk, dim=1).indices
            beams = best + num_candidates
            parent_beams = best // topk
            hidden = output.hidden.view(num_rows, topk, -1).gather(
                1, parent_beams.unsqueeze(2).expand(-1, -1, hidden.shape[2])
            )
            inherited = mask.gather(1, parent_beams.unsqueeze(2).expand(-1, -1, mask.shape[2]))
            itself = torch.eye(topk, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
            mask = torch.cat([inherited, itself], dim=2)
        # Ties go to the earlier draft. A parent is never less likely than its child, so it is taken before it.
        ranked = probs.sort(dim=1, descending=True, stable=True).indices
        taken = ranked[:, : spec_info.num_draft_tokens].sort(dim=1).values
        parent_candidates = parents.gather(1, taken)
        parent_nodes = torch.searchsorted(taken, parent_candidates) + 1
        return DraftTree.of(
            ids.gather(1, taken),
            parent_nodes.masked_fill(parent_candidates < 0, 0),
            num_levels=spec_info.num_steps,
        )


class MultiLayerEagleDrafter(HeadDrafter):
    """Drafts with a head of several layers. Layer i drafts the i-th token of the chain.

    All drafts of a step are in the draft seed that the relay holds for it: the head made them in the step before. KV
    that a layer wrote for rejected drafts is not removed.
    """

    def draft(self, batch: ForwardBatch, inputs: RelayedInputs) -> DraftTree:
        return DraftTree.chain(inputs.seeds[TOPK_INDEX][:, : batch.spec_info.num_steps])


def _forced_first(forced: Tensor, ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the candidates of one level [B, topk] with the forced token [B], where there is one, as the first and the
    only likely one. The others differ from it.
    """
    is_forced = (forced != NOT_FORCED).unsqueeze(1)
    others = torch.where(ids == forced.unsqueeze(1), ids[:, :1], ids)[:, 1:]
    certain = torch.zeros_like(probs)
    certain[:, 0] = 1.0
    return (
        torch.where(is_forced, torch.cat([forced.unsqueeze(1), others], dim=1), ids),
        torch.where(is_forced, certain, probs),
    )
