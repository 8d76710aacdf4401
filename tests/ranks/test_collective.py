"""Tests of sums and joins: in shared memory, and by a process group (gloo) between ranks with memory of their own.

The ranks are threads of this process: neither holds a lock of the interpreter while it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from baton_cpu.collective import SharedCollective, collective_bytes
from common.host.untouched_memory import untouched_zeros
from common.model.part import Collective, MemberLost
from common.ranks.process_group import GroupCollective, new_store

LARGE = (1 << 20) // 4 * 2 + 12_345
"""More float32 numbers than two copies have."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUND_S = 60.0


def shared_ranks(num_ranks: int) -> list[Collective]:
    alone = SharedCollective(untouched_zeros(collective_bytes(1)), rank=0, num_ranks=1)
    alone.joined(torch.ones(1, 1), [1])  # compiles; the ranks of a service do so in their own processes
    for dtype in DTYPES:
        alone.sum_up(torch.ones(1, dtype=dtype))
    memory = untouched_zeros(collective_bytes(num_ranks))
    return [SharedCollective(memory, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def group_ranks(num_ranks: int) -> list[Collective]:
    counts, first = torch.zeros(num_ranks, dtype=torch.int64), new_store(None, num_ranks=num_ranks)
    stores = [first, *(new_store(first.port, num_ranks=num_ranks) for _ in range(num_ranks - 1))]
    return [
        GroupCollective(store, rank=rank, num_ranks=num_ranks, torch_device=torch.device("cpu"), counts=counts)
        for rank, store in enumerate(stores)
    ]


NewRanks = Callable[[int], list[Collective]]
each_kind = pytest.mark.parametrize("new_ranks", [shared_ranks, group_ranks])


def together(ranks: Sequence[Collective], work: Callable[[int, Collective], Tensor]) -> list[Tensor]:
    """Lets each rank do `work`, all at the same time, and returns what they return."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, range(len(ranks)), ranks, timeout=BOUND_S))


def sums_of(ranks: Sequence[Collective], values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns for each rank the sums of all ranks' `values`, side by side."""

    def work(rank: int, collective: Collective) -> Tensor:
        sums = [each.clone() for each in values[rank]]
        for each in sums:
            collective.sum_up(each)
        return torch.cat(sums)

    return together(ranks, work)


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_get_the_sum(num_ranks: int, dtype: torch.dtype, new_ranks: NewRanks) -> None:
    """The numbers are small and whole, so that sums in any order are the same."""
    sizes = [1, 7, LARGE, 0, 64, 3]
    values = [[torch.randint(-8, 9, (size,)).to(dtype) for size in sizes] for _ in range(num_ranks)]
    expected = torch.stack([torch.cat(each) for each in values]).float().sum(0).to(dtype)
    for seen in sums_of(new_ranks(num_ranks), values):
        assert torch.equal(seen, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_that_share_memory_sum_up_in_their_order(num_ranks: int, dtype: torch.dtype) -> None:
    sizes = [1, 7, LARGE, 0, 64, 3]
    values = [[torch.randn(size).to(dtype) for size in sizes] for _ in range(num_ranks)]
    wide = torch.cat(values[0]).float()
    for rank in range(1, num_ranks):
        wide += torch.cat(values[rank]).float()
    for seen in sums_of(shared_ranks(num_ranks), values):
        assert torch.equal(seen, wide.to(dtype))


@each_kind
@pytest.mark.parametrize("shape", [(1, 1), (0,), (2,)], ids=str)
def test_parts_are_joined_in_the_order_of_the_ranks(shape: tuple[int, ...], new_ranks: NewRanks) -> None:
    widths = [5, 0, 290_001]
    parts = [torch.randn(*shape, width) for width in widths]
    joined = together(new_ranks(3), lambda rank, collective: collective.joined(parts[rank], widths))
    for seen in joined:
        assert torch.equal(seen, torch.cat(parts, dim=-1))


def check_given_up(ranks: Sequence[Collective], gives_up: Collective, ended: Sequence[Collective]) -> None:
    """The first of two ranks waits for the other one, and then `gives_up` does. The calls of those `ended` raise."""
    waiting, other = ranks
    with ThreadPoolExecutor(1) as threads:
        summing = threads.submit(waiting.sum_up, torch.ones(4))
        while other.counts() != [1, 0]:
            pass
        gives_up.give_up()
        with pytest.raises(MemberLost):
            summing.result(BOUND_S)
    for each in ended:
        with pytest.raises(MemberLost):
            each.joined(torch.ones(1, 1), [1, 1])


@each_kind
def test_a_rank_that_is_given_up_does_not_wait_for_one_that_never_comes(new_ranks: NewRanks) -> None:
    ranks = new_ranks(2)
    check_given_up(ranks, gives_up=ranks[0], ended=ranks[:1])


def test_of_ranks_that_share_memory_one_gives_all_up() -> None:
    ranks = shared_ranks(2)
    check_given_up(ranks, gives_up=ranks[1], ended=ranks)
