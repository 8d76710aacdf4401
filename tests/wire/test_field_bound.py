"""Tests that messages with very many entries are refused by their count, before the event loop parses or reads each
entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.v1 import prefill_pb2, types_pb2
from common.rpc.grpc_options import MAX_MESSAGE_BYTES
from common.rpc.messages import ProtocolError
from common.sampling.params import MAX_END_TOKEN_IDS, MAX_LOGIT_BIAS_ENTRIES
from common.wire.codec_commands import PrefillBatch, decode_command, encode_prefill_batch, encode_row
from common.wire.codec_fingerprint import PROTOCOL_VERSION, encode_fingerprint
from common.wire.codec_frames import FrameCodec
from common.wire.framing import seal_bytes
from common.wire.handoff import MAX_CALL_ROWS, MAX_ROW_TOKENS
from tests.fuzz.wire_strategies import delimited, tagged
from tests.wire.strategies import PLAIN, VOCAB_SIZE
from tests.wire.wire_samples import PLAIN_ROW

MANY = MAX_MESSAGE_BYTES // 2 - 64
CPU_BOUND_S = 1.0
"""A limit in seconds of CPU time: four times what the slowest case takes on a slow machine."""
NUM_TRIES = 3
"""The number of tries, of which one must be fast enough. Other work on the core and garbage collection can only add CPU
time.
"""
FINGERPRINT = encode_fingerprint(PLAIN).SerializeToString()


def field(number: int, payload: bytes) -> bytes:
    return tagged(number, 2, delimited(payload))


def empty(number: int, times: int = MANY) -> bytes:
    return field(number, b"") * times


def decode_frame(data: bytes) -> object:
    return FrameCodec(fingerprint=PLAIN, vocab_size=VOCAB_SIZE).decode(data, (PLAIN_ROW,))


def refused_field(decode: Callable[[bytes], object], data: bytes) -> str:
    data = seal_bytes(data)
    assert len(data) <= MAX_MESSAGE_BYTES
    taken_s = []
    for _ in range(NUM_TRIES):
        began_s = time.thread_time()
        with pytest.raises(ProtocolError) as caught:
            decode(data)
        taken_s.append(time.thread_time() - began_s)
        if taken_s[-1] < CPU_BOUND_S:
            return caught.value.field
    raise AssertionError(f"refused after {taken_s} s of CPU time")


COMMANDS = {
    "prefill_batch.rows": field(1, field(1, FINGERPRINT) + empty(2)),
    "prefill_batch.fingerprint.layer_groups": field(1, field(1, FINGERPRINT + empty(6)) + empty(2, 1)),
    "prefill_batch.99": field(1, field(1, FINGERPRINT) + tagged(99, 0, b"\1") * (MANY // 2)),
    "prefill_batch": field(1, b"") * MANY,
    "prefill_batch.rows.num_held_tokens": field(1, field(1, FINGERPRINT) + field(2, empty(6))),
    "cancel_rows.rows": field(2, field(1, b"\1" * (MANY // 4))),
}
FRAMES = {
    "accepted.fingerprint.layer_groups": field(1, field(1, FINGERPRINT + empty(6))),
    "prebuilt_batch.top_logprobs": field(3, empty(5)),
    "prebuilt_batch.bytes_sent": field(3, empty(6)),
    "prebuilt_batch.rows": field(3, field(1, b"\0" * (2 * MANY))),
}


@pytest.mark.parametrize("name", [*COMMANDS, *FRAMES])
def test_a_message_of_very_many_entries_is_refused_at_once_naming_them(name: str) -> None:
    decode, data = (decode_command, COMMANDS[name]) if name in COMMANDS else (decode_frame, FRAMES[name])
    assert refused_field(decode, data) == name


def test_one_row_too_many_is_refused_before_any_is_looked_at() -> None:
    rows = field(1, field(1, FINGERPRINT) + field(2, encode_row(PLAIN_ROW).SerializeToString()) * 4)
    with pytest.raises(ProtocolError, match="has 4, more than 3") as caught:
        decode_command(seal_bytes(rows), max_rows=3)
    assert caught.value.field == "prefill_batch.rows"


def command_of(row: prefill_pb2.PrefillRow, fingerprint: types_pb2.Fingerprint) -> bytes:
    batch = prefill_pb2.PrefillBatch(fingerprint=fingerprint, rows=[row])
    return prefill_pb2.HandoffCommand(prefill_batch=batch).SerializeToString()


@pytest.mark.parametrize(
    "name",
    ["token_ids", "sampling.stop_token_ids", "sampling.eos_token_ids", "sampling.logit_bias_ids", "num_held_tokens"],
)
def test_lists_that_no_row_has_are_refused_before_any_is_looked_at(name: str) -> None:
    """A list counts with its full length, even if all of its entries are equal."""
    row = encode_row(PLAIN_ROW)
    if name == "num_held_tokens":
        row.num_held_tokens.update({str(number): 0 for number in range(17)})  # more groups than any model has
    else:
        part = {"token_ids": row, "sampling.stop_token_ids": row.sampling.params}.get(name, row.sampling)
        getattr(part, name.removeprefix("sampling.")).extend([1] * (MAX_ROW_TOKENS + 1))
    command = command_of(row, encode_fingerprint(PLAIN))
    assert refused_field(decode_command, command) == f"prefill_batch.rows[0].{name}"


def test_a_fingerprint_longer_than_any_is_refused() -> None:
    column = types_pb2.SeedColumn(name="topk_p", row_shape=[1] * (1 << 20))
    theirs = types_pb2.Fingerprint(protocol_version=PROTOCOL_VERSION, seed_columns=[column])
    command = command_of(prefill_pb2.PrefillRow(), theirs)
    assert refused_field(decode_command, command) == "fingerprint.seed_columns.row_shape"


def test_a_call_of_the_largest_rows_is_taken() -> None:
    """Every list of every row has the largest length allowed."""
    sampling = replace(
        PLAIN_ROW.sampling,
        stop_token_ids=tuple(range(MAX_END_TOKEN_IDS // 2)),
        eos_token_ids=tuple(range(MAX_END_TOKEN_IDS // 2, MAX_END_TOKEN_IDS)),
        logit_bias=tuple((token_id, 1.0) for token_id in range(MAX_LOGIT_BIAS_ENTRIES)),
    )
    rows = (replace(PLAIN_ROW, sampling=sampling),) * MAX_CALL_ROWS
    assert decode_command(encode_prefill_batch(PLAIN, rows)) == PrefillBatch(PLAIN, rows)
