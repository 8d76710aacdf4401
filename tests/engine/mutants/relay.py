"""Mutants that break invariants I2, I3, I6 and I8.

They change the relay: the device tensors through which a decode step passes tokens and lengths to the next step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.device.stream import Cell, Scope
from common.kv.rows import ReqToTokenPool
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap, RelayPayload
from decode_service.forward.worker import OnPublish, Worker, WorkerOutput
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.step import EndedStep, RowResults
from tests.engine.mutants.kinds import arguments_given, instead_of


def relay_is_a_ring(patch: pytest.MonkeyPatch) -> None:
    """Keeps the relayed tokens in a ring buffer instead of one entry per row. It has fewer entries than requests can
    run at once.
    """
    init, stash, bootstrap = FutureMap.__init__, FutureMap.stash, FutureMap.bootstrap
    resolve, forward = FutureMap.resolve_forward_inputs, Worker.forward
    rings: dict[int, tuple[dict[int, int], Iterator[int]]] = {}

    def mutant_init(self: FutureMap, **arguments: Any) -> None:
        init(self, **arguments)
        rings[id(self)] = {}, itertools.count()

    def advance(self: FutureMap, rows: Tensor) -> Tensor:
        places, counter = rings[id(self)]
        for row in rows.tolist():
            places[row] = 1 + next(counter) % 3
        return current(self, rows)

    def current(self: FutureMap, rows: Tensor) -> Tensor:
        return torch.tensor([rings[id(self)][0][row] for row in rows.tolist()], dtype=torch.int64)

    def mutant_stash(self: FutureMap, rows: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        stash(self, advance(self, rows), payload, scope)

    def mutant_bootstrap(self: FutureMap, rows: Tensor, seq_lens: Tensor, payload: RelayPayload) -> None:
        bootstrap(self, advance(self, rows), seq_lens, payload)

    def mutant_forward(self: Worker, batch: ForwardBatch, *, future_map: FutureMap, **rest: Any) -> WorkerOutput:
        rows = current(future_map, batch.req_pool_indices)
        ring = SimpleNamespace(
            resolve_forward_inputs=lambda _, with_seeds: resolve(future_map, rows, with_seeds=with_seeds)
        )
        return forward(self, batch, future_map=ring, **rest)  # type: ignore[arg-type]

    patch.setattr(FutureMap, "__init__", mutant_init)
    patch.setattr(FutureMap, "stash", mutant_stash)
    patch.setattr(FutureMap, "bootstrap", mutant_bootstrap)
    patch.setattr(Worker, "forward", mutant_forward)


@instead_of(FutureMap, "__init__")
def relay_without_padding_row(init: Callable[..., None], self: FutureMap, **arguments: Any) -> None:
    init(self, **arguments)
    self.output_tokens = self.output_tokens[1:]


@instead_of(ReqToTokenPool, "take")
def row_zero_is_given_out(take: Callable[..., int | None], self: ReqToTokenPool) -> int | None:
    row = take(self)
    return None if row is None else row - 1


@instead_of(FutureMap, "stash")
def padding_falls_on_the_last_row(stash: Callable[..., None], self: FutureMap, rows: Tensor, *rest: Any) -> None:
    """Lets padding write to the last row, which a request may hold, instead of row 0."""
    stash(self, torch.where(rows == 0, self.output_tokens.shape[0] - 1, rows), *rest)


@instead_of(FutureMap, "resolve_seq_lens")
def lengths_read_without_waiting(_: object, self: FutureMap, rows: Tensor) -> Tensor:
    return self.new_seq_lens_buf[rows]


def fence_covers_draft_extend(patch: pytest.MonkeyPatch) -> None:
    stash, given = FutureMap.stash, arguments_given(patch, FutureMap)

    def mutant(self: FutureMap, rows: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        stash(self, rows, payload, scope)
        self.publish_ready = given(self)["forward_stream"].record(scope)

    patch.setattr(FutureMap, "stash", mutant)


@instead_of(Worker, "forward")
def published_after_draft_extend(
    forward: Callable[..., WorkerOutput], *args: Any, on_publish: OnPublish, **rest: Any
) -> WorkerOutput:
    lengths: list[Cell[Tensor]] = []
    output = forward(*args, on_publish=lengths.append, **rest)
    for new_seq_lens in lengths:
        on_publish(new_seq_lens)
    return output


@instead_of(ScheduleBatch, "set_seq_lens")
def only_the_device_twin_is_resolved(_: object, self: ScheduleBatch, seq_lens: Tensor) -> None:
    self.seq_lens = seq_lens


@instead_of(Worker, "forward")
def inputs_taken_at_launch(
    forward: Callable[..., WorkerOutput], self: Worker, batch: ForwardBatch, *, future_map: FutureMap, **rest: Any
) -> WorkerOutput:
    early = future_map.resolve_forward_inputs(batch.req_pool_indices, with_seeds=batch.has_drafts)
    taken = SimpleNamespace(resolve_forward_inputs=lambda _, with_seeds: early)
    return forward(self, batch, future_map=taken, **rest)


@instead_of(FutureMap, "__init__")
def consumed_rows_not_poisoned(init: Callable[..., None], self: FutureMap, **arguments: Any) -> None:
    init(self, **{**arguments, "poisons_consumed_rows": False})


@instead_of(EndedStep, "results")
def row_flag_dropped(results: Callable[..., RowResults], self: EndedStep) -> RowResults:
    found = results(self)
    return dataclasses.replace(found, are_invalid=np.zeros_like(found.are_invalid))


def empty_batch_publishes(patch: pytest.MonkeyPatch) -> None:
    publish, given = FutureMap.publish, arguments_given(patch, FutureMap)

    def mutant(self: FutureMap, rows: Tensor, new_seq_lens: Cell[Tensor], scope: Scope) -> None:
        publish(self, rows, new_seq_lens, scope)
        self.publish_ready = given(self)["forward_stream"].record(scope)

    patch.setattr(FutureMap, "publish", mutant)


def empty_batch_stashes(patch: pytest.MonkeyPatch) -> None:
    stash, given = FutureMap.stash, arguments_given(patch, FutureMap)

    def mutant(self: FutureMap, rows: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        if rows.shape[0]:
            stash(self, rows, payload, scope)
        else:
            given(self)["forward_stream"].enqueue(lambda: None, scope)

    patch.setattr(FutureMap, "stash", mutant)


@instead_of(FutureMap, "resolve_seq_lens")
def empty_batch_resolves(resolve: Callable[..., Tensor | None], self: FutureMap, rows: Tensor) -> Tensor | None:
    if self.publish_ready is not None:
        self.publish_ready.synchronize(1.0)
    return resolve(self, rows)
