"""Tests of how the thorough tests are split into parts, and of the table of what tests cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.costs import ONE_UNIT, Cost, FileCosts, page, part_of_files, read_table

FILES = st.dictionaries(
    st.sampled_from(
        [f"tests/{folder}/test_{name}.py" for folder in ("kv", "pair", "interleavings") for name in "abcdef"]
    ),
    st.floats(0, 400),
)


@given(costs=FILES, num_parts=st.integers(1, 9))
def test_every_file_is_in_one_part_and_no_part_outweighs_another_by_more_than_a_unit(
    costs: dict[str, float], num_parts: int
) -> None:
    part_of = part_of_files(costs, num_parts)
    assert part_of.keys() == costs.keys()
    explored = [file for file in costs if file.startswith(ONE_UNIT)]
    assert {part_of[file] for file in explored} <= {1}
    loads = [sum(costs[file] for file in costs if part_of[file] == part) for part in range(1, num_parts + 1)]
    dearest_unit = max(
        [sum(costs[file] for file in explored), *(costs[file] for file in costs if file not in explored)], default=0
    )
    assert max(loads) - min(loads) <= dearest_unit + 1e-6


def test_the_table_is_read_as_it_was_written() -> None:
    costs = {
        "tests/kv/test_a.py": FileCosts(Cost(3, 12.5), Cost(1, 0.5), "all pools"),
        "tests/pair/test_b.py": FileCosts(Cost(0, 0.0), Cost(2, 7.0)),
    }
    assert read_table(page(costs, "today, here")) == costs


def test_a_row_that_is_none_is_refused_by_its_file() -> None:
    with pytest.raises(ValueError, match=r"^tests/kv/test_a\.py: 3 cells"):
        read_table("| `tests/kv/test_a.py` | 1 | 2.0 |")
