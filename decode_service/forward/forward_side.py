"""Creates what the decode engine runs forwards with: the forward stream, worker, relay and sampling state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.device.stream import Stream
from common.draft.graphed_head import GraphedHead
from common.engine import EngineParts, warm_kernels
from common.kv.pool import KvPool
from common.model.forward_graphs import ForwardGraphs, batch_sizes
from common.model.graphed_target import GraphedTarget
from common.model.target import Target
from common.sampling.state import SamplingState
from decode_service.forward.drafter import Drafter, NoDrafter
from decode_service.forward.eagle_drafter import EagleDrafter, MultiLayerEagleDrafter
from decode_service.forward.future_map import FutureMap
from decode_service.forward.recording import Recorded, record_forwards
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
        levels: Sequence[SpecInfo],
        pool: KvPool,
        drafter: Drafter | None = None,
        replays_forwards: bool,
        poisons_consumed_rows: bool,
        wait_timeout_s: float,
    ) -> ForwardSide:
        """Creates the objects, warms the kernels and records the forwards if they are to be replayed.

        `levels` are the speculations of all depths that a step may have, the deepest last. `drafter` proposes the
        drafts; None is the model's draft head, if it has one. With `replays_forwards` the forwards are recorded where
        the device and the attention backend allow it. With `poisons_consumed_rows` the relay detects a token that is
        read twice. `wait_timeout_s` limits each wait for the forward stream. Raises PieceFailed if the forwards should
        be recorded and cannot be.
        """
        device, max_rows = parts.device, pool.rows.max_rows
        recorder = parts.model.recorder(device.graphs) if replays_forwards and device.graphs is not None else None
        if recorder is not None and not parts.model.attention.follows_lengths:
            recorder = None  # a recorded forward is bounded by the table's width, and each step would pay for that
        graphs = None if recorder is None else ForwardGraphs(recorder=recorder, batch_sizes=batch_sizes(max_rows))
        stream = device.new_stream("forward")
        sampling_state = SamplingState(
            max_rows=max_rows,
            vocab_size=parts.model.vocab_size,
            torch_device=device.torch_device,
            kernels=parts.draw_kernels,
        )
        model: Target = parts.model if graphs is None else GraphedTarget(parts.model, graphs)
        speculates = levels[-1].has_drafts
        if drafter is None and speculates:
            assert parts.draft is not None, "who drafts needs a drafter"
            head = parts.draft if graphs is None else GraphedHead(parts.draft, graphs)
            kind = EagleDrafter if head.layer_group.num_layers == 1 else MultiLayerEagleDrafter
            drafter = kind(head=head, model=model, spec_info=levels[-1], pool=pool, sampling_state=sampling_state)
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
            draft_topk=levels[-1].topk,
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
                spec_infos=levels,
                future_map=future_map,
                device=device,
                stream=stream,
                timeout_s=wait_timeout_s,
            )
        return cls(stream, worker, future_map, sampling_state, recorded)
