"""How many rows and tokens a KV pool has: what settings say, and else what fits the memory that is left.

a GPU   | the model, its head | beside the pool | KV pool |  others'  |
        |<------------- memory_share of it -------------->|
a CPU   half of memory_share of what is available, less what is beside the pool: as a rule a pair shares its host
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from common.device.errors import PieceFailed
from common.device.stream import DeviceMemory
from common.errors import StartupError
from common.peer_text import peer_text

GPU_ROWS, CPU_ROWS = 256, 32
"""The most rows that a pool takes by itself."""
CPU_TOKENS = 32768
LEAST_TOKENS = 1024
"""Fewest tokens of a pool that sizes itself, unless a request's context is shorter."""
_ROWS_PART = 4
"""Rows may take one part in this many of the memory that is left, beside the pool."""
_LIBRARIES_BYTES = 512 << 20
"""GPU memory for what is loaded later and counted nowhere."""
_ACTIVATION_BYTES = 128
"""Upper estimate of activations for each token and hidden value: a layer's and its MLP's, some in float32."""
SPLIT_BYTES = 256
"""The same on a GPU for rows with few new tokens: 32 parts of attention in float32, with heads twice as wide as the
hidden state.
"""
LOGIT_BYTES = 4
_SAMPLED_LOGIT_BYTES = 32
"""Copies of the logits: the model's, and while rows sample float32, shaped, sorted, order and probabilities."""
_ROW_BYTES = 16 << 10
"""A row's numbers, biases and end tokens of sampling, and its relay entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What settings and model say; None where the available memory decides.

    A request has at most `context_tokens`, and slots for `tokens_ahead` more.
    """

    max_rows: int | None
    max_kv_tokens: int | None
    memory_share: float
    context_tokens: int
    tokens_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBeside:
    """What a service needs beside its model and the pool, estimated from above.

    `row_bytes` is permanent for each row; `peak_bytes` of so many rows includes that and everything a step needs.
    """

    row_bytes: int
    peak_bytes: Callable[[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """`max_context_tokens` bounds one request, which also fits the pool. `decided_by` names the setting, or what else
    bounds the tokens.
    """

    max_rows: int
    max_kv_tokens: int
    max_context_tokens: int
    decided_by: str


def size_pool(
    limits: PoolLimits,
    *,
    token_bytes: int,
    beside: MemoryBeside,
    memory: DeviceMemory | None,
    torch_device: torch.device,
) -> PoolSize:
    """Size the pool. `memory` is measured after the model is loaded; None if the system does not tell, and then nothing
    is checked.

    Raises StartupError, which names the setting, when its value does not fit, or one request does not.
    """
    is_host = torch_device.type == "cpu"
    left = None if memory is None else _left_bytes(memory, limits.memory_share, is_host=is_host)
    max_rows = limits.max_rows or _fitting_rows(CPU_ROWS if is_host else GPU_ROWS, beside, left)
    if memory is not None and limits.max_rows is not None:
        _require_rows(max_rows, beside, memory, torch_device)
    row_tokens = limits.context_tokens + limits.tokens_ahead
    if limits.max_kv_tokens is not None:
        max_kv_tokens, decided_by = limits.max_kv_tokens, "max_kv_tokens"
        if memory is not None:
            _require_tokens(max_kv_tokens, token_bytes, beside.peak_bytes(max_rows), memory, torch_device)
    else:
        bounds = {"max_rows": max_rows * row_tokens}
        if is_host:
            bounds["the most on a CPU"] = CPU_TOKENS
        if memory is not None and left is not None:
            least = min(LEAST_TOKENS, row_tokens)
            fitting = (left - beside.peak_bytes(max_rows)) // token_bytes - 1  # slot 0 is padding
            if fitting < least:
                fitting = least
                _require_one_request(least, token_bytes, beside.peak_bytes(max_rows), memory, limits, torch_device)
            bounds["memory_share"] = fitting
        decided_by, max_kv_tokens = min(bounds.items(), key=lambda bound: bound[1])
    return PoolSize(
        max_rows=max_rows,
        max_kv_tokens=max_kv_tokens,
        max_context_tokens=min(limits.context_tokens, max_kv_tokens),
        decided_by=decided_by,
    )


@contextmanager
def room_beside_pool() -> Iterator[None]:
    """Bytes for building an engine. Raises StartupError if the memory does not suffice."""
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
    """Permanent bytes of a row: sampling tables, and the token table for so many tokens."""
    return 5 * vocab_size + 8 * num_tokens + _ROW_BYTES


def forward_bytes(*, num_tokens: int, num_logits: int, hidden_size: int, vocab_size: int) -> int:
    """Bytes that a forward of so many tokens needs while it runs, with drawing from the logits of some of them."""
    return num_tokens * hidden_size * _ACTIVATION_BYTES + num_logits * vocab_size * _SAMPLED_LOGIT_BYTES


def _left_bytes(memory: DeviceMemory, share: float, *, is_host: bool) -> int:
    """Bytes left for the pool and what is beside it."""
    if is_host:
        return int(share * memory.free_bytes) // 2
    return min(int(share * memory.total_bytes) - memory.held_bytes, memory.free_bytes - _LIBRARIES_BYTES)


def _fitting_rows(most: int, beside: MemoryBeside, left: int | None) -> int:
    """Returns a power of two."""
    num_rows = most
    one_bytes = beside.peak_bytes(1)
    while left is not None and num_rows > 1 and _ROWS_PART * (beside.peak_bytes(num_rows) - one_bytes) > left:
        num_rows //= 2
    return num_rows


def _require_rows(num_rows: int, beside: MemoryBeside, memory: DeviceMemory, torch_device: torch.device) -> None:
    if (needed := num_rows * beside.row_bytes) > memory.free_bytes:
        raise StartupError(
            f"max_rows: {num_rows} rows take {_gib(needed)} on {torch_device} beside their KV, and "
            f"{_gib(memory.free_bytes)} are left: {memory.free_bytes // (2 * beside.row_bytes)} take half of that"
        )


def _require_tokens(
    num_tokens: int, token_bytes: int, beside_bytes: int, memory: DeviceMemory, torch_device: torch.device
) -> None:
    if (needed := (num_tokens + 1) * token_bytes) > memory.free_bytes:
        num_fitting = max(0, (memory.free_bytes - beside_bytes) // token_bytes - 1)
        raise StartupError(
            f"max_kv_tokens: {num_tokens} tokens take {_gib(needed)} on {torch_device}, and {_gib(memory.free_bytes)} "
            f"are left: {num_fitting} would fit"
        )


def _require_one_request(
    num_tokens: int,
    token_bytes: int,
    beside_bytes: int,
    memory: DeviceMemory,
    limits: PoolLimits,
    torch_device: torch.device,
) -> None:
    """One request must fit, even if that takes more than the share."""
    if (needed := (num_tokens + 1) * token_bytes + beside_bytes) > memory.free_bytes:
        raise StartupError(
            f"memory_share: of {torch_device}'s memory {_gib(memory.free_bytes)} are left beside the model, and a pool "
            f"of {num_tokens} tokens, with what forwards take, needs {_gib(needed)}. Give this service more memory, or "
            f"lower max_context_tokens ({limits.context_tokens}), max_rows or max_batch_tokens"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
