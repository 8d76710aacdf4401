"""Decides how many rows and tokens a KV pool has: as the settings say, or as many as fit into the memory.

a GPU   | model, draft head | working memory | KV pool | other processes |
        |<----- memory_share of the GPU's memory ----->|
a CPU   half of memory_share of the available memory, less the working memory: prefill and decode often share the host
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from common.device.stream import DeviceMemory, PieceFailed
from common.errors import StartupError
from common.peer_text import peer_text

GPU_ROWS, CPU_ROWS = 256, 32
"""The most rows of a pool whose number of rows is not set."""
CPU_TOKENS = 32768
LEAST_TOKENS = 1024
"""The fewest tokens of a pool whose size is not set, unless the longest request is shorter."""
_SHORTEST_REQUEST = 2
"""The tokens of the shortest request: one of prompt and one of output."""
_MOST_TOKENS = 1 << 40
"""More tokens than any pool has."""
_ROWS_PART = 4
"""The working memory of rows may take at most 1 / this of the memory left."""
_LIBRARIES_BYTES = 512 << 20
"""GPU memory kept free for libraries that are loaded later and not counted elsewhere."""
_ACTIVATION_BYTES = 128
"""Bytes of activations per token and hidden dimension, estimated from above: a layer's and its MLP's."""
SPLIT_BYTES = 256
"""Bytes per token and hidden dimension for attention that a GPU splits into parts, for rows with few new tokens.

