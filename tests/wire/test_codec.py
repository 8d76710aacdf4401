"""Tests that the codec carries every valid value unchanged, and refuses everything else with an error that names it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import prefill_pb2
from common.errors import FingerprintMismatch, RowFailure
from common.rpc.messages import ProtocolError
from common.wire.codec_commands import (
    CancelRows,
    PrefillBatch,
    decode_command,
    encode_cancel_rows,
    encode_prefill_batch,
)
from common.wire.codec_fingerprint import PROTOCOL_VERSION, decode_fingerprint, encode_fingerprint
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import Fingerprint
from common.wire.framing import MessageT, seal
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, RowFailed
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
from tests.wire.wire_samples import (
    LOGPROBS_ROW,
    PLAIN_ROW,
    SCORED_ROW,
    prebuilt_batch,
    prebuilt_message,
    row_logprobs_message,
    segment_message,
    segment_payload,
)

PLAIN_CODEC = FrameCodec(fingerprint=PLAIN, vocab_size=VOCAB_SIZE)
SPECULATIVE_CODEC = FrameCodec(fingerprint=SPECULATIVE, vocab_size=VOCAB_SIZE)
ROWS = (PLAIN_ROW, LOGPROBS_ROW)


@given(st.data(), rows_of_a_call, fingerprints)
def test_every_frame_arrives_as_it_was_sent(
    data: st.DataObject, rows: tuple[HandoffRow, ...], fingerprint: Fingerprint
) -> None:
    codec = FrameCodec(fingerprint=fingerprint, vocab_size=VOCAB_SIZE)
    frame = data.draw(frames(rows, fingerprint))
    assert comparable(codec.decode(codec.encode(frame), rows)) == comparable(frame)


@given(rows_of_a_call, fingerprints)
def test_every_prefill_batch_arrives_as_it_was_sent(rows: tuple[HandoffRow, ...], fingerprint: Fingerprint) -> None:
    assert decode_command(encode_prefill_batch(fingerprint, rows)) == PrefillBatch(fingerprint, rows)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple))
def test_every_cancellation_arrives_as_it_was_sent(rows: tuple[int, ...]) -> None:
    assert decode_command(encode_cancel_rows(rows)) == CancelRows(rows)


@given(fingerprints)
def test_every_fingerprint_arrives_as_it_was_sent(fingerprint: Fingerprint) -> None:
    assert decode_fingerprint(encode_fingerprint(fingerprint)) == fingerprint


@given(st.binary(max_size=64))
def test_random_bytes_are_a_protocol_error_or_a_value(data: bytes) -> None:
    for decode in (lambda: SPECULATIVE_CODEC.decode(data, ROWS), lambda: decode_command(data)):
        with contextlib.suppress(ProtocolError, FingerprintMismatch):
            decode()


@given(st.data(), rows_of_a_call)
def test_damaged_frames_are_a_protocol_error_or_a_value(data: st.DataObject, rows: tuple[HandoffRow, ...]) -> None:
    sent = bytearray(SPECULATIVE_CODEC.encode(data.draw(frames(rows, SPECULATIVE))))
    position = data.draw(st.integers(0, len(sent) - 1))
    sent[position] ^= data.draw(st.integers(1, 255))
    del sent[data.draw(st.integers(position, len(sent))) :]
    with contextlib.suppress(ProtocolError, FingerprintMismatch):
        SPECULATIVE_CODEC.decode(bytes(sent), rows)


def damaged_byte(data: st.DataObject, sent: bytes) -> bytes:
    place = data.draw(st.integers(0, len(sent) - 1))
    return sent[:place] + bytes([sent[place] ^ data.draw(st.integers(1, 255))]) + sent[place + 1 :]


@given(rows_of_a_call, st.data())
def test_a_frame_with_a_damaged_byte_never_carries_another_value(
    rows: tuple[HandoffRow, ...], data: st.DataObject
) -> None:
    frame = data.draw(frames(rows, SPECULATIVE))
    sent = damaged_byte(data, SPECULATIVE_CODEC.encode(frame))
    with contextlib.suppress(ProtocolError, FingerprintMismatch):
        assert comparable(SPECULATIVE_CODEC.decode(sent, rows)) == comparable(frame)


@given(rows_of_a_call, st.data())
def test_a_command_with_a_damaged_byte_never_carries_another_value(
    rows: tuple[HandoffRow, ...], data: st.DataObject
) -> None:
    wanted = data.draw(st.sampled_from([PrefillBatch(SPECULATIVE, rows), CancelRows(tuple(range(len(rows))))]))
    sent = (
        encode_cancel_rows(wanted.rows) if isinstance(wanted, CancelRows) else encode_prefill_batch(SPECULATIVE, rows)
    )
    with contextlib.suppress(ProtocolError, FingerprintMismatch):
        assert decode_command(damaged_byte(data, sent)) == wanted


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


def changed(
    kind: type[MessageT], sent: bytes, change: Callable[[MessageT], object], num_payload_bytes: int = 0
) -> bytes:
    """Returns the bytes of the message after `change`, with the trailer (checksum) of the original bytes."""
    message = kind.FromString(sent[num_payload_bytes:-NUM_TRAILER_BYTES])
    change(message)
    return sent[:num_payload_bytes] + message.SerializeToString() + sent[-NUM_TRAILER_BYTES:]


NUM_TRAILER_BYTES = 14
DAMAGED_FRAMES: dict[str, Callable[[prefill_pb2.HandoffFrame], object]] = {
    "accepted": lambda frame: setattr(frame.accepted, "instance_id", "b"),
    "row_failed": lambda frame: setattr(frame.row_failed, "row", 1),
}
DAMAGED_COMMANDS: dict[str, Callable[[prefill_pb2.HandoffCommand], object]] = {
    "prefill_batch": lambda command: command.prefill_batch.rows[1].token_ids.__setitem__(0, 3),
    "cancel_rows": lambda command: command.cancel_rows.rows.__setitem__(0, 0),
}


@pytest.mark.parametrize("kind", DAMAGED_FRAMES)
def test_a_damaged_frame_of_legal_values_never_passes(kind: str) -> None:
    frames: dict[str, Frame] = {
        "accepted": Accepted("a"),
        "row_failed": RowFailed(row=0, reason=RowFailure.CAPACITY, retryable=True),
    }
    sent = changed(prefill_pb2.HandoffFrame, PLAIN_CODEC.encode(frames[kind]), DAMAGED_FRAMES[kind])
    with pytest.raises(ProtocolError) as caught:
        PLAIN_CODEC.decode(sent, ROWS)
    assert caught.value.field == "crc32c"


@pytest.mark.parametrize("kind", DAMAGED_COMMANDS)
def test_a_damaged_command_of_legal_values_never_passes(kind: str) -> None:
    sent = {"prefill_batch": encode_prefill_batch(PLAIN, ROWS), "cancel_rows": encode_cancel_rows((1,))}
    with pytest.raises(ProtocolError) as caught:
        decode_command(changed(prefill_pb2.HandoffCommand, sent[kind], DAMAGED_COMMANDS[kind]))
    assert caught.value.field == "crc32c"


MISPLACED = ("row", "layer_start", "token_start")


@pytest.mark.parametrize("field", MISPLACED)
def test_a_segment_of_another_place_never_passes(field: str) -> None:
    """All changed fields stay within bounds, so only the checksum reveals the change."""
    row = replace(PLAIN_ROW, token_ids=(1, 2), prompt_len=2)
    payload = bytes(TARGET.layer_token_bytes)
    sent = PLAIN_CODEC.encode(KvSegment(0, TARGET.name, 1, 1, 0, 1, payload))
    PLAIN_CODEC.decode(sent, (row, row))

    def misplace(frame: prefill_pb2.HandoffFrame) -> None:
        setattr(frame.kv_segment, field, 1 - getattr(frame.kv_segment, field))

    moved = changed(prefill_pb2.HandoffFrame, sent, misplace, len(payload))
    with pytest.raises(ProtocolError, match="crc32c"):
        PLAIN_CODEC.decode(moved, (row, row))


@pytest.mark.parametrize("place", ["payload", "message", "payload_bytes", "crc32c"])
def test_a_damaged_bit_anywhere_in_a_segment_is_seen(place: str) -> None:
    payload = segment_payload(TARGET, PLAIN_ROW)
    sent = PLAIN_CODEC.encode(KvSegment(0, TARGET.name, 0, TARGET.num_layers, 0, 3, payload))
    places = {
        "payload": range(len(payload)),
        "message": range(len(payload), len(sent) - NUM_TRAILER_BYTES),
        "payload_bytes": range(len(sent) - NUM_TRAILER_BYTES, len(sent) - 5),
        "crc32c": range(len(sent) - 5, len(sent)),
    }
    for position in places[place]:
        for bit in range(8):
            damaged = bytearray(sent)
            damaged[position] ^= 1 << bit
            with pytest.raises(ProtocolError, match="crc32c: does not match the bytes"):
                PLAIN_CODEC.decode(bytes(damaged), ROWS)


DAMAGED_COLUMNS: dict[str, Callable[[prefill_pb2.PrebuiltBatch], object]] = {
    "first_token_ids": lambda message: message.first_token_ids.__setitem__(0, 9),
    "first_token_logprobs": lambda message: message.first_token_logprobs.__setitem__(1, -0.75),
    "top_logprobs": lambda message: message.top_logprobs[1].token_ids.__setitem__(0, 3),
    "bytes_sent": lambda message: message.bytes_sent[0].bytes.__setitem__(0, 1),
    "topk_p": lambda message: setattr(message, "topk_p", message.topk_p[:-1] + b"\1"),
    "topk_index": lambda message: setattr(message, "topk_index", message.topk_index[:-1] + b"\1"),
    "hidden_states": lambda message: setattr(message, "hidden_states", message.hidden_states[:-1] + b"\1"),
    "queue_s": lambda message: message.queue_s.__setitem__(0, 0.75),
    "compute_s": lambda message: message.compute_s.__setitem__(0, 0.75),
    "num_cached_tokens": lambda message: message.num_cached_tokens.__setitem__(0, 0),
}


@pytest.mark.parametrize("column", DAMAGED_COLUMNS)
def test_a_damaged_column_of_legal_values_never_passes(column: str) -> None:
    sent = SPECULATIVE_CODEC.encode(prebuilt_batch(SPECULATIVE, ROWS))
    damaged = changed(prefill_pb2.HandoffFrame, sent, lambda frame: DAMAGED_COLUMNS[column](frame.prebuilt_batch))
    with pytest.raises(ProtocolError) as caught:
        SPECULATIVE_CODEC.decode(damaged, ROWS)
    assert caught.value.field == "crc32c"


SEGMENT_FAULTS: dict[str, Callable[[prefill_pb2.KvSegment], object]] = {
    "kv_segment.row": lambda message: setattr(message, "row", len(ROWS)),
    "kv_segment.layer_group": lambda message: setattr(message, "layer_group", "draft"),
    "kv_segment.num_layers": lambda message: setattr(message, "layer_start", 1),
    "kv_segment.num_tokens": lambda message: setattr(message, "token_start", 1),
    "kv_segment.shard": lambda message: setattr(message, "num_shards", 2),
}


@pytest.mark.parametrize("field", SEGMENT_FAULTS)
def test_a_segment_out_of_bounds_is_refused_naming_the_field(field: str) -> None:
    message = segment_message(TARGET, PLAIN_ROW)
    SEGMENT_FAULTS[field](message)
    sent = seal(prefill_pb2.HandoffFrame(kv_segment=message), segment_payload(TARGET, PLAIN_ROW))
    with pytest.raises(ProtocolError) as caught:
        PLAIN_CODEC.decode(sent, ROWS)
    assert caught.value.field == field


@pytest.mark.parametrize("num_missing", [1, -1])
def test_a_segment_of_another_size_is_refused(num_missing: int) -> None:
    payload = (segment_payload(TARGET, PLAIN_ROW) + b"\0")[: -num_missing - 1]
    sent = seal(prefill_pb2.HandoffFrame(kv_segment=segment_message(TARGET, PLAIN_ROW)), payload)
    with pytest.raises(ProtocolError) as caught:
        PLAIN_CODEC.decode(sent, ROWS)
    assert caught.value.field == "kv_segment.payload"


def test_a_payload_that_is_no_segments_is_refused() -> None:
    for decode, message in (
        (lambda data: PLAIN_CODEC.decode(data, ROWS), prefill_pb2.HandoffFrame(row_failed={"reason": 1})),
        (decode_command, prefill_pb2.HandoffCommand(cancel_rows={"rows": [0]})),
    ):
        with pytest.raises(ProtocolError) as caught:
            decode(seal(message, b"\0"))
        assert caught.value.field == "payload"


@pytest.mark.parametrize("attribute", ["num_layers", "num_tokens"])
def test_a_segment_of_nothing_is_refused(attribute: str) -> None:
    message = segment_message(TARGET, PLAIN_ROW)
    setattr(message, attribute, 0)
    with pytest.raises(ProtocolError) as caught:
        PLAIN_CODEC.decode(seal(prefill_pb2.HandoffFrame(kv_segment=message)), ROWS)
    assert caught.value.field == f"kv_segment.{attribute}"


def test_a_segment_beyond_the_size_bound_is_refused() -> None:
    wide = replace(TARGET, head_dim=1 << 19)
    row = replace(PLAIN_ROW, token_ids=(1, 2, 3), prompt_len=3)
    message = segment_message(wide, row)
    codec = FrameCodec(fingerprint=replace(PLAIN, layer_groups=(wide,)), vocab_size=VOCAB_SIZE)
    with pytest.raises(ProtocolError, match="more than 8388608 bytes"):
        codec.decode(seal(prefill_pb2.HandoffFrame(kv_segment=message), segment_payload(wide, row)), (row,))


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
    with pytest.raises(ProtocolError) as caught:
        SPECULATIVE_CODEC.decode(seal(prefill_pb2.HandoffFrame(prebuilt_batch=message)), ROWS)
    assert caught.value.field == f"prebuilt_batch.{column}"


def test_a_seed_column_that_is_not_in_the_fingerprint_is_refused() -> None:
    message = prebuilt_message(PLAIN, ROWS)
    message.topk_p = b"\0\0\0\0"
    with pytest.raises(ProtocolError) as caught:
        PLAIN_CODEC.decode(seal(prefill_pb2.HandoffFrame(prebuilt_batch=message)), ROWS)
    assert caught.value.field == "prebuilt_batch.topk_p"


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
    rows, message = (*ROWS, SCORED_ROW), row_logprobs_message(2)
    damage(message)
    with pytest.raises(ProtocolError) as caught:
        PLAIN_CODEC.decode(seal(prefill_pb2.HandoffFrame(row_logprobs=message)), rows)
    assert caught.value.field == f"row_logprobs.{column}"


def test_logprobs_nobody_asked_for_are_refused() -> None:
    message = prebuilt_message(PLAIN, (PLAIN_ROW,))
    message.first_token_logprobs.append(-1.0)
    with pytest.raises(ProtocolError) as caught:
        PLAIN_CODEC.decode(seal(prefill_pb2.HandoffFrame(prebuilt_batch=message)), (PLAIN_ROW,))
    assert caught.value.field == "prebuilt_batch.first_token_logprobs"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (prefill_pb2.HandoffFrame(), "frame"),
        (
            prefill_pb2.HandoffFrame(row_failed=prefill_pb2.RowFailed(row=2, reason="ROW_FAILURE_COMPUTE")),
            "row_failed.row",
        ),
        (prefill_pb2.HandoffFrame(row_failed=prefill_pb2.RowFailed(row=0)), "row_failed.reason"),
        (prefill_pb2.HandoffFrame(row_failed=prefill_pb2.RowFailed(row=0, reason=77)), "row_failed.reason"),
        (prefill_pb2.HandoffFrame(accepted=prefill_pb2.Accepted(instance_id="a")), "accepted.fingerprint"),
        (
            prefill_pb2.HandoffFrame(accepted=prefill_pb2.Accepted(fingerprint=encode_fingerprint(PLAIN))),
            "accepted.instance_id",
        ),
    ],
)
def test_a_frame_with_a_fault_is_refused_naming_the_field(message: prefill_pb2.HandoffFrame, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        PLAIN_CODEC.decode(seal(message), ROWS)
    assert caught.value.field == field


def test_an_acceptance_with_another_fingerprint_names_the_difference() -> None:
    sent = FrameCodec(fingerprint=replace(PLAIN, layer_groups=(DRAFT,)), vocab_size=VOCAB_SIZE).encode(Accepted("a"))
    with pytest.raises(FingerprintMismatch) as caught:
        PLAIN_CODEC.decode(sent, ROWS)
    assert caught.value.field == "layer_groups"
