"""Forwards of a model by its program: what TargetModel calls instead of the model's layers."""

from __future__ import annotations

from collections.abc import Callable

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
_COLUMNS = np.array(
    [
        Call.INPUT_IDS,
        Call.POSITIONS,
        Call.OUT_CACHE_LOC,
        Call.TABLE,
        Call.REQ_POOL_INDICES,
        Call.SEQ_LENS,
        Call.SELECTED,
    ]
)
_OF_BATCH = np.array(
    [
        Call.NUM_TOKENS,
        Call.NUM_ROWS,
        Call.NUM_SELECTED,
        Call.TABLE_WIDTH,
        Call.STARTS,
        Call.ATTENDED,
        Call.ATTENDED_WIDTH,
        Call.NUM_MASKED,
        Call.MAX_SEQ_LEN,
        Call.KV,
        Call.NUM_SLOTS,
        Call.SCRATCH,
        Call.SCRATCH_BYTES,
        Call.BUFFERS + 2 * LOGITS,
        Call.BUFFERS + 2 * STATES,
    ]
)


class FusedForward:
    """A ForwardProgram. Called from one thread at a time. Forwards of more than `max_tokens` are not taken."""

    def __init__(self, decoder: FusedDecoder, team: Team, *, max_tokens: int) -> None:
        program = decoder.program
        assert len(program.operations) <= team.max_operations and len(program.widths) <= _MAX_BUFFERS
        self._program, self._decoder = program, decoder
        self._team = team
        self._max_tokens = max_tokens
        self._call: NDArray[np.int64] = np.zeros(NUM_CALL_WORDS, np.int64)
        for word, number in {
            Call.OPERATIONS: program.operations.ctypes.data,
            Call.NUM_OPERATIONS: len(program.operations),
            Call.NUMBERS: program.numbers.ctypes.data,
            Call.COSINES: decoder.cosines.data_ptr(),
            Call.SINES: decoder.sines.data_ptr(),
        }.items():
            self._call[word] = number
        self._buffers: list[Tensor] = []
        self._reserve(1)
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
        return self.prepare(batch, beside)()

    @torch.inference_mode()
    def prepare(self, batch: ForwardInput, beside: Tensor | None = None) -> Callable[[], tuple[Tensor, Tensor | None]]:
        num_tokens, num_rows = batch.input_ids.shape[0], batch.req_pool_indices.shape[0]
        num_selected = num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        self._reserve(num_tokens)
        logits, states = self._new_buffer(LOGITS, num_selected), self._new_buffer(STATES, num_tokens)
        extend_lens = batch.extend_lens or (1,) * num_rows
        attended, num_masked = attended_tokens(batch, extend_lens)
        starts = np.cumsum((0, *extend_lens), dtype=np.int64)
        assert batch.kv.is_contiguous(), "the kernel writes to the pool itself"
        scratch, scratch_bytes = self._reserve_scratch(num_tokens, max(extend_lens, default=1), batch.max_seq_len)
        columns = [
            column if column.dtype is torch.int64 and column.is_contiguous() else column.to(torch.int64).contiguous()
            for column in (
                batch.input_ids,
                batch.positions,
                batch.out_cache_loc,
                batch.req_to_token,
                batch.req_pool_indices,
                batch.seq_lens,
                *(() if batch.logits_rows is None else (batch.logits_rows,)),
            )
        ]
        call = self._call.copy()
        call[_COLUMNS[: len(columns)]] = [column.data_ptr() for column in columns]
        call[_OF_BATCH] = (
            num_tokens,
            num_rows,
            num_selected,
            batch.req_to_token.shape[1],
            starts.ctypes.data,
            attended.ctypes.data,
            attended.shape[1],
            num_masked.ctypes.data,
            batch.max_seq_len,
            batch.kv.data_ptr(),
            batch.kv.shape[2],
            scratch,
            scratch_bytes,
            logits.data_ptr(),
            states.data_ptr(),
        )
        if beside is not None:
            assert beside.dtype == self._program.dtype and beside.shape == (num_tokens, self._program.widths[STREAM])
            beside = beside.contiguous()
            call[Call.BUFFERS + 2 * STREAM] = beside.data_ptr()
        addressed = (batch.kv, columns, beside, starts, attended, num_masked, self._scratch, self._buffers)

        def compute() -> tuple[Tensor, Tensor | None]:
            self._team.run(call, addressed)
            return logits, states if self._captures else None

        return compute

    def _new_buffer(self, number: int, num_tokens: int) -> Tensor:
        dtype = torch.float32 if number in self._program.float_buffers else self._program.dtype
        return torch.empty((num_tokens, self._program.widths[number]), dtype=dtype)

    def _reserve(self, num_tokens: int) -> None:
        if self._buffers and self._buffers[-1].shape[0] >= num_tokens:
            return
        inner = range(STATES + 1, len(self._program.widths))
        self._buffers = [self._new_buffer(number, num_tokens) for number in inner]
        addresses = self._call[Call.BUFFERS :].reshape(-1, 2)
        addresses[: len(self._program.widths), 1] = self._program.widths
        addresses[inner.start : inner.stop, 0] = [buffer.data_ptr() for buffer in self._buffers]

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
