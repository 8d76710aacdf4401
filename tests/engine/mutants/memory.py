"""Mutants that break invariant I15 on devices that run work in the background: memory is freed or allocated while a
stream still has to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from torch import Tensor

from common.prompts import computing
from common.prompts.chunk_batch import ChunkBatch
from decode_service.forward.worker import Worker, WorkerOutput
from decode_service.schedule.step import LaunchedStep, SealedStep
from tests.engine.mutants.kinds import Mutant, instead_of


@instead_of(Worker, "forward")
def tokens_dropped_at_launch(forward: Callable[..., WorkerOutput], *args: Any, **options: Any) -> WorkerOutput:
    """Drops the `input_ids` tensor that the worker made for a launch without drafts."""
    return replace(forward(*args, **options), input_ids=None, kept=())


def dropped_at_launch(column: str) -> Mutant:
    """Returns a mutant that drops the tensor `column` of a decode step's batch as soon as the step is launched."""

    @instead_of(LaunchedStep, "seal")
    def drops(seal: Callable[..., SealedStep], self: LaunchedStep, **given: Any) -> SealedStep:
        step = seal(self, **given)
        return replace(step, batch=replace(step.batch, **{column: None}))

    return drops


def rows_dropped_at_launch(patch: pytest.MonkeyPatch) -> None:
    dropped_at_launch("req_pool_indices")(patch)


@instead_of(computing, "ChunksInFlight")
def chunks_dropped_at_launch(
    chunks_in_flight: Callable[..., computing.ChunksInFlight], batch: ChunkBatch, *rest: Any
) -> computing.ChunksInFlight:
    """Drops all tensors of a prefill forward as soon as it is launched."""
    tensors = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
    dropped: dict[str, Any] = dict.fromkeys([*tensors, "forward_input", "next_tokens"])
    return chunks_in_flight(replace(batch, **dropped), *rest)
