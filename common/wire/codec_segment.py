"""Converts a KvSegment to its `baton.v1` message and back, and checks its sizes and bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_kv import MAX_LENT_BYTES, PoolTicket, RemoteKv, SharedKv, runs_of, slots_of
from common.rpc.grpc_options import MAX_SEGMENT_BYTES
from common.rpc.messages import ProtocolError, require
from common.wire.handoff import HandoffRow, KvSegment


class ReadablePool(Protocol):
    """The KV pool of another process, from which this process can read. It has the fingerprint's layer groups."""

    def read(self, group_name: str, layers: slice, ticket: PoolTicket) -> SharedKv | RemoteKv | None:
        """Returns where the KV of a segment lies: the `layers` of a group, in the ticket's slots. It copies nothing.

        A SharedKv can be read in place; a RemoteKv must be fetched. Returns None if the pool does not have these slots.
        """


def encode_segment(segment: KvSegment, into: prefill_pb2.KvSegment) -> None:
    """Writes `segment` into the message `into`, without the payload, which is sent in front of it."""
    into.row = segment.row
    into.layer_group = segment.layer_group
    into.layer_start = segment.layer_start
    into.num_layers = segment.num_layers
    into.token_start = segment.token_start
    into.num_tokens = segment.num_tokens
    into.num_shards = 1
    if segment.shared is not None:
        ticket = segment.shared.ticket
        starts, lengths = runs_of(ticket.slots)
        into.ticket.run_starts.extend(starts)
        into.ticket.run_lengths.extend(lengths)
        into.ticket.generation, into.ticket.number = ticket.generation, ticket.number


def decode_segment(
    message: prefill_pb2.KvSegment,
    payload: NDArray[np.uint8],
    *,
    groups: Mapping[str, LayerGroupSpec],
    rows: Sequence[HandoffRow],
    pool: ReadablePool | None,
) -> KvSegment:
    """Returns the segment in `message`, after it has checked every bound.

    `rows` are the rows of the call. `pool` is the sender's pool, from which a segment with a ticket is read; None if
    this process cannot read it. Raises ProtocolError, which names the field.
    """
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
    num_bytes = message.num_layers * group.num_planes * message.num_tokens * group.row_bytes
    shared = None
    if message.HasField("ticket"):
        require(not len(payload), "kv_segment.payload", "comes with a ticket")
        require(num_bytes <= MAX_LENT_BYTES, "kv_segment.ticket", f"is of {num_bytes} bytes, over {MAX_LENT_BYTES}")
        layers = slice(message.layer_start, layer_end)
        shared = _shared(message.ticket, pool, group.name, layers, num_tokens=message.num_tokens)
    else:
        require(len(payload) <= MAX_SEGMENT_BYTES, "kv_segment.payload", f"has more than {MAX_SEGMENT_BYTES} bytes")
        require(len(payload) == num_bytes, "kv_segment.payload", f"has {len(payload)} bytes instead of {num_bytes}")
    return KvSegment(
        row=message.row,
        layer_group=message.layer_group,
        layer_start=message.layer_start,
        num_layers=message.num_layers,
        token_start=message.token_start,
        num_tokens=message.num_tokens,
        payload=payload,
        shared=shared,
    )


def _shared(
    message: prefill_pb2.PoolTicket, pool: ReadablePool | None, group_name: str, layers: slice, *, num_tokens: int
) -> SharedKv | RemoteKv:
    """Returns the KV to which a ticket refers. Raises ProtocolError if the ticket is invalid."""
    if pool is None:
        raise ProtocolError("kv_segment.ticket", "is into memory that cannot be read")
    starts, lengths = message.run_starts, message.run_lengths
    require(
        len(starts) == len(lengths) <= num_tokens,
        "kv_segment.ticket",
        f"has {len(starts)} starts and {len(lengths)} lengths of runs for {num_tokens} tokens",
    )
    require(0 not in lengths, "kv_segment.ticket", "has runs that are none")
    require(sum(lengths) == num_tokens, "kv_segment.ticket", f"has {sum(lengths)} slots instead of {num_tokens}")
    shared = pool.read(group_name, layers, PoolTicket(slots_of(starts, lengths), message.generation, message.number))
    if shared is None:
        raise ProtocolError("kv_segment.ticket", f"is of slots that {group_name} does not have in the pool")
    return shared
