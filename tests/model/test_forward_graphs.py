"""Tests of replayed forwards: a batch's rows, with padding rows, run in one recorded shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.attention.backend import ForwardInput, LayerAttention
from common.attention.torch_attention import TorchAttention
from common.model.forward_graphs import ForwardGraphs, batch_sizes
from tests.support.recording_device import CallRecorder

NUM_ROWS, MAX_TOKENS, HEAD_DIM = 6, 12, 16
HEADS = 2


class Toy:
    """One attention layer over rows 1 .. NUM_ROWS of a pool. It counts the forwards that run without replay."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._embedding = torch.randn((50, 3, HEADS, HEAD_DIM), generator=generator)
        num_slots = NUM_ROWS * MAX_TOKENS
        slots = torch.randperm(num_slots, generator=generator) + 1
        self.table = torch.cat([torch.zeros((1, MAX_TOKENS), dtype=torch.int64), slots.view(NUM_ROWS, MAX_TOKENS)])
        self.kv = torch.randn((1, 2, num_slots + 1, HEADS, HEAD_DIM), generator=generator)
        self.num_eager = 0

    def forward(self, batch: ForwardInput, beside: Tensor | None) -> tuple[Tensor, ...]:
        self.num_eager += 1
        query, key, value = self._embedding[batch.input_ids].unbind(1)
        if beside is not None:
            query = query + beside.view(query.shape)
        query = query + batch.positions.view(-1, 1, 1)
        attended = TorchAttention().plan(batch).attend(0, query, key, value, LayerAttention(0.25))
        return attended.flatten(1), batch.positions.clone()

    def batch(self, lens: dict[int, int], num_tokens: int = 1, num_masked: int | None = None) -> ForwardInput:
        """Returns a batch with the next `num_tokens` tokens of each of these rows. `lens` says how many tokens each row
        then has. The mask covers the last `num_masked` tokens.
        """
        rows = torch.tensor(list(lens))
        seq_lens = torch.tensor(list(lens.values()))
        places = (seq_lens - num_tokens).unsqueeze(1) + torch.arange(num_tokens)
        mask = None
        if num_masked is not None:
            mask = torch.ones((num_tokens, num_masked), dtype=torch.bool).tril(num_masked - num_tokens)
            mask[:, 0] = False
            mask = mask.repeat(len(lens), 1)
        is_decode = num_tokens == 1 and mask is None
        return ForwardInput(
            input_ids=(7 * places + rows.unsqueeze(1)).flatten() % 50,
            positions=places.flatten(),
            out_cache_loc=self.table[rows.unsqueeze(1), places].flatten(),
            req_to_token=self.table,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            prefix_lens=None if is_decode else tuple((seq_lens - num_tokens).tolist()),
            extend_lens=None if is_decode else (num_tokens,) * len(lens),
            max_seq_len=int(seq_lens.max()),
            kv=self.kv,
            logits_rows=None,
            tree_mask=mask,
        )


SHAPES = {"decode": (1, None), "verify": (4, None), "a tree": (4, 4), "a level of a tree": (2, 6)}
"""Cases by name: (tokens of each row, number of its last tokens that the mask covers, or None without a mask)."""
BATCHES = [{1: 8, 2: 9, 3: 12, 4: 7, 5: 8}, {6: 11}, {2: 10, 5: 9, 1: 12}, {3: 9, 4: 9}, {1: 12}]


def recorded(toy: Toy, *, sizes: tuple[int, ...] = (1, 2, 4, 6)) -> tuple[ForwardGraphs, CallRecorder]:
    recorder = CallRecorder()
    return ForwardGraphs(recorder=recorder, batch_sizes=sizes), recorder


