"""Creates what the decode engine runs forwards with: the forward stream, worker, relay and sampling state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.device.stream import Device, Stream
from common.draft.graphed_head import GraphedHead
from common.draft.head import DraftHead
from common.engine.parts import EngineParts
from common.engine.warm_kernels import warm_kernels
from common.kv.pool import KvPool
from common.model.forward_graphs import ForwardGraphs, batch_sizes
from common.model.graphed_target import GraphedTarget
from common.model.target import Target
from common.sampling.state import SamplingState
from decode_service.forward.eagle_worker import EagleWorker, MultiLayerEagleWorker
from decode_service.forward.future_map import FutureMap
from decode_service.forward.recording import Recorded, record_forwards
from decode_service.forward.worker import PlainWorker, Worker
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
        levels: Sequence[SpecInfo],
        pool: KvPool,
        replays_forwards: bool,
        poisons_consumed_rows: bool,
        wait_timeout_s: float,
    ) -> ForwardSide:
        """Creates the objects, warms the kernels and records the forwards if they are to be replayed.

        `levels` are the speculations of all depths that a step may have, the deepest last. It is empty without a head.
        With `replays_forwards` the forwards are recorded where the device and the attention backend allow it. With
        `poisons_consumed_rows` the relay detects a token that is read twice. `wait_timeout_s` limits each wait for the
        forward stream. Raises PieceFailed if the forwards should be recorded and cannot be.
        """
        model, device, max_rows = parts.model, parts.device, pool.rows.max_rows
        recorder = model.recorder(device.graphs) if replays_forwards and device.graphs is not None else None
        if recorder is not None and not model.attention.follows_lengths:
            recorder = None  # a recorded forward is bounded by the table's width, and each step would pay for that
        graphs = None if recorder is None else ForwardGraphs(recorder=recorder, batch_sizes=batch_sizes(max_rows))
        stream = device.new_stream("forward")
        sampling_state = SamplingState(
            max_rows=max_rows,
            vocab_size=model.vocab_size,
            torch_device=device.torch_device,
            kernels=parts.draw_kernels,
        )
        worker = new_worker(
            model=model,
            draft=parts.draft,
            spec_info=levels[-1] if levels else None,
            device=device,
            pool=pool,
            sampling_state=sampling_state,
            stream=stream,
            graphs=graphs,
        )
        future_map = FutureMap(
            device=device,
            forward_stream=stream,
            max_rows=max_rows,
            vocab_size=model.vocab_size,
            relays_lengths=worker.relays_lengths,
            seed_columns=worker.seed_columns,
            poisons_consumed_rows=poisons_consumed_rows,
            wait_timeout_s=wait_timeout_s,
        )
        # Recording compiles most kernels but not all: a head catches up on rows of unequal lag without a recorded
        # forward.
        warm_kernels(
            parts,
            draft_topk=max((level.topk for level in levels), default=1),
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
                spec_infos=levels or [None],
                future_map=future_map,
                device=device,
                stream=stream,
                timeout_s=wait_timeout_s,
            )
        return cls(stream, worker, future_map, sampling_state, recorded)


def new_worker(
    *,
    model: Target,
    draft: DraftHead | None,
    spec_info: SpecInfo | None,
    device: Device,
    pool: KvPool,
    sampling_state: SamplingState,
    stream: Stream,
    graphs: ForwardGraphs | None = None,
) -> Worker:
    """Creates the worker that fits the head `draft`, or a plain worker if there is none.

    `spec_info` is the deepest speculation that a step may have. `draft` and `spec_info` are both given or both None.
    With `graphs`, forwards of recorded shapes are replayed.
    """
    if graphs is not None:
        model = GraphedTarget(model, graphs)
        draft = GraphedHead(draft, graphs) if draft is not None else None
    if draft is None or spec_info is None:
        return PlainWorker(model=model, pool=pool, sampling_state=sampling_state, stream=stream)
    speculative = EagleWorker if draft.layer_group.num_layers == 1 else MultiLayerEagleWorker
    return speculative(
        model=model,
        draft=draft,
        spec_info=spec_info,
        device=device,
        pool=pool,
        sampling_state=sampling_state,
        stream=stream,
    )
