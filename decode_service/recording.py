"""Records the forwards of every step that a worker will take, by having it take steps of padding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.device.stream import Device, Scope, Stream
from common.model.forward_graphs import ForwardGraphs
from common.model.sampling_state import NO_SAMPLING
from decode_service.future_map import FutureMap
from decode_service.schedule_batch import ForwardBatch, ForwardMode
from decode_service.spec_info import SpecInfo
from decode_service.worker import Worker


@dataclass(frozen=True, slots=True)
class Recorded:
    """`num_bytes`: what the device's memory was taken for it."""

    num_graphs: int
    num_bytes: int
    seconds: float


def record_forwards(
    worker: Worker,
    graphs: ForwardGraphs,
    *,
    spec_infos: Sequence[SpecInfo | None],
    future_map: FutureMap,
    device: Device,
    stream: Stream,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Recorded:
    """Every number of rows that is recorded, speculating in each way of `spec_infos`; before the first request.

    The largest first: what they need in between is enough for the others. Raises PieceFailed, DeviceTimeout.
    """
    begin_s, begin_bytes = clock(), graphs.held_bytes()
    with graphs.recording():
        for num_rows in reversed(graphs.batch_sizes):
            for spec_info in spec_infos:
                scope = Scope(f"recording {num_rows} rows")
                stream.wait(device.schedule_stream.record())
                batch = padding_batch(num_rows, spec_info, device.torch_device)
                worker.forward(batch, future_map=future_map, scope=scope, on_publish=lambda new_seq_lens: None)
                stream.record(scope).synchronize(timeout_s)
    return Recorded(graphs.num_graphs, graphs.held_bytes() - begin_bytes, clock() - begin_s)


def padding_batch(num_rows: int, spec_info: SpecInfo | None, torch_device: torch.device) -> ForwardBatch:
    """Entries that are all row 0, with nothing before them."""
    num_tokens = 1 if spec_info is None else spec_info.num_verify_tokens
    num_slots = 1 if spec_info is None else spec_info.num_slots

    def zeros(length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.int64, device=torch_device)

    return ForwardBatch(
        req_pool_indices=zeros(num_rows),
        seq_lens=zeros(num_rows) + num_tokens,
        prefix_lens=zeros(num_rows),
        seq_lens_cpu=(num_tokens,) * num_rows,
        seq_lens_sum=num_tokens * num_rows,
        positions=torch.arange(num_tokens, device=torch_device).repeat(num_rows),
        out_cache_loc=zeros(num_rows * num_slots),
        sampling=NO_SAMPLING,
        spec_info=spec_info,
        undrafted=(),
        draft_lag=(0,) * num_rows,
        forward_mode=ForwardMode.DECODE,
    )