It is enough for 32 parts in float32, and attention heads that are together twice as wide as the hidden state.
"""
INDEX_BYTES = 8
"""Bytes that a group with a window takes, beside its KV, for each slot of the pool."""
LOGIT_BYTES = 4
"""Bytes of one logit, in float32."""
_SAMPLED_LOGIT_BYTES = 32
"""Bytes per logit while tokens are sampled: several copies, such as sorted logits, their order and probabilities."""
_ROW_BYTES = 16 << 10
"""Fixed bytes per row: its sampling parameters, logit biases and end tokens, and its state between steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """The limits of a pool's size that the settings and the model give.

    `max_rows` or `max_kv_tokens` is None if the available memory decides; `memory_share` (above 0, at most 1) is the
    share of the memory to use then. A request has at most `context_tokens` tokens, and slots for `tokens_ahead` more.
    """

    max_rows: int | None
    max_kv_tokens: int | None
    memory_share: float
    context_tokens: int
    tokens_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBeside:
    """An upper estimate of the working memory that a service needs besides its model and the KV pool.

    `row_bytes` is what each row takes permanently. `peak_bytes(num_rows)` is the total for `num_rows` rows while a step
    runs: their permanent memory, and all that the step needs.
    """

    row_bytes: int
    peak_bytes: Callable[[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBytes:
    """The memory that a KV pool takes.

    `token_bytes` is the KV of one token in all layer groups without a window, and `window_token_bytes` in those with
    one. A row needs at most `row_window_tokens` slots in a group with a window; 0 if there is no such group.
    """

    token_bytes: int
    window_token_bytes: int = 0
    row_window_tokens: int = 0

    def num_window_tokens(self, num_rows: int, num_tokens: int) -> int:
        """Returns how many slots each group with a window has in a pool of this size, so that no row lacks any."""
        return min(num_tokens, num_rows * self.row_window_tokens)

    def of(self, num_rows: int, num_tokens: int) -> int:
        """Returns the bytes of a pool of this size, with slot 0 of each group, which is padding."""
        num_window_tokens = self.num_window_tokens(num_rows, num_tokens)
        return (num_tokens + 1) * self.token_bytes + (num_window_tokens + 1) * self.window_token_bytes

    def fitting(self, num_rows: int, num_bytes: int) -> int:
        """Returns the most tokens of a pool of `num_rows` that takes at most `num_bytes`; 0 if none fits."""
        return max(bisect_right(range(_MOST_TOKENS), num_bytes, key=partial(self.of, num_rows)) - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The size of a KV pool.

    One request has at most `max_context_tokens` tokens, which always fit the pool. Each layer group with a window has
    slots for `max_window_tokens`; 0 if there is no such group. `decided_by` names the setting or other limit that
    decided `max_kv_tokens`.
    """

    max_rows: int
    max_kv_tokens: int
    max_window_tokens: int
    max_context_tokens: int
    decided_by: str


def size_pool(
    limits: PoolLimits,
    *,
    pool: PoolBytes,
    beside: MemoryBeside,
    memory: DeviceMemory | None,
    torch_device: torch.device,
) -> PoolSize:
    """Returns the size of the KV pool: as `limits` sets it, or as many rows and tokens as fit.

    `pool` says what the pool takes. `memory` is measured after the model is loaded. It is None if it is not known, and
    then nothing is checked. Raises StartupError, which names the setting, if a size that `limits` sets does not fit, or
    if not even the smallest pool fits.
    """
    is_host = torch_device.type == "cpu"
    left = None if memory is None else _left_bytes(memory, limits.memory_share, is_host=is_host)
    max_rows = limits.max_rows or _fitting_rows(CPU_ROWS if is_host else GPU_ROWS, beside, left)
    if memory is not None and limits.max_rows is not None:
        _require_rows(max_rows, beside, memory, torch_device)
    row_tokens = limits.context_tokens + limits.tokens_ahead
    if limits.max_kv_tokens is not None:
        max_kv_tokens, decided_by = limits.max_kv_tokens, "max_kv_tokens"
        if max_kv_tokens < (shortest := _SHORTEST_REQUEST + limits.tokens_ahead):
            raise StartupError(
                f"max_kv_tokens: {max_kv_tokens} hold no request: the shortest needs {shortest}, and one of "
                f"{limits.context_tokens} tokens {row_tokens}"
            )
        if memory is not None:
            _require_tokens(max_rows, max_kv_tokens, pool, beside.peak_bytes(max_rows), memory, torch_device)
    else:
        bounds = {"max_rows": max_rows * row_tokens}
        if is_host:
            bounds["the most on a CPU"] = CPU_TOKENS
        if memory is not None and left is not None:
            least = min(LEAST_TOKENS, row_tokens)
            fitting = pool.fitting(max_rows, left - beside.peak_bytes(max_rows))
            if fitting < least:
                fitting = least
                _require_one_request(max_rows, least, pool, beside.peak_bytes(max_rows), memory, limits, torch_device)
            bounds["memory_share"] = fitting
        decided_by, max_kv_tokens = min(bounds.items(), key=lambda bound: bound[1])
    return PoolSize(
        max_rows=max_rows,
        max_kv_tokens=max_kv_tokens,
        max_window_tokens=pool.num_window_tokens(max_rows, max_kv_tokens),
        max_context_tokens=min(limits.context_tokens, max_kv_tokens - limits.tokens_ahead),
        decided_by=decided_by,
    )


@contextmanager
def room_beside_pool() -> Iterator[None]:
    """Wraps code that builds an engine, and turns its out-of-memory errors into StartupError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, PieceFailed) as error:
        cause = error.__cause__ if isinstance(error, PieceFailed) else error
        if not isinstance(cause, MemoryError | torch.OutOfMemoryError):
            raise
        said = peer_text(str(cause).strip() or type(cause).__name__)
        raise StartupError(
            f"memory_share: beside the KV pool too little memory is left: {said}. Lower it, or where they are set "
            "max_kv_tokens or max_rows"
        ) from error


def row_bytes(*, vocab_size: int, num_tokens: int) -> int:
    """Returns the permanent bytes of one row: its sampling tables, and `num_tokens` entries of token tables."""
    return 5 * vocab_size + 8 * num_tokens + _ROW_BYTES


def forward_bytes(*, num_tokens: int, num_logits: int, hidden_size: int, vocab_size: int) -> int:
    """Returns the bytes that a forward needs while it runs: activations of all tokens, and sampling from the logits."""
    return num_tokens * hidden_size * _ACTIVATION_BYTES + num_logits * vocab_size * _SAMPLED_LOGIT_BYTES


def _left_bytes(memory: DeviceMemory, share: float, *, is_host: bool) -> int:
    """Returns the bytes left for the KV pool and the working memory.

    On a GPU that is `share` of its memory, less what this process holds, but at most the free memory less what
    libraries take later. On a CPU (`is_host`) it is half of `share` of the free memory.
    """
    if is_host:
        return int(share * memory.free_bytes) // 2
    return min(int(share * memory.total_bytes) - memory.held_bytes, memory.free_bytes - _LIBRARIES_BYTES)


def _fitting_rows(most: int, beside: MemoryBeside, left: int | None) -> int:
    """Returns how many rows to have: `most`, halved until the working memory of the rows fits into a part of `left`.

    That part is 1 / _ROWS_PART. `left` is in bytes, or None if the memory is not known; then `most` is returned.
    """
    num_rows = most
    one_bytes = beside.peak_bytes(1)
    while left is not None and num_rows > 1 and _ROWS_PART * (beside.peak_bytes(num_rows) - one_bytes) > left:
        num_rows //= 2
    return num_rows


def _require_rows(num_rows: int, beside: MemoryBeside, memory: DeviceMemory, torch_device: torch.device) -> None:
    """Raises StartupError if the permanent memory of `num_rows` rows is more than the free memory."""
    if (needed := num_rows * beside.row_bytes) > memory.free_bytes:
        raise StartupError(
            f"max_rows: {num_rows} rows take {_gib(needed)} on {torch_device} beside their KV, and "
            f"{_gib(memory.free_bytes)} are left: {memory.free_bytes // (2 * beside.row_bytes)} take half of that"
        )


def _require_tokens(
    num_rows: int, num_tokens: int, pool: PoolBytes, beside_bytes: int, memory: DeviceMemory, torch_device: torch.device
) -> None:
    """Raises StartupError if the KV of `num_tokens` tokens is more than the free memory.

    `beside_bytes` is the memory needed besides the pool. It does not count in the check, only in the error, which says
    how many tokens would fit beside it.
    """
    if (needed := pool.of(num_rows, num_tokens)) > memory.free_bytes:
        num_fitting = pool.fitting(num_rows, memory.free_bytes - beside_bytes)
        raise StartupError(
            f"max_kv_tokens: {num_tokens} tokens take {_gib(needed)} on {torch_device}, and {_gib(memory.free_bytes)} "
            f"are left: {num_fitting} would fit"
        )


def _require_one_request(
    num_rows: int,
    num_tokens: int,
    pool: PoolBytes,
    beside_bytes: int,
    memory: DeviceMemory,
    limits: PoolLimits,
    torch_device: torch.device,
) -> None:
    """Raises StartupError if a pool of `num_tokens`, the fewest allowed, does not fit even into all the free memory.

    `beside_bytes`, the memory needed besides the pool, must fit too.
    """
    if (needed := pool.of(num_rows, num_tokens) + beside_bytes) > memory.free_bytes:
        raise StartupError(
            f"memory_share: of {torch_device}'s memory {_gib(memory.free_bytes)} are left beside the model, and a pool "
            f"of {num_tokens} tokens, with what forwards take, needs {_gib(needed)}. Give this service more memory, or "
            f"lower max_context_tokens ({limits.context_tokens}), max_rows or max_batch_tokens"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
