"""The one kernel that runs programs. Each thread takes items (units of work) of an operation until none is left, and
waits until all are done before it goes on to the next operation.
"""

from __future__ import annotations

import numpy as np

from baton_cpu.compiler.jit import jit
from baton_cpu.compiler.memory import pointer
from baton_cpu.program.kernel.attending import attend
from baton_cpu.program.kernel.attending_chunks import attend_chunks, prepare_chunks
from baton_cpu.program.kernel.dot_products import MAX_ROWS, PANEL_WIDTH
from baton_cpu.program.kernel.experts import down_experts, gate_experts, most_blocks, route, sort_choices
from baton_cpu.program.kernel.numbers import input_like
from baton_cpu.program.kernel.operations import (
    ITEM_ROWS,
    ITEM_TOKENS,
    MANY_TOKENS,
    Call,
    Field,
    Kind,
    array_at,
    copy_elements,
    embed,
    largest,
    linear,
    norm,
    normalise_input,
    words,
)
from baton_cpu.program.kernel.team import (
    STOP,
    await_operation,
    await_run,
    close_items,
    end_items,
    is_run,
    offer_core,
    open_items,
    share_of,
    show_progress,
    take_items,
)

NUM_FIELDS = len(Field)
SUMS_BYTES = 4 * MAX_ROWS * PANEL_WIDTH
"""Bytes at the beginning of each thread's scratch memory, for the products of MAX_ROWS rows and one panel."""
_TURNS_A_THREAD = 2  # a thread takes 1 / (2 * threads) of the items that are left
_MOST_BYTES = 1 << 20  # of weights that a thread takes at once, some 60 us of work
_AHEAD_BYTES = 128 << 10  # of the next operation's weights, prefetched while a thread waits


@jit
def _num_rows(call, fields):
    """Returns the number of rows that a matrix product (LINEAR) computes. `call` holds the int64 words that describe
    the run of the program (see Call), `fields` those of the operation (see Field).
    """
    return call[Call.NUM_SELECTED] if fields[Field.SELECTED_ROWS] else call[Call.NUM_TOKENS]


