"""Threads that run one program together, without the interpreter, and without a fixed share of the work for each.

An operation is cut into items. A thread takes the next items, many at once while many are left, until none is left.
When all items are done, all threads go on to the next operation. A thread whose core is taken away delays only the
items that it has taken; the others take the rest. (OpenMP gives each thread its share beforehand and waits for all of
them.) If the delayed items are the last ones, all threads wait for them. So threads offer their cores to other threads
of the system between two turns; a turn is the items that a thread takes at once.

    caller    announce ──▶ run ────────────────────────────▶ all items of the last operation are done
    helpers   asleep ────▶ run ─▶ spin a little ─▶ asleep

A run is one execution of a program by the team. The `call` of a run is the int64 words that describe it. Runs are
numbered, and the argument `run` of the functions below is the number of a run. `board` is the address of the int64
words that the threads share: the number of the present run, the number of sleeping helpers, a count of progress, and
counters for each operation. A helper that is late may find items of another run, which it must not take. So every
counter carries the number of its run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from baton_cpu.compiler.jit import jit
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
from baton_cpu.compiler.vectors import LINE_BYTES, prefetch
from common.host.cores import compute

_LINE = 8  # words of a cache line; each word that threads write often has a line of its own
_RUN, _NUM_ASLEEP, _PROGRESS = 0, _LINE, 2 * _LINE
_COUNTERS = 3 * _LINE
_COUNTER_WORDS = 2 * _LINE  # for each operation: the next item, and how many are done
_RUN_SHIFT = 32
STOP = -1
_MAX_RUNS = (1 << 31) - 1
_LEADER = 0
_NO_RUN = 0
_NO_ITEM = (1 << 31) - 1
_SPINS_FOR_RUN = 16_000  # some 400 us, longer than between two steps: waking threads delays the leader
_SPINS_BETWEEN_OFFERS = 256
_TURNS_BETWEEN_OFFERS = 8  # a turn takes some 60 us, a yield that no thread wants half a microsecond
_SPINS_BEFORE_YIELD = 4_000


@jit
def share_of(num_left, share, most):
    """Returns how many of an operation's `num_left` items (units of work) a thread takes at once: `num_left` / `share`,
    at most `most`, and at least one. `share` is a small multiple of the number of threads.

    At first threads take many neighbouring items at once. Near the end they take few, so that they finish together.
    """
    return max(np.int64(1), min(num_left // share, most))


@jit
def take_items(board, run, operation, num_items, share, most):
    """Takes the next of the `num_items` items (units of work) of an operation for this thread, as many as
    `share_of(number left, share, most)` says. Returns the number of the first one and how many were taken, or -1 and 0
    if none is left or run number `run` is over.

    `board` is the address of the words that the team's threads share. `operation` is the operation's index in the run's
    program. A run is one execution of a program; runs are numbered.
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
    """Counts `num_taken` more items (units of work) of an operation as done. `board` is the address of the words that
    the team's threads share. `operation` is the operation's index in the run's program.
    """
    add_to_word(board + 8 * (_COUNTERS + operation * _COUNTER_WORDS + _LINE), num_taken)


@jit
def offer_core(num_turns):
    """Yields the core to other threads of the system if `num_turns`, the number of turns that this thread has ended, is
    a multiple of _TURNS_BETWEEN_OFFERS. A turn is the items that a thread takes at once. Call this after every turn,
    when no other thread of the team waits for items that this thread has taken.
    """
    if num_turns % _TURNS_BETWEEN_OFFERS == 0:
        yield_core()


