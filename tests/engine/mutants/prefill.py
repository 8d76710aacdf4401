"""Mutants of the prefill engine: its chunks, and the copies of their KV to the host."""

from __future__ import annotations

import pytest

from common.device.scripted import ScriptedStream
from common.device.stream import Event
from prefill_service.handoff.sender import KvSender
from prefill_service.prompt import Prompt
from prefill_service.schedule.scheduler import PrefillEngine
from tests.engine.mutants.rows import _use_not_noted


def kv_leaves_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    wait = ScriptedStream.wait

    def mutant(self: ScriptedStream, event: Event) -> None:
        if self.name != "sending":
            wait(self, event)

    patch.setattr(ScriptedStream, "wait", mutant)


def sending_does_not_hold_its_row(patch: pytest.MonkeyPatch) -> None:
    _use_not_noted(patch, "sending")


def chunk_does_not_hold_its_row(patch: pytest.MonkeyPatch) -> None:
    _use_not_noted(patch, "forward")


def first_tokens_taken_early(patch: pytest.MonkeyPatch) -> None:
    """Take first tokens as soon as the step is launched, before it has computed them."""

    def mutant(self: PrefillEngine) -> None:
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    patch.setattr(PrefillEngine, "_finish_done", mutant)


def cancelled_row_is_sent(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: KvSender, prompt: Prompt) -> None:
        pass

    patch.setattr(KvSender, "forget", mutant)
