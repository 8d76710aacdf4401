"""I15 broken where pieces run at once: memory that a stream has still to read is let go of, or made too late for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from torch import Tensor

from decode_service.forward import forward_side
from decode_service.forward.worker import Worker, WorkerOutput
from decode_service.schedule.results import StepInFlight
from prefill_service.forward.chunk_batch import ChunkBatch
from prefill_service.schedule import scheduler as prefill_scheduler


class _ForgetfulWorker:
    """A Worker that keeps none of the tensors it made at the launch."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.relays_lengths = worker.relays_lengths
        self.seed_columns = worker.seed_columns

    def forward(self, *args: Any, **kwargs: Any) -> WorkerOutput:
        return replace(self._worker.forward(*args, **kwargs), input_ids=None, kept=())


def tokens_dropped_at_launch(patch: pytest.MonkeyPatch) -> None:
    """`input_ids=tokens` of the plain worker."""
    new_worker = forward_side.new_worker
    patch.setattr(forward_side, "new_worker", lambda **given: _ForgetfulWorker(new_worker(**given)))


def dropped_at_launch(column: str) -> Callable[[pytest.MonkeyPatch], None]:
    """That tensor of a decode step's batch."""

    def mutant(patch: pytest.MonkeyPatch) -> None:
        seal = StepInFlight.seal

        def sealed(**given: Any) -> StepInFlight:
            step = seal(**given)
            return replace(step, batch=replace(step.batch, **{column: None}))

        patch.setattr(StepInFlight, "seal", sealed)

    return mutant


def rows_dropped_at_launch(patch: pytest.MonkeyPatch) -> None:
    dropped_at_launch("req_pool_indices")(patch)


def chunks_dropped_at_launch(patch: pytest.MonkeyPatch) -> None:
    """All tensors of a prefill forward."""

    def step_in_flight(batch: ChunkBatch, *rest: Any) -> prefill_scheduler.StepInFlight:
        tensors = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
        dropped: dict[str, Any] = dict.fromkeys([*tensors, "forward_input", "next_tokens"])
        return kind(replace(batch, **dropped), *rest)

    kind = prefill_scheduler.StepInFlight
    patch.setattr(prefill_scheduler, "StepInFlight", step_in_flight)
