"""Mutants of the drawing of tokens under grammars. They break invariants I9 and I12."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.device.stream import NOT_YET
from common.grammar.matcher import Mask
from common.kv.pool import KvPool
from decode_service.schedule import scheduler
from decode_service.schedule.request import Request
from decode_service.schedule.results import ResultTaker


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
