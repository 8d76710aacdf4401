"""Mutants of the drawing of tokens under grammars. They break invariants I9 and I12."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import NOT_YET
from common.grammar.matcher import NOT_FORCED, Mask
from common.kv.pool import KvPool
from decode_service.forward import eagle_drafter
from decode_service.forward.eagle_drafter import EagleDrafter
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.schedule import scheduler
from decode_service.schedule.request import Request
from decode_service.schedule.results import AheadMatcher, ResultTaker
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.step import LaunchedStep, RowResults
from decode_service.speculate.spec_info import DraftTree
from tests.engine.mutants.kinds import instead_of

DraftOfTrees = Callable[..., DraftTree]
LookAhead = Callable[..., dict[Request, AheadMatcher]]


def masks_of_the_last_step(patch: pytest.MonkeyPatch) -> None:
    """Draws each step's tokens under the masks that its rows had one step before."""
    masks_of = scheduler.masks_of
    before: dict[Request, Mask] = {}

    def mutant(begun: Any, *args: Any, **options: Any) -> tuple[Mask, list[Request]]:
        masks, failed = masks_of(begun, *args, **options)
        entries = begun.batch.sampling.constrained
        of_entries = masks.reshape(len(entries), -1, masks.shape[1])
        for place, entry in enumerate(entries.tolist()):
            own = of_entries[place].copy()
            stale = before.get(begun.reqs[entry])
            if stale is not None and stale.shape == own.shape:
                of_entries[place] = stale
            before[begun.reqs[entry]] = own
        return masks, failed

    patch.setattr(scheduler, "masks_of", mutant)


@instead_of(scheduler, "masks_of")
def masks_of_another_row(masks_of: Callable[..., Any], *args: Any, **options: Any) -> tuple[Mask, list[Request]]:
    masks, failed = masks_of(*args, **options)
    return np.roll(masks, 1, axis=0), failed


@instead_of(scheduler, "forced_tokens")
def forced_tokens_one_too_far(
    forced_tokens: Callable[..., Any], *args: Any, **options: Any
) -> dict[Request, Sequence[int]]:
    """Draft forced tokens from the second one on."""
    return {req: run[1:] for req, run in forced_tokens(*args, **options).items() if run[1:]}


@instead_of(EagleDrafter, "draft")
def forced_tokens_have_twins(draft: DraftOfTrees, self: EagleDrafter, batch: ForwardBatch, *args: Any) -> DraftTree:
    """Leave the head's own draft in a tree beside the same token that a grammar forces."""
    tree = draft(self, batch, *args)
    if batch.forced is not None:
        tree.token_ids[:, 1] = tree.token_ids[:, 0]
    return tree


@instead_of(EagleDrafter, "draft")
def forced_tokens_are_not_read(draft: DraftOfTrees, self: EagleDrafter, batch: ForwardBatch, *args: Any) -> DraftTree:
    """Let the head read its own drafts in a chain of which some tokens are forced."""
    if batch.forced is None:
        return draft(self, batch, *args)
    own = draft(self, replace(batch, forced=None), *args).token_ids
    return DraftTree.chain(torch.where(batch.forced == NOT_FORCED, own, batch.forced))


@instead_of(eagle_drafter, "forward_input_of")
def forced_branches_are_not_read(
    forward_input_of: Callable[..., ForwardInput], batch: ForwardBatch, token_ids: Tensor, *args: Any, **options: Any
) -> ForwardInput:
    """Let the head read token 0 in a tree of which some tokens are forced."""
    read = token_ids if batch.forced is None else torch.zeros_like(token_ids)
    return forward_input_of(batch, read, *args, **options)


@instead_of(ResultTaker, "look_ahead")
def nobody_looks_ahead(*_: object) -> dict[Request, AheadMatcher]:
    """Leave the matchers before a step's tokens until it has ended, so that nothing is known to be forced after it."""
    return {}


@instead_of(ResultTaker, "look_ahead")
def matchers_ahead_stay_ahead(
    look_ahead: LookAhead, self: ResultTaker, step: LaunchedStep
) -> dict[Request, AheadMatcher]:
    """Let the matchers themselves look ahead, not copies."""
    ahead = look_ahead(self, step)
    for req, each in ahead.items():
        req.matcher = each.matcher
    return ahead


@instead_of(ResultTaker, "look_ahead")
def tokens_accepted_ahead_are_accepted_again(
    look_ahead: LookAhead, self: ResultTaker, step: LaunchedStep
) -> dict[Request, AheadMatcher]:
    return {req: replace(each, num_tokens=0) for req, each in look_ahead(self, step).items()}


@instead_of(ResultTaker, "take_first_tokens")
def first_token_not_accepted(
    take: Callable[..., None], self: ResultTaker, prebuilt: ScheduleBatch, results: RowResults
) -> None:
    """Leaves the matcher where it was before the first token, which prefill has drawn."""
    matchers = [req.matcher for req in prebuilt.reqs]
    for req in prebuilt.reqs:
        req.matcher = None
    take(self, prebuilt, results)
    for req, matcher in zip(prebuilt.reqs, matchers, strict=True):
        req.matcher = matcher


@instead_of(KvPool, "use_until")
def rows_not_held_until_their_draw(
    use_until: Callable[..., None], self: KvPool, rows: Any, event: Any, *args: Any
) -> None:
    """Lets a step's rows be reused between the step's launch and its draw. They are held only from the draw on."""
    if event is not NOT_YET:
        use_until(self, rows, event, *args)
