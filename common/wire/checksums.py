"""CRC-32C of the frames that carry data, over values rather than protobuf bytes, which no two versions promise alike.

KvSegment: the payload, the group's name in UTF-8, then row, layer_start, num_layers, token_start, num_tokens.
PrebuiltBatch: its columns in the order of their field numbers, a `bytes_sent` entry as its name and its values,
`top_logprobs` row by row. Numbers are little-endian, in the width of their field.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import google_crc32c
import numpy as np

from baton.v1 import prefill_pb2


def segment_checksum(message: prefill_pb2.KvSegment, payload: bytes) -> int:
    """`payload` is the message's: to read it from there would copy it."""
    place = struct.pack(
        "<5I", message.row, message.layer_start, message.num_layers, message.token_start, message.num_tokens
    )
    crc: int = google_crc32c.extend(google_crc32c.value(payload), message.layer_group.encode() + place)
    return crc


def prebuilt_checksum(message: prefill_pb2.PrebuiltBatch) -> int:
    crc = 0
    for column in _columns(message):
        crc = google_crc32c.extend(crc, column)
    return crc


def _columns(message: prefill_pb2.PrebuiltBatch) -> Iterator[bytes]:
    for ids in (message.rows, message.seq_lens, message.first_token_ids):
        yield np.array(ids, "<u4").tobytes()
    yield np.array(message.first_token_logprobs, "<f4").tobytes()
    for top in message.top_logprobs:
        yield np.array(top.token_ids, "<u4").tobytes()
        yield np.array(top.logprobs, "<f4").tobytes()
    for entry in message.bytes_sent:
        yield entry.layer_group.encode()
        yield np.array(entry.bytes, "<u8").tobytes()
    yield from (message.topk_p, message.topk_index, message.hidden_states)
    for seconds in (message.queue_s, message.compute_s):
        yield np.array(seconds, "<f8").tobytes()
