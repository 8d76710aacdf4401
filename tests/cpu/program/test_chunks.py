"""Tests of chunks of prompts in one fused kernel: both dtypes, the head sizes of real models, alone and with other
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_cpu.attention import MAX_QUERIES
from baton_cpu.program.fusing import fuse
from common.attention.backend import ForwardInput
from common.model.forward_program import ForwardProgram
from common.model.target import TargetModel
from tests.cpu.program.batches import scattered_batch
from tests.support.loading import load_target
from tests.support.models import save_tiny_model

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest allowed norm of the difference, relative to the norm of the model's own result."""


@pytest.fixture(
    scope="module",
    params=[
        ("float32", 16),
        ("float32", 128),
        *(pytest.param(("bfloat16", head_dim), marks=pytest.mark.thorough) for head_dim in (64, 128)),
    ],
    ids=str,
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    dtype, head_dim = request.param
    directory = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", head_dim=head_dim)
    return load_target(directory, device="cpu", dtype=dtype, attention="torch", fuses=True)


@pytest.fixture(scope="module")
def program(model: TargetModel) -> Iterator[ForwardProgram]:
    fuse(model, num_threads=2, max_tokens=1024)
    assert model._program is not None
    yield model._program
    assert model._program.close(5.0), "a thread of the team did not end"


def _batch(model: TargetModel, rows: list[tuple[int, int]]) -> ForwardInput:
    return scattered_batch(model.layer_group, rows, vocab_size=model.vocab_size, asks_for_last=True)


_ROWS = {
    "one chunk": [(0, MAX_QUERIES + 1)],
    "several items of queries": [(0, 150)],
    "a later chunk": [(45, 70)],
    "keys past one block of them": [(490, 100)],
    "several prompts, and rows of few tokens between them": [(0, 70), (33, 1), (7, 40), (5, MAX_QUERIES)],
    "rows that fill panels": [(64, 64), (0, 128)],
}


@pytest.mark.parametrize("rows", _ROWS.values(), ids=_ROWS)
def test_logits_and_kv_are_the_models(model: TargetModel, program: ForwardProgram, rows: list[tuple[int, int]]) -> None:
    batch = _batch(model, rows)
    mine = replace(batch, kv=batch.kv.clone())
    logits, *_ = program.forward(mine)
    model._program = None
    try:
        expected = model.forward(batch).logits
    finally:
        model.run_program(program)
    assert _apart(logits, expected) < _TOLERANCE[model.dtype]
    assert _apart(mine.kv, batch.kv) < _TOLERANCE[model.dtype]


def test_a_broken_request_breaks_no_other(model: TargetModel, program: ForwardProgram) -> None:
    batch = _batch(model, [(40, 50), (40, 1), (40, 60), (40, 3)])
    sound, *_ = program.forward(replace(batch, kv=batch.kv.clone()))
    for row in range(4):
        kv = batch.kv.clone()
        kv[:, :, batch.req_to_token[row + 1, 20]] = float("nan")
        logits, *_ = program.forward(replace(batch, kv=kv))
        others = [other for other in range(4) if other != row]
        assert logits[row].isnan().all()
        assert torch.equal(logits[others], sound[others])


def test_of_padding_behind_a_chunk_nothing_is_read(model: TargetModel, program: ForwardProgram) -> None:
    batch = _batch(model, [(0, 45)])
    before, *_ = program.forward(replace(batch, kv=batch.kv.clone()))
    kv = batch.kv.clone()
    kv[:, :, 0] = float("nan")
    after, *_ = program.forward(replace(batch, kv=kv))
    assert torch.equal(after, before)


def test_layers_are_told_once_their_kv_is_there_and_before_later_ones_are(
    model: TargetModel, program: ForwardProgram
) -> None:
    batch = _batch(model, [(10, 40)])
    whole = replace(batch, kv=batch.kv.clone())
    expected, *_ = program.forward(whole)
    written: list[list[bool]] = []

    def look() -> None:
        written.append([torch.equal(mine, its) for mine, its in zip(batch.kv, whole.kv, strict=True)])

    logits, *_ = program.forward(batch, on_layer_kv=dict.fromkeys(range(model.num_layers), look))
    assert written == [[True, False], [True, True]]
    assert torch.equal(logits, expected)


def test_trees_of_more_tokens_than_a_step_has_are_the_models_own(model: TargetModel, program: ForwardProgram) -> None:
    batch = _batch(model, [(4, MAX_QUERIES + 1)])
    assert program.takes(batch)
    assert not program.takes(replace(batch, tree_mask=torch.eye(MAX_QUERIES + 1, dtype=torch.bool)))


def _apart(seen: Tensor, expected: Tensor) -> float:
    return float((seen.float() - expected.float()).norm() / expected.float().norm())
