"""Mutants that break invariant I15 on devices that run work in the background: memory is freed or allocated while a
stream still has to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from torch import Tensor

from common.prompts.chunk_batch import ChunkBatch
from decode_service.forward import forward_side
from decode_service.forward.worker import Worker, WorkerOutput
from decode_service.schedule.results import StepInFlight
from prefill_service.schedule import scheduler as prefill_scheduler


class _ForgetfulWorker:
    """A worker that drops its reference to the tensors it made for a launch."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.relays_lengths = worker.relays_lengths
        self.seed_columns = worker.seed_columns

    def forward(self, *args: Any, **kwargs: Any) -> WorkerOutput:
        return replace(self._worker.forward(*args, **kwargs), input_ids=None, kept=())


def tokens_dropped_at_launch(patch: pytest.MonkeyPatch) -> None:
    """Drops the `input_ids` tensor that the plain worker made for a launch."""
    new_worker = forward_side.new_worker
    patch.setattr(forward_side, "new_worker", lambda **given: _ForgetfulWorker(new_worker(**given)))


def dropped_at_launch(column: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Returns a mutant that drops the tensor `column` of a decode step's batch as soon as the step is launched."""

    def mutant(patch: pytest.MonkeyPatch) -> None:
        seal = StepInFlight.seal

        def sealed(**given: Any) -> StepInFlight:
            step = seal(**given)
            return replace(step, begun=replace(step.begun, batch=replace(step.begun.batch, **{column: None})))

        patch.setattr(StepInFlight, "seal", sealed)

    return mutant


def rows_dropped_at_launch(patch: pytest.MonkeyPatch) -> None:
    dropped_at_launch("req_pool_indices")(patch)


def chunks_dropped_at_launch(patch: pytest.MonkeyPatch) -> None:
    """Drops all tensors of a prefill forward as soon as it is launched."""

    def step_in_flight(batch: ChunkBatch, *rest: Any) -> prefill_scheduler.StepInFlight:
        tensors = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
        dropped: dict[str, Any] = dict.fromkeys([*tensors, "forward_input", "next_tokens"])
        return kind(replace(batch, **dropped), *rest)

    kind = prefill_scheduler.StepInFlight
    patch.setattr(prefill_scheduler, "StepInFlight", step_in_flight)
