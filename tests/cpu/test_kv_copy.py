"""Copies of KV in host memory give the same bytes by every method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baton_cpu import kv_copy
from baton_cpu.compiler.vectors import LINE_BYTES
from baton_cpu.kv_copy import MIN_BYTES, copy_blocks, copy_kv


@pytest.fixture
def num_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The block size in bytes of each copy so far that bypassed the caches."""
    seen: list[int] = []
    kernel = copy_blocks()

    def counted(*arguments: int) -> None:
        seen.append(arguments[-1])
        kernel(*arguments)

    monkeypatch.setattr(kv_copy, "copy_blocks", lambda: counted)
    return seen


def buffer(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns a tensor of random numbers, aligned to LINE_BYTES."""
    memory = torch.empty(torch.Size(shape).numel() * dtype.itemsize + LINE_BYTES, dtype=torch.uint8)
    aligned = memory[-memory.data_ptr() % LINE_BYTES :][: memory.shape[0] - LINE_BYTES]
    return aligned.random_().view(dtype).view(shape)


def check(target: Tensor, source: Tensor, **where: Any) -> None:
    """Copies `source` to the part `where` of `target`, and asserts that everything around it stays unchanged."""
    expected = target.clone().view(torch.uint8)
    part = tuple(where.get(name, slice(None)) for name in ("layers", "planes", "tokens"))
    expected[part] = source.view(torch.uint8)
    copy_kv(target[part], source)
    assert torch.equal(target.view(torch.uint8), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_ones_go_past_the_caches(dtype: torch.dtype, num_copies: list[int]) -> None:
    source = buffer((4, 2, 1100, 8, 64), dtype)
    check(buffer((6, 2, 1300, 8, 64), dtype), source, layers=slice(1, 5), tokens=slice(7, 1107))
    assert num_copies == [1100 * 8 * 64 * dtype.itemsize]
    assert source.numel() * source.itemsize >= MIN_BYTES


def test_the_source_may_be_a_part_too(num_copies: list[int]) -> None:
    source = buffer((5, 2, 3000, 2, 64))
    check(buffer((4, 2, 2500, 2, 64)), source[1:, :, 400:2900])
    assert len(num_copies) == 1


def test_the_source_may_lie_anywhere(num_copies: list[int]) -> None:
    """The bytes of a received frame may be unaligned."""
    memory = torch.empty(4 * 2 * 1100 * 1024 + 65, dtype=torch.uint8).random_()
    source = memory[(memory.data_ptr() + 1) % 2 :][: 4 * 2 * 1100 * 1024]
    assert source.data_ptr() % 2
    check(buffer((4, 2, 1300, 8, 128), torch.uint8), source.view(4, 2, 1100, 8, 128), tokens=slice(9, 1109))
    assert len(num_copies) == 1


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_small_ones_do_not(num_tokens: int, num_copies: list[int]) -> None:
    check(buffer((4, 2, 300, 8, 64)), buffer((4, 2, num_tokens, 8, 64)), tokens=slice(9, 9 + num_tokens))
    assert not num_copies


@pytest.mark.parametrize("shape", [(4, 2, 9000, 5, 6), (4, 2, 3001, 3, 33), (1, 1, 70_001, 1, 33)], ids=str)
def test_what_is_not_in_whole_lines_is_copied_otherwise(shape: tuple[int, ...], num_copies: list[int]) -> None:
    larger = (*shape[:2], shape[2] + 5, *shape[3:])
    check(buffer(larger), buffer(shape), tokens=slice(3, 3 + shape[2]))
    assert not num_copies


def test_neither_are_tokens_apart(num_copies: list[int]) -> None:
    check(buffer((4, 2, 1100, 8, 64)), buffer((4, 2, 2200, 8, 64))[:, :, ::2])
    assert not num_copies


def test_shapes_must_be_the_same() -> None:
    with pytest.raises(AssertionError):
        copy_kv(buffer((1, 2, 3, 4, 5)), buffer((1, 2, 3, 4, 6)))
