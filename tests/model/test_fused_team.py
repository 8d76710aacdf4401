"""A team's contract: each item is one thread's, late threads take nothing of a run that is over, helpers end."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from common.model.fused.team import (
    STOP,
    Team,
    announce,
    await_operation,
    await_run,
    close_items,
    end_item,
    is_run,
    open_items,
    take_item,
)

NUM_OPERATIONS, NUM_ITEMS = 2, 500
NOTHING = np.zeros(1, np.int64)


class Board:
    """A team of one thread, whose board others use."""

    def __init__(self) -> None:
        self.team = Team(num_threads=1, max_operations=NUM_OPERATIONS, num_call_words=1, take_part=lambda *_: None)
        self.address = self.team._board.ctypes.data

    def begin(self, run: int) -> None:
        close_items(self.address, run, NUM_OPERATIONS)
        open_items(self.address, run, NUM_OPERATIONS, self.team._wake_fd)

    def take(self, run: int, operation: int = 0) -> int:
        return int(take_item(self.address, run, operation, NUM_ITEMS))

    def awaits(self, run: int, num_items: int) -> bool:
        return bool(await_operation(self.address, run, 0, num_items, NOTHING, 0))


@pytest.fixture(scope="module")
def board() -> Board:
    return Board()


def test_every_item_is_one_threads(board: Board) -> None:
    board.begin(1)
    begin = threading.Barrier(4)

    def work() -> list[int]:
        begin.wait(10)
        taken = []
        while (item := board.take(1)) >= 0:
            taken.append(item)
            end_item(board.address, 0)
        assert board.awaits(1, NUM_ITEMS)
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = [item for future in [pool.submit(work) for _ in range(4)] for item in future.result(10)]
    assert Counter(taken) == Counter(range(NUM_ITEMS))
    assert board.take(1, operation=1) == 0, "operations have items of their own"


def test_who_comes_late_takes_nothing_of_a_run_that_is_over(board: Board) -> None:
    board.begin(2)
    assert board.take(2) == 0
    close_items(board.address, 3, NUM_OPERATIONS)
    assert board.take(2) == -1
    assert not board.awaits(2, NUM_ITEMS), "it must not wait for items that nobody will end"
    assert not is_run(board.address, 2)
    assert board.take(3) == -1, "what describes the run may be half written"
    open_items(board.address, 3, NUM_OPERATIONS, board.team._wake_fd)
    assert is_run(board.address, 3)
    assert board.take(3) == 0


def test_helpers_see_runs_and_end_whether_asleep_or_not() -> None:
    seen: dict[int, list[int]] = {1: [], 2: []}
    all_saw = threading.Barrier(3)

    def take_part(board: int, run: int, call: object, shared: int, thread: int, fd: int) -> None:
        if thread == 0:
            open_items(board, run, NUM_OPERATIONS, fd)
            all_saw.wait(10)
            return
        while (run := int(await_run(board, run, fd))) != STOP:
            seen[thread].append(run)
            all_saw.wait(10)

    team = Team(num_threads=3, max_operations=NUM_OPERATIONS, num_call_words=1, take_part=take_part)
    fds = team._sleep_fd, team._wake_fd
    team.run(NOTHING, None)
    team.run(NOTHING, None)
    assert team.close(10.0)
    assert seen == {1: [1, 2], 2: [1, 2]}
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_closing_compiles_nothing() -> None:
    compiled = len(announce.signatures)  # type: ignore[attr-defined]
    team = Team(num_threads=1, max_operations=NUM_OPERATIONS, num_call_words=1, take_part=lambda *_: None)
    assert team.close(10.0)
    assert len(announce.signatures) == compiled  # type: ignore[attr-defined]


def test_closing_twice_closes_nobody_elses_file() -> None:
    team = Team(num_threads=1, max_operations=NUM_OPERATIONS, num_call_words=1, take_part=lambda *_: None)
    assert team.close(10.0)
    others = os.pipe()  # takes the numbers that are free again
    assert team.close(10.0)
    for file in others:
        os.close(file)
