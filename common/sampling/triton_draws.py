"""Draws tokens on a GPU in one launch, by the rules of operators.py and in their order, with one program for each row.

    what changes single logits         in place, and only if the row's own parameters need it
    the largest                        one pass: this completes a greedy row, and finds rows without a finite number
    top_k, top_p                       find the logit at which to cut, by bisection over the bits of a number
    noise, and the largest again       one pass, which leaves out what was cut

Nothing is sorted. In descending order of logit, then ascending order of id, top_k and top_p each keep a first part of
the tokens. The logit of the last kept token, and how many tokens with this same logit are kept, determine that part.
The logit of the last kept token is the largest number x such that the tokens with a logit of at least x are enough: in
count for top_k, in total probability for top_p. Bisection finds its 32 bits in sixteen passes of two bits each.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from common.device.triton_launch import Kernel, Launch, Launcher, aligned, device_function, kernel
from common.sampling.params import MAX_END_TOKEN_IDS, MAX_LOGIT_BIAS_ENTRIES
from common.sampling.state import FLOAT_OPTIONS, Ancestors, DrawKernels, SamplingState

_BLOCK = 4096
_NUM_WARPS = 16


@device_function
def _mixed_64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@device_function
def _mixed_32(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@device_function
def _row_key(seed, choice_index, position):  # type: ignore[no-untyped-def]
    """Returns one row's key as uint64, as `row_keys` in operators.py computes it."""
    golden = 0x9E3779B97F4A7C15
    key = _mixed_64(seed.to(tl.uint64) + golden)
    key = _mixed_64((key ^ choice_index.to(tl.uint64)) + golden)
    return _mixed_64((key ^ position.to(tl.uint64)) + golden)


