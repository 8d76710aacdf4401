"""Encodes and decodes a fingerprint's message. Computing one needs no gRPC, so this is a file of its own."""

from __future__ import annotations

from baton.v1 import types_pb2
from common.kv.layer_group import LayerGroupSpec, SeedColumnSpec
from common.rpc.messages import require_at_most
from common.wire.fingerprint import Fingerprint

_MAX_ENTRIES = 32
PROTOCOL_VERSION: int = types_pb2.PROTOCOL_VERSION_CURRENT
"""The version of the handoff protocol that this program speaks."""


def encode_fingerprint(fingerprint: Fingerprint) -> types_pb2.Fingerprint:
    """Returns the message of `fingerprint`."""
    return types_pb2.Fingerprint(
        protocol_version=fingerprint.protocol_version,
        config_digest=fingerprint.config_digest,
        target_weights_digest=fingerprint.target_weights_digest,
        draft_weights_digest=fingerprint.draft_weights_digest,
        algorithm=fingerprint.algorithm,
        layer_groups=[
            types_pb2.LayerGroup(
                name=group.name,
                num_layers=group.num_layers,
                num_planes=group.num_planes,
                num_heads=group.num_heads,
                head_dim=group.head_dim,
                dtype=group.dtype,
                window=group.window or 0,
            )
            for group in fingerprint.layer_groups
        ],
        tokenizer_digest=fingerprint.tokenizer_digest,
        dtype=fingerprint.dtype,
        seed_columns=[
            types_pb2.SeedColumn(name=column.name, dtype=column.dtype, row_shape=column.row_shape)
            for column in fingerprint.seed_columns
        ],
    )


def decode_fingerprint(message: types_pb2.Fingerprint) -> Fingerprint:
    """Returns the fingerprint in `message`.

    Accepts unknown values, such as a new algorithm: they are reported as a difference and not as a broken message.
    Raises ProtocolError for a list longer than any fingerprint's.
    """
    require_at_most(_MAX_ENTRIES, "fingerprint.layer_groups", len(message.layer_groups))
    require_at_most(_MAX_ENTRIES, "fingerprint.seed_columns", len(message.seed_columns))
    for column in message.seed_columns:
        require_at_most(_MAX_ENTRIES, "fingerprint.seed_columns.row_shape", len(column.row_shape))
    return Fingerprint(
        protocol_version=message.protocol_version,
        config_digest=message.config_digest,
        target_weights_digest=message.target_weights_digest,
        draft_weights_digest=message.draft_weights_digest,
        algorithm=message.algorithm,
        layer_groups=tuple(
            LayerGroupSpec(
                name=group.name,
                num_layers=group.num_layers,
                num_planes=group.num_planes,
                num_heads=group.num_heads,
                head_dim=group.head_dim,
                dtype=group.dtype,
                window=group.window or None,
            )
            for group in message.layer_groups
        ),
        tokenizer_digest=message.tokenizer_digest,
        dtype=message.dtype,
        seed_columns=tuple(
            SeedColumnSpec(name=column.name, dtype=column.dtype, row_shape=tuple(column.row_shape))
            for column in message.seed_columns
        ),
    )