@pytest.mark.parametrize("has_beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replay_gives_what_the_forward_gives_and_writes_to_its_rows_alone(shape: str, has_beside: bool) -> None:
    """A replay must contain nothing of the previous batch, even if that was larger."""
    toy, (num_tokens, num_masked) = Toy(), SHAPES[shape]
    graphs, recorder = recorded(toy, sizes=(1, 6))
    for number, lens in enumerate(BATCHES):
        batch = toy.batch(lens, num_tokens, num_masked)
        toy.kv[:, :, 1:].normal_(generator=torch.Generator().manual_seed(number))  # these slots now belong to others
        beside = torch.full((len(lens) * num_tokens, HEADS * HEAD_DIM), 0.5 + number) if has_beside else None
        before = toy.kv.clone()
        expected = toy.forward(batch, beside)
        expected_kv = toy.kv.clone()
        toy.kv.copy_(before)
        with graphs.recording():
            seen = graphs.run("toy", toy.forward, batch, beside)
        for output, wanted in zip(seen, expected, strict=True):
            torch.testing.assert_close(output, wanted)
        assert torch.equal(toy.kv[:, :, 1:], expected_kv[:, :, 1:]), "a slot was written that is not the batch's"
        assert torch.isfinite(toy.kv).all()
    assert recorder.num_replays == len(BATCHES)


def test_a_batch_takes_the_smallest_recorded_forward_that_holds_it() -> None:
    toy = Toy()
    graphs, recorder = recorded(toy)
    with graphs.recording():
        for num_rows in (6, 3, 4, 5, 1):
            graphs.run("toy", toy.forward, toy.batch(dict.fromkeys(range(1, num_rows + 1), 8)))
    assert [graph.num_replays for graph in recorder.graphs] == [2, 2, 1]


def test_outputs_outlive_replays_of_what_was_recorded_later_and_of_nothing_else() -> None:
    toy = Toy()
    graphs, _ = recorded(toy)
    first, second = toy.batch({1: 8}), toy.batch({1: 9}, num_tokens=4)
    with graphs.recording():
        for batch in (first, second):
            graphs.run("toy", toy.forward, batch)
    of_first, *_ = graphs.run("toy", toy.forward, first)
    of_second, *_ = graphs.run("toy", toy.forward, second)
    assert torch.isfinite(of_first).all() and torch.isfinite(of_second).all()
    graphs.run("toy", toy.forward, first)
    assert not torch.isfinite(of_second).any()


@pytest.mark.parametrize("max_rows", [1, 2, 5, 8, 33])
def test_recorded_sizes_leave_less_than_half_to_padding(max_rows: int) -> None:
    sizes = batch_sizes(max_rows)
    assert sizes == tuple(sorted({*sizes})) and sizes[0] == 1 and sizes[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        assert min(size for size in sizes if size >= num_rows) < 2 * num_rows


def test_what_is_not_recorded_runs_as_it_is() -> None:
    toy = Toy()
    graphs, recorder = recorded(toy, sizes=(1, 2))
    decode = toy.batch({1: 8, 2: 8})
    graphs.run("toy", toy.forward, decode)
    assert recorder.graphs == [], "nothing is recorded once serving has begun"
    ragged = replace(toy.batch({1: 8, 2: 8}, 2), extend_lens=(1, 3), prefix_lens=(7, 5))
    some_logits = replace(toy.batch({1: 8}, 4), logits_rows=torch.tensor([3]))
    more_rows = toy.batch({1: 8, 2: 8, 3: 8})
    with graphs.recording():
        for batch in (ragged, some_logits, more_rows):
            graphs.run("toy", toy.forward, batch)
    assert recorder.graphs == [] and toy.num_eager == 4


def test_forwards_over_another_pool_or_of_another_layer_are_others() -> None:
    toy, other = Toy(), Toy()
    graphs, recorder = recorded(toy)
    with graphs.recording():
        graphs.run("layer 0", toy.forward, toy.batch({1: 8}))
        graphs.run("layer 1", toy.forward, toy.batch({1: 8}))
        graphs.run("layer 0", other.forward, other.batch({1: 8}))
    assert len(recorder.graphs) == graphs.num_graphs == 3
