"""Creates what the decode engine runs forwards with: the forward stream, worker, relay and sampling state.

Where forwards are replayed, a forward of each shape that a step can have is first recorded as a graph, by running steps
of padding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.device.stream import Device, Scope, Stream
from common.engine import EngineParts, warm_kernels
from common.kv.pool import KvPool
from common.kv.pool_size import LOGIT_BYTES
from common.kv.rows import PADDING_ROW
from common.kv.slot_allocator import PADDING_SLOT
from common.model.forward_graphs import ForwardGraphs, batch_sizes
from common.model.target import Target
from common.sampling.state import NUM_NEEDS, SamplingBatch, SamplingState
from decode_service.forward.drafter import Drafter, NoDrafter
from decode_service.forward.eagle_drafter import EagleDrafter, MultiLayerEagleDrafter
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap
from decode_service.forward.graphed_models import GraphedHead, GraphedTarget
from decode_service.forward.worker import Worker
from decode_service.speculate.spec_info import SpecInfo


@dataclass(frozen=True, slots=True)
class ForwardSide:
    """The decode engine's objects that forwards use.

    `recorded` says how many forwards were recorded as graphs, and the time and memory that this took; None if none were
    recorded.
    """

    stream: Stream
    worker: Worker
    future_map: FutureMap
    sampling_state: SamplingState
    recorded: Recorded | None

    @classmethod
    def open(
        cls,
        parts: EngineParts,
        *,
        spec_infos: Sequence[SpecInfo],
        max_unread: int,
        pool: KvPool,
        drafter: Drafter | None = None,
        replays_forwards: bool,
        poisons_consumed_rows: bool,
        wait_timeout_s: float,
    ) -> ForwardSide:
        """Creates the objects, warms the kernels and records the forwards if they are to be replayed.

        `spec_infos` are the speculations of all depths that a step may have, the deepest last. `drafter` proposes the
        drafts; with None the model's draft head does, if it has one, and leaves fewer than `max_unread` tokens of a row
        unread. With `replays_forwards` the forwards are recorded where the device and the attention backend allow it.
        With `poisons_consumed_rows` the relay detects a token that is read twice. `wait_timeout_s` limits each wait for
        the forward stream. Raises PieceFailed if the forwards should be recorded and cannot be.
        """
        device, max_rows = parts.device, pool.rows.max_rows
        recorder = parts.model.recorder(device.graphs) if replays_forwards and device.graphs is not None else None
        if recorder is not None and not parts.model.attention.follows_lengths:
            recorder = None  # each replay would compute attention over the token table's full width
        graphs = None if recorder is None else ForwardGraphs(recorder=recorder, batch_sizes=batch_sizes(max_rows))
        stream = device.new_stream("forward")
        sampling_state = SamplingState(
            max_rows=max_rows,
            vocab_size=parts.model.vocab_size,
            torch_device=device.torch_device,
            kernels=parts.draw_kernels,
        )
        model: Target = parts.model if graphs is None else GraphedTarget(parts.model, graphs)
        speculates = spec_infos[-1].has_drafts
        if drafter is None and speculates:
            assert parts.draft is not None, "who drafts needs a drafter"
            head = parts.draft if graphs is None else GraphedHead(parts.draft, graphs)
            kind = EagleDrafter if head.layer_group.num_layers == 1 else MultiLayerEagleDrafter
            drafter = kind(
                head=head,
                model=model,
                spec_info=spec_infos[-1],
                max_unread=max_unread,
                pool=pool,
                sampling_state=sampling_state,
            )
        worker = Worker(
            model=model,
            drafter=drafter or NoDrafter(),
            device=device,
            pool=pool,
            sampling_state=sampling_state,
            stream=stream,
            speculates=speculates,
        )
        future_map = FutureMap(
            device=device,
            forward_stream=stream,
            max_rows=max_rows,
            vocab_size=parts.model.vocab_size,
            relays_lengths=speculates,
            seed_columns=worker.drafter.seed_columns,
            poisons_consumed_rows=poisons_consumed_rows,
            wait_timeout_s=wait_timeout_s,
        )
        # Recording compiles most kernels but not all: a head catches up on unread tokens without a recorded forward.
        warm_kernels(
            parts,
            draft_topk=spec_infos[-1].topk,
            pool=pool,
            sampling_state=sampling_state,
            stream=stream,
            timeout_s=wait_timeout_s,
        )
        recorded = None
        if graphs is not None:
            recorded = record_forwards(
                worker,
                graphs,
                spec_infos=spec_infos,
                future_map=future_map,
                device=device,
                stream=stream,
                timeout_s=wait_timeout_s,
            )
        return cls(stream, worker, future_map, sampling_state, recorded)


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
) -> Recorded:
    """Records the forwards of a step for every batch size of `graphs` and each speculation in `spec_infos`.

    Call this before the first request. The largest batch comes first: its intermediate memory is enough for the others.
    Raises PieceFailed if a forward cannot be recorded, and DeviceTimeout if it does not end within `timeout_s`.
    """
    begin_s, begin_bytes = time.monotonic(), graphs.held_bytes()
    with graphs.recording():
        for num_rows in reversed(graphs.batch_sizes):
            for spec_info in spec_infos:
                scope = Scope(f"recording {num_rows} rows")
                batch = padding_batch(num_rows, spec_info, device.torch_device)
                stream.wait(device.schedule_stream.record())  # that stream makes the batch
                output = worker.forward(batch, future_map=future_map, scope=scope, on_publish=lambda new_seq_lens: None)
                stream.record(scope).synchronize(timeout_s)
                del output  # kept until here, because the stream reads what the worker made for it
    return Recorded(graphs.num_graphs, graphs.held_bytes() - begin_bytes, time.monotonic() - begin_s)


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
