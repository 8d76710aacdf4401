"""Tests that the codec carries every valid value unchanged, and refuses everything else with an error that names it."""

from __future__ import annotations

import itertools
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import prefill_pb2
from common.errors import FingerprintMismatch
from common.rpc.messages import ProtocolError
from common.wire.codec_commands import (
    CancelRows,
    PrefillBatch,
    decode_command,
    encode_cancel_rows,
    encode_prefill_batch,
)
from common.wire.codec_fingerprint import PROTOCOL_VERSION, encode_fingerprint
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import Fingerprint
from common.wire.framing import seal
from common.wire.handoff import Accepted, HandoffRow
from tests.wire.strategies import (
    DRAFT,
    PLAIN,
    SPECULATIVE,
    TARGET,
    VOCAB_SIZE,
    comparable,
    fingerprints,
    frames,
    rows_of_a_call,
)
from tests.wire.test_wire_contract import CODEC, COMMANDS, ROW, SENT
from tests.wire.wire_samples import (
    LOGPROBS_ROW,
    PLAIN_ROW,
    SCORED_ROW,
    prebuilt_message,
    row_logprobs_message,
    segment_message,
    segment_payload,
)

PLAIN_CODEC = FrameCodec(fingerprint=PLAIN, vocab_size=VOCAB_SIZE)
SPECULATIVE_CODEC = FrameCodec(fingerprint=SPECULATIVE, vocab_size=VOCAB_SIZE)
ROWS = (PLAIN_ROW, LOGPROBS_ROW)


def refused_field(codec: FrameCodec, sent: bytes, rows: tuple[HandoffRow, ...] = ROWS) -> str:
    """Returns the field that the error names with which the codec refuses the frame."""
    with pytest.raises(ProtocolError) as caught:
        codec.decode(sent, rows)
    return caught.value.field


@pytest.mark.thorough
@given(st.data(), rows_of_a_call, fingerprints)
def test_every_frame_arrives_as_it_was_sent(
    data: st.DataObject, rows: tuple[HandoffRow, ...], fingerprint: Fingerprint
) -> None:
    codec = FrameCodec(fingerprint=fingerprint, vocab_size=VOCAB_SIZE)
    frame = data.draw(frames(rows, fingerprint))
    assert comparable(codec.decode(codec.encode(frame), rows)) == comparable(frame)


@pytest.mark.thorough
@given(rows_of_a_call, fingerprints)
def test_every_prefill_batch_arrives_as_it_was_sent(rows: tuple[HandoffRow, ...], fingerprint: Fingerprint) -> None:
    assert decode_command(encode_prefill_batch(fingerprint, rows)) == PrefillBatch(fingerprint, rows)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple))
def test_every_cancellation_arrives_as_it_was_sent(rows: tuple[int, ...]) -> None:
    assert decode_command(encode_cancel_rows(rows)) == CancelRows(rows)


@pytest.mark.parametrize("kind", SENT)
def test_a_damaged_bit_anywhere_in_a_message_is_seen(kind: str) -> None:
    """The messages are those of the contract, which have every field. A damaged version may also be taken for the
    version of a peer.
    """
    sent = b64decode(SENT[kind])
    decode = decode_command if kind in COMMANDS else lambda data: CODEC.decode(data, (ROW, ROW))
    for place, bit in itertools.product(range(len(sent)), range(8)):
        damaged = bytearray(sent)
        damaged[place] ^= 1 << bit
        with pytest.raises((ProtocolError, FingerprintMismatch)) as caught:
            decode(bytes(damaged))
        assert caught.value.field in ("crc32c", "protocol_version")


THEIRS = replace(PLAIN, protocol_version=PROTOCOL_VERSION - 1)


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed as ours", "sealed in another way"])
def test_a_peer_of_another_protocol_version_is_told_so_and_not_that_its_checksum_is_wrong(is_sealed: bool) -> None:
    command = prefill_pb2.HandoffCommand(
        prefill_batch=prefill_pb2.PrefillBatch(fingerprint=encode_fingerprint(THEIRS), rows=[{}])
    )
    accepted = prefill_pb2.Accepted(instance_id="a", fingerprint=encode_fingerprint(THEIRS))
    frame = prefill_pb2.HandoffFrame(accepted=accepted)
    with pytest.raises(FingerprintMismatch) as caught:
        decode_command(seal(command) if is_sealed else command.SerializeToString())
    assert caught.value.metadata == {
        "field": "protocol_version",
        "decode": str(PROTOCOL_VERSION - 1),
        "prefill": str(PROTOCOL_VERSION),
    }
    with pytest.raises(FingerprintMismatch) as caught:
        PLAIN_CODEC.decode(seal(frame) if is_sealed else frame.SerializeToString(), ROWS)
    assert caught.value.metadata == {
        "field": "protocol_version",
        "decode": str(PROTOCOL_VERSION),
        "prefill": str(PROTOCOL_VERSION - 1),
    }


