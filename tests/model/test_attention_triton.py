"""The GPU's attention kernels against the reference backend, in Triton's interpreter. tests/gpu has them on a device.

That drafts attend what their masks say is shown with the other backends (test_attention_trees.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from common.model import triton_kernels
from common.model.attention import KernelShape
from common.model.attention_torch import TorchAttention
from common.model.attention_triton import TritonAttention
from tests.model.attention_rows import LAYER, Rows

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}
ROWS = {
    "decode": ((0, 1), (32, 1), (99, 1), (16, 1)),
    "decode, rows of several parts": ((300, 1), (5, 1), (128, 1)),
    "verify": ((0, 5), (130, 5), (63, 5)),
    "prompts of any length behind any prefix": ((0, 40), (7, 1), (200, 33), (1, 2)),
}
HEADS = [((4, 4), 64), ((4, 1), 96), ((14, 2), 128), ((2, 1), 256), ((3, 1), 20)]
"""Heads of the query, of K and V; and their size."""
CASES = [*((lens, (6, 2), 80) for lens in ROWS), *(("decode, rows of several parts", *shape) for shape in HEADS)]


@pytest.mark.parametrize(("lens", "heads", "head_dim"), CASES, ids=str)
def test_it_agrees_with_the_reference_and_writes_the_same_kv(lens: str, heads: tuple[int, int], head_dim: int) -> None:
    rows = Rows.of(ROWS[lens], heads=heads, head_dim=head_dim)
    rows.check(rows.attend(TritonAttention()), rows.attend(TorchAttention()), TOLERANCES[torch.float32])


@pytest.mark.parametrize("lens", ROWS)
def test_sixteen_bits_are_enough_between_kernels(lens: str) -> None:
    rows = Rows.of(ROWS[lens], heads=(6, 2), head_dim=64, dtype=torch.float16)
    rows.check(rows.attend(TritonAttention()), rows.attend(TorchAttention()), TOLERANCES[torch.float16])


def test_a_bound_on_lengths_far_above_them_changes_nothing() -> None:
    """So that a forward can be recorded once for all lengths."""
    near = Rows.of(ROWS["decode, rows of several parts"], heads=(4, 2), head_dim=64)
    far = replace(near, batch=replace(near.batch, max_seq_len=near.batch.req_to_token.shape[1]))
    assert torch.equal(near.attend(TritonAttention())[0], far.attend(TritonAttention())[0])


def test_a_rows_numbers_are_the_same_in_any_company() -> None:
    alone, others = (300, 1), ((5, 1), (700, 1))
    crowd = Rows.of((alone, *others), heads=(4, 2), head_dim=64)
    batch = crowd.batch
    one = replace(
        crowd,
        batch=replace(
            batch,
            out_cache_loc=batch.out_cache_loc[:1],
            req_pool_indices=batch.req_pool_indices[:1],
            seq_lens=batch.seq_lens[:1],
            max_seq_len=301,
        ),
        query=crowd.query[:1],
        key=crowd.key[:1],
        value=crowd.value[:1],
    )
    assert torch.equal(one.attend(TritonAttention())[0], crowd.attend(TritonAttention())[0][:1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which the interpreter computes with
@pytest.mark.parametrize("plane", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_a_number_that_is_none_shows_in_its_row_and_in_no_other(plane: int, poison: float) -> None:
    rows = Rows.of(((150, 1), (30, 1), (20, 1)), heads=(4, 2), head_dim=64)
    sound, _ = rows.attend(TritonAttention())
    slot = rows.batch.req_to_token[rows.batch.req_pool_indices[0], 140]
    rows.batch.kv[LAYER, plane, slot] = poison
    output, _ = rows.attend(TritonAttention())
    assert not torch.isfinite(output[0]).any(-1).all()
    assert torch.equal(output[1:], sound[1:])


class _Launches:
    """A kernel that is only told of: with which constants it would be compiled."""

    def __init__(self) -> None:
        self.seen: set[tuple[tuple[str, object], ...]] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **constants: self.seen.add(tuple(sorted(constants.items())))


@pytest.mark.parametrize(("heads", "head_dim"), HEADS, ids=str)
def test_prompts_of_any_length_need_no_kernel_but_those_of_the_shapes(
    heads: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(lens: Iterable[KernelShape]) -> set[tuple[tuple[str, object], ...]]:
        launches = _Launches()
        for name in ("write", "attend", "combine"):
            monkeypatch.setattr(triton_kernels, name, launches)
        for each in lens:
            rows = Rows.of(((0, each.num_new),), heads=heads, head_dim=head_dim, max_seq_len=each.max_seq_len)
            rows.attend(TritonAttention())
        return launches.seen

    anything = [KernelShape(new, new + before) for new in (*range(1, 70, 3), 128) for before in (0, 100, 900)]
    assert compiled(TritonAttention().kernel_shapes()) == compiled(anything)


def test_a_batch_of_no_rows_attends_nothing() -> None:
    rows = Rows.of(((4, 1),), heads=(4, 2), head_dim=64)
    batch = rows.batch
    nothing = batch.seq_lens[:0]
    empty = replace(
        rows,
        batch=replace(batch, out_cache_loc=nothing, req_pool_indices=nothing, seq_lens=nothing),
        query=rows.query[:0],
        key=rows.key[:0],
        value=rows.value[:0],
    )
    output, kv = empty.attend(TritonAttention())
    assert output.shape == (0, 4, 64)
    assert torch.equal(kv.nan_to_num(7), batch.kv.nan_to_num(7))
