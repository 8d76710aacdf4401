"""Threads that run one program together, without the interpreter and without waiting for each other in turns.

An operation is cut into items. Whoever comes takes the next ones, many while many are left; when all are done
everybody goes on. A thread whose core is taken away holds up the items it has, nothing else: the others take the rest.
(OpenMP gives each thread its share beforehand and waits for all of them.) When those are the last, all wait for them;
so threads offer their cores between turns.

    caller    begin_run ─▶ run ────────────────────────────▶ all items of the last operation are done
    helpers   asleep ────▶ run ─▶ spin a little ─▶ asleep

A helper that is late finds items of another run, which it must not take: every counter carries the run's number.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from baton_cpu.compiler.jit import jit, prefetch
from baton_cpu.compiler.memory import (
    add_to_word,
    address_of,
    fence,
    load_word,
    pause,
    read_file,
    store_word,
    swap_word_if,
    write_file,
    yield_core,
)
from common.host.cores import compute

_LINE_BYTES = 64
_LINE = 8  # words; what threads write often lies on cache lines of its own
_RUN, _NUM_ASLEEP, _PROGRESS = 0, _LINE, 2 * _LINE
_COUNTERS = 3 * _LINE
_COUNTER_WORDS = 2 * _LINE  # of an operation: the next item, and the number done
_RUN_SHIFT = 32
STOP = -1
_MAX_RUNS = (1 << 31) - 1
_LEADER = 0
_NO_RUN = 0
_NO_ITEM = (1 << 31) - 1
_SPINS_FOR_RUN = 16_000  # some 400 us, longer than what lies between two steps: to wake a thread holds up who does it
_SPINS_BETWEEN_OFFERS = 256
_TURNS_BETWEEN_OFFERS = 8  # of a thread; some 60 us of weights, and a yield to nobody takes half a microsecond
_SPINS_BEFORE_YIELD = 4_000


@jit
def share_of(num_left, share, most):
    """How many of the items that are left a thread takes at once: a `share`th, so that long runs of neighbours come
    first and threads end together, but at most `most`, and one at least.
    """
    return max(np.int64(1), min(num_left // share, most))


@jit
def take_items(board, run, operation, num_items, share, most):
    """The first item of `operation` that is this thread's now, and their number; -1 and 0 when none is left, or the run
    is over.
    """
    counter = board + 8 * (_COUNTERS + operation * _COUNTER_WORDS)
    while True:
        seen = load_word(counter)
        item = seen & ((np.int64(1) << _RUN_SHIFT) - 1)
        if seen >> _RUN_SHIFT != run or item >= num_items:
            return np.int64(-1), np.int64(0)
        num_taken = share_of(num_items - item, share, most)
        if swap_word_if(counter, seen, seen + num_taken):
            return item, num_taken


@jit
def end_items(board, operation, num_taken):
    add_to_word(board + 8 * (_COUNTERS + operation * _COUNTER_WORDS + _LINE), num_taken)


@jit
def offer_core(num_turns):
    """Between two turns, every so often: who waits for this core takes it here, where nobody waits for this thread, and
    not in the middle of one.
    """
    if num_turns % _TURNS_BETWEEN_OFFERS == 0:
        yield_core()


@jit
def await_operation(board, run, operation, num_items, ahead, ahead_bytes):
    """Until all its items are done. False when the run is over. Who waits asks for memory meanwhile: `ahead_bytes` from
    the start of array `ahead` on.
    """
    offset = np.int64(0)
    counter = board + 8 * (_COUNTERS + operation * _COUNTER_WORDS + _LINE)
    expected = (np.int64(run) << _RUN_SHIFT) + num_items
    num_spins = 0
    while True:
        seen = load_word(counter)
        if seen == expected:
            return True
        if seen >> _RUN_SHIFT != run:
            return False
        num_spins += 1
        if offset < ahead_bytes:
            prefetch(ahead, offset)
            offset += _LINE_BYTES
        elif num_spins > _SPINS_BEFORE_YIELD:
            yield_core()
        else:
            pause()


@jit
def show_progress(board):
    add_to_word(board + 8 * _PROGRESS, 1)


@jit
def close_items(board, run, num_operations):
    """From now on nobody finds an item of an earlier run, and none of `run` yet; what describes it may be written."""
    store_word(board + 8 * _RUN, _NO_RUN)
    for operation in range(num_operations):
        counter = board + 8 * (_COUNTERS + operation * _COUNTER_WORDS)
        store_word(counter, (np.int64(run) << _RUN_SHIFT) + _NO_ITEM)
        store_word(counter + 8 * _LINE, np.int64(run) << _RUN_SHIFT)
    fence()


@jit
def open_items(board, run, num_operations, wake_fd):
    for operation in range(num_operations):
        store_word(board + 8 * (_COUNTERS + operation * _COUNTER_WORDS), np.int64(run) << _RUN_SHIFT)
    announce(board, run, wake_fd)


@jit
def announce(board, run, wake_fd):
    store_word(board + 8 * _RUN, run)
    num_asleep = load_word(board + 8 * _NUM_ASLEEP)
    if num_asleep > 0:
        tokens = np.zeros(num_asleep, np.uint8)
        write_file(np.int32(wake_fd), address_of(tokens), num_asleep)


@jit
def await_run(board, last_run, sleep_fd):
    """The number of a run after `last_run`; STOP when there will be none."""
    token = np.zeros(1, np.uint8)
    while True:
        for spin in range(1, _SPINS_FOR_RUN + 1):
            run = load_word(board + 8 * _RUN)
            if run != last_run and run != _NO_RUN:
                return run
            if spin % _SPINS_BETWEEN_OFFERS == 0:
                yield_core()
            else:
                pause()
        add_to_word(board + 8 * _NUM_ASLEEP, 1)
        run = load_word(board + 8 * _RUN)
        if run in (last_run, _NO_RUN):
            read_file(np.int32(sleep_fd), address_of(token), 1)
        add_to_word(board + 8 * _NUM_ASLEEP, -1)


@jit
def is_run(board, run):
    """Whether `run` is still the one; what was read of its description before this call then was all its own."""
    fence()
    return load_word(board + 8 * _RUN) == run


class Team:
    """`num_threads` threads, the caller's among them, for programs of at most `max_operations`.

    `take_part(board, run, call, shared, thread, fd)` leads as thread 0 and helps as another; `call` are the
    `num_call_words` that describe a run, `shared` the address where helpers find them. One thread at a time leads.
    """

    def __init__(
        self, *, num_threads: int, max_operations: int, num_call_words: int, take_part: Callable[..., None]
    ) -> None:
        self.num_threads = num_threads
        self.max_operations = max_operations
        self._take_part = take_part
        board: NDArray[np.int64] = np.zeros(_COUNTERS + max_operations * _COUNTER_WORDS + _LINE, np.int64)
        self._board = board[-board.ctypes.data % (8 * _LINE) // 8 :]
        self._shared: NDArray[np.int64] = np.zeros(num_call_words, np.int64)
        self._sleep_fd, self._wake_fd = os.pipe()
        self._num_runs = 0
        self._is_closed = False
        self._helpers = [
            threading.Thread(target=self._help, args=(thread,), name=f"forward-{thread}", daemon=True)
            for thread in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, call: NDArray[np.int64], addressed: object) -> None:
        """Run what `call` describes to its end. `addressed` holds what it has addresses of until then."""
        self._num_runs = self._num_runs % _MAX_RUNS + 1
        self._take_part(self._board.ctypes.data, self._num_runs, call, self._shared.ctypes.data, _LEADER, self._wake_fd)

    @property
    def num_shown(self) -> int:
        """How often a program showed progress. May be asked from any thread."""
        return int(self._board[_PROGRESS])

    def close(self, timeout_s: float) -> bool:
        """End the helpers; nobody may lead any more. False when one did not end within `timeout_s`. Idempotent."""
        if self._is_closed:
            return True
        self._board[_RUN] = STOP  # what `announce` does, which would be compiled for this call alone
        os.write(self._wake_fd, bytes(len(self._helpers)))
        deadline_s = time.monotonic() + timeout_s
        for helper in self._helpers:
            helper.join(max(0.0, deadline_s - time.monotonic()))
        self._is_closed = not any(helper.is_alive() for helper in self._helpers)
        if self._is_closed:
            os.close(self._sleep_fd)
            os.close(self._wake_fd)
        return self._is_closed

    def _help(self, thread: int) -> None:
        compute()
        call = np.zeros_like(self._shared)
        self._take_part(self._board.ctypes.data, 0, call, self._shared.ctypes.data, thread, self._sleep_fd)
