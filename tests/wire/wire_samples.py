"""Well-formed messages for tests to damage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from baton.v1 import prefill_pb2
from common.kv.layer_group import LayerGroupSpec
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.codec_frames import encode_prebuilt, encode_row_logprobs
from common.wire.fingerprint import Fingerprint
from common.wire.handoff import HandoffRow, PrebuiltBatch, RowLogprobs

PLAIN_ROW = HandoffRow(
    request_id="plain", attempt=0, token_ids=(1, 2, 3), prompt_len=3, sampling=ResolvedSampling(seed=1, max_tokens=8)
)
LOGPROBS_ROW = HandoffRow(
    request_id="logprobs",
    attempt=1,
    token_ids=(4, 5),
    prompt_len=1,
    sampling=ResolvedSampling(seed=2, max_tokens=8, num_logprobs=2),
    cache_salt="tenant",
    priority=3,
)

SCORED_ROW = replace(
    PLAIN_ROW, request_id="scored", sampling=ResolvedSampling(seed=3, max_tokens=0, num_prompt_logprobs=2)
)


def segment_message(group: LayerGroupSpec, row: HandoffRow) -> prefill_pb2.KvSegment:
    """Returns the message of a segment with all of the group's KV of row 0."""
    return prefill_pb2.KvSegment(
        row=0,
        layer_group=group.name,
        num_layers=group.num_layers,
        num_tokens=len(row.token_ids),
        num_shards=1,
    )


def segment_payload(group: LayerGroupSpec, row: HandoffRow) -> bytes:
    """Returns the payload of the message that `segment_message` returns."""
    return bytes(index % 251 for index in range(group.token_bytes)) * len(row.token_ids)


def row_logprobs(row: int) -> RowLogprobs:
    """Returns the log-probabilities of all tokens of SCORED_ROW, which is number `row` of its call."""
    return RowLogprobs(
        row,
        PromptLogprobs(
            start=1,
            logprobs=np.array([-2.5, -0.5], np.float32),
            ranks=np.array([3, 1]),
            top_ids=np.array([[7, 8], [3, 9]]),
            top_values=np.array([[-0.5, -1.5], [-0.5, -2.0]], np.float32),
        ),
    )


def row_logprobs_message(row: int) -> prefill_pb2.RowLogprobs:
    message = prefill_pb2.RowLogprobs()
    encode_row_logprobs(row_logprobs(row), message)
    return message


def prebuilt_batch(fingerprint: Fingerprint, rows: tuple[HandoffRow, ...]) -> PrebuiltBatch:
    size = len(rows)
    return PrebuiltBatch(
        rows=np.arange(size),
        seq_lens=np.array([len(row.token_ids) for row in rows]),
        first_token_ids=np.arange(size),
        bytes_sent={
            group.name: np.array([len(row.token_ids) * group.token_bytes for row in rows])
            for group in fingerprint.layer_groups
        },
        queue_s=np.full(size, 0.5),
        compute_s=np.full(size, 0.25),
        num_cached_tokens=np.array([len(row.token_ids) - 1 for row in rows]),
        first_token_logprobs=tuple(
            None if row.sampling.num_logprobs is None else TokenLogprobs(-0.5, (1, 2), (-0.5, -1.5)) for row in rows
        ),
        seed_columns={
            column.name: np.ones((size, *column.row_shape), column.dtype) for column in fingerprint.seed_columns
        },
    )


def prebuilt_message(fingerprint: Fingerprint, rows: tuple[HandoffRow, ...]) -> prefill_pb2.PrebuiltBatch:
    message = prefill_pb2.PrebuiltBatch()
    encode_prebuilt(prebuilt_batch(fingerprint, rows), message)
    return message
