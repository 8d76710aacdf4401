"""Tests of a thread team: each work item goes to one thread, late threads take no items of a finished run, and helpers
end.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from baton_cpu.program.kernel.team import (
    STOP,
    Team,
    await_operation,
    await_run,
    close_items,
    end_items,
    is_run,
    open_items,
    share_of,
    take_items,
)

NUM_OPERATIONS, NUM_ITEMS = 2, 500
BOUND_S = 60.0
"""A busy machine may have to compile kernels meanwhile."""
NOTHING = np.zeros(1, np.int64)


class Board:
    """A team of one thread, and access for other threads to the memory through which a team shares its work."""

    def __init__(self) -> None:
        self.team = Team(num_threads=1, max_operations=NUM_OPERATIONS, num_call_words=1, take_part=lambda *_: None)
        self.address = self.team._board.ctypes.data

    def begin(self, run: int) -> None:
        close_items(self.address, run, NUM_OPERATIONS)
        open_items(self.address, run, NUM_OPERATIONS, self.team._wake_fd)

    def take(self, run: int, operation: int = 0, *, share: int = NUM_ITEMS, most: int = 1) -> range:
        first, number = take_items(self.address, run, operation, NUM_ITEMS, share, most)
        return range(first, first + number)

    def awaits(self, run: int, num_items: int) -> bool:
        return bool(await_operation(self.address, run, 0, num_items, 0, 0))


@pytest.fixture(scope="module")
def board() -> Board:
    return Board()


@pytest.mark.parametrize("most", [1, NUM_ITEMS], ids=["one by one", "many at once"])
def test_every_item_is_one_threads(board: Board, most: int) -> None:
    board.begin(most)
    begin = threading.Barrier(4)

    def work() -> list[int]:
        begin.wait(BOUND_S)
        taken: list[int] = []
        while items := board.take(most, share=8, most=most):
            taken += items
            end_items(board.address, 0, len(items))
        assert board.awaits(most, NUM_ITEMS)
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = [item for future in [pool.submit(work) for _ in range(4)] for item in future.result(BOUND_S)]
    assert Counter(taken) == Counter(range(NUM_ITEMS))
    assert board.take(most, operation=1) == range(1), "operations have items of their own"


def test_runs_of_items_get_shorter(board: Board) -> None:
    board.begin(4)
    taken = [board.take(4, share=4, most=100) for _ in range(3)]
    assert taken == [range(100), range(100, 200), range(200, 275)], "a quarter of what is left, at most 100"
    assert share_of(3, 4, 100) == 1, "the last are taken one by one"


def test_who_comes_late_takes_nothing_of_a_run_that_is_over(board: Board) -> None:
    board.begin(2)
    assert board.take(2) == range(1)
    close_items(board.address, 3, NUM_OPERATIONS)
    assert not board.take(2)
    assert not board.awaits(2, NUM_ITEMS), "it must not wait for items that nobody will end"
    assert not is_run(board.address, 2)
    assert not board.take(3), "what describes the run may be half written"
    open_items(board.address, 3, NUM_OPERATIONS, board.team._wake_fd)
    assert is_run(board.address, 3)
    assert board.take(3) == range(1)


def test_helpers_see_runs_and_end_whether_asleep_or_not() -> None:
    seen: dict[int, list[int]] = {1: [], 2: []}
    all_saw = threading.Barrier(3)

    def take_part(board: int, run: int, call: object, shared: int, thread: int, fd: int) -> None:
        if thread == 0:
            open_items(board, run, NUM_OPERATIONS, fd)
            all_saw.wait(BOUND_S)
            return
        while (run := int(await_run(board, run, fd))) != STOP:
            seen[thread].append(run)
            all_saw.wait(BOUND_S)

    team = Team(num_threads=3, max_operations=NUM_OPERATIONS, num_call_words=1, take_part=take_part)
    fds = team._sleep_fd, team._wake_fd
    team.run(NOTHING, None)
    team.run(NOTHING, None)
    assert team.close(BOUND_S)
    assert seen == {1: [1, 2], 2: [1, 2]}
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]  # takes the descriptors that are free again
    assert set(fds) <= set(others) and team.close(BOUND_S)
    for file in others:
        os.close(file)  # raises if closing twice has closed it
