"""Tests the slots of groups with a window: every token finds the KV of its whole window, whatever rows come and go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from numpy.typing import NDArray

from common.device.stream import NOT_YET
from common.kv.kv_shard import OneDevice
from common.kv.layer_group import LayerGroupSpec, WindowLayers
from common.kv.pool import CacheKey, KvPool, RowLease
from common.kv.prefix_tree import PrefixTree
from common.kv.slot_allocator import Slots
from common.kv.window_slots import WindowSlots

WINDOWS, CHUNK_TOKENS, MAX_ROWS, POOL_TOKENS, WINDOW_TOKENS = (3, 5), 4, 4, 48, 36
NUM_IN_FLIGHT = 2 * CHUNK_TOKENS
PROMPTS = [(1,) * 6 + (2,) * 6, (1,) * 6 + (3,) * 3, (1,) * 14, (1,) * 3]
"""Prompts that begin alike, so that rows share prefixes of different lengths."""


STREAM: Any = object()
DONE: Any = SimpleNamespace(is_done=lambda: True)


def layers_of(window: int) -> WindowLayers:
    group = LayerGroupSpec(
        name=f"target_{window}", num_layers=1, num_planes=2, num_heads=1, head_dim=2, dtype="float32", window=window
    )
    return WindowLayers(group, (window,))


def make_pool(*, lookahead: int = 0, windows: Sequence[int] = WINDOWS, window_tokens: int = WINDOW_TOKENS) -> KvPool:
    full = LayerGroupSpec(name="target", num_layers=1, num_planes=2, num_heads=1, head_dim=2, dtype="float32")
    draft = LayerGroupSpec(name="draft", num_layers=lookahead, num_planes=2, num_heads=1, head_dim=2, dtype="float32")
    return KvPool(
        groups=[full, *([draft] if lookahead else [])],
        windows=[layers_of(window) for window in windows],
        max_rows=MAX_ROWS,
        max_kv_tokens=POOL_TOKENS,
        max_window_tokens=window_tokens,
        num_in_flight=NUM_IN_FLIGHT,
        max_tokens_per_row=POOL_TOKENS,
        tensors=OneDevice(torch.device("cpu")),
        prefixes=PrefixTree(lookahead),
    )


def one(number: int) -> NDArray[np.int64]:
    return np.array([number])


class Row:
    """A row, the tokens it is to have, and how many of them are computed."""

    def __init__(self, lease: RowLease, token_ids: Sequence[int], num_computed: int) -> None:
        self.lease = lease
        self.token_ids = list(token_ids)
        self.num_computed = num_computed


class WindowMachine(RuleBasedStateMachine):
    """Takes the pool's rows through their lives in any order. It writes a number that stands for a token's KV into each
    slot that a forward would write, and before that reads the slots of the window like the forward would.
    """

    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(lookahead=self.lookahead)
        self.rows: list[Row] = []
        self.contents = {name: np.zeros(WINDOW_TOKENS + 1, np.int64) for name in self.pool.windows}
        self.numbers: dict[tuple[int, ...], int] = {}
        self.new_numbers = count(1)

    def number_of(self, token_ids: Sequence[int]) -> int:
        """Returns the number that stands for the KV of the last of `token_ids`."""
        return self.numbers.setdefault(tuple(token_ids), next(self.new_numbers))

    def compute(self, row: Row, start: int, stop: int) -> None:
        """Writes the KV of tokens [start, stop), like a forward."""
        batch = np.array([row.lease.row])
        for view in self.pool.windows_beside("target"):
            name = next(each for each, window in self.pool.windows.items() if window.table is view.req_to_token)
            window, contents = self.pool.windows[name], self.contents[name]
            table = view.req_to_token[batch[0]].numpy()
            for position in range(start, stop):
                slot = int(view.slot_of[int(row.lease.slots[position])])
                assert slot == table[position] != 0
                contents[slot] = self.number_of(row.token_ids[: position + 1])
                first = max(0, position - window.window + 1)
                assert np.array_equal(
                    window.slots(row.lease.row, slice(first, position + 1)), table[first : position + 1]
                )
                for seen in range(first, position + 1):
                    assert contents[table[seen]] == self.number_of(row.token_ids[: seen + 1]), (name, position, seen)

    def receive(self, row: Row) -> None:
        """Writes the KV that a prefill service sends."""
        num_tokens = len(row.token_ids)
        for name in self.pool.windows:
            first = max(row.lease.num_held[name], self.pool.first_kept(name, num_tokens))
            slots = self.pool.slots_of(row.lease, name, slice(first, num_tokens))
            self.contents[name][slots] = [self.number_of(row.token_ids[: p + 1]) for p in range(first, num_tokens)]

    @rule(prompt=st.sampled_from(PROMPTS), is_received=st.booleans())
    def reserve(self, prompt: tuple[int, ...], is_received: bool) -> None:
        key = CacheKey(np.array(prompt), "")
        expected = self.pool.num_cached(key)
        lease = self.pool.reserve(len(prompt), key=key, is_received=is_received)
        if lease is None:
            return
        assert lease.num_cached >= expected if is_received else lease.num_cached == expected
        row = Row(lease, prompt, lease.num_cached)
        self.rows.append(row)
        if is_received:
            row.num_computed = -1

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(),
        num_tokens=st.integers(1, CHUNK_TOKENS),
        num_accepted=st.integers(1, CHUNK_TOKENS),
        keeps=st.booleans(),
        is_late=st.booleans(),
        is_in_use=st.booleans(),
    )
    def go_on(
        self, data: st.DataObject, num_tokens: int, num_accepted: int, keeps: bool, is_late: bool, is_in_use: bool
    ) -> None:
        """Receives a row's prompt, computes its next chunk, or decodes with `num_tokens` of which some are accepted.

        `is_in_use` means that stream work uses the row while its KV is kept.
        """
        row = data.draw(st.sampled_from(self.rows))
        batch, start, length = one(row.lease.row), row.num_computed, len(row.token_ids)
        if start < 0:
            self.receive(row)
            row.num_computed = length
        elif start < length:
            row.num_computed = min(start + num_tokens, length)
            self.pool.extend_windows(batch, one(row.num_computed))
            self.compute(row, start, row.num_computed)
        else:
            stop = start + num_tokens
            if stop > POOL_TOKENS or not self.pool.grow(batch, one(stop)):
                return
            row.token_ids += [7] * num_tokens  # drafts, of which not all are right
            self.compute(row, start, stop)
            row.num_computed = start + min(num_accepted, num_tokens)
            del row.token_ids[row.num_computed :]
        if keeps:
            row.lease.use_until(NOT_YET if is_in_use else DONE, STREAM)
            self.pool.keep(row.lease, np.array(row.token_ids), row.num_computed)
            row.lease.use_until(DONE, STREAM)
        self.pool.leave_behind(batch, one(max(start, 0) if is_late else row.num_computed))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.rows.remove(row)
        self.pool.release(row.lease)
        self.pool.reclaim()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check_conservation()


class WindowMachineWithHead(WindowMachine):
    lookahead = 2


TestWindows = WindowMachine.TestCase
TestWindowsWithHead = WindowMachineWithHead.TestCase
TestWindows.settings = TestWindowsWithHead.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def pool_of_one_window(**options: int) -> tuple[KvPool, WindowSlots]:
    pool = make_pool(windows=[3], **options)
    return pool, pool.windows["target_3"]


def key_of(token_ids: Sequence[int]) -> CacheKey:
    return CacheKey(np.array(token_ids), "")


def computed(pool: KvPool, token_ids: Sequence[int], *, work: Any = DONE) -> RowLease:
    """Returns a row whose tokens were computed in chunks, and left in the prefix cache, which had none of them. The
    event `work` ends the work that uses the row while its KV is kept.
    """
    lease = pool.reserve(len(token_ids), key=key_of(token_ids))
    assert lease is not None and lease.num_cached == 0
    for start in range(0, len(token_ids), CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, len(token_ids))
        pool.extend_windows(one(lease.row), one(stop))
        lease.use_until(work, STREAM)
        pool.keep(lease, np.array(token_ids), stop)
        pool.leave_behind(one(lease.row), one(stop))
    lease.use_until(DONE, STREAM)
    return lease


def received(pool: KvPool, token_ids: Sequence[int]) -> RowLease:
    """Returns a row whose KV came from elsewhere, and was left in the prefix cache."""
    lease = pool.reserve(len(token_ids), key=key_of(token_ids), is_received=True)
    assert lease is not None
    pool.keep(lease, np.array(token_ids), len(token_ids))
    return lease


def end(pool: KvPool, lease: RowLease) -> None:
    pool.release(lease)
    pool.reclaim()
    pool.check_conservation()


def test_a_row_has_no_more_slots_than_its_window_however_long_it_grows() -> None:
    pool, window = pool_of_one_window()
    lease = computed(pool, [1, 2])
    for length in range(3, POOL_TOKENS + 1):
        assert pool.grow(one(lease.row), one(length))
        pool.leave_behind(one(lease.row), one(length))
        assert window.counts().running == min(3, length), "what the next token attends besides itself, and one more"
    assert (window.num_slots - window.num_unpromised) == window.row_slots == 4 + NUM_IN_FLIGHT
    end(pool, lease)
    assert (window.counts().running, window.num_unpromised) == (0, window.num_slots)


def test_what_all_rows_have_left_is_found_until_its_slots_are_needed() -> None:
    pool, window = pool_of_one_window(window_tokens=12)
    end(pool, computed(pool, range(1, 9)))
    assert pool.num_cached(key_of(range(1, 10))) == 8
    assert pool.num_cached(key_of([1, 2, 3, 4, 9, 9])) == 4, "in its middle too"
    assert window._free.num_free == 4
    end(pool, computed(pool, range(20, 28)))  # takes them, and the four that were left first
    assert pool.num_cached(key_of([1, 2, 3, 4, 9, 9])) == 0
    assert pool.num_cached(key_of(range(1, 10))) == 8, "its end is still there"


def test_a_row_whose_kv_comes_from_elsewhere_uses_a_prefix_that_has_lost_its_window() -> None:
    pool, window = pool_of_one_window()
    lease = received(pool, range(1, 9))
    assert lease.num_held == {"target_3": 0}
    assert window.slots(lease.row, slice(6, 8)).all(), "what comes has slots"
    end(pool, lease)
    other = [1, 2, 3, 4, 9]
    assert pool.num_cached(key_of(other)) == 0, "nobody sent the window of the fourth token"
    lease = pool.reserve(5, key=key_of(other), is_received=True)
    assert lease is not None and (lease.num_cached, lease.num_held) == (4, {"target_3": 0})
    end(pool, lease)
    again = pool.reserve(9, key=key_of(range(1, 10)), is_received=True)
    assert again is not None and (again.num_cached, again.num_held) == (8, {"target_3": 8})


def test_kv_that_is_on_its_way_is_not_found_and_not_replaced() -> None:
    pool, window = pool_of_one_window()
    end(pool, received(pool, range(1, 9)))
    window.drop(window._owner[window._owner != 0])  # as if others had needed the slots
    lease = pool.reserve(9, key=key_of(range(1, 10)), is_received=True)
    assert lease is not None and (lease.num_cached, lease.num_held) == (8, {"target_3": 0})
    assert pool.num_cached(key_of(range(1, 10))) == 0
    other = pool.reserve(9, key=key_of(range(1, 10)), is_received=True)
    assert other is not None and other.num_cached == 6, "up to what the first waits for"
    pool.check_conservation()
    pool.keep(lease, np.arange(1, 10), 9)
    assert pool.num_cached(key_of(range(1, 11))) == 9


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_prefix_that_lost_its_window_gets_it_from_the_next_row_that_computes_it(is_in_use: bool) -> None:
    pool, window = pool_of_one_window()
    shared = list(range(1, 9))
    end(pool, computed(pool, [*shared, 20]))
    window.drop(window._owner[window._owner != 0])  # as if others had needed the slots
    assert pool.num_cached(key_of([*shared, 21])) == 0
    end(pool, computed(pool, [*shared, 21], work=NOT_YET if is_in_use else DONE))
    assert pool.num_cached(key_of([*shared, 22])) == 8


def test_the_same_prompt_is_found_after_it_was_received() -> None:
    pool, _ = pool_of_one_window()
    received(pool, range(1, 9))
    assert pool.num_cached(key_of(range(1, 9))) == 7
    assert pool.num_cached(key_of([1, 2, 3, 4, 5, 9, 9])) == 0
    assert pool.num_cached(key_of([1, 2, 3, 4, 5, 9, 9, 9]), is_received=True) == 5, "its window comes"


def test_rows_are_promised_what_they_will_need() -> None:
    pool, window = pool_of_one_window(window_tokens=4 + NUM_IN_FLIGHT + 4)
    assert pool.reserve(20) is not None, "a long row needs a window, and what is in flight"
    assert pool.reserve(5) is None
    short = pool.reserve(3)
    assert short is not None and window.num_unpromised == 1
    rows = one(short.row)
    assert pool.grow(rows, one(4)) and not pool.grow(rows, one(5)) and pool.lacks(rows, one(5))
    assert not pool.lacks(rows, one(5), leaving=[lease for lease in pool._held.values() if lease is not short])


@pytest.mark.parametrize("broken", ["too early", "a stale table"])
def test_what_is_broken_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "too early":
        leave = WindowSlots.leave
        monkeypatch.setattr(
            WindowSlots, "leave", lambda self, rows, num_tokens, **more: leave(self, rows, num_tokens + 2, **more)
        )
    else:
        extend = WindowSlots.extend

        def extend_stale(self: WindowSlots, rows: Slots, num_tokens: Slots) -> Slots:
            slots = extend(self, rows, num_tokens)
            self.table[rows[-1], num_tokens[-1] - 1] = 0
            return slots

        monkeypatch.setattr(WindowSlots, "extend", extend_stale)
    with pytest.raises((AssertionError, ExceptionGroup)):  # hypothesis groups the errors that it finds
        run_state_machine_as_test(
            WindowMachine,
            settings=settings(max_examples=30, stateful_step_count=30, phases=[Phase.generate], derandomize=True),
        )
