"""Forwards of a model by its program: what TargetModel calls instead of the model's layers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.model.attention import ForwardInput
from common.model.attention_cpu import MAX_QUERIES, NUM_LANES, attended_tokens
from common.model.forward_program import FusedDecoder
from common.model.fused.decoder import LOGITS, STATES, STREAM
from common.model.fused.operations import Call
from common.model.fused.program import SUMS_BYTES
from common.model.fused.team import Team

_MAX_BUFFERS = 12
NUM_CALL_WORDS = Call.BUFFERS + 2 * _MAX_BUFFERS
_ALIGNMENT = 64


class FusedForward:
    """A ForwardProgram. Called from one thread at a time. Forwards of more than `max_tokens` are not taken."""

    def __init__(self, decoder: FusedDecoder, team: Team, *, max_tokens: int) -> None:
        program = decoder.program
        assert len(program.operations) <= team.max_operations and len(program.widths) <= _MAX_BUFFERS
        self._program, self._decoder = program, decoder
        self._team = team
        self._max_tokens = max_tokens
        self._buffers: list[Tensor] = [self._new_buffer(number, 0) for number in range(len(program.widths))]
        self._scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._captures = program.widths[STATES] > 1

    def close(self, timeout_s: float) -> bool:
        """End the team. False when a thread did not end within `timeout_s`."""
        return self._team.close(timeout_s)

    @property
    def num_layers_begun(self) -> int:
        return self._team.num_shown

    def takes(self, batch: ForwardInput) -> bool:
        return (
            batch.input_ids.shape[0] <= self._max_tokens
            and max(batch.extend_lens or (1,), default=1) <= MAX_QUERIES
            and batch.max_seq_len <= self._decoder.cosines.shape[0]
        )

    def forward(self, batch: ForwardInput, beside: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        num_tokens, num_rows = batch.input_ids.shape[0], batch.req_pool_indices.shape[0]
        num_selected = num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        self._reserve(num_tokens)
        logits, states = self._new_buffer(LOGITS, num_selected), self._new_buffer(STATES, num_tokens)
        buffers = [logits, states, *self._buffers[2:]]
        if beside is not None:
            assert beside.dtype == self._program.dtype and beside.shape == (num_tokens, self._program.widths[STREAM])
            buffers[STREAM] = beside.contiguous()
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
        max_queries = max(extend_lens, default=1)
        scratch, scratch_bytes = self._reserve_scratch(num_tokens, max_queries, batch.max_seq_len)
        call: NDArray[np.int64] = np.zeros(NUM_CALL_WORDS, np.int64)
        for word, column in kept.items():
            call[word] = column.data_ptr()
        for word, number in {
            Call.OPERATIONS: self._program.operations.ctypes.data,
            Call.NUM_OPERATIONS: len(self._program.operations),
            Call.NUMBERS: self._program.numbers.ctypes.data,
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
            Call.SCRATCH: scratch,
            Call.SCRATCH_BYTES: scratch_bytes,
        }.items():
            call[word] = number
        for number, buffer in enumerate(buffers):
            call[Call.BUFFERS + 2 * number] = buffer.data_ptr()
            call[Call.BUFFERS + 2 * number + 1] = self._program.widths[number]
        self._team.run(call)
        return logits, states if self._captures else None

    def _new_buffer(self, number: int, num_tokens: int) -> Tensor:
        dtype = torch.float32 if number in self._program.float_buffers else self._program.dtype
        return torch.empty((num_tokens, self._program.widths[number]), dtype=dtype)

    def _reserve(self, num_tokens: int) -> None:
        if self._buffers[-1].shape[0] < num_tokens:
            self._buffers[2:] = [self._new_buffer(number, num_tokens) for number in range(2, len(self._buffers))]

    def _reserve_scratch(self, num_tokens: int, max_queries: int, max_seq_len: int) -> tuple[int, int]:
        """Address, at a multiple of 64, and bytes of each thread's."""
        attention = self._program.attention
        num_queries = max_queries * (attention.num_heads // attention.num_kv_heads)
        attending = 4 * ((2 * num_queries + 1) * attention.head_dim + NUM_LANES + num_queries * max_seq_len)
        norming = num_tokens * self._program.normed_width * self._program.dtype.itemsize
        wanted = SUMS_BYTES + max(attending, norming)
        of_thread = wanted + -wanted % _ALIGNMENT
        if self._scratch.shape[0] < of_thread * self._team.num_threads + _ALIGNMENT:
            self._scratch = np.empty(2 * of_thread * self._team.num_threads + _ALIGNMENT, np.uint8)
        address = self._scratch.ctypes.data
        return address + -address % _ALIGNMENT, of_thread
