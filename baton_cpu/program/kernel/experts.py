"""Layers of experts: each token is sent to a few of them, and their outputs are added, weighted by the router's scores.

ROUTE          norm ▸ router ▸ softmax ▸ the largest scores     an item: up to MAX_ROWS tokens
EXPERTS_GATE   silu(gate) * up of each expert over its tokens   an item: a panel of an expert, up to ITEM_ROWS rows
EXPERTS_DOWN   down of each expert ▸ weighted sum ▸ add         an item: a panel of all experts

A choice is one expert of one token. A token has NUM_CHOSEN choices, which are numbered token * NUM_CHOSEN + rank. ROUTE
leaves them in buffer ROUTES: for each token the experts (int32), then their weights (float32). A thread that has taken
an item of one of the other two operations sorts the choices by expert for itself, which is faster than waiting for
another thread. The rows of one expert then lie together, and are multiplied by its panels as the rows of a LINEAR are.

A token's results are added in the order of its experts, whoever shares the forward. An expert without tokens is not
read. The number of items must not depend on the choices: a late thread may count items of a run that has ended.

`call` holds the int64 words of the forward, which `Call` names, and `fields` those of the operation, which `Field`
names. `like` is an array of the model's dtype. `scratch` is the address of this thread's memory: the sorted choices
come first, and what an operation needs for itself lies after them.
"""

from __future__ import annotations

import numpy as np

from baton_cpu.compiler.jit import exp, jit
from baton_cpu.compiler.memory import pointer
from baton_cpu.compiler.numbers import read
from baton_cpu.program.kernel.dot_products import MAX_ROWS, PANEL_WIDTH, panel_products
from baton_cpu.program.kernel.numbers import input_like, rounded
from baton_cpu.program.kernel.operations import (
    ITEM_ROWS,
    Call,
    Field,
    array_at,
    buffer_row,
    copy_elements,
    elements,
    normalise,
    store_gate,
    words,
)

_LINE_BYTES = 64


def scratch_bytes(num_tokens: int, num_experts: int, num_chosen: int, width: int, input_itemsize: int) -> int:
    """Returns the scratch memory in bytes that one thread needs for the operations of experts, in a forward of
    `num_tokens`. `width` is the length of the experts' input rows, and `input_itemsize` the size of a number in them.
    """
    num_gathered = min(num_tokens * num_chosen, ITEM_ROWS)
    own = max(num_gathered * width * input_itemsize, 4 * PANEL_WIDTH * num_tokens, 4 * MAX_ROWS * num_experts)
    return 8 * (2 * num_experts + 1 + num_tokens * num_chosen) + _LINE_BYTES + own


@jit
def _routes(call, fields, token):
    """Returns the experts of a token, an array [NUM_CHOSEN] int32, and their weights, an array [NUM_CHOSEN] float32."""
    num_chosen = fields[Field.NUM_CHOSEN]
    address = call[Call.BUFFERS + 2 * fields[Field.ROUTES]] + token * 2 * num_chosen * 4
    experts = array_at(pointer(address), (num_chosen,), np.int32)
    return experts, array_at(pointer(address + 4 * num_chosen), (num_chosen,), np.float32)


@jit
def _choose(scores, experts, weights):
    """Writes the experts with the largest of the router's `scores` (array [experts] float32, which is overwritten) to
    array `experts`, the largest first, and their softmax weights to array `weights`. Of equal scores the first counts.

    If a score is NaN, all weights are NaN, and the experts are arbitrary.
    """
    highest = np.float32(-np.inf)
    for e in range(scores.shape[0]):
        highest = max(highest, scores[e])
    total = np.float32(0)
    for e in range(scores.shape[0]):
        total += exp(scores[e] - highest)
    for rank in range(experts.shape[0]):
        best = 0
        for e in range(1, scores.shape[0]):
            if scores[e] > scores[best]:
                best = e
        experts[rank] = best
        weights[rank] = exp(scores[best] - highest) / total
        scores[best] = -np.inf


