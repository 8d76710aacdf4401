"""Mutants of the drawing of tokens under grammars. They break invariants I9 and I12."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import NOT_YET
from common.grammar.matcher import Mask
from common.kv.pool import KvPool
from decode_service.forward import eagle_worker
from decode_service.forward.eagle_worker import EagleWorker
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.schedule import scheduler
from decode_service.schedule.request import Request
from decode_service.schedule.results import AheadMatcher, ResultTaker, StepInFlight


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


def masks_of_another_row(patch: pytest.MonkeyPatch) -> None:
    masks_of = scheduler.masks_of

    def mutant(*args: Any, **options: Any) -> tuple[Mask, list[Request]]:
        masks, failed = masks_of(*args, **options)
        return np.roll(masks, 1, axis=0), failed

    patch.setattr(scheduler, "masks_of", mutant)


def forced_tokens_one_too_far(patch: pytest.MonkeyPatch) -> None:
    """Draft forced tokens from the second one on."""
    forced_tokens = scheduler.forced_tokens

    def mutant(*args: Any, **options: Any) -> dict[Request, Sequence[int]]:
        return {req: run[1:] for req, run in forced_tokens(*args, **options).items() if run[1:]}

    patch.setattr(scheduler, "forced_tokens", mutant)


def forced_tokens_have_twins(patch: pytest.MonkeyPatch) -> None:
    """Leave the head's own draft in a tree beside the same token that a grammar forces."""
    forced_first = eagle_worker._forced_first

    def mutant(forced: Tensor, ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        first_ids, first_probs = forced_first(forced, ids, probs)
        return torch.cat([first_ids[:, :1], ids[:, 1:]], dim=1), first_probs

    patch.setattr(eagle_worker, "_forced_first", mutant)


def forced_tokens_are_not_read(patch: pytest.MonkeyPatch) -> None:
    """Let the head read its own drafts in a chain of which some tokens are forced."""

    def mutant(self: EagleWorker, batch: ForwardBatch, *args: Any) -> Tensor:
        drafts = draft_chain(self, replace(batch, forced=None), *args)
        return drafts if batch.forced is None else eagle_worker._forced_or(batch.forced, drafts)

    draft_chain = EagleWorker._draft_chain
    patch.setattr(EagleWorker, "_draft_chain", mutant)


def forced_branches_are_not_read(patch: pytest.MonkeyPatch) -> None:
    """Let the head read token 0 in a tree of which some tokens are forced."""
    window_input = eagle_worker.window_input

    def mutant(batch: ForwardBatch, token_ids: Tensor, *args: Any, **options: Any) -> ForwardInput:
        read = token_ids if batch.forced is None else torch.zeros_like(token_ids)
        return window_input(batch, read, *args, **options)

    patch.setattr(eagle_worker, "window_input", mutant)


def nobody_looks_ahead(patch: pytest.MonkeyPatch) -> None:
    """Leave the matchers before a step's tokens until it has ended, so that nothing is known to be forced after it."""
    patch.setattr(ResultTaker, "look_ahead", lambda self, step: {})


def matchers_ahead_stay_ahead(patch: pytest.MonkeyPatch) -> None:
    """Let the matchers themselves look ahead, not copies."""
    look_ahead = ResultTaker.look_ahead

    def mutant(self: ResultTaker, step: StepInFlight) -> dict[Request, AheadMatcher]:
        ahead = look_ahead(self, step)
        for req, each in ahead.items():
            req.matcher = each.matcher
        return ahead

    patch.setattr(ResultTaker, "look_ahead", mutant)


def tokens_accepted_ahead_are_accepted_again(patch: pytest.MonkeyPatch) -> None:
    look_ahead = ResultTaker.look_ahead

    def mutant(self: ResultTaker, step: StepInFlight) -> dict[Request, AheadMatcher]:
        return {req: replace(each, num_tokens=0) for req, each in look_ahead(self, step).items()}

    patch.setattr(ResultTaker, "look_ahead", mutant)


def first_token_not_accepted(patch: pytest.MonkeyPatch) -> None:
    """Leaves the matcher where it was before the first token, which prefill has drawn."""
    take, follow = ResultTaker.take_first_tokens, ResultTaker._follow_grammars

    def mutant(self: ResultTaker, prebuilt: Any, results: Any) -> None:
        patch.setattr(ResultTaker, "_follow_grammars", lambda *args: None)
        take(self, prebuilt, results)
        patch.setattr(ResultTaker, "_follow_grammars", follow)

    patch.setattr(ResultTaker, "take_first_tokens", mutant)


def rows_not_held_until_their_draw(patch: pytest.MonkeyPatch) -> None:
    """Lets a step's rows be reused between the step's launch and its draw. They are held only from the draw on."""
    use_until = KvPool.use_until

    def mutant(self: KvPool, rows: Any, event: Any, *args: Any) -> None:
        if event is not NOT_YET:
            use_until(self, rows, event, *args)

    patch.setattr(KvPool, "use_until", mutant)
