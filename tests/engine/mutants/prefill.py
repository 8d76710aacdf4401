"""Mutants of the prefill engine: its chunks, and the copies of their KV to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from common.device.stream import Event
from common.kv.pool import RowLease
from common.prompts import computing
from common.prompts.chunk_batch import ChunkBatch
from common.prompts.worker import LaunchedChunks
from prefill_service.handoff.sender import KvSender
from tests.engine.mutants.kinds import instead_of, use_not_noted
from tests.support.scripted_device import ScriptedStream


@instead_of(ScriptedStream, "wait")
def kv_leaves_before_it_is_computed(wait: Callable[..., None], self: ScriptedStream, event: Event) -> None:
    if self.name != "sending":
        wait(self, event)


def sending_does_not_hold_its_row(patch: pytest.MonkeyPatch) -> None:
    use_not_noted("sending")(patch)


def chunk_does_not_hold_its_row(patch: pytest.MonkeyPatch) -> None:
    use_not_noted("forward")(patch)


def first_tokens_taken_early(patch: pytest.MonkeyPatch) -> None:
    """Reads first tokens as soon as the step is launched, before it has computed them."""

    class Ended:
        """The event at a step's end, which always seems to be done."""

        error = None

        def __init__(self, end: Event) -> None:
            self.end = end

        def is_done(self) -> bool:
            return True

        def __getattr__(self, name: str) -> object:
            return getattr(self.end, name)

    given, use_until = computing.ChunksInFlight, RowLease.use_until
    kept = []  # as long as their forwards may run

    def mutant(batch: ChunkBatch, launched: LaunchedChunks, end: Event) -> object:
        kept.append(given(batch, launched, cast(Event, Ended(end))))
        return kept[-1]

    patch.setattr(computing, "ChunksInFlight", mutant)
    patch.setattr(
        RowLease, "use_until", lambda self, event, stream: use_until(self, getattr(event, "end", event), stream)
    )


def cancelled_row_is_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvSender, "forget", lambda self, prompt: None)
