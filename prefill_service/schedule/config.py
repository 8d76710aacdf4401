"""The options of the prefill engine, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine import EngineConfig
from common.rpc.grpc_options import MAX_SEGMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(EngineConfig):
    """The options of the prefill engine.

    A forward computes at most `max_batch_tokens`, and at most `chunk_tokens` of each prompt. `draft_topk` is the number
    of first drafts from which the decode service starts its trees. KV is sent in segments of at most
    `max_segment_bytes`; copies of KV that gRPC has not taken have at most `send_budget_bytes`. `max_queued_rows` bounds
    the prompts that wait for a row. With `early_sending` a layer's KV may be sent before its forward ends.
    """

    chunk_tokens: int = 512
    max_batch_tokens: int = 2048
    draft_topk: int = 1
    send_budget_bytes: int = 64 << 20
    max_segment_bytes: int = MAX_SEGMENT_BYTES
    max_queued_rows: int = 1024
    early_sending: bool = True

    @property
    def max_in_flight(self) -> int:
        """The most forwards in flight."""
        return 2 if self.overlap else 1

    @property
    def tokens_in_flight(self) -> int:
        """For how many tokens of a row forwards in flight may write KV."""
        return self.max_in_flight * self.chunk_tokens
