"""Counter-based Gumbel noise: a function of seed, choice index, position and token id only.

A row's 64-bit key mixes seed, choice and position, with splitmix64's finaliser after each. Two rounds of a 32-bit
mixing function, keyed by the two halves of the key, then give a token's 32 bits. All of it is integer arithmetic, so
every device draws the same bits, and noise can be drawn for any subset of the vocabulary alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX64_A = _signed(0xBF58476D1CE4E5B9, 64)
_MIX64_B = _signed(0x94D049BB133111EB, 64)
_MIX32_A = _signed(0x7FEB352D, 32)
_MIX32_B = _signed(0x846CA68B, 32)


def _shift_right(x: Tensor, bits: int, width: int) -> Tensor:
    """Shifts signed integers of `width` bits right and fills with zeros; torch's own operator copies the sign bit."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30, 64)) * _MIX64_A
    x = (x ^ _shift_right(x, 27, 64)) * _MIX64_B
    return x ^ _shift_right(x, 31, 64)


def mix32(x: Tensor) -> Tensor:
    """Mixes the bits of 32-bit integers (any shape): each result depends on all bits of its number, one to one."""
    x = (x ^ _shift_right(x, 16, 32)).mul_(_MIX32_A)
    x ^= _shift_right(x, 15, 32)
    x = x.mul_(_MIX32_B)
    x ^= _shift_right(x, 16, 32)
    return x


def row_keys(seeds: Tensor, choice_indices: Tensor, positions: Tensor) -> Tensor:
    """Returns each row's noise key, from its seed, choice index and absolute token position. All are [B] int64.

    An unsigned 64-bit seed is passed as the int64 with the same bits.
    """
    keys = _mix64(seeds + _GOLDEN)
    keys = _mix64((keys ^ choice_indices) + _GOLDEN)
    return _mix64((keys ^ positions) + _GOLDEN)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise [B, N] float32 for keys [B] and token ids [N] or [B, N].

    The upper tail, which decides the winning token, has a resolution of 2^-33. No value is infinite.
    """
    low = keys.to(torch.int32).unsqueeze(-1)
    high = (keys >> 32).to(torch.int32).unsqueeze(-1)
    bits = mix32(mix32(token_ids.to(torch.int32) ^ low) + high)
    # Read as unsigned, so that the smallest probabilities, which make the largest noise, come from the small patterns
    # that float32 holds exactly; those near 1 round, and stay below it.
    value = bits.to(torch.float32)
    tail = torch.where(value < 0, value + 2.0**32, value).add_(0.5).mul_(2.0**-32)
    return torch.log1p(tail.clamp_(max=1 - 2.0**-24).neg_()).neg_().log_().neg_()