@jit
def route(call, fields, epsilon, item, scratch, sums_address, like):
    """Computes one item of the operation ROUTE: normalises up to MAX_ROWS tokens into buffer NORMED, with `epsilon`,
    and chooses their experts. `sums_address` is the address of memory for the products of MAX_ROWS rows.
    """
    width, num_experts = fields[Field.WIDTH], fields[Field.NUM_EXPERTS]
    inputs = input_like(like)
    first = item * MAX_ROWS
    num_rows = min(MAX_ROWS, call[Call.NUM_TOKENS] - first)
    for token in range(first, first + num_rows):
        source = buffer_row(call, fields[Field.SOURCE], token, width, 0, like)
        target = buffer_row(call, fields[Field.NORMED], token, width, 0, inputs)
        normalise(source, elements(fields[Field.NORM], width, like), epsilon, target, like)
    x_stride = call[Call.BUFFERS + 2 * fields[Field.NORMED] + 1] * inputs.itemsize
    x = call[Call.BUFFERS + 2 * fields[Field.NORMED]] + first * x_stride
    num_steps = width * like.itemsize // 4
    sums = array_at(pointer(sums_address), (MAX_ROWS, PANEL_WIDTH), np.float32)
    scores = array_at(pointer(scratch), (MAX_ROWS, num_experts), np.float32)
    for panel in range(fields[Field.NUM_PANELS]):
        weight = fields[Field.WEIGHT] + panel * num_steps * PANEL_WIDTH * 4
        panel_products(weight, x, x_stride, num_steps, num_rows, sums_address, like)
        for m in range(num_rows):
            for i in range(min(PANEL_WIDTH, num_experts - panel * PANEL_WIDTH)):
                scores[m, panel * PANEL_WIDTH + i] = read(rounded(sums[m, i], like))
    for m in range(num_rows):
        experts, weights = _routes(call, fields, first + m)
        _choose(scores[m], experts, weights)
        if fields[Field.WEIGHTS_ADD_UP]:
            total = np.float32(0)
            for rank in range(weights.shape[0]):
                total += weights[rank]
            for rank in range(weights.shape[0]):
                weights[rank] /= total
        if fields[Field.ROUNDS_WEIGHTS]:
            for rank in range(weights.shape[0]):
                weights[rank] = read(rounded(weights[rank], like))


@jit
def _sorted_choices(call, fields, scratch):
    """Returns the sorted choices in `scratch`: an array [experts + 1] that says where each expert's choices begin, an
    array with the numbers of all choices, by expert, and the address of the memory after both.
    """
    num_experts, num_choices = fields[Field.NUM_EXPERTS], call[Call.NUM_TOKENS] * fields[Field.NUM_CHOSEN]
    choices = scratch + 8 * (2 * num_experts + 1)
    end = choices + 8 * num_choices
    return words(scratch, num_experts + 1), words(choices, num_choices), end + -end % _LINE_BYTES


@jit
def most_blocks(call, fields):
    """Returns how many blocks of choices a forward has at most. A block has up to ITEM_ROWS choices of one expert."""
    num_choices = call[Call.NUM_TOKENS] * fields[Field.NUM_CHOSEN]
    return min(fields[Field.NUM_EXPERTS], num_choices) + num_choices // ITEM_ROWS


@jit
def sort_choices(call, fields, scratch):
    """Sorts the choices of all tokens by expert, those of one expert by token, into `scratch`. Returns how many blocks
    they make, at most `most_blocks`.
    """
    num_experts, num_chosen = fields[Field.NUM_EXPERTS], fields[Field.NUM_CHOSEN]
    starts, choices, _end = _sorted_choices(call, fields, scratch)
    places = words(scratch + 8 * (num_experts + 1), num_experts)
    for e in range(num_experts + 1):
        starts[e] = 0
    for token in range(call[Call.NUM_TOKENS]):
        experts = _routes(call, fields, token)[0]
        for rank in range(num_chosen):
            starts[experts[rank] + 1] += 1
    num_blocks = np.int64(0)
    for e in range(num_experts):
        num_blocks += (starts[e + 1] + ITEM_ROWS - 1) // ITEM_ROWS
        starts[e + 1] += starts[e]
        places[e] = starts[e]
    for token in range(call[Call.NUM_TOKENS]):
        experts = _routes(call, fields, token)[0]
        for rank in range(num_chosen):
            place = places[experts[rank]]
            choices[place] = token * num_chosen + rank
            places[experts[rank]] = place + 1
    return num_blocks


@jit
def _block_of(starts, block):
    """Returns the expert of a block of choices, and the block's start and stop among the sorted choices. `starts` comes
    from `_sorted_choices`.
    """
    expert = np.int64(0)
    while True:
        num_own = (starts[expert + 1] - starts[expert] + ITEM_ROWS - 1) // ITEM_ROWS
        if block < num_own:
            first = starts[expert] + block * ITEM_ROWS
            return expert, first, min(starts[expert + 1], first + ITEM_ROWS)
        block -= num_own
        expert += 1


