"""The checksums' values, and the fields that they cover, are part of the contract: both are fixed for a version."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from awscrt.checksums import crc32c
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.v1 import prefill_pb2
from common.errors import RowFailure
from common.kv.layer_group import LayerGroupSpec
from common.model.sampling_params import ResolvedSampling, TokenLogprobs
from common.wire.codec_commands import encode_cancel_rows, encode_prefill_batch, encode_release_segments
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import PROTOCOL_VERSION, Fingerprint, SeedColumnSpec
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, PrebuiltBatch, RowFailed
from tests.wire.test_contract_fields import messages

CONTRACT = (8, "2c16a059865cbbdc")
"""The protocol version, and the digest of its fields."""
CHECKSUMS = {
    "prefill_batch": 0x4AFB2542,
    "cancel_rows": 0x5319EDC8,
    "release_segments": 0x850F26C4,
    "accepted": 0x149C7B11,
    "kv_segment": 0xED17DBF8,
    "prebuilt_batch": 0xBC1D142E,
    "row_failed": 0x85CF59B1,
}
"""Of the messages below: every field but `shard` and `ticket` has a value; as protocol version 5 makes them."""

TARGET = LayerGroupSpec("target", num_layers=2, num_planes=2, num_heads=1, head_dim=2, dtype="float32")
FINGERPRINT = Fingerprint(
    protocol_version=5,
    config_digest="c0ffee",
    target_weights_digest="beef",
    tokenizer_digest="7e57",
    layer_groups=(TARGET,),
    draft_weights_digest="d4af",
    algorithm="eagle",
    seed_columns=(
        SeedColumnSpec("topk_p", "float32", (2,)),
        SeedColumnSpec("topk_index", "int64", (2,)),
        SeedColumnSpec("hidden_states", "float16", (3,)),
    ),
)
ROW = HandoffRow(
    request_id="grüße",
    attempt=1,
    choice_index=2,
    token_ids=(3, 70_000),
    prompt_len=1,
    num_held_tokens=(("draft", 0), ("target", 0)),
    sampling=ResolvedSampling(
        seed=2**63 + 1,
        max_tokens=8,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        min_tokens=2,
        stop_token_ids=(5, 6),
        eos_token_ids=(7,),
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=((8, -1.5), (9, 2.0)),
        num_logprobs=2,
    ),
    deadline_unix_ms=2**40,
    traceparent="00-1-2-03",
)
FRAMES: dict[str, Frame] = {
    "accepted": Accepted("instance"),
    "kv_segment": KvSegment(1, "target", 1, 1, 1, 2, bytes(range(32))),
    "prebuilt_batch": PrebuiltBatch(
        rows=np.array([1, 0]),
        seq_lens=np.array([2, 2]),
        first_token_ids=np.array([11, 12]),
        bytes_sent={"target": np.array([2**40, 64])},
        queue_s=np.array([0.5, 0.1]),
        compute_s=np.array([0.25, 0.2]),
        first_token_logprobs=(TokenLogprobs(-0.5, (1, 2), (-0.5, -1.5)), None),
        seed_columns={
            "topk_p": np.ones((2, 2), "float32"),
            "topk_index": np.arange(4).reshape(2, 2),
            "hidden_states": np.arange(6, dtype="float16").reshape(2, 3),
        },
    ),
    "row_failed": RowFailed(row=1, reason=RowFailure.CAPACITY, retryable=True, retry_after_ms=250, message="größer"),
}


def sent_checksum(kind: str) -> int:
    """As the codec puts it into the message."""
    if kind in FRAMES:
        frame = FrameCodec(fingerprint=FINGERPRINT, vocab_size=100).encode(FRAMES[kind])
        crc: int = getattr(prefill_pb2.HandoffFrame.FromString(frame), kind).crc32c
        return crc
    command = {
        "prefill_batch": encode_prefill_batch(FINGERPRINT, (ROW,), pool_secret=bytes(range(16))),
        "cancel_rows": encode_cancel_rows((1, 70_000)),
        "release_segments": encode_release_segments((1, 2**40)),
    }[kind]
    crc = getattr(prefill_pb2.HandoffCommand.FromString(command), kind).crc32c
    return crc


def digest_of_fields(*kinds: Descriptor) -> str:
    """Of all messages in these: numbers and types of their fields; of enums the values. Fields may be renamed."""
    reached = {message.full_name: message for kind in kinds for message in messages(kind)}
    contract = [
        (name, [described(field) for field in sorted(message.fields, key=lambda field: field.number)])
        for name, message in sorted(reached.items())
    ]
    return hashlib.sha256(repr(contract).encode()).hexdigest()[:16]


def described(field: FieldDescriptor) -> tuple[object, ...]:
    message: Descriptor | None = field.message_type
    return (
        field.number,
        field.type,
        field.is_repeated,
        message.full_name if message else "",
        sorted(value.number for value in field.enum_type.values) if field.enum_type else [],
        field.name == "crc32c",
    )


def test_the_messages_have_a_checksum_each_and_no_other_has() -> None:
    kinds = {
        field.name
        for kind in (prefill_pb2.HandoffCommand, prefill_pb2.HandoffFrame)
        for field in kind.DESCRIPTOR.fields
        if "crc32c" in field.message_type.fields_by_name
    }
    assert kinds == set(CHECKSUMS)


@pytest.mark.parametrize("kind", CHECKSUMS)
def test_a_checksum_is_the_one_that_every_peer_of_this_version_makes(kind: str) -> None:
    assert sent_checksum(kind) == CHECKSUMS[kind], (
        f"the checksum of {kind} is not what peers of protocol version {CONTRACT[0]} expect: raise PROTOCOL_VERSION"
    )


def test_the_rule_of_the_checksum_spelt_out_for_one_message() -> None:
    """The count of the rows, then each, uint32 and little-endian."""
    assert CHECKSUMS["cancel_rows"] == crc32c(struct.pack("<III", 2, 1, 70_000))


def test_a_change_of_the_fields_raises_the_protocol_version() -> None:
    digest = digest_of_fields(prefill_pb2.HandoffCommand.DESCRIPTOR, prefill_pb2.HandoffFrame.DESCRIPTOR)
    assert (PROTOCOL_VERSION, digest) == CONTRACT, (
        "the handoff's fields changed, and with them its checksums: a change of fields must raise PROTOCOL_VERSION "
        "(common/wire/fingerprint.py); then CONTRACT and CHECKSUMS here are the new version's"
    )
