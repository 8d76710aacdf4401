"""Forwards of a model by its program: what TargetModel calls instead of the model's layers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.model.attention import ForwardInput
from common.model.attention_cpu import MAX_QUERIES, NUM_LANES, attended_tokens
from common.model.forward_program import FusedDecoder, OnLayerKv
from common.model.fused.attending_chunks import packed_numbers, scratch_bytes
from common.model.fused.chunk_parts import ChunkParts
from common.model.fused.decoder import LOGITS, STATES
from common.model.fused.operations import MANY_TOKENS, Call, Field, Kind
from common.model.fused.program import SUMS_BYTES
from common.model.fused.team import Team

_MAX_BUFFERS = 8
NUM_CALL_WORDS = Call.BUFFERS + 2 * _MAX_BUFFERS
_ALIGNMENT = 64


class FusedForward:
    """A ForwardProgram. Called from one thread at a time. Forwards of more than `max_tokens` are not taken.

    It keeps rows of its buffers for the most tokens it has met, and one layer's K and V of the longest chunks.
    """

    def __init__(self, decoder: FusedDecoder, team: Team, *, max_tokens: int) -> None:
        program = decoder.program
        assert len(program.operations) <= team.max_operations and len(program.widths) <= _MAX_BUFFERS
        self._program, self._decoder = program, decoder
        self._team = team
        self._max_tokens = max_tokens
        self._buffers: list[Tensor] = [self._new_buffer(number, 0) for number in range(len(program.widths))]
        self._scratch, self._packed = _Room(), _Room()
        self._captures = program.widths[STATES] > 1
        attends = np.flatnonzero(program.operations[:, Field.KIND] == Kind.ATTEND).tolist()
        self._layer_stops = {int(program.operations[place, Field.LAYER]): place + 1 for place in attends}

    def close(self, timeout_s: float) -> bool:
        """End the team. False when a thread did not end within `timeout_s`."""
        return self._team.close(timeout_s)

    @property
    def num_layers_begun(self) -> int:
        return self._team.num_shown

    def takes(self, batch: ForwardInput) -> bool:
        return (
            batch.input_ids.shape[0] <= self._max_tokens
            and (batch.tree_mask is None or max(batch.extend_lens or (1,), default=1) <= MAX_QUERIES)
            and batch.max_seq_len <= self._decoder.cosines.shape[0]
        )

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> tuple[Tensor, Tensor | None]:
        num_tokens, num_rows = batch.input_ids.shape[0], batch.req_pool_indices.shape[0]
        num_selected = num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        self._reserve(num_tokens)
        logits, states = self._new_buffer(LOGITS, num_selected), self._new_buffer(STATES, num_tokens)
        buffers = [logits, states, *self._buffers[2:]]
        extend_lens = batch.extend_lens or (1,) * num_rows
        attended, num_masked = attended_tokens(batch, extend_lens)
        starts = np.cumsum((0, *extend_lens), dtype=np.int64)
        assert batch.kv.is_contiguous(), "the kernel writes to the pool itself"
        columns = {
            Call.INPUT_IDS: batch.input_ids,
            Call.POSITIONS: batch.positions,
            Call.OUT_CACHE_LOC: batch.out_cache_loc,
            Call.TABLE: batch.req_to_token,
            Call.REQ_POOL_INDICES: batch.req_pool_indices,
            Call.SEQ_LENS: batch.seq_lens,
        }
        if batch.logits_rows is not None:
            columns[Call.SELECTED] = batch.logits_rows
        kept = {word: column.to(torch.int64).contiguous() for word, column in columns.items()}
        chunks = ChunkParts.of(batch)
        scratch_bytes = self._scratch_bytes(num_tokens, num_selected, extend_lens, batch.max_seq_len)
        call: NDArray[np.int64] = np.zeros(NUM_CALL_WORDS, np.int64)
        for word, column in kept.items():
            call[word] = column.data_ptr()
        for word, number in {
            Call.NUM_TOKENS: num_tokens,
            Call.NUM_ROWS: num_rows,
            Call.NUM_SELECTED: num_selected,
            Call.TABLE_WIDTH: batch.req_to_token.shape[1],
            Call.STARTS: starts.ctypes.data,
            Call.ATTENDED: attended.ctypes.data,
            Call.ATTENDED_WIDTH: attended.shape[1],
            Call.NUM_MASKED: num_masked.ctypes.data,
            Call.MAX_SEQ_LEN: batch.max_seq_len,
            Call.KV: batch.kv.data_ptr(),
            Call.NUM_SLOTS: batch.kv.shape[2],
            Call.COSINES: self._decoder.cosines.data_ptr(),
            Call.SINES: self._decoder.sines.data_ptr(),
            Call.SCRATCH: self._scratch.address(scratch_bytes * self._team.num_threads),
            Call.SCRATCH_BYTES: scratch_bytes,
            Call.NUM_KEY_PARTS: len(chunks.key_parts),
            Call.KEY_PARTS: chunks.key_parts.ctypes.data,
            Call.NUM_QUERY_PARTS: len(chunks.query_parts),
            Call.QUERY_PARTS: chunks.query_parts.ctypes.data,
            Call.PACKED: self._packed.address(self._packed_bytes(chunks)),
            Call.PACKED_STARTS: chunks.packed_starts.ctypes.data,
        }.items():
            call[word] = number
        for number, buffer in enumerate(buffers):
            call[Call.BUFFERS + 2 * number] = buffer.data_ptr()
            call[Call.BUFFERS + 2 * number + 1] = self._program.widths[number]
        begin = 0
        for layer, tell in sorted((on_layer_kv or {}).items()):
            begin = self._run(call, begin, self._layer_stops[layer])
            tell()
        self._run(call, begin, len(self._program.operations))
        return logits, states if self._captures else None

    def _run(self, call: NDArray[np.int64], begin: int, end: int) -> int:
        operations, numbers = self._program.operations[begin:end], self._program.numbers[begin:end]
        call[Call.OPERATIONS], call[Call.NUM_OPERATIONS] = operations.ctypes.data, end - begin
        call[Call.NUMBERS] = numbers.ctypes.data
        self._team.run(call)
        return end

    def _new_buffer(self, number: int, num_tokens: int) -> Tensor:
        dtype = torch.float32 if number in self._program.float_buffers else self._program.dtype
        return torch.empty((num_tokens, self._program.widths[number]), dtype=dtype)

    def _reserve(self, num_tokens: int) -> None:
        if self._buffers[-1].shape[0] < num_tokens:
            self._buffers[2:] = [self._new_buffer(number, num_tokens) for number in range(2, len(self._buffers))]

    def _packed_bytes(self, chunks: ChunkParts) -> int:
        attention, num_tokens = self._program.attention, int(chunks.packed_starts[-1])
        return packed_numbers(num_tokens, attention.num_kv_heads, attention.head_dim) * self._program.dtype.itemsize

    def _scratch_bytes(self, num_tokens: int, num_selected: int, extend_lens: tuple[int, ...], max_seq_len: int) -> int:
        """Of each thread; a multiple of 64."""
        attention, itemsize = self._program.attention, self._program.dtype.itemsize
        num_shared = attention.num_heads // attention.num_kv_heads
        num_queries = num_shared * max((num for num in extend_lens if num <= MAX_QUERIES), default=0)
        attending = 4 * ((2 * num_queries + 1) * attention.head_dim + NUM_LANES + num_queries * max_seq_len)
        if max(extend_lens, default=0) > MAX_QUERIES:
            attending = max(attending, scratch_bytes(num_shared, attention.head_dim, itemsize))
        num_normed = max(num_selected, num_tokens if num_tokens < MANY_TOKENS else 0)
        wanted = SUMS_BYTES + max(attending, num_normed * self._program.normed_width * itemsize)
        return wanted + -wanted % _ALIGNMENT


class _Room:
    """Memory that grows, and whose content means nothing from one use to the next."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def address(self, num_bytes: int) -> int:
        """Of so many bytes, at a multiple of 64."""
        if self._memory.shape[0] < num_bytes + _ALIGNMENT:
            self._memory = np.empty(2 * num_bytes + _ALIGNMENT, np.uint8)
        address = self._memory.ctypes.data
        return address + -address % _ALIGNMENT
