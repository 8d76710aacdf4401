"""Tests that the bytes and fields of the handoff's messages are fixed for each protocol version."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.v1 import prefill_pb2
from common.errors import RowFailure
from common.grammar.grammar import Grammar, GrammarKind, TokenRules
from common.grammar.reasoning import Reasoning
from common.kv.layer_group import LayerGroupSpec, SeedColumnSpec
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.codec_commands import (
    CancelRows,
    HandoffCommand,
    PrefillBatch,
    ReleaseSegments,
    decode_command,
)
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import Fingerprint
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, PrebuiltBatch, RowFailed, RowLogprobs
from tests.wire.strategies import comparable
from tests.wire.test_contract_fields import messages

CONTRACT_FILE = Path(__file__).with_name("contract.json")
"""A file with the protocol version, the digest of its fields, and in base64 the bytes that a peer of that version sends
for the values below. `write_contract` writes it.
"""
CONTRACT = json.loads(CONTRACT_FILE.read_text())
SENT: dict[str, str] = CONTRACT["sent"]
"""The bytes of each message. Together the messages contain all fields but `shard` and `ticket`."""

TARGET = LayerGroupSpec("target", num_layers=2, num_planes=2, num_heads=1, head_dim=2, dtype="float32")
FINGERPRINT = Fingerprint(
    protocol_version=PROTOCOL_VERSION,
    config_digest="c0ffee",
    target_weights_digest="beef",
    tokenizer_digest="7e57",
    dtype="float32",
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
    prompt_len=2,
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
        num_prompt_logprobs=1,
        grammar=Grammar(GrammarKind.REGEX, "[äö]+"),
        token_rules=TokenRules((3, 9, 70_000), ((5,), (6, 7))),
        reasoning=Reasoning("<ü>", "</ü>", is_open=True, max_tokens=3),
    ),
    time_left_ms=2**40,
    traceparent="00-1-2-03",
    cache_salt="mandant ü",
    priority=-7,
)
FRAMES: dict[str, Frame] = {
    "accepted": Accepted("instance"),
    "kv_segment": KvSegment(1, "target", 1, 1, 1, 1, bytes(range(16))),
    "prebuilt_batch": PrebuiltBatch(
        rows=np.array([1, 0]),
        seq_lens=np.array([2, 2]),
        first_token_ids=np.array([11, 12]),
        bytes_sent={"target": np.array([2**40, 64])},
        queue_s=np.array([0.5, 0.1]),
        compute_s=np.array([0.25, 0.2]),
        num_cached_tokens=np.array([2, 1]),
        first_token_logprobs=(TokenLogprobs(-0.5, (1, 2), (-0.5, -1.5)), None),
        seed_columns={
            "topk_p": np.ones((2, 2), "float32"),
            "topk_index": np.arange(4).reshape(2, 2),
            "hidden_states": np.arange(6, dtype="float16").reshape(2, 3),
        },
    ),
    "row_logprobs": RowLogprobs(
        1,
        PromptLogprobs(
            start=1,
            logprobs=np.array([-1.5], "float32"),
            ranks=np.array([3]),
            top_ids=np.array([[7]]),
            top_values=np.array([[-0.5]], "float32"),
        ),
    ),
    "row_failed": RowFailed(row=1, reason=RowFailure.CAPACITY, retryable=True, retry_after_ms=250, message="größer"),
}


COMMANDS: dict[str, HandoffCommand] = {
    "prefill_batch": PrefillBatch(FINGERPRINT, (ROW,), pool_secret=bytes(range(16))),
    "cancel_rows": CancelRows((1, 70_000)),
    "release_segments": ReleaseSegments((1, 2**40)),
}
CODEC = FrameCodec(fingerprint=FINGERPRINT, vocab_size=100)


def digest_of_fields() -> str:
    """Returns a digest of all messages of the handoff: the numbers and types of their fields and the values of enums.
    Renaming a field does not change it.
    """
    kinds = (prefill_pb2.HandoffCommand, prefill_pb2.HandoffFrame, prefill_pb2.HandoffTrailer)
    reached = {message.full_name: message for kind in kinds for message in messages(kind.DESCRIPTOR)}
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
    )


def test_a_change_of_the_fields_raises_the_protocol_version() -> None:
    written = (CONTRACT["protocol_version"], CONTRACT["digest_of_fields"])
    assert (PROTOCOL_VERSION, digest_of_fields()) == written, (
        "the handoff's fields changed: raise PROTOCOL_VERSION_CURRENT (types.proto), unless it was raised since the "
        "last release, then run python -m tests.wire.write_contract"
    )


def test_every_kind_of_message_is_fixed() -> None:
    kinds = (prefill_pb2.HandoffCommand, prefill_pb2.HandoffFrame)
    assert {field.name for kind in kinds for field in kind.DESCRIPTOR.fields} == set(SENT)


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_that_a_peer_of_this_version_sends_is_understood(kind: str) -> None:
    plain = replace(ROW, sampling=replace(ROW.sampling, num_logprobs=None))
    assert comparable(CODEC.decode(b64decode(SENT[kind]), (plain, ROW))) == comparable(FRAMES[kind])


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_that_a_peer_of_this_version_sends_is_understood(kind: str) -> None:
    assert decode_command(b64decode(SENT[kind])) == COMMANDS[kind]
