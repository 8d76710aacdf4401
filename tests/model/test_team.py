"""Threads that run a program together: who is late takes nothing of another run, and closing ends them all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from common.model.fused import team
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

BOUND_S = 20.0
NUM_ITEMS = 3


@pytest.fixture
def board() -> Iterator[int]:
    words: NDArray[np.int64] = np.zeros(team._COUNTERS + 2 * team._COUNTER_WORDS, np.int64)
    yield words.ctypes.data
    del words


def begin(board: int, run: int) -> None:
    close_items(board, run, 1)
    assert take_item(board, run, 0, NUM_ITEMS) == -1, "items before the run is described"
    open_items(board, run, 1, -1)


def test_every_item_is_taken_once_and_then_the_operation_is_over(board: int) -> None:
    begin(board, 1)
    assert [take_item(board, 1, 0, NUM_ITEMS) for _ in range(NUM_ITEMS + 1)] == [0, 1, 2, -1]
    for _ in range(NUM_ITEMS):
        end_item(board, 0)
    assert await_operation(board, 1, 0, NUM_ITEMS, np.zeros(1, np.int64), 0)


def test_who_is_late_finds_nothing_of_a_later_run(board: int) -> None:
    begin(board, 1)
    begin(board, 2)
    assert not is_run(board, 1)
    assert take_item(board, 1, 0, NUM_ITEMS) == -1
    assert not await_operation(board, 1, 0, NUM_ITEMS, np.zeros(1, np.int64), 0)
    assert take_item(board, 2, 0, NUM_ITEMS) == 0


class Waiting:
    """Helpers that only wait for runs, and note what they were told."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def take_part(self, board: int, run: int, call: object, shared: int, thread: int, fd: int) -> None:
        while run != STOP:
            run = await_run(board, run, fd)
            self.seen.append(run)


def test_closing_ends_helpers_awake_and_asleep_and_compiles_nothing_for_it() -> None:
    waiting = Waiting()
    helpers = Team(num_threads=3, max_operations=1, num_call_words=1, take_part=waiting.take_part)
    compiled = len(announce.signatures)
    assert helpers.close(BOUND_S)
    assert waiting.seen == [STOP] * 2
    assert len(announce.signatures) == compiled
    assert not [thread for thread in threading.enumerate() if thread in helpers._helpers]


def test_closing_twice_closes_nobody_elses_file() -> None:
    helpers = Team(num_threads=1, max_operations=1, num_call_words=1, take_part=lambda *_: None)
    assert helpers.close(BOUND_S)
    others = os.pipe()  # takes the numbers that are free again
    assert helpers.close(BOUND_S)
    for file in others:
        os.close(file)
