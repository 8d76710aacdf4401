"""Mutants that break invariants I3, I4, I9 and I10 where only speculation can: seeds, slots of drafts and the head's
KV.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from torch import Tensor

from common.device.stream import Cell, Scope
from common.engine import Place
from common.kv.rows import RowColumns
from common.kv.slot_allocator import SlotAllocator
from decode_service.forward.future_map import FutureMap, RelayPayload
from decode_service.messages import Command
from decode_service.schedule.landing import LandingRow
from decode_service.schedule.life import RULES
from decode_service.schedule.running_rows import Rows, RunningRows
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.scheduler import DecodeEngine
from tests.engine.mutants.kinds import arguments_given, instead_of, newest
from tests.engine.tags import GROUP


def seeds_stashed_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    """Writes the draft head's seeds into the relay on another stream. The write comes after the step that made them,
    but no forward waits for it.
    """
    stash, given = FutureMap.stash, arguments_given(patch, FutureMap)

    def mutant(self: FutureMap, rows: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        tokens: Cell[RelayPayload] = Cell()

        def leave_seeds() -> None:
            tokens.set(RelayPayload(payload.get().tokens))

        def write_seeds() -> None:
            for name, column in payload.get().seeds.items():
                self.seeds[name][rows] = column

        forward, device = given(self)["forward_stream"], given(self)["device"]
        forward.enqueue(leave_seeds, scope)
        stash(self, rows, tokens, scope)
        if not any(stream.name == "stash" for stream in device.streams):
            device.new_stream("stash")
        other = device.stream("stash")
        other.wait(forward.record(scope))
        other.enqueue(write_seeds, scope)

    patch.setattr(FutureMap, "stash", mutant)


def an_earlier_steps_fence_stays_armed(patch: pytest.MonkeyPatch) -> None:
    """Keeps an earlier step's published lengths when a step without drafts is launched, so that the next step reads
    those.
    """
    patch.setattr(FutureMap, "publish_nothing", lambda self: None)


def rows_at_their_limit_are_launched(patch: pytest.MonkeyPatch) -> None:
    """Launches a further step for a row although its published length shows that it has all its tokens."""
    patch.setattr(RunningRows, "have_room_after", lambda self, rows, seq_lens: np.ones(len(rows), dtype=np.bool_))


def no_slots_for_drafts(patch: pytest.MonkeyPatch) -> None:
    """Gives a step the one slot per row that decoding without drafts needs, and none for drafts."""
    patch.setattr(ScheduleBatch, "wanted_tokens", lambda self: self.seq_lens_cpu.numpy() + 1)


@instead_of(ScheduleBatch, "wanted_tokens")
def slots_taken_anew_each_step(_: object, self: ScheduleBatch) -> Rows:
    """Gives each step new slots, and never reuses those of rejected drafts."""
    held = [req.lease.num_tokens for req in self.reqs if req.lease]
    return np.array(held, dtype=np.int64) + self.num_step_slots


def rejected_slots_given_back(patch: pytest.MonkeyPatch) -> None:
    """Releases the slots of rejected drafts as soon as a step's results are known, although the step in flight drafts
    and verifies in these slots.
    """
    step, slots, columns = DecodeEngine.step, newest(patch, SlotAllocator), newest(patch, RowColumns)

    def mutant(self: DecodeEngine, commands: Sequence[Command]) -> None:
        step(self, commands)
        for req in self.lives.requests.values():
            if req.lease is not None and RULES[req.phase].place is Place.ROWS:
                num_committed = len(req.token_ids) - 1
                slots().give_back(req.lease.slots[num_committed:])
                columns().num_slots[req.lease.row] = num_committed

    patch.setattr(DecodeEngine, "step", mutant)


def drafts_kv_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """Counts a row as complete once the target's KV has landed, without waiting for the draft head's."""

    def mutant(self: LandingRow) -> bool:
        return self.columns is not None and not self.missing[GROUP.name].any()

    patch.setattr(LandingRow, "is_complete", property(mutant))
    patch.setattr(LandingRow, "miscount", lambda self: None)