@device_function
def _noise(key, token_ids):  # type: ignore[no-untyped-def]
    """Returns Gumbel noise as operators.py does: from the same bits, but logarithms may round differently."""
    bits = _mixed_32(_mixed_32(token_ids.to(tl.uint32) ^ key.to(tl.uint32)) + (key >> 32).to(tl.uint32))
    value = bits.to(tl.int32, bitcast=True).to(tl.float32)
    value = tl.where(value < 0, value + 4294967296.0, value)
    tail = tl.minimum((value + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)  # 2^-32, 1 - 2^-24
    rest = 1.0 - tail
    lost = tl.where(rest == 1.0, -1.0, rest - 1.0)  # -tail as rounded in 1 - tail
    log1p = tl.where(rest == 1.0, -tail, tl.log(rest) * tl.div_rn(-tail, lost))
    return -tl.log(-log1p)


@device_function
def _ordered(x):  # type: ignore[no-untyped-def]
    """Maps float32 `x` to uint32 bits that sort in the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@device_function
def _number(bits):  # type: ignore[no-untyped-def]
    """Inverts `_ordered`: returns the float32 number that `_ordered` maps to `bits`."""
    return tl.where((bits >> 31) == 1, bits & 0x7FFFFFFF, bits ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@device_function
def _weights(scores, tokens, num_columns, largest, BY_CHANCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scores of a block of tokens, as bits that sort in the same order (`_ordered`), and their weights.

    A weight is 1 or, if BY_CHANCE, the token's probability divided by that of the likeliest token. `largest` is the
    largest of all scores.
    """
    is_there = tokens < num_columns
    x = tl.load(scores + tokens, mask=is_there, other=float("-inf"))
    weights = tl.where(is_there, tl.exp(x - largest) if BY_CHANCE else 1.0, 0.0)
    return _ordered(x), weights


@device_function
def _last_kept(scores, num_columns, largest, enough, BY_CHANCE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns `_ordered` of the largest number x such that the tokens with a score of at least x have enough weight.

    They do if the sum of their weights (see `_weights`) is at least `enough`.
    """
    found = tl.full([], 0, tl.uint32)
    for digit in range(16):
        unit = tl.full([], 1, tl.uint32) << (30 - 2 * digit)
        above_1 = tl.full([BLOCK], 0.0, tl.float32)
        above_2 = tl.full([BLOCK], 0.0, tl.float32)
        above_3 = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(0, num_columns, BLOCK):
            bits, weights = _weights(scores, start + tl.arange(0, BLOCK), num_columns, largest, BY_CHANCE)
            above_1 += tl.where(bits >= found + unit, weights, 0.0)
            above_2 += tl.where(bits >= found + unit * 2, weights, 0.0)
            above_3 += tl.where(bits >= found + unit * 3, weights, 0.0)
        num_units = (
            (tl.sum(above_1, 0) >= enough).to(tl.uint32)
            + (tl.sum(above_2, 0) >= enough).to(tl.uint32)
            + (tl.sum(above_3, 0) >= enough).to(tl.uint32)
        )
        found += unit * num_units
    return found


@device_function
def _weight_above(scores, num_columns, largest, cut, BY_CHANCE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    above = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, num_columns, BLOCK):
        bits, weights = _weights(scores, start + tl.arange(0, BLOCK), num_columns, largest, BY_CHANCE)
        above += tl.where(bits > cut, weights, 0.0)
    return tl.sum(above, 0)


@kernel(
    fixed=(
        "logits",
        "num_columns",
        "column_ids",
        *("seed", "choice_index", "min_position", "top_k", "num_bias", "num_ends"),
        *FLOAT_OPTIONS,
        *("bias_ids", "bias_values", "end_ids", "in_prompt", "output_counts"),
    )
)
def draw(  # type: ignore[no-untyped-def]
    logits,
    rows,
    positions,
    chosen,
    is_invalid,
    num_columns,
    column_ids,
    ancestor_ids,
    ancestor_counted,
    num_ancestors,
    is_counted,
    seed,
    choice_index,
    min_position,
    top_k,
    num_bias,
    num_ends,
    temperature,
    top_p,
    min_p,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    bias_ids,
    bias_values,
    end_ids,
    in_prompt,
    output_counts,
    INT_STRIDE: tl.constexpr,
    FLOAT_STRIDE: tl.constexpr,
    MAX_BIAS: tl.constexpr,
    MAX_ENDS: tl.constexpr,
    IS_TARGET: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draws the token of one batch entry in each program. The grid is [B].

    If IS_TARGET, it draws the target's token by all rules of sampling. Otherwise it draws a draft head's token, with
    temperature and noise only; the columns of the head's logits are the tokens `column_ids`. Without IS_CHOSEN it
    chooses no token, and only applies these rules to `logits` in place.

    The results are `chosen` [B], and `is_invalid` [B]: 1 if the entry's largest logit is not finite. With IS_TARGET the
    kernel overwrites `logits`.
    """
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    position = tl.load(positions + entry)
    scores = logits + entry * num_columns
    place = tl.arange(0, BLOCK)
    heat = tl.load(temperature + row * FLOAT_STRIDE)
    is_penalised = False
    if IS_TARGET:
        repetition = tl.load(repetition_penalty + row * FLOAT_STRIDE)
        presence = tl.load(presence_penalty + row * FLOAT_STRIDE)
        frequency = tl.load(frequency_penalty + row * FLOAT_STRIDE)
        is_penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
        if is_penalised:
            for start in range(0, num_columns, BLOCK):
                token = start + place
                is_there = token < num_columns
                x = tl.load(scores + token, mask=is_there, other=0.0)
                count = tl.load(output_counts + row * num_columns + token, mask=is_there, other=0)
                for ancestor in range(num_ancestors):
                    at = entry * num_ancestors + ancestor
                    count += tl.where(token == tl.load(ancestor_ids + at), tl.load(ancestor_counted + at), 0)
                was_output = count > 0
                was_there = was_output | (tl.load(in_prompt + row * num_columns + token, mask=is_there, other=0) != 0)
                x = tl.where(was_there, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
                x = x - count.to(tl.float32) * frequency
                x = x - tl.where(was_output, presence, 0.0)
                tl.store(scores + token, x, mask=is_there)
            tl.debug_barrier()
        num_biased = tl.load(num_bias + row * INT_STRIDE)
        if num_biased > 0:
            at = tl.arange(0, MAX_BIAS)
            token = tl.load(bias_ids + row * MAX_BIAS + at, mask=at < num_biased, other=0)
            bias = tl.load(bias_values + row * MAX_BIAS + at, mask=at < num_biased, other=0.0)
            x = tl.load(scores + token, mask=at < num_biased, other=0.0)
            tl.store(scores + token, x + bias, mask=at < num_biased)
            tl.debug_barrier()
        num_ending = tl.load(num_ends + row * INT_STRIDE)
        if (num_ending > 0) & (position < tl.load(min_position + row * INT_STRIDE)):
            at = tl.arange(0, MAX_ENDS)
            token = tl.load(end_ids + row * MAX_ENDS + at, mask=at < num_ending, other=0)
            tl.store(scores + token, tl.full([MAX_ENDS], float("-inf"), tl.float32), mask=at < num_ending)
            tl.debug_barrier()

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, num_columns, BLOCK):
        token = start + place
        x = tl.load(scores + token, mask=token < num_columns, other=float("-inf"))
        x = tl.where(x != x, float("inf"), x)
        best_at = tl.where(x > best, token, best_at)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    column = tl.min(tl.where(best == largest, best_at, num_columns), 0)
    is_finite = (largest < float("inf")) & (largest > float("-inf"))
    if IS_CHOSEN:
        tl.store(is_invalid + entry, 1 - is_finite.to(tl.uint8))

    if (heat > 0.0) & is_finite:
        key = _row_key(
            tl.load(seed + row * INT_STRIDE), tl.load(choice_index + row * INT_STRIDE), position.to(tl.int64)
        )
        cut = tl.full([], 0, tl.uint32)
        num_equal = tl.full([], num_columns, tl.int32)  # how many tokens at the cut are kept, by id
        least = 0.0
        is_cut = False
        if IS_TARGET:
            num_kept = tl.load(top_k + row * INT_STRIDE)
            mass = tl.load(top_p + row * FLOAT_STRIDE)
            least = tl.load(min_p + row * FLOAT_STRIDE)
            is_cut = (num_kept < num_columns) | (mass < 1.0) | (least > 0.0)
            if is_cut:
                for start in range(0, num_columns, BLOCK):
                    token = start + place
                    x = tl.load(scores + token, mask=token < num_columns, other=0.0)
                    tl.store(scores + token, tl.div_rn(x, heat), mask=token < num_columns)
                tl.debug_barrier()
                largest = tl.div_rn(largest, heat)
                if num_kept < num_columns:
                    enough = num_kept.to(tl.float32)
                    cut = _last_kept(scores, num_columns, largest, enough, False, BLOCK)
                    above = _weight_above(scores, num_columns, largest, cut, False, BLOCK)
                    num_equal = (enough - above).to(tl.int32)
                if mass < 1.0:
                    whole = _weight_above(scores, num_columns, largest, cut, True, BLOCK)
                    if num_kept < num_columns:
                        whole += num_equal.to(tl.float32) * tl.exp(_number(cut) - largest)
                    enough = tl.maximum(mass * whole, 1e-30)
                    last = _last_kept(scores, num_columns, largest, enough, True, BLOCK)
                    last = tl.maximum(last, cut)
                    above = _weight_above(scores, num_columns, largest, last, True, BLOCK)
                    wanted = tl.ceil(tl.div_rn(enough - above, tl.exp(_number(last) - largest)))
                    wanted = tl.minimum(tl.maximum(wanted, 1.0), num_columns.to(tl.float32)).to(tl.int32)
                    num_equal = tl.where(last == cut, tl.minimum(num_equal, wanted), wanted)
                    cut = last
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_at = tl.full([BLOCK], 0, tl.int32)
        num_met = tl.full([], 0, tl.int32)
        for start in range(0, num_columns, BLOCK):
            token = start + place
            is_there = token < num_columns
            x = tl.load(scores + token, mask=is_there, other=float("-inf"))
            if is_cut:
                bits = _ordered(x)
                is_equal = ((bits == cut) & is_there).to(tl.int32)
                is_kept = (bits > cut) | ((is_equal != 0) & (num_met + tl.cumsum(is_equal, 0) <= num_equal))
                x = tl.where(is_kept & (tl.exp(x - largest) >= least), x, float("-inf"))
                num_met += tl.sum(is_equal, 0)
            else:
                x = tl.div_rn(x, heat)
            if IS_TARGET:
                x = x + _noise(key, token)
            else:
                x = x + _noise(key, tl.load(column_ids + token, mask=is_there, other=0))
            if IS_CHOSEN:
                best_at = tl.where(x > best, token, best_at)
                best = tl.maximum(best, x)
            else:
                tl.store(scores + token, x, mask=is_there)
        if IS_CHOSEN:
            column = tl.min(tl.where(best == tl.max(best, 0), best_at, num_columns), 0)

    if IS_CHOSEN:
        if IS_TARGET:
            tl.store(chosen + entry, column.to(tl.int64))
            if is_penalised & (is_counted != 0):
                counter = output_counts + row * num_columns + column
                tl.store(counter, tl.load(counter) + 1)
        else:
            tl.store(chosen + entry, tl.load(column_ids + column))


class TritonDraws(DrawKernels):
    """Draws tokens with the Triton kernel of this module. `launch` starts the kernel; a test may replace it."""

    def __init__(self, launch: Launcher = Launch.run) -> None:
        self._launch = launch

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingState,
        ancestors: Ancestors | None,
        *,
        is_counted: bool,
    ) -> tuple[Tensor, Tensor]:
        token_ids, is_invalid = _outputs(logits)
        known = ancestors if ancestors is not None and ancestors.token_ids.shape[1] else None
        self._run(
            aligned(logits),
            rows,
            positions,
            state,
            token_ids,
            is_invalid,
            arguments={
                "column_ids": state.token_ids,
                "ancestor_ids": rows if known is None else known.token_ids.contiguous(),
                "ancestor_counted": state.output_counts if known is None else known.counted.contiguous(),
                "num_ancestors": 0 if known is None else known.token_ids.shape[1],
                "is_counted": int(is_counted),
            },
            is_target=True,
            is_chosen=True,
        )
        return token_ids, is_invalid

    def propose(
        self, logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState
    ) -> Tensor:
        chosen, is_invalid = _outputs(logits)
        self._draft(aligned(logits), token_ids, rows, positions, state, chosen, is_invalid, is_chosen=True)
        return chosen

    def couple(
        self, logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState
    ) -> Tensor:
        logits = aligned(logits)
        self._draft(logits, token_ids, rows, positions, state, rows, state.in_prompt, is_chosen=False)
        return logits

    def _draft(
        self,
        logits: Tensor,
        token_ids: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingState,
        chosen: Tensor,
        is_invalid: Tensor,
        *,
        is_chosen: bool,
    ) -> None:
        nothing: dict[str, Tensor | float] = {
            "ancestor_ids": rows,
            "ancestor_counted": state.output_counts,
            "num_ancestors": 0,
            "is_counted": 0,
        }
        self._run(
            logits,
            rows,
            positions,
            state,
            chosen,
            is_invalid,
            arguments={"column_ids": token_ids, **nothing},
            is_target=False,
            is_chosen=is_chosen,
        )

    def _run(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingState,
        chosen: Tensor,
        is_invalid: Tensor,
        *,
        arguments: dict[str, Tensor | float],
        is_target: bool,
        is_chosen: bool,
    ) -> None:
        columns = {name: getattr(state, name) for name in (*_INT_COLUMNS, *_TABLES)} | state.floats
        self._launch(
            Launch(
                _DRAW,
                grid=(logits.shape[0],),
                arguments={
                    "logits": logits,
                    "rows": rows.contiguous(),
                    "positions": positions.contiguous(),
                    "chosen": chosen,
                    "is_invalid": is_invalid.view(torch.uint8),
                    "num_columns": logits.shape[1],
                    **columns,
                    "in_prompt": state.in_prompt.view(torch.uint8),
                    **arguments,
                },
                constants={
                    "INT_STRIDE": state.seed.stride(0),
                    "FLOAT_STRIDE": state.floats["temperature"].stride(0),
                    "MAX_BIAS": MAX_LOGIT_BIAS_ENTRIES,
                    "MAX_ENDS": MAX_END_TOKEN_IDS,
                    "IS_TARGET": is_target,
                    "IS_CHOSEN": is_chosen,
                    "BLOCK": _BLOCK,
                },
                num_warps=_NUM_WARPS,
                fuses_operations=False,  # round after each operation, as a CPU does
            )
        )


_DRAW: Kernel = draw
_INT_COLUMNS = ("seed", "choice_index", "min_position", "top_k", "num_bias", "num_ends")
_TABLES = ("bias_ids", "bias_values", "end_ids", "output_counts")


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates token ids [B] int64, and flags for invalid rows [B] bool."""
    num_rows = logits.shape[0]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    return token_ids, torch.empty(num_rows, dtype=torch.bool, device=logits.device)
