"""Triton kernels for the parts of a decoder layer around attention.

    norm       RMS norm, optionally of a sum: one program per token
    rotate     rotary positions of queries and keys in place, normalised before if the model does: one program per head
    gate       silu(gate) * up, whose two inputs are joined in one tensor
    multiply   one token times a matrix, fused with a norm before, and a gate or a sum after

With many tokens cuBLAS computes the matrix products. With one token, `multiply` is bound by reading the weights: each
program computes a few outputs, and loads the next block of weights while it sums the present one.

On devices of compute capability 9.0 or higher a kernel may start before the previous one ends (`OVERLAPS`): it loads
its first weights, which no kernel writes, and waits before it reads or writes anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.device.triton_launch import Launch, Launcher, aligned, device_function, kernel

_GATE_BLOCK = 1024
_MANY_INPUTS = 8192


@device_function
def _rounded(x, like):  # type: ignore[no-untyped-def]
    """Rounds float32 `x` to the type that `like` points to, and converts it back."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@device_function
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@kernel(fixed=("x", "added", "weight", "total", "output"))
def norm(  # type: ignore[no-untyped-def]
    x,
    added,
    weight,
    total,
    output,
    epsilon: tl.float32,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """RMS-normalises one token of WIDTH <= BLOCK numbers per program.

    If HAS_ADDED, it adds `added` to `x` first, and writes the sum to `total`. Else it uses neither `added` nor `total`.
    It rounds where transformers rounds: after the sum, after the normalisation, and after the product with `weight`.
    """
    place = tl.arange(0, BLOCK)
    is_there = place < WIDTH
    scale = tl.load(weight + place, mask=is_there, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    where = tl.program_id(0).to(tl.int64) * WIDTH + place
    number = tl.load(x + where, mask=is_there, other=0.0).to(tl.float32)
    if HAS_ADDED:
        number = _rounded(number + tl.load(added + where, mask=is_there, other=0.0).to(tl.float32), total)
        tl.store(total + where, number.to(total.dtype.element_ty), mask=is_there)
    factor = tl.rsqrt(tl.sum(number * number, 0) / WIDTH + epsilon)
    normed = scale * _rounded(number * factor, output)
    tl.store(output + where, normed.to(output.dtype.element_ty), mask=is_there)


@kernel(fixed=("heads", "cosines", "sines", "query_weight", "key_weight"))
def rotate(  # type: ignore[no-untyped-def]
    heads,
    cosines,
    sines,
    query_weight,
    key_weight,
    query_epsilon: tl.float32,
    key_epsilon: tl.float32,
    TOKEN_SIZE: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Applies rotary positions in place to one head of one token per program. The grid is [T, query heads + key heads].

    A token's TOKEN_SIZE numbers begin with its query heads, and its key heads follow. If HAS_NORM, each head is
    RMS-normalised before it is rotated, with the weight and epsilon of its kind.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    place = tl.arange(0, HALF_BLOCK)
    is_there = place < half
    first_place = heads + token * TOKEN_SIZE + head * HEAD_DIM + place
    second_place = first_place + half
    first = tl.load(first_place, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(second_place, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(first * first + second * second, 0) / HEAD_DIM
        if head < NUM_QUERY_HEADS:
            factor = tl.rsqrt(square + query_epsilon)
            first_scale = tl.load(query_weight + place, mask=is_there, other=0.0).to(tl.float32)
            second_scale = tl.load(query_weight + half + place, mask=is_there, other=0.0).to(tl.float32)
        else:
            factor = tl.rsqrt(square + key_epsilon)
            first_scale = tl.load(key_weight + place, mask=is_there, other=0.0).to(tl.float32)
            second_scale = tl.load(key_weight + half + place, mask=is_there, other=0.0).to(tl.float32)
        first = _rounded(first_scale * _rounded(first * factor, heads), heads)
        second = _rounded(second_scale * _rounded(second * factor, heads), heads)
    angle = token * HEAD_DIM + place
    cosine = tl.load(cosines + angle, mask=is_there, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=is_there, other=0.0).to(tl.float32)
    turned = first * cosine - second * sine
    cosine = tl.load(cosines + half + angle, mask=is_there, other=0.0).to(tl.float32)
    sine = tl.load(sines + half + angle, mask=is_there, other=0.0).to(tl.float32)
    turned_second = second * cosine + first * sine
    tl.store(first_place, turned.to(heads.dtype.element_ty), mask=is_there)
    tl.store(second_place, turned_second.to(heads.dtype.element_ty), mask=is_there)


@kernel(fixed=("joined", "output"))
def gate(joined, output, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes silu(gate) * up of one block of one token per program. The grid is [T, blocks].

    Each token has WIDTH gates, followed by the WIDTH numbers that they scale.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < WIDTH
    where = joined + token * (2 * WIDTH) + place
    opened = _rounded(_silu(tl.load(where, mask=is_there, other=0.0).to(tl.float32)), output)
    scaled = opened * tl.load(where + WIDTH, mask=is_there, other=0.0).to(tl.float32)
    tl.store(output + token * WIDTH + place, scaled.to(output.dtype.element_ty), mask=is_there)


@kernel(fixed=("x", "weight", "bias", "norm_weight", "added", "output"))
def multiply(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    norm_weight,
    added,
    output,
    epsilon: tl.float32,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    OUTPUT_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    IS_GATED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiplies one token by a matrix; each program computes OUTPUT_BLOCK of the NUM_OUTPUTS outputs.

    If HAS_NORM, the token is RMS-normalised. The norm's factor is the same for all inputs, so it is computed along with
    the sum and multiplied into it at the end. If IS_GATED, `weight` has NUM_OUTPUTS rows of gates, then as many rows of
    the values that they scale, and silu(gate) * value is the output. If HAS_ADDED, `added` is added to the output.
    """
    outputs = tl.program_id(0) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    inputs = tl.arange(0, INPUT_BLOCK)
    is_output = outputs < NUM_OUTPUTS
    rows = weight + outputs.to(tl.int64)[:, None] * NUM_INPUTS + inputs[None, :]
    scaled_rows = rows + NUM_OUTPUTS * NUM_INPUTS
    is_weight = is_output[:, None] & (inputs < NUM_INPUTS)[None, :]
    weights = tl.load(rows, mask=is_weight, other=0.0)
    if IS_GATED:
        scaled_weights = tl.load(scaled_rows, mask=is_weight, other=0.0)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([OUTPUT_BLOCK, INPUT_BLOCK], tl.float32)
    if IS_GATED:
        scaled_sums = tl.zeros([OUTPUT_BLOCK, INPUT_BLOCK], tl.float32)
    squares = tl.zeros([INPUT_BLOCK], tl.float32)
    for start in range(0, NUM_INPUTS, INPUT_BLOCK):
        following = start + INPUT_BLOCK + inputs
        is_weight = is_output[:, None] & (following < NUM_INPUTS)[None, :]
        next_weights = tl.load(rows + start + INPUT_BLOCK, mask=is_weight, other=0.0)
        if IS_GATED:
            next_scaled_weights = tl.load(scaled_rows + start + INPUT_BLOCK, mask=is_weight, other=0.0)
        is_input = start + inputs < NUM_INPUTS
        number = tl.load(x + start + inputs, mask=is_input, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += number * number
            number *= tl.load(norm_weight + start + inputs, mask=is_input, other=0.0).to(tl.float32)
        sums += weights.to(tl.float32) * number[None, :]
        weights = next_weights
        if IS_GATED:
            scaled_sums += scaled_weights.to(tl.float32) * number[None, :]
            scaled_weights = next_scaled_weights
    product = tl.sum(sums, 1)
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / NUM_INPUTS + epsilon)
        product *= factor
    if HAS_BIAS:
        product += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    if IS_GATED:
        scaled = tl.sum(scaled_sums, 1) * factor
        if HAS_BIAS:
            scaled += tl.load(bias + NUM_OUTPUTS + outputs, mask=is_output, other=0.0).to(tl.float32)
        product = _rounded(_silu(_rounded(product, output)), output) * _rounded(scaled, output)
    if HAS_ADDED:
        product = _rounded(product, output) + tl.load(added + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + outputs, product.to(output.dtype.element_ty), mask=is_output)


@dataclass(frozen=True, slots=True)
class Tile:
    """The block of a matrix that one program of `multiply` processes at a time, and its number of warps."""

    output_block: int
    input_block: int
    num_warps: int

    @classmethod
    def of(cls, num_inputs: int, itemsize: int, *, is_gated: bool, has_norm: bool) -> Tile:
        """Returns the tile that was fastest on an H100 for 2-byte numbers. With 4-byte numbers it has half as many
        inputs.
        """
        if is_gated:
            output_block, input_block, num_warps = 2, 4096, 8
        elif has_norm:
            output_block, input_block, num_warps = 8, 1024, 4
        elif num_inputs <= _MANY_INPUTS:
            output_block, input_block, num_warps = 2, 2048, 4
        else:
            output_block, input_block, num_warps = 2, 1024, 2
        return cls(output_block, min(2 * input_block // itemsize, triton.next_power_of_2(num_inputs)), num_warps)


@dataclass(frozen=True, slots=True)
class Norm:
    """The parameters of an RMS norm. `weight` is [width]."""

    weight: Tensor
    epsilon: float


class LayerKernels:
    """Launches the kernels of this module. Tensors are contiguous [T, width] of one dtype; results are in new memory.

    `overlaps` says whether the device starts a kernel before the previous one ends. `launch` runs each launch; a test
    may replace it.
    """

    def __init__(self, *, overlaps: bool = False, launch: Launcher = Launch.run) -> None:
        self._overlaps = overlaps
        self._launch = launch

    def normed(self, x: Tensor, by: Norm) -> Tensor:
        output = torch.empty_like(x)
        self._norm(x, None, by, x, output)
        return output

    def added_and_normed(self, x: Tensor, added: Tensor, by: Norm) -> tuple[Tensor, Tensor]:
        """Returns the sum `x + added`, and the RMS norm of this sum."""
        total, output = torch.empty_like(x), torch.empty_like(x)
        self._norm(x, added, by, total, output)
        return total, output

    def _norm(self, x: Tensor, added: Tensor | None, by: Norm, total: Tensor, output: Tensor) -> None:
        num_tokens, width = x.shape
        block = triton.next_power_of_2(width)
        self._run(
            norm,
            (num_tokens,),
            {
                "x": aligned(x),
                "added": x if added is None else aligned(added),
                "weight": by.weight,
                "total": total,
                "output": output,
                "epsilon": by.epsilon,
            },
            {"WIDTH": width, "BLOCK": block, "HAS_ADDED": added is not None},
            num_warps=max(1, min(16, block // 512)),
        )

    def rotate(
        self,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],
        *,
        num_query_heads: int,
        num_key_heads: int,
        norms: tuple[Norm, Norm] | None,
    ) -> None:
        """Applies rotary positions in place to the query heads, which come first in `heads`, and to the key heads after
        them.

        Shapes: heads [T, heads, head_dim]; rotation, cosines and sines, [T, head_dim] each. `norms`, if given, are the
        norms of query heads and of key heads; each head is normalised before it is rotated.
        """
        cosines, sines = rotation
        num_tokens, num_heads, head_dim = heads.shape
        assert cosines.shape == sines.shape == (num_tokens, head_dim), "the rotation is of whole heads"
        query_norm, key_norm = norms or (Norm(cosines, 0.0),) * 2
        self._run(
            rotate,
            (num_tokens, num_query_heads + num_key_heads),
            {
                "heads": heads,
                "cosines": cosines,
                "sines": sines,
                "query_weight": query_norm.weight,
                "key_weight": key_norm.weight,
                "query_epsilon": query_norm.epsilon,
                "key_epsilon": key_norm.epsilon,
            },
            {
                "TOKEN_SIZE": num_heads * head_dim,
                "NUM_QUERY_HEADS": num_query_heads,
                "HEAD_DIM": head_dim,
                "HALF_BLOCK": triton.next_power_of_2(head_dim // 2),
                "HAS_NORM": norms is not None,
            },
            num_warps=1,
        )

    def gated(self, joined: Tensor) -> Tensor:
        """Returns silu(gate) * up [T, width] for `joined` [T, 2 * width], whose first half holds the gates."""
        num_tokens, width = joined.shape[0], joined.shape[1] // 2
        output = torch.empty((num_tokens, width), dtype=joined.dtype, device=joined.device)
        block = min(_GATE_BLOCK, triton.next_power_of_2(width))
        self._run(
            gate,
            (num_tokens, -(-width // block)),
            {"joined": joined, "output": output},
            {"WIDTH": width, "BLOCK": block},
        )
        return output

    def multiplied(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        added: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """Multiplies one token `x` [1, inputs] by `weight` [outputs, inputs].

        `norm` is applied to `x` first; `bias` and `added` are added to the product. If `is_gated`, the first half of
        the outputs are gates, and silu(gate) * up is returned, half as wide.
        """
        num_outputs, num_inputs = weight.shape
        num_outputs //= 2 if is_gated else 1
        assert x.shape == (1, num_inputs), "one token"
        output = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
        tile = Tile.of(num_inputs, x.dtype.itemsize, is_gated=is_gated, has_norm=norm is not None)
        self._run(
            multiply,
            (-(-num_outputs // tile.output_block),),
            {
                "x": aligned(x),
                "weight": weight,
                "bias": weight if bias is None else bias,
                "norm_weight": weight if norm is None else norm.weight,
                "added": x if added is None else aligned(added),
                "output": output,
                "epsilon": 0.0 if norm is None else norm.epsilon,
            },
            {
                "NUM_INPUTS": num_inputs,
                "NUM_OUTPUTS": num_outputs,
                "INPUT_BLOCK": tile.input_block,
                "OUTPUT_BLOCK": tile.output_block,
                "HAS_BIAS": bias is not None,
                "HAS_NORM": norm is not None,
                "HAS_ADDED": added is not None,
                "IS_GATED": is_gated,
            },
            num_warps=tile.num_warps,
        )
        return output

    def _run(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: dict[str, Tensor | float],
        constants: dict[str, int | bool],
        *,
        num_warps: int = 4,
    ) -> None:
        self._launch(
            Launch(
                kernel,
                grid=grid,
                arguments=arguments,
                constants={**constants, "OVERLAPS": self._overlaps},
                num_warps=num_warps,
                overlaps=self._overlaps,
            )
        )
