"""Mutants of speculation (one rule removed each). They change tokens, accepted drafts, or the seeds of the next
drafts.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.mtp import MtpHead
from common.draft.seed import DraftSeed
from common.kv.pool import KvPool
from common.sampling import operators as sampling
from common.sampling.operators import Largest, Sampled
from common.sampling.state import Ancestors, SamplingBatch, SamplingState
from decode_service.forward import eagle_drafter, worker
from decode_service.speculate.spec_info import AcceptedPath, DraftTree

Mutant = Callable[[pytest.MonkeyPatch], None]

# ---- the target's draws -----------------------------------------------------------------------------------------


def _target_draws(patch: pytest.MonkeyPatch, mutant: Callable[..., Sampled]) -> None:
    """Replaces the `draw` that verification calls. `mutant` gets the original `draw` first, and then its arguments
    except `found`, which only saves work.
    """
    draw = worker.draw

    def drawn(
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingState,
        batch: SamplingBatch,
        ancestors: Ancestors | None = None,
        *,
        found: Largest | None,
    ) -> Sampled:
        return mutant(draw, logits, rows, positions, state, batch, ancestors)

    patch.setattr(worker, "draw", drawn)


def target_draws_one_position_early(patch: pytest.MonkeyPatch) -> None:
    _target_draws(patch, lambda draw, logits, rows, positions, *rest: draw(logits, rows, positions - 1, *rest))


def target_draws_all_tokens_with_one_noise(patch: pytest.MonkeyPatch) -> None:
    def mutant(draw: Any, logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, *rest: Any) -> Sampled:
        same = copy.copy(state)
        same.token_ids = torch.zeros_like(state.token_ids)
        drawn: Sampled = draw(logits, rows, positions, same, *rest)
        return drawn

    _target_draws(patch, mutant)


def _skipped_on_draft_rows(patch: pytest.MonkeyPatch, part: str) -> None:
    """Applies `part`, a field of SamplingBatch, to the first node of each request only."""

    def mutant(
        draw: Any, logits: Tensor, rows: Tensor, positions: Tensor, state: Any, batch: Any, rest: Any
    ) -> Sampled:
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), rows[1:] != rows[:-1]]).numpy()
        entries = getattr(batch, part)
        firsts = dataclasses.replace(batch, **{part: entries[is_first[entries]]})
        drawn: Sampled = draw(logits, rows, positions, state, firsts, rest)
        return drawn

    _target_draws(patch, mutant)


def penalties_skipped_on_draft_rows(patch: pytest.MonkeyPatch) -> None:
    _skipped_on_draft_rows(patch, "penalised")


def bias_skipped_on_draft_rows(patch: pytest.MonkeyPatch) -> None:
    _skipped_on_draft_rows(patch, "biased")


def min_tokens_skipped_on_draft_rows(patch: pytest.MonkeyPatch) -> None:
    _skipped_on_draft_rows(patch, "min_length")


def top_p_skipped_on_draft_rows(patch: pytest.MonkeyPatch) -> None:
    _skipped_on_draft_rows(patch, "truncated")


def ancestors_not_penalised(patch: pytest.MonkeyPatch) -> None:
    _target_draws(patch, lambda draw, *rest: draw(*rest[:-1], None))


def rejected_tokens_counted(patch: pytest.MonkeyPatch) -> None:
    count_runs = SamplingState.count_runs

    def mutant(self: SamplingState, rows: Tensor, token_ids: Tensor, is_counted: Tensor) -> None:
        count_runs(self, rows, token_ids, torch.ones_like(is_counted))

    patch.setattr(SamplingState, "count_runs", mutant)


# ---- acceptance -------------------------------------------------------------------------------------------------


def draft_committed_unverified(patch: pytest.MonkeyPatch) -> None:
    """Commits the first rejected draft in place of the target's token."""
    accept = DraftTree.accept

    def mutant(self: DraftTree, target_ids: Tensor) -> AcceptedPath:
        accepted = accept(self, target_ids)
        rows = torch.arange(target_ids.shape[0])
        node = accepted.path[rows, accepted.accept_lens - 1]
        is_child = self.parents == node.unsqueeze(1)
        child = is_child.to(torch.int8).argmax(dim=1)
        committed = torch.where(is_child.any(dim=1), self.token_ids[rows, child], target_ids[rows, node])
        target_ids[rows, node] = committed
        return accept(self, target_ids)

    patch.setattr(DraftTree, "accept", mutant)


def refused_draft_redrawn(patch: pytest.MonkeyPatch) -> None:
    """Replaces a rejected draft by a token drawn from the whole distribution, instead of from the part that acceptance
    leaves.
    """
    accept, draw = DraftTree.accept, worker.draw
    redrawn: list[Tensor] = []

    def drawn(logits: Tensor, rows: Tensor, positions: Tensor, *rest: Any, **known: Any) -> Sampled:
        redrawn[:] = [draw(logits.clone(), rows, positions + 1_000_000, *rest).token_ids]
        return draw(logits, rows, positions, *rest, **known)

    def mutant(self: DraftTree, target_ids: Tensor) -> AcceptedPath:
        accepted = accept(self, target_ids)
        rows = torch.arange(target_ids.shape[0])
        node = accepted.path[rows, accepted.accept_lens - 1]
        is_refused = (self.parents == node.unsqueeze(1)).any(dim=1)
        other = redrawn[0].view_as(target_ids)[rows, node]
        target_ids[rows, node] = torch.where(is_refused, other, target_ids[rows, node])
        return accepted

    patch.setattr(worker, "draw", drawn)
    patch.setattr(DraftTree, "accept", mutant)


