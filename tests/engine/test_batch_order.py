"""Tests of invariant I14: merge and filter keep row order, and every column stays aligned with the requests."""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from decode_service.schedule.schedule_batch import ScheduleBatch
from tests.engine.checks import breaking, broken_by, broken_by_each, holding
from tests.engine.mutants import batches
from tests.engine.relay_rig import make_batch

MAX_MERGED = 4

Operation = tuple[str, int]
"""An operation on a batch: ("merge", number of new rows), or ("filter", bit mask), where entry i stays if bit i is
set.
"""

operations = st.lists(
    st.tuples(st.just("merge"), st.integers(0, MAX_MERGED)) | st.tuples(st.just("filter"), st.integers(0, 255)),
    max_size=10,
)


def length_of(row: int) -> int:
    return 100 + 7 * row


def assert_aligned(batch: ScheduleBatch, rows: list[int]) -> None:
    lengths = [length_of(row) for row in rows]
    assert [req.arrival for req in batch.reqs] == rows, "the order of requests changed"
    assert batch.req_pool_indices.tolist() == rows, "req_pool_indices are not the requests'"
    assert batch.req_pool_indices_cpu.tolist() == rows, "req_pool_indices_cpu are not the requests'"
    assert batch.seq_lens.tolist() == lengths, "seq_lens are not the requests'"
    assert batch.seq_lens_cpu.tolist() == lengths, "seq_lens_cpu are not the requests'"
    assert batch.sampling_needs[:, 0].tolist() == [row % 2 for row in rows], "sampling_needs are not the requests'"
    assert batch.sampling.sampled.tolist() == [i for i, row in enumerate(rows) if row % 2], (
        "sampling outlived its batch"
    )
    assert batch.request_ids == tuple(f"row {row}" for row in rows), "request_ids outlived their batch"
    assert batch.undrafted == tuple(i for i, row in enumerate(rows) if row % 3 == 0), "undrafted outlived its batch"
    assert batch.batch_size == len(rows)


def assert_slots(out_cache_loc: torch.Tensor | None, rows: list[int]) -> None:
    assert out_cache_loc is None or out_cache_loc.tolist() == rows, "out_cache_loc outlived a filter"


FORGETFUL = {
    batches.forgetful(operation, column): f"{column} are not"
    for operation in ("filter_batch", "merge_batch")
    for column in batches.COLUMNS
}


@broken_by(batches.merge_reorders, "the order of requests")
@broken_by(batches.filter_reorders, "the order of requests")
@broken_by(batches.filter_keeps_old_slots, "out_cache_loc outlived")
@broken_by(batches.what_follows_is_kept, "sampling outlived")
@broken_by_each(FORGETFUL)
@settings(max_examples=100, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(operations=operations)
def check_columns_follow_the_requests(operations: list[Operation]) -> None:
    batch = ScheduleBatch.empty(torch.device("cpu"))
    rows: list[int] = []
    next_row = 1
    for operation, argument in operations:
        if operation == "merge":
            new = list(range(next_row, next_row + argument))
            next_row += argument
            merged = make_batch(new, [length_of(row) for row in new])
            merged.sampling_needs[:, 0] = [row % 2 for row in new]
            for req in merged.reqs:
                req.wants_drafts = req.arrival % 3 > 0
            batch.merge_batch(merged)
            rows = [*rows, *new]
        else:
            keep = [i for i in range(len(rows)) if argument >> (i % 8) & 1]
            batch.out_cache_loc = torch.tensor(rows, dtype=torch.int64)
            batch.filter_batch(keep)
            rows = [rows[i] for i in keep]
            assert_slots(batch.out_cache_loc, rows)
        assert_aligned(batch, rows)


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
