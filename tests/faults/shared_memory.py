"""Injects faults into KV in shared memory: its slots are reused, its socket is removed, or it is read late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.kv.shared_kv import SharedKv
from common.kv.shared_pool import DIRECTORY, SharedPool
from tests.faults.injector import Injector
from tests.faults.plan import Action

LENT, READ = "shared_memory.lent", "shared_memory.read"


def disturb_shared_memory(injector: Injector) -> None:
    lend, is_current = SharedPool.lend, SharedKv.is_current

    def faulty_lend(self: SharedPool, group_name: str, layers: slice, slots: Sequence[int]) -> SharedKv:
        if (fault := injector.visit(LENT)) is not None:
            match fault.action:
                case Action.STALL:
                    time.sleep(fault.seconds)
                case Action.UNLINK:
                    (DIRECTORY / self.name).unlink(missing_ok=True)
                case (
                    _
                ):  # a ticket from before the slots were reused: their stamps are newer, and their KV is another row's
                    lent = lend(self, group_name, layers, np.roll(slots, 1))
                    return replace(lent, ticket=replace(lent.ticket, generation=0))
        return lend(self, group_name, layers, slots)

    def late_is_current(self: SharedKv) -> bool:
        if (fault := injector.visit(READ)) is not None:
            time.sleep(fault.seconds)
        return is_current.__get__(self)  # type: ignore[attr-defined, no-any-return]

    if injector.watches(LENT):
        SharedPool.lend = faulty_lend  # type: ignore[method-assign]
    if injector.watches(READ):
        SharedKv.is_current = property(late_is_current)  # type: ignore[method-assign, assignment]