@jit
def gate_experts(call, fields, item, num_blocks, gathered, scratch, sums_address, like):
    """Computes one item of the operation EXPERTS_GATE: multiplies the rows of one block of choices by one panel of
    their expert's gate and up weights, and stores silu(gate) * up, in the order of the sorted choices. `num_blocks` is
    what `sort_choices` returned; if it is below `most_blocks`, the first items do nothing.

    `gathered` is the number of the block whose input rows this thread has gathered already, or -1. Returns the number
    for the next call. `sums_address` is the address of memory for the products of MAX_ROWS rows.
    """
    width, num_panels, inputs = fields[Field.WIDTH], fields[Field.NUM_PANELS], input_like(like)
    block, panel = item // num_panels - (most_blocks(call, fields) - num_blocks), item % num_panels
    if block < 0:
        return gathered
    starts, choices, rows = _sorted_choices(call, fields, scratch)
    expert, first, last = _block_of(starts, block)
    stride = width * inputs.itemsize
    if block != gathered:
        for place in range(first, last):
            token = choices[place] // fields[Field.NUM_CHOSEN]
            source = buffer_row(call, fields[Field.SOURCE], token, width, 0, inputs)
            copy_elements(source, elements(rows + (place - first) * stride, width, inputs))
    num_steps = width * like.itemsize // 4
    weight = fields[Field.WEIGHT] + (expert * num_panels + panel) * num_steps * PANEL_WIDTH * 4
    half = PANEL_WIDTH // 2
    target_bytes = num_panels * half * inputs.itemsize
    target = call[Call.BUFFERS + 2 * fields[Field.TARGET]] + panel * half * inputs.itemsize
    sums = array_at(pointer(sums_address), (MAX_ROWS, PANEL_WIDTH), np.float32)
    for start in range(first, last, MAX_ROWS):
        num_rows = min(MAX_ROWS, last - start)
        panel_products(weight, rows + (start - first) * stride, stride, num_steps, num_rows, sums_address, like)
        for m in range(num_rows):
            store_gate(sums[m], elements(target + (start + m) * target_bytes, half, inputs), like)
    return block


@jit
def down_experts(call, fields, panel, scratch, sums_address, like):
    """Computes one item of the operation EXPERTS_DOWN: the PANEL_WIDTH outputs of panel number `panel`, of all experts
    over their choices. Sums each token's outputs, weighted, and adds the sums to the target buffer. `sums_address` is
    the address of memory for the products of MAX_ROWS rows.
    """
    width, num_panels, num_chosen = fields[Field.WIDTH], fields[Field.NUM_PANELS], fields[Field.NUM_CHOSEN]
    num_tokens, stride = call[Call.NUM_TOKENS], width * input_like(like).itemsize
    starts, choices, totals_address = _sorted_choices(call, fields, scratch)
    totals = array_at(pointer(totals_address), (num_tokens, PANEL_WIDTH), np.float32)
    totals[:] = 0
    num_steps = width * like.itemsize // 4
    x = call[Call.BUFFERS + 2 * fields[Field.SOURCE]]
    sums = array_at(pointer(sums_address), (MAX_ROWS, PANEL_WIDTH), np.float32)
    for expert in range(fields[Field.NUM_EXPERTS]):
        weight = fields[Field.WEIGHT] + (expert * num_panels + panel) * num_steps * PANEL_WIDTH * 4
        for start in range(starts[expert], starts[expert + 1], MAX_ROWS):
            num_rows = min(MAX_ROWS, starts[expert + 1] - start)
            panel_products(weight, x + start * stride, stride, num_steps, num_rows, sums_address, like)
            for m in range(num_rows):
                token, rank = choices[start + m] // num_chosen, choices[start + m] % num_chosen
                weight_of_token = _routes(call, fields, token)[1][rank]
                for i in range(PANEL_WIDTH):
                    totals[token, i] += weight_of_token * read(rounded(sums[m, i], like))
    first = panel * PANEL_WIDTH
    num = min(PANEL_WIDTH, fields[Field.NUM_OUTPUTS] - first)
    for token in range(num_tokens):
        target = buffer_row(call, fields[Field.TARGET], token, num, first, like)
        for i in range(num):
            target[i] = rounded(read(target[i]) + read(rounded(totals[token, i], like)), like)