@jit
def _num_items(call, fields):
    """Returns into how many items, the units of work for threads, an operation is cut. `call` holds the int64 words
    that describe the run of the program (see Call), `fields` those of the operation (see Field).
    """
    kind = fields[Field.KIND]
    if kind == Kind.LINEAR:
        return fields[Field.NUM_PANELS] * ((_num_rows(call, fields) + ITEM_ROWS - 1) // ITEM_ROWS)
    if kind == Kind.ATTEND:
        return call[Call.NUM_ROWS] * call[Call.NUM_GROUPS]
    if kind == Kind.PREPARE_CHUNKS:
        return call[Call.NUM_KEY_PARTS]
    if kind == Kind.ATTEND_CHUNKS:
        return call[Call.NUM_QUERY_PARTS] * fields[Field.NUM_KV_HEADS]
    if kind == Kind.LARGEST:
        return call[Call.NUM_SELECTED]
    if kind == Kind.ROUTE:
        return (call[Call.NUM_TOKENS] + MAX_ROWS - 1) // MAX_ROWS
    if kind == Kind.EXPERTS_GATE:
        return fields[Field.NUM_PANELS] * most_blocks(call, fields)
    if kind == Kind.EXPERTS_DOWN:
        return fields[Field.NUM_PANELS] if call[Call.NUM_TOKENS] else np.int64(0)
    if kind == Kind.INPUT_NORM and call[Call.NUM_TOKENS] < MANY_TOKENS:
        return np.int64(0)
    return (call[Call.NUM_TOKENS] + ITEM_TOKENS - 1) // ITEM_TOKENS


@jit
def _panel_bytes(fields, like):
    """Returns the bytes of one panel (PANEL_WIDTH outputs) of a LINEAR's weight. `fields` holds the int64 words of the
    operation (see Field), and array `like` has the weight's dtype.
    """
    return PANEL_WIDTH * fields[Field.WIDTH] * like.itemsize


@jit
def _is_of_experts(kind):
    """Returns whether an operation multiplies the rows of experts by their panels."""
    return kind == Kind.EXPERTS_GATE or kind == Kind.EXPERTS_DOWN


@jit
def _most_items(call, fields, like):
    """Returns the most items of an operation that a thread takes at once. For a LINEAR, an item is a panel of its
    weight, and for experts a panel of one or of all of them. A thread takes so many that it reads about _MOST_BYTES.
    For other operations it is one item.

    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    kind = fields[Field.KIND]
    if kind == Kind.LINEAR:
        num_passes = (min(_num_rows(call, fields), ITEM_ROWS) + MAX_ROWS - 1) // MAX_ROWS
    elif _is_of_experts(kind):
        num_passes = most_blocks(call, fields) + call[Call.NUM_TOKENS] * fields[Field.NUM_CHOSEN] // MAX_ROWS
        if kind == Kind.EXPERTS_GATE:
            num_passes //= max(np.int64(1), most_blocks(call, fields))
    else:
        return np.int64(1)
    return _MOST_BYTES // (_panel_bytes(fields, like) * max(np.int64(1), num_passes))


@jit
def _run(board, run, call, thread, like):
    """Runs the program that `call` describes (int64 words, see Call), as thread number `thread` of a team. Returns when
    the program has ended, or early if the leader has begun another run.

    `run` is the number of this run, and `board` is the address of the words that the team's threads share. `like` is
    any array of the model's dtype (uint16 for bfloat16).
    """
    num_operations = call[Call.NUM_OPERATIONS]
    operations = words(call[Call.OPERATIONS], num_operations * NUM_FIELDS)
    numbers = array_at(pointer(call[Call.NUMBERS]), (num_operations * 2,), np.float64)
    scratch = call[Call.SCRATCH] + thread * call[Call.SCRATCH_BYTES]
    inputs = scratch + SUMS_BYTES
    share, num_turns = _TURNS_A_THREAD * call[Call.NUM_THREADS], 0
    for operation in range(num_operations):
        fields = operations[operation * NUM_FIELDS : (operation + 1) * NUM_FIELDS]
        epsilon, scaling = numbers[2 * operation], numbers[2 * operation + 1]
        kind = fields[Field.KIND]
        if thread == 0 and fields[Field.SHOWS_LAYER]:
            show_progress(board)
        num_items, most = _num_items(call, fields), _most_items(call, fields, like)
        item, num_taken = take_items(board, run, operation, num_items, share, most)
        width, num_rows, x, x_stride = fields[Field.WIDTH], np.int64(0), np.int64(0), np.int64(0)
        if item >= 0 and kind == Kind.LINEAR:
            num_rows = _num_rows(call, fields)
            item_bytes = input_like(like).itemsize
            is_normed = fields[Field.NORMED] and call[Call.NUM_TOKENS] >= MANY_TOKENS
            source = fields[Field.NORMED] if is_normed else fields[Field.SOURCE]
            x = call[Call.BUFFERS + 2 * source]
            x_stride = call[Call.BUFFERS + 2 * source + 1] * item_bytes
            is_chosen = fields[Field.SELECTED_ROWS] and call[Call.SELECTED]
            if not is_normed and (fields[Field.COPIED] or is_chosen):
                normalise_input(call, fields, epsilon, inputs, like)
                x, x_stride = inputs, width * item_bytes
        num_blocks, gathered = np.int64(0), np.int64(-1)
        if item >= 0 and _is_of_experts(kind):
            num_blocks = sort_choices(call, fields, inputs)
        while item >= 0:
            for place in range(item, item + num_taken):
                if kind == Kind.LINEAR:
                    linear(call, fields, place, x, x_stride, num_rows, scratch, like)
                elif kind == Kind.ATTEND:
                    attend(call, fields, epsilon, scaling, place, inputs, like)
                elif kind == Kind.PREPARE_CHUNKS:
                    prepare_chunks(call, fields, epsilon, place, inputs, like)
                elif kind == Kind.ATTEND_CHUNKS:
                    attend_chunks(call, fields, epsilon, scaling, place, inputs, like)
                elif kind == Kind.EMBED:
                    embed(call, fields, place, like)
                elif kind == Kind.LARGEST:
                    largest(call, fields, place)
                elif kind == Kind.EXPERTS_GATE:
                    gathered = gate_experts(call, fields, place, num_blocks, gathered, inputs, scratch, like)
                elif kind == Kind.EXPERTS_DOWN:
                    down_experts(call, fields, place, inputs, scratch, like)
                elif kind == Kind.ROUTE:
                    route(call, fields, epsilon, place, inputs, scratch, like)
                elif kind == Kind.INPUT_NORM:
                    norm(call, fields, epsilon, place, input_like(like), like)
                else:
                    norm(call, fields, epsilon, place, like, like)
            end_items(board, operation, num_taken)
            num_turns += 1
            offer_core(num_turns)
            item, num_taken = take_items(board, run, operation, num_items, share, most)
        following = operations[(operation + 1) * NUM_FIELDS : (operation + 2) * NUM_FIELDS]
        if following.shape[0] and following[Field.KIND] == Kind.INPUT_NORM:
            following = operations[(operation + 2) * NUM_FIELDS : (operation + 3) * NUM_FIELDS]
        ahead, ahead_bytes = np.int64(0), np.int64(0)
        if following.shape[0] and following[Field.KIND] == Kind.LINEAR:
            first, num_panels, most = np.int64(0), following[Field.NUM_PANELS], _most_items(call, following, like)
            for _ in range(thread):
                first += share_of(num_panels - first, share, most)
            start = min(first, num_panels) * _panel_bytes(following, like)
            ahead, ahead_bytes = following[Field.WEIGHT] + start, np.int64(_AHEAD_BYTES)
        if not await_operation(board, run, operation, num_items, ahead, ahead_bytes):
            return


def take_part(board, run, call, shared_address, thread, wake_or_sleep_fd, like):
    """Runs programs as thread number `thread` of a team. Thread 0 leads: it runs the program that `call` describes
    (int64 words, see Call) to its end, as run number `run`, and returns. Any other thread helps with every program that
    is begun from now on, until the team stops; its `call` is scratch memory, and its `run` 0.

    `board` is the address of the words that the team's threads share. The leader copies `call` to `shared_address`,
    where helpers read it. Helpers sleep by reading from a pipe, and the leader wakes them by writing to it;
    `wake_or_sleep_fd` is this thread's end of the pipe. `like` is any array of the model's dtype (uint16 for bfloat16).
    Leading and helping are one function, so that it is compiled once, by `load_kernels`.
    """
    shared = words(shared_address, call.shape[0])
    if thread == 0:
        close_items(board, run, call[Call.NUM_OPERATIONS])
        copy_elements(call, shared)
        open_items(board, run, call[Call.NUM_OPERATIONS], wake_or_sleep_fd)
    while True:
        if thread != 0:
            run = await_run(board, run, wake_or_sleep_fd)
            if run == STOP:
                return
            copy_elements(shared, call)
        if thread == 0 or is_run(board, run):
            _run(board, run, call, thread, like)
        if thread == 0:
            return