def test_a_peer_of_another_protocol_version_can_read_ours() -> None:
    """The other version's peer parses our bytes despite unknown fields, and finds the version in its usual place."""
    command = prefill_pb2.HandoffCommand.FromString(encode_prefill_batch(PLAIN, ROWS))
    assert command.prefill_batch.fingerprint.protocol_version == PROTOCOL_VERSION
    frame = prefill_pb2.HandoffFrame.FromString(PLAIN_CODEC.encode(Accepted("a")))
    assert frame.accepted.fingerprint.protocol_version == PROTOCOL_VERSION


SEGMENT_FAULTS: dict[str, tuple[str, Callable[[prefill_pb2.KvSegment], object]]] = {
    "a row out of range": ("row", lambda message: setattr(message, "row", len(ROWS))),
    "another layer group": ("layer_group", lambda message: setattr(message, "layer_group", "draft")),
    "layers past the last": ("num_layers", lambda message: setattr(message, "layer_start", 1)),
    "no layer": ("num_layers", lambda message: setattr(message, "num_layers", 0)),
    "tokens past the last": ("num_tokens", lambda message: setattr(message, "token_start", 1)),
    "no token": ("num_tokens", lambda message: setattr(message, "num_tokens", 0)),
    "one of several shards": ("shard", lambda message: setattr(message, "num_shards", 2)),
    "a payload that is too long": ("payload", lambda message: setattr(message, "num_layers", 2)),
}


@pytest.mark.parametrize("fault", SEGMENT_FAULTS)
def test_a_segment_with_a_fault_is_refused_naming_the_field(fault: str) -> None:
    field, damage = SEGMENT_FAULTS[fault]
    message = segment_message(TARGET, PLAIN_ROW)
    damage(message)
    sent = seal(prefill_pb2.HandoffFrame(kv_segment=message), segment_payload(TARGET, PLAIN_ROW))
    assert refused_field(PLAIN_CODEC, sent) == f"kv_segment.{field}"


def test_a_payload_that_is_too_short_is_refused() -> None:
    payload = segment_payload(TARGET, PLAIN_ROW)[1:]
    sent = seal(prefill_pb2.HandoffFrame(kv_segment=segment_message(TARGET, PLAIN_ROW)), payload)
    assert refused_field(PLAIN_CODEC, sent) == "kv_segment.payload"


def test_a_payload_that_is_no_segments_is_refused() -> None:
    frame = prefill_pb2.HandoffFrame(row_failed={"reason": 1})
    assert refused_field(PLAIN_CODEC, seal(frame, b"\0")) == "payload"
    with pytest.raises(ProtocolError, match=r"^payload"):
        decode_command(seal(prefill_pb2.HandoffCommand(cancel_rows={"rows": [0]}), b"\0"))


def test_a_segment_beyond_the_size_bound_is_refused() -> None:
    wide = replace(TARGET, head_dim=1 << 19)
    row = replace(PLAIN_ROW, token_ids=(1, 2, 3), prompt_len=3)
    message = segment_message(wide, row)
    codec = FrameCodec(fingerprint=replace(PLAIN, layer_groups=(wide,)), vocab_size=VOCAB_SIZE)
    with pytest.raises(ProtocolError, match="more than 8388608 bytes"):
        codec.decode(seal(prefill_pb2.HandoffFrame(kv_segment=message), bytes(3 * wide.token_bytes)), (row,))


PREBUILT_FAULTS: dict[str, tuple[str, Callable[[prefill_pb2.PrebuiltBatch], object]]] = {
    "a row out of range": ("rows", lambda message: message.rows.__setitem__(1, 2)),
    "a row named twice": ("rows", lambda message: message.rows.__setitem__(1, 0)),
    "no row at all": ("rows", lambda message: message.ClearField("rows")),
    "a column too long": ("seq_lens", lambda message: message.seq_lens.append(1)),
    "a length that is not the prompt's": ("seq_lens", lambda message: message.seq_lens.__setitem__(0, 99)),
    "a token out of the vocabulary": (
        "first_token_ids",
        lambda message: message.first_token_ids.__setitem__(0, VOCAB_SIZE),
    ),
    "a column too short": ("first_token_ids", lambda message: message.first_token_ids.pop()),
    "an absent layer group": ("bytes_sent", lambda message: message.bytes_sent.pop()),
    "a layer group twice": ("bytes_sent", lambda message: message.bytes_sent.append(message.bytes_sent[0])),
    "a short group column": ("bytes_sent[target]", lambda message: message.bytes_sent[0].bytes.pop()),
    "bytes beyond 63 bits": ("bytes_sent[target]", lambda message: message.bytes_sent[0].bytes.__setitem__(0, 2**63)),
    "an infinite time": ("queue_s", lambda message: message.queue_s.__setitem__(0, float("inf"))),
    "a negative time": ("compute_s", lambda message: message.compute_s.__setitem__(0, -1.0)),
    "no count of cached tokens": ("num_cached_tokens", lambda message: message.ClearField("num_cached_tokens")),
    "more cached tokens than tokens": (
        "num_cached_tokens",
        lambda message: message.num_cached_tokens.__setitem__(1, message.seq_lens[1] + 1),
    ),
    "asked logprobs absent": ("first_token_logprobs", lambda message: message.ClearField("first_token_logprobs")),
    "too few top logprobs": ("top_logprobs", lambda message: message.top_logprobs[1].logprobs.pop()),
    "a top logprob out of the vocabulary": (
        "top_logprobs",
        lambda message: message.top_logprobs[1].token_ids.__setitem__(0, VOCAB_SIZE),
    ),
    "a short seed column": ("topk_p", lambda message: setattr(message, "topk_p", message.topk_p[:-1])),
    "an absent seed column": ("hidden_states", lambda message: message.ClearField("hidden_states")),
}


