"""KvSegment to and from `baton.v1`: sizes, bounds and checksum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.kv.layer_group import LayerGroupSpec
from common.wire.checksums import checksum
from common.wire.codec_checks import ProtocolError, require
from common.wire.grpc_options import MAX_SEGMENT_BYTES
from common.wire.handoff import HandoffRow, KvSegment
from common.wire.kv_ring import MappedRing, RingSlot, SlotTicket
from common.wire.segment_bytes import joined


def encode_segment(segment: KvSegment) -> bytes:
    """The bytes of a HandoffFrame. They hold the only copy of the payload that is made."""
    into = prefill_pb2.KvSegment()
    into.row = segment.row
    into.layer_group = segment.layer_group
    into.layer_start = segment.layer_start
    into.num_layers = segment.num_layers
    into.token_start = segment.token_start
    into.num_tokens = segment.num_tokens
    into.num_shards = 1
    if segment.slot is not None:
        ticket = segment.slot.ticket
        into.ticket.offset, into.ticket.num_bytes, into.ticket.generation = (
            ticket.offset,
            ticket.num_bytes,
            ticket.generation,
        )
        into.crc32c = checksum(into)
        return prefill_pb2.HandoffFrame(kv_segment=into).SerializeToString()
    into.crc32c = checksum(into, payload=segment.payload)
    return joined(into, segment.payload)


def decode_segment(
    message: prefill_pb2.KvSegment,
    payload: NDArray[np.uint8],
    *,
    groups: Mapping[str, LayerGroupSpec],
    rows: Sequence[HandoffRow],
    ring: MappedRing | None,
) -> KvSegment:
    """The segment, with every bound and its checksum verified. Raises ProtocolError naming the field.

    `payload`: what `split` took out of the message's bytes. `ring`: where tickets lead.
    """
    require(not message.payload, "kv_segment.payload", "is not alone in its frame")
    require(message.row < len(rows), "kv_segment.row", f"{message.row} is not one of the call's {len(rows)} rows")
    require((message.shard, message.num_shards) == (0, 1), "kv_segment.shard", "is not shard 0 of 1")
    group = groups.get(message.layer_group)
    if group is None:
        raise ProtocolError("kv_segment.layer_group", f"{message.layer_group!r} is not in the fingerprint")
    layer_end = message.layer_start + message.num_layers
    require(
        message.num_layers >= 1 and layer_end <= group.num_layers,
        "kv_segment.num_layers",
        f"layers {message.layer_start}..{layer_end} are not within the group's {group.num_layers}",
    )
    token_end, num_row_tokens = message.token_start + message.num_tokens, len(rows[message.row].token_ids)
    require(
        message.num_tokens >= 1 and token_end <= num_row_tokens,
        "kv_segment.num_tokens",
        f"tokens {message.token_start}..{token_end} are not within the row's {num_row_tokens}",
    )
    sent = payload
    slot = _slot(message.ticket, ring) if message.HasField("ticket") else None
    if slot is not None:
        require(not len(payload), "kv_segment.payload", "comes with a ticket")
        payload = slot.payload
    require(len(sent) <= MAX_SEGMENT_BYTES, "kv_segment.payload", f"has more than {MAX_SEGMENT_BYTES} bytes")
    num_bytes = message.num_layers * group.num_planes * message.num_tokens * group.row_bytes
    require(len(payload) == num_bytes, "kv_segment.payload", f"has {len(payload)} bytes instead of {num_bytes}")
    require(checksum(message, payload=sent) == message.crc32c, "kv_segment.crc32c", "does not match the segment")
    return KvSegment(
        row=message.row,
        layer_group=message.layer_group,
        layer_start=message.layer_start,
        num_layers=message.num_layers,
        token_start=message.token_start,
        num_tokens=message.num_tokens,
        payload=payload,
        slot=slot,
    )


def _slot(message: prefill_pb2.SlotTicket, ring: MappedRing | None) -> RingSlot:
    if ring is None:
        raise ProtocolError("kv_segment.ticket", "is into shared memory that is not mapped")
    slot = ring.slot(SlotTicket(message.offset, message.num_bytes, message.generation))
    if slot is None:
        raise ProtocolError("kv_segment.ticket", "is of no slot that is there")
    return slot
