"""Tests of sums and joins in shared memory. The ranks are threads of this process: the kernels hold no lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from baton_cpu.collective import SharedCollective, collective_bytes
from common.host.untouched_memory import untouched_zeros
from common.model.part import MemberLost

LARGE = (1 << 20) // 4 * 2 + 12_345
"""More float32 numbers than two copies have."""


def together(num_ranks: int, work: Callable[[int, SharedCollective], Tensor]) -> list[Tensor]:
    """Lets each rank do `work`, all at the same time, and returns what they return."""
    alone = SharedCollective(untouched_zeros(collective_bytes(1)), rank=0, num_ranks=1)
    alone.joined(torch.ones(1, 1), [1])  # compiles; the ranks of a service do so in their own processes
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        alone.sum_up(torch.ones(1, dtype=dtype))
    memory = untouched_zeros(collective_bytes(num_ranks))
    ranks = [SharedCollective(memory, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(work, range(num_ranks), ranks, timeout=60.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_all_ranks_get_the_same_sum_in_the_order_of_the_ranks(num_ranks: int, dtype: torch.dtype) -> None:
    sizes = [1, 7, LARGE, 0, 64, 3]
    values = [[torch.randn(size).to(dtype) for size in sizes] for _ in range(num_ranks)]

    def work(rank: int, collective: SharedCollective) -> Tensor:
        sums = [each.clone() for each in values[rank]]
        for each in sums:
            collective.sum_up(each)
        return torch.cat(sums)

    sums = together(num_ranks, work)
    wide = torch.cat(values[0]).float()
    for rank in range(1, num_ranks):
        wide += torch.cat(values[rank]).float()
    for seen in sums:
        assert torch.equal(seen, wide.to(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (0,), (2,)], ids=str)
def test_parts_are_joined_in_the_order_of_the_ranks(shape: tuple[int, ...]) -> None:
    widths = [5, 0, 290_001]
    parts = [torch.randn(*shape, width) for width in widths]
    joined = together(3, lambda rank, collective: collective.joined(parts[rank], widths))
    for seen in joined:
        assert torch.equal(seen, torch.cat(parts, dim=-1))


def test_ranks_that_are_given_up_wait_no_longer() -> None:
    memory = untouched_zeros(collective_bytes(2))
    waiting, other = (SharedCollective(memory, rank=rank, num_ranks=2) for rank in range(2))
    with ThreadPoolExecutor(1) as threads:
        summing = threads.submit(waiting.sum_up, torch.ones(4))
        while other.counts() != [1, 0]:
            pass
        other.give_up()
        with pytest.raises(MemberLost):
            summing.result(60.0)
    for each in (waiting, other):
        with pytest.raises(MemberLost):
            each.joined(torch.ones(1, 1), [1, 1])
