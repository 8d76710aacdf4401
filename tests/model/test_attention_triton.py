"""Tests of the GPU's attention kernels in the interpreter of Triton: heads of any shape, how rows are split, and which
kernels are compiled. tests/gpu runs them on a device.

test_attention.py compares them with the other backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.compile_kernels import attention_launches
from benchmarks.kernel_variants import Variant
from common.attention.backend import KernelShape, LayerAttention
from common.attention.torch_attention import TorchAttention
from common.attention.triton_attention import NO_LIMIT, HeadShape, TritonAttention
from common.device.triton_launch import Launch
from tests.model.attention_rows import Rows

ROWS = {
    "decode, rows of several parts": ((300, 1), (5, 1), (128, 1)),
    "verify": ((0, 5), (130, 5), (63, 5)),
    "a few tokens each": ((300, 2), (5, 9), (0, 1), (140, 4), (7, 3)),
}
thorough = pytest.mark.thorough
HEADS = [((4, 4), 64), ((6, 2), 80), ((4, 1), 96), ((14, 2), 128), ((2, 1), 256), ((3, 1), 20)]
"""Each entry is ((query heads, KV heads), head_dim)."""


@pytest.mark.parametrize(("heads", "head_dim"), HEADS, ids=str)
def test_it_agrees_with_the_reference_and_writes_the_same_kv(heads: tuple[int, int], head_dim: int) -> None:
    rows = Rows.of(ROWS["decode, rows of several parts"], heads=heads, head_dim=head_dim)
    rows.check(rows.attend(rows.triton()), rows.attend(TorchAttention()), 1e-5)


def test_a_bound_on_lengths_far_above_them_changes_nothing() -> None:
    """Therefore a forward can be recorded once, with the largest length as the bound, and be replayed for all
    lengths.
    """
    near = Rows.of(ROWS["decode, rows of several parts"], heads=(4, 2), head_dim=64)
    far = replace(near, batch=replace(near.batch, max_seq_len=near.batch.req_to_token.shape[1]))
    assert torch.equal(near.attend(near.triton())[0], far.attend(far.triton())[0])


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
    assert torch.equal(one.attend(one.triton())[0], crowd.attend(crowd.triton())[0][:1])


@pytest.mark.parametrize("lens", ROWS)
@pytest.mark.parametrize("num_together", [*(pytest.param(number, marks=thorough) for number in (0, 1)), 2])
def test_parts_that_take_more_than_they_may_are_made_of_fewer_rows_at_once(lens: str, num_together: int) -> None:
    """If the memory for parts of attention is limited, rows are computed in several launches. The result of each row
    stays the same.
    """
    rows = Rows.of(ROWS[lens], heads=(4, 2), head_dim=20)
    num_splits, max_new = -(-rows.batch.max_seq_len // 128), max(rows.batch.extend_lens or (1,))
    row_bytes = max_new * 4 * num_splits * (20 + 1) * 4
    launches: list[Launch] = []

    def noted(launch: Launch) -> None:
        launches.append(launch)
        launch.run()

    capped = TritonAttention(HeadShape(4, 2, 20, torch.float32), split_bytes=num_together * row_bytes + 1, launch=noted)
    output, kv = rows.attend(capped)
    expected, expected_kv = rows.attend(rows.triton())
    assert torch.equal(output, expected) and torch.equal(kv.nan_to_num(7), expected_kv.nan_to_num(7))
    parts = [launch.arguments["parts"] for launch in launches if "parts" in launch.arguments]
    num_rows = rows.batch.seq_lens.shape[0]
    assert len(parts) == -(-num_rows // max(1, num_together))
    for tensor in parts:
        assert isinstance(tensor, Tensor) and tensor.nbytes <= max(1, num_together) * row_bytes


def variants(forwards: Iterable[Rows], how: LayerAttention | None = None) -> set[Variant]:
    """Returns the kernel variants that would be compiled for these forwards."""
    seen: set[Variant] = set()
    for rows in forwards:
        rows.attend(rows.triton(lambda launch: seen.add(Variant.of(launch))), how)
    return seen


def masked(rows: Rows) -> Rows:
    num_tokens = rows.query.shape[0]
    return replace(rows, batch=replace(rows.batch, tree_mask=torch.ones((num_tokens, num_tokens), dtype=torch.bool)))


def misplaced(rows: Rows) -> Rows:
    """Returns the same rows, but each column is a view into a larger tensor at an odd offset. Each token's heads stay
    adjacent in memory.
    """

    def moved(column: Tensor) -> Tensor:
        return torch.cat([column.new_zeros(1), column])[1:]

    def inside(heads: Tensor) -> Tensor:
        return torch.cat([heads.new_zeros(heads.shape[0], 3, heads.shape[2]), heads], dim=1)[:, 3:]

    batch = rows.batch
    return replace(
        rows,
        batch=replace(
            batch,
            out_cache_loc=moved(batch.out_cache_loc),
            req_pool_indices=moved(batch.req_pool_indices),
            seq_lens=moved(batch.seq_lens),
        ),
        query=inside(rows.query),
        key=inside(rows.key),
        value=inside(rows.value),
    )


@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "has_masks"),
    [
        ((4, 4), 64, None, True),
        ((4, 2), 64, 90, False),
        *(
            pytest.param(heads, head_dim, window, has_masks, marks=thorough)
            for heads, head_dim, window in (((14, 2), 128, None), ((3, 1), 20, None), ((4, 2), 64, 130))
            for has_masks in (False, True)
        ),
    ],
    ids=str,
)
def test_no_forward_needs_a_kernel_but_those_of_the_shapes(
    heads: tuple[int, int], head_dim: int, window: int | None, has_masks: bool
) -> None:
    def forward(lens: tuple[tuple[int, int], ...], max_seq_len: int | None = None) -> Rows:
        return Rows.of(lens, heads=heads, head_dim=head_dim, max_seq_len=max_seq_len, num_slots=1500)

    def anything() -> Iterator[Rows]:
        for num_new in (*range(1, 70, 5), 128):
            for num_before in (0, 100, 900):
                yield forward(((0, num_new),), num_new + num_before)
        for num_rows in range(1, 10):
            for max_seq_len in (3, 900):
                yield forward(((2, 1),) * num_rows, max_seq_len)
                yield misplaced(forward(((2, 1),) * num_rows, max_seq_len))
                yield misplaced(forward(((2, 5),) * num_rows, max_seq_len))
                yield misplaced(forward(((7, 3), *((2, place % 3 + 1) for place in range(num_rows))), max_seq_len))
        if has_masks:
            for num_rows, num_new in ((1, 1), (3, 3), (2, 5), (1, 16), (1, 32), (1, 40)):
                yield masked(misplaced(forward(((200, num_new),) * num_rows)))
                yield masked(forward(((0, num_new),) * num_rows))

    def warm() -> Iterator[Rows]:
        for shape in forward(((0, 1),)).triton().kernel_shapes(with_masks=has_masks):
            rows = forward(((0, shape.num_new),), shape.max_seq_len)
            yield masked(rows) if shape.has_mask else rows

    how = LayerAttention(0.1, window)
    assert variants(anything(), how) == variants(warm(), how)


@pytest.mark.parametrize(
    "shape", [KernelShape(1, 900), KernelShape(64, 64), KernelShape(8, 900, has_mask=True)], ids=str
)
def test_addresses_have_64_bits_however_large_the_pool_is(shape: KernelShape) -> None:
    """Therefore pools of any size need the same kernels, and in a pool of more than 2^31 numbers no address wraps
    around.
    """
    heads = HeadShape(32, 8, 128, torch.bfloat16)
    small, large = (
        [Variant.of(launch) for launch in attention_launches(heads, shape, NO_LIMIT, num_slots=num_slots)]
        for num_slots in (4096, 1 << 24)
    )
    assert small == large
    for variant in small:
        strides = {kind for name, kind in variant.argument_types.items() if name.endswith("_stride")}
        assert strides <= {"i64"}


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
    output, kv = empty.attend(empty.triton())
    assert output.shape == (0, 4, 64)
    assert torch.equal(kv.nan_to_num(7), batch.kv.nan_to_num(7))