@jit
def await_operation(board, run, operation, num_items, ahead, ahead_bytes):
    """Waits until all `num_items` items of an operation are done. Returns True, or False if run number `run` is over
    instead. While it waits it prefetches `ahead_bytes` bytes from address `ahead` on; fewer may be there.

    `board` is the address of the words that the team's threads share. `operation` is the operation's index in the run's
    program. A run is one execution of a program; runs are numbered.
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
            prefetch(ahead + offset)
            offset += LINE_BYTES
        elif num_spins > _SPINS_BEFORE_YIELD:
            yield_core()
        else:
            pause()


@jit
def show_progress(board):
    """Adds one to the count of progress that `Team.num_shown` returns. The leader calls this at the start of a layer of
    the target. `board` is the address of the words that the team's threads share.
    """
    add_to_word(board + 8 * _PROGRESS, 1)


@jit
def close_items(board, run, num_operations):
    """Prepares the counters of `num_operations` operations for run number `run`, but lets no thread take items yet.
    From now on no thread can take items of an earlier run either, so the leader may overwrite the shared words that
    describe the run. A run is one execution of a program; runs are numbered. `board` is the address of the words that
    the team's threads share.
    """
    store_word(board + 8 * _RUN, _NO_RUN)
    for operation in range(num_operations):
        counter = board + 8 * (_COUNTERS + operation * _COUNTER_WORDS)
        store_word(counter, (np.int64(run) << _RUN_SHIFT) + _NO_ITEM)
        store_word(counter + 8 * _LINE, np.int64(run) << _RUN_SHIFT)
    fence()


@jit
def open_items(board, run, num_operations, wake_fd):
    """Begins run number `run`, which is one execution of a program of `num_operations` operations. Each operation is
    cut into items, and each thread of the team takes items until none are left. The helpers, which are all threads but
    the caller's, are told as `announce` says. `board` is the address of the words that the threads share, and `wake_fd`
    the pipe that wakes helpers.
    """
    for operation in range(num_operations):
        store_word(board + 8 * (_COUNTERS + operation * _COUNTER_WORDS), np.int64(run) << _RUN_SHIFT)
    announce(board, run, wake_fd)


@jit
def announce(board, run, wake_fd):
    """Stores `run` as the number of the present run, which spinning helpers see. A run is one execution of a program;
    runs are numbered. Wakes sleeping helpers: it writes a byte for each to the pipe `wake_fd`. `board` is the address
    of the words that the team's threads share.
    """
    store_word(board + 8 * _RUN, run)
    num_asleep = load_word(board + 8 * _NUM_ASLEEP)
    if num_asleep > 0:
        tokens = np.zeros(num_asleep, np.uint8)
        write_file(np.int32(wake_fd), address_of(tokens), num_asleep)


@jit
def await_run(board, last_run, sleep_fd):
    """Waits until the present run has another number than `last_run`. It spins for a while, and then sleeps: it reads a
    byte from the pipe `sleep_fd`. Returns the new run's number, or STOP if there will be no more runs. A run is one
    execution of a program; runs are numbered. `board` is the address of the words that the team's threads share.
    """
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
    """Returns whether `run` is still the number of the present run. If so, the words that this thread copied from the
    shared ones before it called this function describe that run, and not another one. A run is one execution of a
    program; runs are numbered. `board` is the address of the words that the team's threads share.
    """
    fence()
    return load_word(board + 8 * _RUN) == run


class Team:
    """A team of `num_threads` threads, the caller's among them. It runs programs of at most `max_operations`
    operations.

    Each thread calls the compiled function `take_part(board, run, call, shared, thread, fd)`. `thread` is its place in
    the team: the caller of `run` passes 0 and leads, the helpers pass 1, 2, ... `board` is the address of the counters
    that coordinate the threads, and `run` the number of the run (a helper passes 0). `call` is an array of
    `num_call_words` words. The leader's describes the run (see Call); it is copied to the address `shared`, and each
    helper copies it from there into its own. `fd` is an end of a pipe: the leader writes to it to wake helpers, and a
    helper sleeps by reading from it.
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
        """Runs the program that `call` describes (int64 words, see Call), and returns when it has ended. `addressed`
        keeps alive, until then, the objects whose addresses are in `call`.
        """
        self._num_runs = self._num_runs % _MAX_RUNS + 1
        self._take_part(self._board.ctypes.data, self._num_runs, call, self._shared.ctypes.data, _LEADER, self._wake_fd)

    @property
    def num_shown(self) -> int:
        """A counter of the target's layers that have begun, over all executions of programs. Another thread reads it to
        see how far a forward is.
        """
        return int(self._board[_PROGRESS])

    def close(self, timeout_s: float) -> bool:
        """Ends the helpers; no thread may call `run` any more. Returns False if a helper did not end within
        `timeout_s`. May be called again.
        """
        if self._is_closed:
            return True
        self._board[_RUN] = STOP  # as `announce` does, which would be compiled for this call alone
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
