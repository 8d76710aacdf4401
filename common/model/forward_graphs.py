"""Records forwards once and replays them as graphs (on CUDA: CUDA graphs).

    ForwardInput of B rows ──copy──▶ [ row 1 | … | row B | padding … ]   the recorded forward's own input, N >= B rows
                                          replay, all N rows
    outputs of B rows      ◀──view── [ row 1 | … | row B | padding … ]   the recorded forward's own outputs

A graph is recorded for one number of rows N and one number of new tokens, the same for every row. A batch of fewer rows
is padded to the next N. A padding row is pool row 0, all of whose tokens are in slot 0, so it reads and writes no
request's KV.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import Graph, GraphRecorder
from common.kv.rows import PADDING_ROW
from common.kv.slot_allocator import PADDING_SLOT

Forward = Callable[[ForwardInput, Tensor | None], tuple[Tensor, ...]]
"""A forward of a batch. Its second argument is one more input [T, ...] for the batch's tokens, or None. The first
dimension of each output is T.
"""


def batch_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns the batch sizes to record, in rows: 1, 2, 4, ... and `max_rows`. Less than half of a batch is padding."""
    powers = [1 << power for power in range(max_rows.bit_length())]
    return tuple(sorted({*powers, max_rows}))


class ForwardGraphs:
    """Records and replays forwards over one KV pool. Use it inside pieces (units of work) of one stream.

    `batch_sizes` are the numbers of rows to record, in ascending order. A forward runs without a graph if its shape was
    not recorded, or if it has more rows than the largest of them.
    """

    def __init__(self, *, recorder: GraphRecorder, batch_sizes: Sequence[int]) -> None:
        self._recorder = recorder
        self.batch_sizes = tuple(batch_sizes)
        self._recorded: dict[_Shape, _RecordedForward] = {}
        self._is_recording = False

    @property
    def num_graphs(self) -> int:
        return len(self._recorded)

    def held_bytes(self) -> int:
        """Returns the bytes of device memory that the whole process holds, not only for graphs."""
        return self._recorder.held_bytes()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside this context, each forward of a new shape is recorded before it is replayed. Recording is slow: use it
        at start.
        """
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def run(self, name: str, forward: Forward, batch: ForwardInput, beside: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns `forward(batch, beside)`. If its shape was recorded, the recording is replayed.

        Replayed outputs are valid until the same shape, or one that was recorded earlier, is replayed: that replay may
        overwrite their memory (see `Graph`). `name` identifies `forward`: one name always stands for the same
        function. `beside` is the forward's second input, if it has one.
        """
        shape = self._shape_of(name, batch)
        if shape is None:
            return forward(batch, beside)
        recorded = self._recorded.get(shape)
        if recorded is None:
            if not self._is_recording:
                return forward(batch, beside)
            recorded = _RecordedForward(self._recorder.new_graph(), forward, shape, batch, beside)
            self._recorded[shape] = recorded
        return recorded.replay(batch, beside)

    def _shape_of(self, name: str, batch: ForwardInput) -> _Shape | None:
        num_rows = batch.req_pool_indices.shape[0]
        extend_lens = {1} if batch.extend_lens is None else {*batch.extend_lens}
        place = bisect_left(self.batch_sizes, num_rows)
        if num_rows == 0 or place == len(self.batch_sizes) or len(extend_lens) != 1 or batch.logits_rows is not None:
            return None
        num_masked = None if batch.tree_mask is None else batch.tree_mask.shape[1]
        memory = (batch.kv.data_ptr(), batch.req_to_token.data_ptr())
        return _Shape(name, self.batch_sizes[place], extend_lens.pop(), batch.is_decode, num_masked, memory)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The key of a recorded forward.

    `num_tokens` counts the new tokens of each row, `num_masked` the tree mask's columns (None without a mask). `memory`
    holds the addresses of the KV pool and the row table.
    """

    name: str
    num_rows: int
    num_tokens: int
    is_decode: bool
    num_masked: int | None
    memory: tuple[int, int]


class _RecordedForward:
    """The graph of one shape, with the memory that it reads and writes."""

    def __init__(
        self, graph: Graph, forward: Forward, shape: _Shape, like: ForwardInput, beside: Tensor | None
    ) -> None:
        self._shape = shape
        self._num_used = 0  # rows that are not padding
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        device = like.seq_lens.device

        def column(length: int, value: int) -> Tensor:
            return torch.full((length,), value, dtype=torch.int64, device=device)

        self._padding_len = max(num_tokens, shape.num_masked or 0)
        self._beside = None if beside is None else beside.new_zeros((num_rows * num_tokens, *beside.shape[1:]))
        self._input = ForwardInput(
            input_ids=column(num_rows * num_tokens, 0),
            positions=column(num_rows * num_tokens, 0),
            out_cache_loc=column(num_rows * num_tokens, PADDING_SLOT),
            req_to_token=like.req_to_token,
            req_pool_indices=column(num_rows, PADDING_ROW),
            seq_lens=column(num_rows, self._padding_len),
            prefix_lens=None if shape.is_decode else (self._padding_len - num_tokens,) * num_rows,
            extend_lens=None if shape.is_decode else (num_tokens,) * num_rows,
            max_seq_len=like.req_to_token.shape[1],
            kv=like.kv,
            windows=like.windows,
            logits_rows=None,
            tree_mask=None
            if like.tree_mask is None
            else like.tree_mask.new_ones((num_rows * num_tokens, like.tree_mask.shape[1])),
        )
        forward(self._input, self._beside)  # compiles kernels, and lets libraries allocate their memory
        self._graph = graph
        self._outputs = graph.record(lambda: forward(self._input, self._beside))

    def replay(self, batch: ForwardInput, beside: Tensor | None) -> tuple[Tensor, ...]:
        num_rows, num_tokens = batch.req_pool_indices.shape[0], self._shape.num_tokens
        self._copy(batch, beside, num_rows)
        if num_rows < self._num_used:
            self._pad(num_rows, self._num_used)
        self._num_used = num_rows
        self._graph.replay()
        return tuple(output[: num_rows * num_tokens] for output in self._outputs)

    def _copy(self, batch: ForwardInput, beside: Tensor | None, num_rows: int) -> None:
        ours, theirs = _columns(self._input), _columns(batch)
        torch._foreach_copy_([own[: new.shape[0]] for own, new in zip(ours, theirs, strict=True)], theirs)
        num_tokens = num_rows * self._shape.num_tokens
        if self._input.tree_mask is not None and batch.tree_mask is not None:
            self._input.tree_mask[:num_tokens].copy_(batch.tree_mask)
        if self._beside is not None and beside is not None:
            self._beside[:num_tokens].copy_(beside)

    def _pad(self, start: int, stop: int) -> None:
        """Turns rows [start, stop) back into padding. A stale row would write to slots that now belong to another
        request.
        """
        own, tokens = self._input, slice(start * self._shape.num_tokens, stop * self._shape.num_tokens)
        torch._foreach_zero_(
            [own.input_ids[tokens], own.positions[tokens], own.out_cache_loc[tokens], own.req_pool_indices[start:stop]]
        )
        own.seq_lens[start:stop].fill_(self._padding_len)
        if own.tree_mask is not None:
            own.tree_mask[tokens].fill_(True)
        if self._beside is not None:
            self._beside[tokens].zero_()


def _columns(batch: ForwardInput) -> list[Tensor]:
    return [batch.input_ids, batch.positions, batch.out_cache_loc, batch.req_pool_indices, batch.seq_lens]
