"""Mutants that break invariants I12 and I13: results, failures and sampling noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from common.device.stream import Scope, Work
from common.sampling import operators as sampling
from common.sampling.state import RowStart, SamplingState
from decode_service.schedule.step import EndedStep, RowResults
from tests.engine.mutants.kinds import instead_of
from tests.support.scripted_device import ScriptedStream


@instead_of(EndedStep, "results")
def results_in_another_order(results: Callable[..., RowResults], self: EndedStep) -> RowResults:
    found = results(self)
    columns = (found.token_ids, found.accept_lens, found.are_invalid, found.num_sound)
    return RowResults(*(column[::-1] for column in columns))


@instead_of(ScriptedStream, "enqueue")
def failure_outlives_its_step(
    enqueue: Callable[..., None], self: ScriptedStream, work: Work, scope: Scope | None = None
) -> None:
    """Enqueues all work without its scope, which limits a failure to one step. A failure then also hits later steps."""
    enqueue(self, work)


@instead_of(sampling, "row_keys")
def noise_keyed_by_place(
    row_keys: Callable[..., Tensor], seeds: Tensor, choice_indices: Tensor, positions: Tensor
) -> Tensor:
    return row_keys(torch.arange(seeds.shape[0]), choice_indices, positions)


def noise_keyed_by_step(patch: pytest.MonkeyPatch) -> None:
    steps, row_keys = itertools.count(), sampling.row_keys

    def mutant(seeds: Tensor, choice_indices: Tensor, positions: Tensor) -> Tensor:
        return row_keys(seeds, choice_indices, torch.full_like(positions, next(steps)))

    patch.setattr(sampling, "row_keys", mutant)


@instead_of(sampling, "row_keys")
def noise_without_seed(
    row_keys: Callable[..., Tensor], seeds: Tensor, choice_indices: Tensor, positions: Tensor
) -> Tensor:
    return row_keys(torch.zeros_like(seeds), choice_indices, positions)


def reused_row_not_reseeded(patch: pytest.MonkeyPatch) -> None:
    """Never resets a row's sampling state: the row's second request samples with the parameters of its first."""
    seen: set[int] = set()
    reset = SamplingState.reset

    def mutant(self: SamplingState, seeds: Sequence[RowStart]) -> None:
        if fresh := [seed for seed in seeds if seed.row not in seen]:
            reset(self, fresh)
        seen.update(seed.row for seed in seeds)

    patch.setattr(SamplingState, "reset", mutant)
