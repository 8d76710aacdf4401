"""Rows and frames of a model whose segments are large enough to fill a stream's flow-control window."""

from __future__ import annotations

import numpy as np

from common.errors import RowFailure
from common.kv.layer_group import LayerGroupSpec
from common.sampling.params import ResolvedSampling
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from common.wire.fingerprint import Fingerprint
from common.wire.handoff import HandoffRow, KvSegment, PrebuiltBatch, RowFailed, RowLogprobs

TARGET = LayerGroupSpec("target", num_layers=4, num_planes=2, num_heads=8, head_dim=128, dtype="float32")
FINGERPRINT = Fingerprint(
    protocol_version=PROTOCOL_VERSION,
    config_digest="c0ffee",
    target_weights_digest="beef",
    tokenizer_digest="7e57",
    dtype="float32",
    layer_groups=(TARGET,),
)
SEGMENT_TOKENS = 32
SEGMENT_BYTES = SEGMENT_TOKENS * TARGET.token_bytes
ROOMY_BUDGET_BYTES = 64 * SEGMENT_BYTES


def row(request_id: str = "request", num_tokens: int = 128, **sampling: int) -> HandoffRow:
    return HandoffRow(
        request_id=request_id,
        attempt=0,
        token_ids=tuple(token % 200 for token in range(num_tokens)),
        prompt_len=num_tokens,
        sampling=ResolvedSampling(**{"seed": 7, "max_tokens": 8, **sampling}),
    )


def segment(row: int = 0, place: int = 0) -> KvSegment:
    """Returns segment number `place` of the row, with all layers and a payload that differs from those of its
    neighbours, and from layer to layer.
    """
    payload = ((np.arange(SEGMENT_BYTES) + place) % 251).astype(np.uint8).tobytes()
    return KvSegment(row, "target", 0, TARGET.num_layers, place * SEGMENT_TOKENS, SEGMENT_TOKENS, payload)


def logprobs(row: int, start: int, stop: int) -> RowLogprobs:
    """Returns the log-probabilities of tokens [start, stop) of the prompt, each with those of the two most likely
    tokens.
    """
    size = stop - start
    columns = PromptLogprobs(
        start,
        -np.arange(start, stop, dtype=np.float32),
        np.arange(start, stop),
        np.arange(2 * size).reshape(size, 2) % 200,
        -np.arange(2 * size, dtype=np.float32).reshape(size, 2),
    )
    return RowLogprobs(row, columns)


def prebuilt(*rows: int, num_tokens: int = 128) -> PrebuiltBatch:
    size = len(rows)
    return PrebuiltBatch(
        rows=np.array(rows, np.int64),
        seq_lens=np.full(size, num_tokens),
        first_token_ids=np.arange(size),
        bytes_sent={"target": np.full(size, num_tokens * TARGET.token_bytes)},
        queue_s=np.zeros(size),
        compute_s=np.zeros(size),
        num_cached_tokens=np.zeros(size, np.int64),
        first_token_logprobs=(None,) * size,
    )


def failed(row: int, *, retryable: bool = True) -> RowFailed:
    return RowFailed(row=row, reason=RowFailure.COMPUTE, retryable=retryable, message="the step failed")