@pytest.mark.parametrize("fault", PREBUILT_FAULTS)
def test_a_prebuilt_batch_with_a_fault_is_refused_naming_the_column(fault: str) -> None:
    column, damage = PREBUILT_FAULTS[fault]
    message = prebuilt_message(SPECULATIVE, ROWS)
    damage(message)
    sent = seal(prefill_pb2.HandoffFrame(prebuilt_batch=message))
    assert refused_field(SPECULATIVE_CODEC, sent) == f"prebuilt_batch.{column}"


@pytest.mark.parametrize("column", ["topk_p", "first_token_logprobs"])
def test_a_column_that_nobody_asked_for_is_refused(column: str) -> None:
    message = prebuilt_message(PLAIN, (PLAIN_ROW,))
    message.MergeFrom(prefill_pb2.PrebuiltBatch(**{column: b"\0\0\0\0" if column == "topk_p" else [-1.0]}))
    sent = seal(prefill_pb2.HandoffFrame(prebuilt_batch=message))
    assert refused_field(PLAIN_CODEC, sent, (PLAIN_ROW,)) == f"prebuilt_batch.{column}"


ROW_LOGPROBS_FAULTS: dict[str, tuple[str, Callable[[prefill_pb2.RowLogprobs], object]]] = {
    "a row out of range": ("row", lambda message: setattr(message, "row", 3)),
    "a row that asked for none": ("row", lambda message: setattr(message, "row", 0)),
    "the first token": ("start", lambda message: setattr(message, "start", 0)),
    "tokens past the prompt": ("start", lambda message: setattr(message, "start", 2)),
    "no token": ("logprobs", lambda message: message.ClearField("logprobs")),
    "a short column": ("ranks", lambda message: message.ranks.pop()),
    "rank 0": ("ranks", lambda message: message.ranks.__setitem__(0, 0)),
    "a rank past the vocabulary": ("ranks", lambda message: message.ranks.__setitem__(0, VOCAB_SIZE + 1)),
    "too few top ids": ("top_token_ids", lambda message: message.top_token_ids.pop()),
    "a top id out of the vocabulary": (
        "top_token_ids",
        lambda message: message.top_token_ids.__setitem__(0, VOCAB_SIZE),
    ),
    "too many top logprobs": ("top_logprobs", lambda message: message.top_logprobs.append(-1.0)),
}


@pytest.mark.parametrize("fault", ROW_LOGPROBS_FAULTS)
def test_a_prompt_s_log_probabilities_with_a_fault_are_refused_naming_the_column(fault: str) -> None:
    column, damage = ROW_LOGPROBS_FAULTS[fault]
    message = row_logprobs_message(2)
    damage(message)
    sent = seal(prefill_pb2.HandoffFrame(row_logprobs=message))
    assert refused_field(PLAIN_CODEC, sent, (*ROWS, SCORED_ROW)) == f"row_logprobs.{column}"


FRAME_FAULTS = [
    ("frame", prefill_pb2.HandoffFrame()),
    ("row_failed.row", prefill_pb2.HandoffFrame(row_failed={"row": 2, "reason": "ROW_FAILURE_COMPUTE"})),
    ("row_failed.reason", prefill_pb2.HandoffFrame(row_failed={"row": 0})),
    ("row_failed.reason", prefill_pb2.HandoffFrame(row_failed={"row": 0, "reason": 77})),
    ("accepted.fingerprint", prefill_pb2.HandoffFrame(accepted={"instance_id": "a"})),
    ("accepted.instance_id", prefill_pb2.HandoffFrame(accepted={"fingerprint": encode_fingerprint(PLAIN)})),
]


@pytest.mark.parametrize(("field", "message"), FRAME_FAULTS)
def test_a_frame_with_a_fault_is_refused_naming_the_field(field: str, message: prefill_pb2.HandoffFrame) -> None:
    assert refused_field(PLAIN_CODEC, seal(message)) == field


def test_an_acceptance_with_another_fingerprint_names_the_difference() -> None:
    sent = FrameCodec(fingerprint=replace(PLAIN, layer_groups=(DRAFT,)), vocab_size=VOCAB_SIZE).encode(Accepted("a"))
    with pytest.raises(FingerprintMismatch) as caught:
        PLAIN_CODEC.decode(sent, ROWS)
    assert caught.value.field == "layer_groups"
