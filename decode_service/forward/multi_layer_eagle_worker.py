"""EAGLE speculation with a head that has a layer for each draft: a chain, drafted whole by draft-extend."""

from __future__ import annotations

from common.draft.seed import TOPK_INDEX
from decode_service.forward.future_map import RelayedInputs
from decode_service.forward.speculative_worker import SpeculativeWorker
from decode_service.schedule.schedule_batch import ForwardBatch
from decode_service.speculate.draft_tree import DraftTree
from decode_service.speculate.spec_info import SpecInfo


class MultiLayerEagleWorker(SpeculativeWorker):
    """Layer i drafts token i + 1 of the chain. What a layer read of drafts that were refused stays in its KV."""

    def draft_tree(self, batch: ForwardBatch, spec_info: SpecInfo, inputs: RelayedInputs) -> DraftTree:
        return DraftTree.chain(inputs.seeds[TOPK_INDEX][:, : spec_info.num_steps])
