"""Tests of the fused kernel's attention for few new tokens: all head sizes, split into parts, on any number of
threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_cpu.program.builder import AttentionSize, FusedDecoder, ProgramBuilder
from baton_cpu.program.fusing import fuse, new_forwards
from baton_cpu.program.kernel.attending import PART_TOKENS
from common.attention.backend import ForwardInput
from common.kv.layer_group import LayerGroupSpec
from common.model.forward_program import ForwardProgram
from tests.cpu.program.batches import scattered_batch
from tests.support.loading import load_target

_VOCAB_SIZE, _MAX_TOKENS, _MAX_POSITIONS = 90, 600, 4096
_SIZES = [
    (16, 4, 2),
    (24, 3, 1),
    (64, 9, 3),
    (64, 4, 4),
    (80, 5, 1),
    (128, 8, 2),
    (144, 2, 2),
    (8, 7, 1),
    (20, 3, 1),
    (12, 2, 2),
]
"""Each entry is (head_dim, heads, KV heads). They cover whole vector registers and remainders, and one or several
queries per KV head.
"""


@pytest.fixture(scope="module", autouse=True)
def _kernels(tiny_model_dir) -> None:  # type: ignore[no-untyped-def]
    model = load_target(tiny_model_dir("llama"), device="cpu", dtype="float32", fuses=True)
    fuse(model, num_threads=1, max_tokens=1)
    assert model._program is not None and model._program.close(5.0)


@dataclass(frozen=True)
class Attention:
    """A program that computes attention in layer 0 and outputs the result. A token's q, k and v are its row of
    `table`.
    """

    size: AttentionSize
    table: Tensor

    @classmethod
    def of(cls, head_dim: int, num_heads: int, num_kv_heads: int) -> Attention:
        size = AttentionSize(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scaling=head_dim**-0.5)
        generator = torch.Generator().manual_seed(head_dim)
        table = torch.randn((_VOCAB_SIZE, (num_heads + 2 * num_kv_heads) * head_dim), generator=generator)
        return cls(size, table)

    @contextmanager
    def program(self, num_threads: int = 2) -> Iterator[ForwardProgram]:
        size, builder = self.size, ProgramBuilder(torch.float32)
        _, states, _ = (
            builder.buffer(1, is_float=True),
            builder.buffer(size.num_heads * size.head_dim, is_input=True),
            builder.buffer(1),
        )
        qkv = builder.buffer(self.table.shape[1])
        builder.embed(self.table, qkv)
        builder.attend(qkv, states, size, layer=0)
        no_rotation = torch.ones((_MAX_POSITIONS, size.head_dim)), torch.zeros((_MAX_POSITIONS, size.head_dim))
        decoder = FusedDecoder(builder.program(), *no_rotation)
        (program,) = new_forwards([decoder], num_threads=num_threads, max_tokens=_MAX_TOKENS)
        try:
            yield program
        finally:
            assert program.close(5.0)

    def batch(self, rows: list[tuple[int, int]], mask: Tensor | None = None) -> ForwardInput:
        """Returns a batch of rows, given as (earlier tokens, new tokens). All slots but their own hold NaN."""
        size = self.size
        group = LayerGroupSpec("target", 1, 2, num_heads=size.num_kv_heads, head_dim=size.head_dim, dtype="float32")
        return scattered_batch(group, rows, vocab_size=_VOCAB_SIZE, mask=mask, unused=float("nan"))

    def expected(self, batch: ForwardInput) -> Tensor:
        """Returns the expected output [tokens, heads * head_dim], computed one token at a time."""
        size, outputs, first = self.size, [], 0
        num_own = size.num_heads * size.head_dim
        seq_lens = batch.seq_lens.tolist()
        for row, new in enumerate(batch.extend_lens or (1,) * len(seq_lens)):
            rows = self.table[batch.input_ids[first : first + new]]
            slots = batch.req_to_token[row + 1, : seq_lens[row]]
            k, v = batch.kv[0][:, slots].clone()
            k[-new:], v[-new:] = rows[:, num_own:].unflatten(1, (2, size.num_kv_heads, size.head_dim)).unbind(1)
            for m in range(new):
                attended = torch.arange(seq_lens[row]) <= seq_lens[row] - new + m
                if batch.tree_mask is not None:
                    attended[-batch.tree_mask.shape[1] :] = batch.tree_mask[first + m]
                keys, values = (
                    each[attended].repeat_interleave(size.num_heads // size.num_kv_heads, 1) for each in (k, v)
                )
                query = rows[m, :num_own].unflatten(0, (size.num_heads, size.head_dim))
                weights = torch.einsum("hd,thd->ht", query * size.scaling, keys).softmax(dim=1)
                outputs.append(torch.einsum("ht,thd->hd", weights, values).flatten())
            first += new
        return torch.stack(outputs)


_ROWS = {
    "a step": [(2 * PART_TOKENS + 20, 1)],
    "a first token": [(0, 1)],
    "few tokens over two parts": [(PART_TOKENS - 2, 5)],
    "few tokens of several lengths": [(PART_TOKENS - 1, 3), (5, 1), (3 * PART_TOKENS - 4, 9), (0, 2)],
    "more rows than threads share": [(place * 15, 1) for place in range(12)],
}


@pytest.mark.parametrize("size", _SIZES, ids=str)
def test_it_attends_as_written_down(size: tuple[int, int, int]) -> None:
    attention = Attention.of(*size)
    with attention.program() as program:
        for rows in _ROWS.values():
            batch = attention.batch(rows)
            _, states, _ = program.forward(batch)
            torch.testing.assert_close(states, attention.expected(batch), rtol=1e-5, atol=1e-5)
            assert not batch.kv[0][:, batch.out_cache_loc].isnan().any(), "new tokens' KV is in the pool"


@pytest.mark.parametrize("before", [0, 10, PART_TOKENS - 3], ids=lambda before: f"{before} before")
def test_of_what_a_query_does_not_attend_nothing_is_read(before: int) -> None:
    attention = Attention.of(64, 9, 3)
    mask = torch.eye(6, dtype=torch.bool)
    mask[:, 0] = True
    mask[3, 1] = mask[4, 2] = True
    sound = replace(attention.batch([(before, 6)], mask), input_ids=torch.arange(6))
    table = attention.table.clone()
    table[2] = float("nan")
    with attention.program() as program, replace(attention, table=table).program() as broken:
        _, expected, _ = program.forward(replace(sound, kv=sound.kv.clone()))
        _, states, _ = broken.forward(replace(sound, kv=sound.kv.clone()))
    assert expected is not None and states is not None
    torch.testing.assert_close(expected, attention.expected(sound), rtol=1e-5, atol=1e-5)
    attends_broken = torch.tensor([False, False, True, False, True, False])
    assert torch.equal(states[~attends_broken], expected[~attends_broken])
    assert states[attends_broken].isnan().all()


def test_nothing_is_written_past_what_was_set_aside(guards: list[NDArray[np.uint8]]) -> None:
    """The batch mixes requests whose attention is split into parts for several threads with chunks of prompts, whose
    attention is not split.
    """
    attention = Attention.of(64, 9, 3)
    batch = attention.batch([(0, 200), (70, 3), (0, 100), (200, 2)])
    with attention.program() as program:
        _, states, _ = program.forward(batch)
    assert states is not None
    torch.testing.assert_close(states, attention.expected(batch), rtol=1e-5, atol=1e-5)
    assert guards and all((guard == 7).all() for guard in guards)


@pytest.mark.parametrize("num_new", [1, 5])
def test_the_numbers_are_the_same_bits_whoever_computes_them(num_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention.of(64, 9, 3)
    rows = [(5 * PART_TOKENS + 7, num_new), *((place, num_new) for place in range(20))]
    crowd, alone = attention.batch(rows), attention.batch(rows[:1])
    slots = crowd.req_to_token[1, : rows[0][0]]
    alone.kv[:, :, alone.req_to_token[1, : rows[0][0]]] = crowd.kv[:, :, slots]
    alone.input_ids.copy_(crowd.input_ids[:num_new])
    seen = []
    for num_threads in (1, 2, 3):
        with attention.program(num_threads) as program:
            for batch in (alone, crowd, alone):
                _, states, _ = program.forward(batch)
                assert states is not None
                seen.append(states[:num_new])
    monkeypatch.setattr("baton_cpu.program.forward.MAX_PARTS_BYTES", 0)
    with attention.program() as program:
        _, states, _ = program.forward(alone)
    assert states is not None
    assert all(torch.equal(each, states) for each in seen)