def token_after_a_refused_draft_committed(patch: pytest.MonkeyPatch) -> None:
    accept = DraftTree.accept

    def mutant(self: DraftTree, target_ids: Tensor) -> AcceptedPath:
        accepted = accept(self, target_ids)
        return AcceptedPath(accepted.path, (accepted.accept_lens + 1).clamp(max=accepted.path.shape[1]))

    patch.setattr(DraftTree, "accept", mutant)


def accepted_without_its_parent(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: DraftTree, target_ids: Tensor) -> AcceptedPath:
        is_accepted = torch.ones(target_ids.shape, dtype=torch.bool)
        is_accepted[:, 1:] = self.token_ids == target_ids.gather(1, self.parents)
        path = is_accepted.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
        path = path[:, : self.num_levels + 1]
        return AcceptedPath(path, is_accepted.sum(dim=1).clamp(max=path.shape[1]))

    patch.setattr(DraftTree, "accept", mutant)


def kv_of_the_path_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvPool, "move_kv", lambda self, sources, destinations: None)


def verify_mask_is_causal(patch: pytest.MonkeyPatch) -> None:
    forward_input_of = worker.forward_input_of

    def mutant(*arguments: Any, **keywords: Any) -> ForwardInput:
        return dataclasses.replace(forward_input_of(*arguments, **keywords), tree_mask=None)

    patch.setattr(worker, "forward_input_of", mutant)


def all_tokens_drawn_with_one_noise(patch: pytest.MonkeyPatch) -> None:
    """Uses the same noise for all tokens of the vocabulary, with or without drafts. The output is the same with both,
    but is no sample of the distribution.
    """
    noise = sampling.gumbel_noise
    patch.setattr(sampling, "gumbel_noise", lambda keys, token_ids: noise(keys, torch.zeros_like(token_ids)))


# ---- drafts -----------------------------------------------------------------------------------------------------


def _drafts_draw(patch: pytest.MonkeyPatch, mutant: Callable[..., Tensor]) -> None:
    """Replaces `coupled_logits`, which `propose` and `propose_branches` use. `mutant` gets the original first, then its
    arguments.
    """
    coupled = sampling.coupled_logits
    patch.setattr(sampling, "coupled_logits", lambda *arguments: mutant(coupled, *arguments))


def drafts_draw_one_position_late(patch: pytest.MonkeyPatch) -> None:
    _drafts_draw(
        patch, lambda coupled, logits, ids, rows, positions, *rest: coupled(logits, ids, rows, positions + 1, *rest)
    )


def drafts_draw_all_tokens_with_one_noise(patch: pytest.MonkeyPatch) -> None:
    """Draws all siblings of a draft tree with the same noise, so that it no longer tells which of them the target will
    draw.
    """
    _drafts_draw(patch, lambda coupled, logits, ids, *rest: coupled(logits, torch.zeros_like(ids), *rest))


def drafts_draw_by_place_in_their_vocabulary(patch: pytest.MonkeyPatch) -> None:
    _drafts_draw(patch, lambda coupled, logits, ids, *rest: coupled(logits, torch.arange(ids.shape[0]), *rest))


def _draft_extend(patch: pytest.MonkeyPatch, mutant: Callable[..., DraftSeed]) -> None:
    """Replaces the decode side's `extend_draft`. `mutant` gets the original first, then its arguments."""
    extend_draft = eagle_drafter.extend_draft
    patch.setattr(eagle_drafter, "extend_draft", lambda *given, **named: mutant(extend_draft, *given, **named))


def seed_of_the_windows_last_row(patch: pytest.MonkeyPatch) -> None:
    def mutant(extend_draft: Any, head: Any, window: ForwardInput, captured: Tensor, **named: Any) -> DraftSeed:
        num_tokens = captured.shape[0] // named["rows"].shape[0]
        last = torch.arange(num_tokens - 1, captured.shape[0], num_tokens)
        seed: DraftSeed = extend_draft(head, window, captured, **{**named, "last": last})
        return seed

    _draft_extend(patch, mutant)


def states_of_other_nodes_extended(patch: pytest.MonkeyPatch) -> None:
    _draft_extend(
        patch,
        lambda extend_draft, head, window, captured, **named: extend_draft(head, window, captured.roll(1, 0), **named),
    )


def drafted_kv_left_in_place(patch: pytest.MonkeyPatch) -> None:
    """Discards the KV that draft-extend computes for the verified tokens, so the head keeps reading the KV that it
    wrote while drafting.
    """

    def mutant(extend_draft: Any, head: Any, window: ForwardInput, captured: Tensor, **named: Any) -> DraftSeed:
        nowhere = torch.zeros_like(window.out_cache_loc)
        seed: DraftSeed = extend_draft(head, dataclasses.replace(window, out_cache_loc=nowhere), captured, **named)
        return seed

    _draft_extend(patch, mutant)


def draft_mask_is_causal(patch: pytest.MonkeyPatch) -> None:
    forward_input_of = eagle_drafter.forward_input_of

    def mutant(*arguments: Any, **keywords: Any) -> ForwardInput:
        return dataclasses.replace(forward_input_of(*arguments, **keywords), tree_mask=None)

    patch.setattr(eagle_drafter, "forward_input_of", mutant)


def ids_not_shifted_per_layer(patch: pytest.MonkeyPatch) -> None:
    """Gives every MTP layer the first layer's input tokens."""
    forward = MtpHead.forward
    first = threading.local()  # prefill and decode each have their own

    def mutant(self: MtpHead, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        if layer == 0:
            first.input_ids = batch.input_ids
        return forward(self, dataclasses.replace(batch, input_ids=first.input_ids), hidden, layer=layer)

    patch.setattr(MtpHead, "forward", mutant)
