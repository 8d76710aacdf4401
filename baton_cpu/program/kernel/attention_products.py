"""Computes the scores of a request's queries with the keys of some of its tokens, and the weighted sums of these
tokens' values.

Keys and values are read as vectors where they lie in the pool; nothing is gathered. They are loaded once for each pass,
which computes a few queries. A pass covers as many numbers of a head as registers can hold. The rest of the head takes
passes of one vector each, and numbers that do not fill a vector are computed one by one.

Arguments of all functions: `plane` is the address of slot 0's numbers of one KV head, and slots lie `token_bytes`
apart. `slots` is the address of the tokens' slots (int64). The first `num_near` of them may be read for prefetches, and
`num_tokens` are computed. Other arrays are float32, with `stride` or `head_dim` numbers for each query. `like` is an
array of the pool's dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton_cpu.compiler.jit import jit
from baton_cpu.compiler.memory import pointer
from baton_cpu.compiler.numbers import read
from baton_cpu.compiler.vectors import (
    FLOAT,
    FLOATS,
    HAS_WIDE_REGISTERS,
    LANES,
    LINE_BYTES,
    WORD,
    load_floats,
    multiply_add,
    prefetch,
    prefetch_line,
    spread,
    store_floats,
    sums_of_lanes,
    switch,
)
from baton_cpu.program.kernel.operations import array_at, elements, words

_OF_SCORES = 64  # numbers of a head that a pass of scores takes; _OF_SUMS: a pass of sums
_OF_SUMS = 64 if HAS_WIDE_REGISTERS else 32
_QUERIES = 4 if HAS_WIDE_REGISTERS else 3  # in a pass, at most
_SCORES_TOGETHER = 4  # tokens; a query's row of scores has room for a multiple of four
TOKENS_AHEAD = 16

_FOUR = ir.VectorType(FLOAT, _SCORES_TOGETHER)
_PLACE = types.int64


@jit
def ask_for_tokens(plane, token_bytes, slots, num_tokens):
    """Prefetches the keys, or the values, of `num_tokens` tokens, for all KV heads. `plane` is the address of slot 0's
    keys (or values), and slots lie `token_bytes` apart. `slots` is the address of the tokens' slots (int64). The slots
    may lie anywhere, so the hardware cannot foresee which memory is needed.
    """
    places = words(slots, num_tokens)
    for t in range(num_tokens):
        for offset in range(0, token_bytes, LINE_BYTES):
            prefetch(plane + places[t] * token_bytes + offset)


def _scores_of(num_vectors: int) -> Any:
    """Returns an intrinsic that multiplies 1 to _QUERIES queries by the keys of tokens, over `num_vectors` vectors of
    LANES numbers of a head. It takes the arguments of `make_scores`, and `adds`, which says that the products are added
    to those at `out` instead of replacing them.
    """

    @intrinsic
    def scores(
        _context, plane, token_bytes, slots, num_tokens, num_near, x, head_dim, num_queries, out, stride, adds, like
    ):
        def generate(target, builder, _signature, arguments):
            def generate_for(num: int) -> None:
                _generate_scores(builder, arguments[:7] + arguments[8:11], num_vectors, num, like.dtype)

            switch(builder, arguments[7], _QUERIES, generate_for)
            return target.get_dummy_value()

        return types.void(*(_PLACE,) * 10, types.boolean, like), generate

    return scores


def _generate_scores(builder: Any, arguments: Any, num_vectors: int, num_queries: int, element: Any) -> None:
    """Generates a loop over the tokens that computes the scores of `num_queries` queries, four tokens at a time. If
    fewer than four are left, it repeats the last token. A score is the product of a query and a token's key, over
    `num_vectors` vectors of LANES numbers.

    `arguments` are LLVM values: those of the intrinsic that `_scores_of` returns, without `num_queries` and `like`.
    `element` is numba's type of the keys' numbers. `builder` is llvmlite's IRBuilder, which the code is added to.
    """
    plane, token_bytes, slots, num_tokens, num_near, queries, head_dim, out, stride, adds = arguments
    starts = [builder.add(queries, builder.mul(head_dim, WORD(4 * query))) for query in range(num_queries)]
    wanted = [load_floats(builder, start, num_vectors, types.float32) for start in starts]
    last = builder.sub(num_tokens, WORD(1))
    zeros = ir.Constant(_FOUR, [0.0] * _SCORES_TOGETHER)
    first, loop, before = _begin_loop(builder)
    addresses = []
    for place in range(_SCORES_TOGETHER):
        token = builder.add(first, WORD(place))
        _ask_ahead(builder, plane, token_bytes, slots, token, num_near, num_vectors, element)
        token = builder.select(builder.icmp_signed("<", token, last), token, last)
        addresses.append(_token_address(builder, plane, token_bytes, slots, token))
    products = [[ir.Constant(FLOATS, [0.0] * LANES)] * _SCORES_TOGETHER for _ in range(num_queries)]
    for vector in range(num_vectors):  # in the outer loop, so that a loaded vector is needed only briefly
        offset = WORD(vector * LANES * element.bitwidth // 8)
        for place, address in enumerate(addresses):
            (key,) = load_floats(builder, builder.add(address, offset), 1, element)
            for query, numbers in enumerate(wanted):
                products[query][place] = multiply_add(builder, key, numbers[vector], products[query][place])
    for query, vectors in enumerate(products):
        place = builder.add(builder.mul(stride, WORD(query)), first)
        where = builder.inttoptr(builder.add(out, builder.mul(place, WORD(4))), _FOUR.as_pointer())
        old = builder.load(where)
        old.align = 4
        base = builder.select(adds, old, zeros)
        builder.store(builder.fadd(base, sums_of_lanes(builder, vectors)), where).align = 4
    _end_loop(builder, first, loop, before, _SCORES_TOGETHER, num_tokens)


def _sums_of(num_vectors: int) -> Any:
    """Returns an intrinsic that adds up the tokens' values, each multiplied by a query's weight of that token, for 1 to
    _QUERIES queries at once. It computes `num_vectors` * LANES numbers of the head, and takes the arguments of
    `sum_values`.
    """

    @intrinsic
    def sums(
        _context, plane, token_bytes, slots, num_tokens, num_near, weights, stride, num_queries, out, head_dim, like
    ):
        def generate(target, builder, _signature, arguments):
            def generate_for(num: int) -> None:
                _generate_sums(builder, arguments[:7] + arguments[8:10], num_vectors, num, like.dtype)

            switch(builder, arguments[7], _QUERIES, generate_for)
            return target.get_dummy_value()

        return types.void(*(_PLACE,) * 10, like), generate

    return sums


def _generate_sums(builder: Any, arguments: Any, num_vectors: int, num_queries: int, element: Any) -> None:
    """Generates a loop over the tokens that adds their values, multiplied by the weights of `num_queries` queries, over
    `num_vectors` vectors of a head's numbers. The sums stay in registers until the loop ends.

    `arguments` are LLVM values: those of `sum_values` without `num_queries` and `like`. `element` is numba's type of
    the values' numbers. `builder` is llvmlite's IRBuilder, which the code is added to.
    """
    plane, token_bytes, slots, num_tokens, num_near, weights, stride, out, head_dim = arguments
    token, loop, before = _begin_loop(builder)
    totals = [builder.phi(FLOATS) for _ in range(num_queries * num_vectors)]
    _ask_ahead(builder, plane, token_bytes, slots, token, num_near, num_vectors, element)
    address = _token_address(builder, plane, token_bytes, slots, token)
    own_weights = []
    for query in range(num_queries):
        place = builder.add(builder.mul(stride, WORD(query)), token)
        weight = builder.load(builder.gep(builder.inttoptr(weights, FLOAT.as_pointer()), [place]))
        own_weights.append(spread(builder, weight, FLOATS))
    new = list(totals)
    for vector in range(num_vectors):
        offset = WORD(vector * LANES * element.bitwidth // 8)
        (value,) = load_floats(builder, builder.add(address, offset), 1, element)
        for place in range(vector, len(new), num_vectors):
            new[place] = multiply_add(builder, value, own_weights[place // num_vectors], totals[place])
    for total, number in zip(totals, new, strict=True):
        total.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
        total.add_incoming(number, loop)
    _end_loop(builder, token, loop, before, 1, num_tokens)
    for place, number in enumerate(new):
        query, vector = divmod(place, num_vectors)
        offset = builder.add(builder.mul(head_dim, WORD(query)), WORD(vector * LANES))
        store_floats(builder, number, builder.add(out, builder.mul(offset, WORD(4))))


def _begin_loop(builder: Any) -> tuple[Any, Any, Any]:
    """Begins a loop in the generated code. Returns its counter, its basic block, and the block before it. Call
    `_end_loop` with them after generating the loop's body. `builder` is llvmlite's IRBuilder, which the code is added
    to.
    """
    before, loop = builder.block, builder.append_basic_block("tokens")
    builder.branch(loop)
    builder.position_at_end(loop)
    return builder.phi(WORD), loop, before


def _end_loop(builder: Any, place: Any, loop: Any, before: Any, step: int, end: Any) -> None:
    """Ends a loop that `_begin_loop` began: adds `step` to its counter `place`, which starts at 0, and repeats the loop
    while the counter is below the LLVM value `end`. The loop runs at least once. `loop` and `before` are the blocks
    that `_begin_loop` returned. `builder` is llvmlite's IRBuilder, which the code is added to.
    """
    after = builder.append_basic_block("after")
    following = builder.add(place, WORD(step))
    place.add_incoming(WORD(0), before)
    place.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
    builder.position_at_end(after)


def _ask_ahead(builder: Any, plane: Any, token_bytes: Any, slots: Any, token: Any, num_near: Any, *size: Any) -> None:
    """Generates a prefetch of the token that comes TOKENS_AHEAD after `token`, or of the last of the `num_near` tokens
    if that comes earlier. `size` is how many vectors of the token to prefetch, and numba's type of its numbers.

    `plane` is the address of slot 0's numbers, and slots lie `token_bytes` apart. `slots` is the address of the tokens'
    slots (int64). `builder` is llvmlite's IRBuilder, which the code is added to. The other arguments but `size` are
    LLVM values.
    """
    num_vectors, element = size
    later, last = builder.add(token, WORD(TOKENS_AHEAD)), builder.sub(num_near, WORD(1))
    later = builder.select(builder.icmp_signed("<", later, last), later, last)
    address = _token_address(builder, plane, token_bytes, slots, later)
    for offset in range(0, num_vectors * LANES * element.bitwidth // 8, LINE_BYTES):
        prefetch_line(builder, builder.add(address, WORD(offset)))


def _token_address(builder: Any, plane: Any, token_bytes: Any, slots: Any, token: Any) -> Any:
    """Generates the address of a token's numbers: `plane` + its slot * `token_bytes`. `slots` is the address of the
    tokens' slots (int64), and `token` an index into them. `builder` is llvmlite's IRBuilder, which the code is added
    to; the other arguments are LLVM values.
    """
    slot = builder.load(builder.gep(builder.inttoptr(slots, WORD.as_pointer()), [token]))
    return builder.add(plane, builder.mul(slot, token_bytes))


_wide_scores, _narrow_scores = _scores_of(_OF_SCORES // LANES), _scores_of(1)
_wide_sums, _narrow_sums = _sums_of(_OF_SUMS // LANES), _sums_of(1)


@jit
def make_scores(plane, token_bytes, slots, num_tokens, num_near, queries, head_dim, num_queries, out, stride, like):
    """Writes each query's score of each token, the product of the query and the token's key for one KV head, to address
    `out` [num_queries, stride] float32. Up to three scores after a query's last token, to the next multiple of four,
    are overwritten too and mean nothing.

    `plane` is the address of slot 0's key, and slots lie `token_bytes` apart. `slots` is the address of the tokens'
    slots (int64): the first `num_tokens` are computed, and the first `num_near`, at least as many, may be prefetched.
    `queries` is the address of [num_queries, head_dim] float32. `like` is any array of the model's dtype (uint16 for
    bfloat16).
    """
    size = np.int64(like.itemsize)
    for q in range(0, num_queries, _QUERIES):
        num, y = min(_QUERIES, num_queries - q), out + q * stride * 4
        d = np.int64(0)
        while d < head_dim:
            x, keys, adds = queries + (q * head_dim + d) * 4, plane + d * size, d > 0
            if d + _OF_SCORES <= head_dim:
                _wide_scores(keys, token_bytes, slots, num_tokens, num_near, x, head_dim, num, y, stride, adds, like)
                d += _OF_SCORES
            elif d + LANES <= head_dim:
                _narrow_scores(keys, token_bytes, slots, num_tokens, num_near, x, head_dim, num, y, stride, adds, like)
                d += LANES
            else:
                _rest_of_scores(keys, token_bytes, slots, num_tokens, x, head_dim, num, y, stride, d, like)
                d = head_dim


@jit
def _rest_of_scores(keys, token_bytes, slots, num_tokens, x, head_dim, num, y, stride, begin, like):
    """Adds to the scores the products of a head's last numbers, from number `begin` on, which are too few for a vector.
    If `begin` is 0, it sets the scores.

    `x` and `keys` are the addresses of number `begin` of the first query and of slot 0's key. `y` is the address of the
    first query's scores, and `num` is the number of queries. One query's scores begin `stride` numbers after the
    previous one's. Slots lie `token_bytes` apart. `slots` is the address of the tokens' slots (int64). `like` is any
    array of the model's dtype (uint16 for bfloat16).
    """
    rest = head_dim - begin
    places = words(slots, num_tokens)
    for m in range(num):
        query = array_at(pointer(x + m * head_dim * 4), (rest,), np.float32)
        scores = array_at(pointer(y + m * stride * 4), (num_tokens,), np.float32)
        for t in range(num_tokens):
            key = elements(keys + places[t] * token_bytes, rest, like)
            total = scores[t] if begin else np.float32(0)
            for d in range(rest):
                total += query[d] * read(key[d])
            scores[t] = total


@jit
def sum_values(plane, token_bytes, slots, num_tokens, num_near, weights, stride, num_queries, out, head_dim, like):
    """Writes to address `out` [num_queries, head_dim] float32, for each query, the sum of the tokens' values for one KV
    head, multiplied by the query's weights.

    `plane` is the address of slot 0's value, and slots lie `token_bytes` apart. `slots` is the address of the tokens'
    slots (int64): the first `num_tokens` are summed, and the first `num_near`, at least as many, may be prefetched.
    `weights` is the address of [num_queries, stride] float32. `like` is any array of the model's dtype (uint16 for
    bfloat16).
    """
    size = np.int64(like.itemsize)
    for q in range(0, num_queries, _QUERIES):
        num, x = min(_QUERIES, num_queries - q), weights + q * stride * 4
        d = np.int64(0)
        while d < head_dim:
            y, values = out + (q * head_dim + d) * 4, plane + d * size
            if d + _OF_SUMS <= head_dim:
                _wide_sums(values, token_bytes, slots, num_tokens, num_near, x, stride, num, y, head_dim, like)
                d += _OF_SUMS
            elif d + LANES <= head_dim:
                _narrow_sums(values, token_bytes, slots, num_tokens, num_near, x, stride, num, y, head_dim, like)
                d += LANES
            else:
                _rest_of_sums(values, token_bytes, slots, num_tokens, x, stride, num, y, head_dim, d, like)
                d = head_dim


@jit
def _rest_of_sums(values, token_bytes, slots, num_tokens, x, stride, num, y, head_dim, begin, like):
    """Writes the sums of values for a head's last numbers, from number `begin` on, which are too few for a vector.

    `values` is the address of number `begin` of slot 0's value, and `y` that of number `begin` of the first query's
    sum. `x` is the address of the first query's weights, and `num` is the number of queries. One query's weights begin
    `stride` numbers after the previous one's. Slots lie `token_bytes` apart. `slots` is the address of the tokens'
    slots (int64). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    rest = head_dim - begin
    places = words(slots, num_tokens)
    for m in range(num):
        weights = array_at(pointer(x + m * stride * 4), (num_tokens,), np.float32)
        sums = array_at(pointer(y + m * head_dim * 4), (rest,), np.float32)
        sums[:] = 0
        for t in range(num_tokens):
            value = elements(values + places[t] * token_bytes, rest, like)
            for d in range(rest):
                sums[d] += weights[t] * read(value[d])
