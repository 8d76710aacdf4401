"""Records the forwards of all shapes that a worker's steps can have as graphs, by running steps of padding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.device.stream import Device, Scope, Stream
from common.kv.pool_size import LOGIT_BYTES
from common.kv.rows import PADDING_ROW
from common.kv.slot_allocator import PADDING_SLOT
from common.model.forward_graphs import ForwardGraphs, batch_sizes
from common.sampling.state import NUM_NEEDS, SamplingBatch
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap
from decode_service.forward.worker import Worker
from decode_service.speculate.spec_info import SpecInfo


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of recording: the number of graphs, the device memory they took and the seconds it lasted."""

    num_graphs: int
    num_bytes: int
    seconds: float


def recorded_bytes(max_rows: int, spec_infos: Sequence[SpecInfo], *, vocab_size: int, state_bytes: int) -> int:
    """Returns how many bytes of results the recorded forwards keep, for all shapes together.

    A shape is a batch size, up to `max_rows`, with a number of tokens per row. Each token of a shape has its logits,
    and `state_bytes` of hidden states.
    """
    tokens_a_row = {spec_info.num_verify_tokens for spec_info in spec_infos}
    num_tokens = sum(batch_sizes(max_rows)) * sum(tokens_a_row)
    return num_tokens * (vocab_size * LOGIT_BYTES + state_bytes)


def record_forwards(
    worker: Worker,
    graphs: ForwardGraphs,
    *,
    spec_infos: Sequence[SpecInfo],
    future_map: FutureMap,
    device: Device,
    stream: Stream,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Recorded:
    """Records the forwards of a step for every batch size of `graphs` and each speculation in `spec_infos`.

    Call it before the first request. The largest
    batch comes first: its intermediate memory is enough for the others. Raises PieceFailed if a forward cannot be
    recorded, and DeviceTimeout if it does not end within `timeout_s`.
    """
    begin_s, begin_bytes = clock(), graphs.held_bytes()
    with graphs.recording():
        for num_rows in reversed(graphs.batch_sizes):
            for spec_info in spec_infos:
                scope = Scope(f"recording {num_rows} rows")
                batch = padding_batch(num_rows, spec_info, device.torch_device)
                stream.wait(device.schedule_stream.record())  # that stream makes the batch
                output = worker.forward(batch, future_map=future_map, scope=scope, on_publish=lambda new_seq_lens: None)
                stream.record(scope).synchronize(timeout_s)
                del output  # kept until here, because the stream reads what the worker made for it
    return Recorded(graphs.num_graphs, graphs.held_bytes() - begin_bytes, clock() - begin_s)


def padding_batch(num_rows: int, spec_info: SpecInfo, torch_device: torch.device) -> ForwardBatch:
    """Builds a step of `num_rows` entries that belong to no request: all use the padding row, and none has a prefix."""
    seq_len = 0 if spec_info.has_drafts else 1  # a step without drafts is prepared with its token counted

    def column(value: int, length: int = num_rows) -> torch.Tensor:
        return torch.full((length,), value, dtype=torch.int64, device=torch_device)

    return ForwardBatch.of(
        req_pool_indices=column(PADDING_ROW),
        rows=np.full(num_rows, PADDING_ROW, np.int64),
        seq_lens=column(seq_len),
        seq_lens_cpu=np.full(num_rows, seq_len, np.int64),
        out_cache_loc=column(PADDING_SLOT, num_rows * spec_info.num_slots),
        sampling=SamplingBatch.of_needs(np.zeros((num_rows, NUM_NEEDS), np.int64)),
        spec_info=spec_info,
        undrafted=(),
    )
