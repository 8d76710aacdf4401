"""From a decoder written down to forwards: kernels compiled once on a machine, seen to compute what the model does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import torch
from torch import Tensor

from baton_cpu.compiler.jit import Kernel
from baton_cpu.compiler.kernel_cache import kept_in
from baton_cpu.program.builder import capturing
from baton_cpu.program.decoder import STATES, STREAM
from baton_cpu.program.forward import NUM_CALL_WORDS, FusedForward
from baton_cpu.program.kernel.numbers import DTYPES
from baton_cpu.program.kernel.run import take_part
from baton_cpu.program.kernel.team import Team
from common.model.attention import ForwardInput
from common.model.capture import HiddenCapture
from common.model.forward_program import ForwardProgram, FusedDecoder
from common.model.target import TargetModel

_BITS = {torch.bfloat16: np.uint16, torch.float32: np.float32}
_TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-3}
"""Of the whole difference, relative to the logits: sums are taken in another order, and rounded."""

_COMPARED = ((0, 5), (5, 1), (6, 1), (7, 40), (47, 20), (67, 1))
"""Tokens before and new ones, of either of two rows: a window, steps, a chunk, a window and a step over two parts."""

_CLOSE_TIMEOUT_S = 5.0


_KERNELS: dict[torch.dtype, Kernel] = {}
"""Of this process."""


def load_kernels(directory: Path, dtype: torch.dtype) -> bool:
    """Load what `directory` holds of them, or compile them and leave them there. False when they had to be compiled.

    What is damaged there raises whatever its reader does.
    """
    array, word = numba.types.Array, numba.types.int64
    words, like = array(word, 1, "C"), array(numba.from_dtype(np.dtype(_BITS[dtype])), 1, "C")
    signature = (word, word, words, word, word, word, like)
    kernel = kept_in(directory, take_part)
    kernel.compile(signature)
    _KERNELS[dtype] = kernel
    return signature not in kernel.stats.cache_misses


def with_capture(decoder: FusedDecoder, capture: HiddenCapture | None) -> FusedDecoder:
    """The same, giving out the states of `capture`."""
    if capture is None:
        return decoder
    return replace(decoder, program=capturing(decoder.program, capture, stream=STREAM, states=STATES))


def new_forwards(decoders: Sequence[FusedDecoder], *, num_threads: int, max_tokens: int) -> list[ForwardProgram]:
    """With one team of `num_threads`, so only one of them runs at a time. After `load_kernels`."""
    dtype = decoders[0].program.dtype
    kernel, like = _KERNELS[dtype], np.zeros(1, _BITS[dtype])
    team = Team(
        num_threads=num_threads,
        max_operations=max(len(decoder.program.operations) for decoder in decoders),
        num_call_words=NUM_CALL_WORDS,
        take_part=lambda *arguments: kernel(*arguments, like),
    )
    try:
        return [FusedForward(decoder, team, max_tokens=max_tokens) for decoder in decoders]
    except BaseException:
        team.close(_CLOSE_TIMEOUT_S)
        raise


def difference(model: TargetModel, forward: ForwardProgram, *, check: Callable[[], None] = lambda: None) -> float:
    """Of `forward`'s logits and states from those of `model`, which does not run it yet: the largest of a few forwards,
    each relative to the model's. `check` is called between them, and may raise.
    """
    generator = torch.Generator().manual_seed(0)
    group = model.layer_group
    num_tokens = _COMPARED[-1][0] + _COMPARED[-1][1]
    kv = torch.zeros((group.num_layers, 2, 2 * num_tokens + 1, group.num_heads, group.head_dim), dtype=model.dtype)
    tables = torch.zeros((3, num_tokens), dtype=torch.int64)
    tables[1:] = torch.randperm(2 * num_tokens, generator=generator).view(2, num_tokens) + 1
    largest = 0.0
    for prefix_len, num_tokens in _COMPARED:
        positions = torch.arange(prefix_len, prefix_len + num_tokens).repeat(2)
        batch = ForwardInput(
            input_ids=torch.randint(0, model.vocab_size, (2 * num_tokens,), generator=generator),
            positions=positions,
            out_cache_loc=tables[1:, prefix_len : prefix_len + num_tokens].flatten(),
            req_to_token=tables,
            req_pool_indices=torch.tensor([1, 2]),
            seq_lens=torch.full((2,), prefix_len + num_tokens),
            prefix_lens=(prefix_len,) * 2 if num_tokens > 1 else None,
            extend_lens=(num_tokens,) * 2 if num_tokens > 1 else None,
            max_seq_len=prefix_len + num_tokens,
            kv=kv.clone(),
            logits_rows=None,
        )
        check()
        expected = model.forward_to_compare(replace(batch, kv=kv))
        check()
        logits, states, found = forward.forward(batch)
        largest = max(largest, relative(logits, expected.logits), relative(batch.kv, kv))
        assert found is not None
        if not torch.equal(found.token_ids, logits.argmax(dim=-1)):
            return float("inf")
        if expected.hidden is not None:
            assert states is not None
            largest = max(largest, relative(states, expected.hidden))
    return largest


def tolerance(dtype: torch.dtype) -> float:
    assert dtype in DTYPES
    return _TOLERANCE[dtype]


def relative(seen: Tensor, expected: Tensor) -> float:
    """How far `seen` is from `expected`, by its size."""
    distance, size = (seen.float() - expected.float()).norm(), expected.float().norm()
    return float("inf") if not torch.isfinite(distance) else float(distance / size)
