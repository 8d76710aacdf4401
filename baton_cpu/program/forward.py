"""Runs a model's forwards by its program. TargetModel calls this instead of the model's layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_cpu.attention import MAX_QUERIES, attended_tokens
from baton_cpu.program.builder import LOGITS, STATES, STREAM, FusedDecoder
from baton_cpu.program.kernel import attending, attending_chunks, experts
from baton_cpu.program.kernel.attending_chunks import QUERY_TOKENS, packed_tokens
from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from baton_cpu.program.kernel.numbers import input_dtype
from baton_cpu.program.kernel.operations import MANY_TOKENS, Call, Field, Kind
from baton_cpu.program.kernel.run import SUMS_BYTES
from baton_cpu.program.kernel.team import Team
from common.attention.backend import ForwardInput
from common.draft.head import DraftOutput, HeadProgram
from common.model.forward_program import ForwardProgram, OnLayerKv, ProgramOutput
from common.sampling.operators import Largest

MAX_BUFFERS = 12
NUM_CALL_WORDS = Call.BUFFERS + 2 * MAX_BUFFERS
_ALIGNMENT = 64
_ITEMS_A_THREAD = 4  # of ATTEND: several, so that threads end together
_MOST_PARTS = 16  # in an item, so that a long request among short ones is shared by threads
MAX_PARTS_BYTES = 64 << 20
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
        Call.MAX_SEQ_LEN,
        Call.KV,
        Call.NUM_SLOTS,
        Call.SCRATCH,
        Call.SCRATCH_BYTES,
        Call.PACKED,
        Call.LARGEST,
        Call.NOT_FINITE,
        Call.NUM_GROUPS,
        Call.PARTS,
        Call.GROUPS_ENDED,
        Call.BUFFERS + 2 * LOGITS,
        Call.BUFFERS + 2 * STATES,
    ]
)
_OF_NEW_TOKENS = np.array(
    [
        Call.STARTS,
        Call.ATTENDED,
        Call.ATTENDED_WIDTH,
        Call.NUM_MASKED,
        Call.NUM_KEY_PARTS,
        Call.KEY_PARTS,
        Call.NUM_QUERY_PARTS,
        Call.QUERY_PARTS,
        Call.PACKED_STARTS,
    ]
)


@dataclass(frozen=True, slots=True)
class _ChunkParts:
    """How the attention of a forward's chunks is cut into items, the work that a thread takes at once. A chunk is a row
    with more than MAX_QUERIES new tokens. Rows are given by their index in the batch.

    `key_parts` [n, 2] int64: a row, and the position of the first of PANEL_WIDTH keys. `query_parts` [n, 2] int64: a
    row, and the index of the first of up to QUERY_TOKENS new tokens, counted in the row. The query parts with most
    tokens to attend come first, so that threads end together. `packed_starts` [B + 1] int64: where each row's packed
    keys and values begin, in tokens.
    """

    key_parts: NDArray[np.int64]
    query_parts: NDArray[np.int64]
    packed_starts: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose keys and values are packed. It includes the tokens that are padding."""
        return int(self.packed_starts[-1])

    @classmethod
    def of(cls, batch: ForwardInput) -> _ChunkParts:
        key_parts: list[tuple[int, int]] = []
        query_parts: list[tuple[int, int, int]] = []
        starts = [0]
        extend_lens = batch.extend_lens or (1,) * batch.req_pool_indices.shape[0]
        for row, num_new in enumerate(extend_lens):
            starts.append(starts[-1])
            if num_new <= MAX_QUERIES:
                continue
            assert batch.prefix_lens is not None
            prefix_len = batch.prefix_lens[row]
            starts[-1] += packed_tokens(prefix_len + num_new)
            key_parts += [(row, begin) for begin in range(0, prefix_len + num_new, PANEL_WIDTH)]
            query_parts += [(prefix_len + begin, row, begin) for begin in range(0, num_new, QUERY_TOKENS)]
        query_parts.sort(reverse=True)
        return cls(
            np.array(key_parts, np.int64).reshape(-1, 2),
            np.array([part[1:] for part in query_parts], np.int64).reshape(-1, 2),
            np.array(starts, np.int64),
        )


