"""Which worker serves a draft head, and which serves none."""

from __future__ import annotations

from common.device.stream import Stream
from common.draft.graphed_head import GraphedHead
from common.draft.head import DraftHead
from common.kv.pool import KvPool
from common.model.forward_graphs import ForwardGraphs
from common.model.graphed_target import GraphedTarget
from common.model.sampling_state import SamplingState
from common.model.target import Target
from decode_service.forward.eagle_worker import EagleWorker
from decode_service.forward.multi_layer_eagle_worker import MultiLayerEagleWorker
from decode_service.forward.worker import PlainWorker, Worker
from decode_service.speculate.spec_info import SpecInfo


def new_worker(
    *,
    model: Target,
    draft: DraftHead | None,
    spec_info: SpecInfo | None,
    pool: KvPool,
    sampling_state: SamplingState,
    stream: Stream,
    graphs: ForwardGraphs | None = None,
) -> Worker:
    """`draft` and `spec_info` come together. With `graphs` forwards of recorded shapes are replayed."""
    if graphs is not None:
        model = GraphedTarget(model, graphs)
        draft = GraphedHead(draft, graphs) if draft is not None else None
    if draft is None or spec_info is None:
        return PlainWorker(model=model, pool=pool, sampling_state=sampling_state, stream=stream)
    speculative = EagleWorker if draft.layer_group.num_layers == 1 else MultiLayerEagleWorker
    return speculative(
        model=model, draft=draft, spec_info=spec_info, pool=pool, sampling_state=sampling_state, stream=stream
    )
