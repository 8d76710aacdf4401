"""Tests which heads and columns each rank has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model.part import Heads, Part
from tests.support.ranked import NoCollective


def parts(num_ranks: int) -> list[Part]:
    return [Part(rank, num_ranks, NoCollective()) for rank in range(num_ranks)]


@given(total=st.integers(0, 5000), num_ranks=st.integers(1, 9))
def test_each_column_belongs_to_one_rank(total: int, num_ranks: int) -> None:
    columns = [part.columns(total) for part in parts(num_ranks)]
    assert [column for each in columns for column in each] == list(range(total))
    sizes = sorted(map(len, columns))
    assert sizes[-1] - sizes[0] <= (16 if total % 16 == 0 and total // 16 >= num_ranks else 1)
    assert [len(each) for each in columns] == parts(num_ranks)[0].widths(total)


@given(num_kv_heads=st.integers(1, 9), num_shared=st.integers(1, 8), num_ranks=st.integers(1, 9))
def test_each_query_head_belongs_to_one_rank_which_has_its_kv_head(
    num_kv_heads: int, num_shared: int, num_ranks: int
) -> None:
    num_heads = num_kv_heads * num_shared
    try:
        heads = [part.heads(num_heads, num_kv_heads) for part in parts(num_ranks)]
    except ValueError:
        assert num_ranks > num_kv_heads and -(-num_ranks // num_kv_heads) > num_shared
        return
    assert [query for each in heads for query in each.queries] == list(range(num_heads))
    for each in heads:
        assert each.queries and {query // num_shared for query in each.queries} == set(each.kv)
        assert len(each.queries) % len(each.kv) == 0, "a kernel has equally many query heads for each KV head"
    of_kv = [kv for each in heads for kv in each.kv]
    assert len(of_kv) == max(num_kv_heads, num_ranks), "ranks share a KV head only where there are too few"


@pytest.mark.parametrize(
    ("rank", "heads"),
    [
        (0, Heads(range(2), range(1))),
        (1, Heads(range(2, 4), range(1))),
        (2, Heads(range(4, 8), range(1, 2))),
    ],
)
def test_three_ranks_share_two_kv_heads(rank: int, heads: Heads) -> None:
    assert parts(3)[rank].heads(8, 2) == heads