class _NewTokens:
    """For each row of a forward: where its new tokens begin, and which tokens they attend.

    A row with at most MAX_QUERIES new tokens has a mask. A row with more is a chunk, and has entries in `chunks`
    instead.
    """

    def __init__(self, batch: ForwardInput) -> None:
        self.extend_lens = extend_lens = _extend_lens(batch)
        self.chunks = _ChunkParts.of(batch)
        self.is_for_any = batch.tree_mask is None and not self.chunks.num_tokens
        attended, num_masked = attended_tokens(batch, extend_lens)
        chunks = self.chunks
        self._arrays = (np.cumsum((0, *extend_lens), dtype=np.int64), attended, num_masked)
        starts, masks, numbers = map(_address, self._arrays)
        self.words = (
            *(starts, masks, attended.shape[1], numbers),
            *(len(chunks.key_parts), _address(chunks.key_parts)),
            *(len(chunks.query_parts), _address(chunks.query_parts)),
            _address(chunks.packed_starts),
        )
        """The values of a call's words, in the order of _OF_NEW_TOKENS."""

    def are_of(self, batch: ForwardInput) -> bool:
        """Returns whether this object also describes the forward of `batch`, so that it can be used again. Always False
        if either forward has a tree mask, or if this one has a chunk.
        """
        return self.is_for_any and batch.tree_mask is None and self.extend_lens == _extend_lens(batch)


class FusedForward:
    """A ForwardProgram that runs a program on a team of threads. One thread at a time may prepare, and one may compute.

    `takes` returns False for a forward that the model's own layers must compute: one of more than `max_tokens` tokens,
    one whose tree mask is for more than MAX_QUERIES tokens of a row, or one with a row longer than the rotary tables.

    A FusedForward keeps buffers for the most tokens of any forward so far, and memory for one layer's packed K and V of
    the longest chunks so far.
    """

    def __init__(self, decoder: FusedDecoder, team: Team, *, max_tokens: int) -> None:
        program = decoder.program
        assert len(program.operations) <= team.max_operations and len(program.widths) <= MAX_BUFFERS
        self._program, self._decoder = program, decoder
        self._tables = _address(program.operations), _address(program.numbers)
        self._team = team
        self._max_tokens = max_tokens
        self._call: NDArray[np.int64] = np.zeros(NUM_CALL_WORDS, np.int64)
        self._call[[Call.COSINES, Call.SINES]] = decoder.cosines.data_ptr(), decoder.sines.data_ptr()
        self._call[Call.NUM_THREADS] = team.num_threads
        self._new_tokens: _NewTokens | None = None
        self._buffers: list[Tensor] = []
        self._reserve(1)
        self._scratch, self._packed, self._parts = _Workspace(), _Workspace(), _Workspace()
        self._groups_ended: NDArray[np.int64] = np.zeros(1, np.int64)
        self._captures = program.widths[STATES] > 1
        self._finds_largest = bool((program.operations[:, Field.KIND] == Kind.LARGEST).any())
        attends = np.flatnonzero(program.operations[:, Field.KIND] == Kind.ATTEND).tolist()
        self._layer_stops = {int(program.operations[place, Field.LAYER]): place + 1 for place in attends}

    def close(self, timeout_s: float) -> bool:
        """Ends the team's threads. Returns False if one of them did not end within `timeout_s`."""
        return self._team.close(timeout_s)

    @property
    def num_layers_begun(self) -> int:
        return self._team.num_shown

    def takes(self, batch: ForwardInput) -> bool:
        return (
            batch.input_ids.shape[0] <= self._max_tokens
            and (batch.tree_mask is None or max(_extend_lens(batch), default=1) <= MAX_QUERIES)
            and batch.max_seq_len <= self._decoder.cosines.shape[0]
        )

    def forward(
        self, batch: ForwardInput, beside: Tensor | None = None, *, on_layer_kv: OnLayerKv | None = None
    ) -> ProgramOutput:
        return self.prepare(batch, beside, on_layer_kv=on_layer_kv)()

    @torch.inference_mode()
    def prepare(
        self, batch: ForwardInput, beside: Tensor | None = None, *, on_layer_kv: OnLayerKv | None = None
    ) -> Callable[[], ProgramOutput]:
        num_tokens, num_rows = batch.input_ids.shape[0], batch.req_pool_indices.shape[0]
        num_selected = num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        self._reserve(num_tokens)
        logits, states = self._new_buffer(LOGITS, num_selected), self._new_buffer(STATES, num_tokens)
        token_ids = torch.empty(num_selected, dtype=torch.int64)
        are_not_finite = torch.empty(num_selected, dtype=torch.bool)
        if self._new_tokens is None or not self._new_tokens.are_of(batch):
            self._new_tokens = _NewTokens(batch)
        new_tokens = self._new_tokens
        assert batch.kv.is_contiguous(), "the kernel writes to the pool itself"
        ids = batch.input_ids
        assert ids.dtype is torch.int64 and ids.is_contiguous(), "what may be filled later cannot be copied now"
        thread_bytes = self._scratch_bytes(num_tokens, num_selected, new_tokens.extend_lens)
        scratch = self._scratch.of(thread_bytes * self._team.num_threads)
        packed = self._packed.of(self._packed_bytes(new_tokens.chunks.num_tokens))
        num_groups, parts_bytes = self._groups(new_tokens.extend_lens, batch.max_seq_len)
        if self._groups_ended.shape[0] < num_rows:
            self._groups_ended = np.zeros(2 * num_rows, np.int64)
        parts = self._parts.of(parts_bytes)
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
            batch.max_seq_len,
            batch.kv.data_ptr(),
            batch.kv.shape[2],
            scratch.address,
            thread_bytes,
            packed.address,
            token_ids.data_ptr(),
            are_not_finite.data_ptr(),
            num_groups,
            parts.address,
            _address(self._groups_ended),
            logits.data_ptr(),
            states.data_ptr(),
        )
        call[_OF_NEW_TOKENS] = new_tokens.words
        if beside is not None:
            assert beside.dtype == self._program.dtype and beside.shape == (num_tokens, self._program.widths[STREAM])
            beside = beside.contiguous()
            call[Call.BUFFERS + 2 * STREAM] = beside.data_ptr()
        addressed = (batch.kv, columns, beside, new_tokens, scratch, packed, parts, self._groups_ended, self._buffers)

        output = ProgramOutput(
            logits,
            states if self._captures else None,
            Largest(token_ids, are_not_finite) if self._finds_largest else None,
        )

        def compute() -> ProgramOutput:
            begin = 0
            for layer, tell in sorted((on_layer_kv or {}).items()):
                begin = self._run(call, addressed, begin, self._layer_stops[layer])
                tell()
            self._run(call, addressed, begin, len(self._program.operations))
            return output

        return compute

    def _run(self, call: NDArray[np.int64], addressed: object, begin: int, end: int) -> int:
        operations, numbers = self._tables
        call[Call.OPERATIONS] = operations + begin * self._program.operations.strides[0]
        call[Call.NUM_OPERATIONS] = end - begin
        call[Call.NUMBERS] = numbers + begin * self._program.numbers.strides[0]
        self._team.run(call, addressed)
        return end

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

    def _groups(self, extend_lens: tuple[int, ...], max_seq_len: int) -> tuple[int, int]:
        """Returns into how many groups each row's attention is divided, and the bytes that the parts' results take.
        `extend_lens` says how many new tokens each row has.

        The tokens that a row attends are divided into parts of PART_TOKENS, and the parts into groups; a thread takes a
        group at once. So all threads have work even if rows are few or one is long. (1, 0) means that rows are not
        divided, and no parts' results are stored.
        """
        attention = self._program.attention
        num_queries = attention.num_heads * sum(num for num in extend_lens if num <= MAX_QUERIES)
        num_parts = -(-max_seq_len // attending.PART_TOKENS)
        num_wanted = _ITEMS_A_THREAD * self._team.num_threads // max(1, len(extend_lens))
        num_groups = max(min(num_parts, num_wanted), -(-num_parts // _MOST_PARTS))
        num_bytes = num_parts * attending.part_bytes(num_queries, attention.head_dim)
        return (1, 0) if num_groups <= 1 or num_bytes > MAX_PARTS_BYTES else (num_groups, num_bytes)

    def _packed_bytes(self, num_tokens: int) -> int:
        attention = self._program.attention
        return (
            attending_chunks.packed_numbers(num_tokens, attention.num_kv_heads, attention.head_dim)
            * self._program.dtype.itemsize
        )

    def _scratch_bytes(self, num_tokens: int, num_selected: int, extend_lens: tuple[int, ...]) -> int:
        """Returns the bytes of scratch memory that each thread needs, a multiple of 64, for a forward of `num_tokens`
        new tokens. `num_selected` of them need logits, and `extend_lens` says how many new tokens each row has.
        """
        attention, itemsize = self._program.attention, input_dtype(self._program.dtype).itemsize
        num_few = max((num for num in extend_lens if num <= MAX_QUERIES), default=0)
        wanted = attending.scratch_bytes(
            num_few * attention.num_heads, num_few * attention.num_heads // attention.num_kv_heads, attention.head_dim
        )
        if max(extend_lens, default=0) > MAX_QUERIES:
            num_shared = attention.num_heads // attention.num_kv_heads
            wanted = max(wanted, attending_chunks.scratch_bytes(num_shared, attention.head_dim, itemsize))
        if (size := self._program.experts) is not None:
            of_experts = experts.scratch_bytes(num_tokens, size.num_experts, size.num_chosen, size.width, itemsize)
            wanted = max(wanted, of_experts)
        num_normed = max(num_selected, num_tokens if num_tokens < MANY_TOKENS else 0)
        wanted = SUMS_BYTES + max(wanted, num_normed * self._program.normed_width * itemsize)
        return wanted + -wanted % _ALIGNMENT


class FusedHead(HeadProgram):
    """A draft head that runs by its two programs."""

    def __init__(self, extend: ForwardProgram, step: ForwardProgram) -> None:
        """Makes the head from `extend` and `step`, which run the two programs of a HeadPrograms."""
        self._extend = extend
        self._step = step

    def takes(self, batch: ForwardInput) -> bool:
        return self._extend.takes(batch)

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput:
        return _output(self._extend, batch, captured)

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        return _output(self._step, batch, hidden)


def _output(program: ForwardProgram, batch: ForwardInput, beside: Tensor) -> DraftOutput:
    logits, hidden, _ = program.forward(batch, beside)
    assert hidden is not None
    return DraftOutput(hidden if batch.logits_rows is None else hidden[batch.logits_rows], logits)


class Memory:
    """Memory of `num_bytes` at `address`, a multiple of 64. It stays allocated as long as this object is referenced."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._bytes: NDArray[np.uint8] = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        self.address = _address(self._bytes) + -_address(self._bytes) % _ALIGNMENT


class _Workspace:
    """Memory that grows. Its content is not kept from one use to the next."""

    def __init__(self) -> None:
        self._memory = Memory(0)

    def of(self, num_bytes: int) -> Memory:
        """Returns memory of at least `num_bytes`, which later calls may return again."""
        if self._memory.num_bytes < num_bytes:
            self._memory = Memory(2 * num_bytes)
        return self._memory


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def _extend_lens(batch: ForwardInput) -> tuple[int, ...]:
    return batch.extend_lens or (1,) * batch.req_pool_indices.shape[0]
