"""Tests that a row which cannot be decoded fails alone, and that the call's other rows are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from baton.v1 import prefill_pb2
from common.errors import RowFailure
from common.grammar.grammar import Grammar, GrammarKind, TokenRules
from common.rpc.messages import ProtocolError
from common.sampling.params import ResolvedSampling
from common.wire.codec_commands import PrefillBatch, decode_command, encode_prefill_batch, encode_row
from common.wire.codec_fingerprint import encode_fingerprint
from common.wire.framing import seal
from common.wire.handoff import MAX_CALL_FIELDS, HandoffRow, RowFailed
from tests.wire.strategies import PLAIN, handoff_rows
from tests.wire.wire_samples import LOGPROBS_ROW, PLAIN_ROW

LARGE_IDS = tuple(range((1 << 21) - 3_000, 1 << 21))


@given(handoff_rows())
def test_a_row_has_no_more_bytes_than_it_says(row: HandoffRow) -> None:
    assert encode_row(row).ByteSize() <= row.most_bytes


@pytest.mark.parametrize(
    "row",
    [
        replace(PLAIN_ROW, token_ids=LARGE_IDS),
        *(
            replace(PLAIN_ROW, sampling=replace(PLAIN_ROW.sampling, **options))  # type: ignore[arg-type]
            for options in (
                {"logit_bias": tuple((each, 1.0) for each in LARGE_IDS)},
                {"token_rules": TokenRules(allowed_ids=LARGE_IDS)},
                {"token_rules": TokenRules(forbidden=tuple((each, each) for each in LARGE_IDS))},
                {"grammar": Grammar(GrammarKind.REGEX, "\U0001f600" * 3_000)},
            )
        ),
    ],
)
def test_a_large_row_has_about_as_many_bytes_as_it_says(row: HandoffRow) -> None:
    num_bytes = encode_row(row).ByteSize()
    assert num_bytes <= row.most_bytes < num_bytes + (16 << 10)


@pytest.mark.parametrize(
    "options",
    [
        {"token_rules": TokenRules(forbidden=tuple((each, each) for each in range(384)))},
        {"grammar": Grammar.of_choices(map(str, range(5_000)))},
    ],
    ids=["bad words", "choice"],
)
def test_rows_of_as_many_fields_as_a_call_may_have_are_read(options: dict[str, Any]) -> None:
    row = replace(PLAIN_ROW, sampling=replace(PLAIN_ROW.sampling, **options))
    num_rows = MAX_CALL_FIELDS // row.most_fields
    batch = decode_command(encode_prefill_batch(PLAIN, [row] * num_rows))
    assert isinstance(batch, PrefillBatch) and batch.rows == (row,) * num_rows


ROW_FAULTS: dict[str, Callable[[prefill_pb2.PrefillRow], object]] = {
    "request_id": lambda row: row.ClearField("request_id"),
    "token_ids": lambda row: row.ClearField("token_ids"),
    "prompt_len": lambda row: setattr(row, "prompt_len", len(row.token_ids) + 1),
    "num_held_tokens": lambda row: row.num_held_tokens.update(target=len(row.token_ids)),
    "sampling": lambda row: row.ClearField("sampling"),
    "cache_salt": lambda row: setattr(row, "cache_salt", "ü" * 129),
    "priority": lambda row: setattr(row, "priority", 101),
    "client": lambda row: setattr(row, "client", "c" * 257),
    "sampling.temperature": lambda row: setattr(row.sampling.params, "temperature", float("nan")),
    "sampling.top_p": lambda row: setattr(row.sampling.params, "top_p", -0.5),
    "sampling.min_p": lambda row: setattr(row.sampling.params, "min_p", 1.5),
    "sampling.repetition_penalty": lambda row: setattr(row.sampling.params, "repetition_penalty", 0.0),
    "sampling.presence_penalty": lambda row: setattr(row.sampling.params, "presence_penalty", float("inf")),
    "sampling.frequency_penalty": lambda row: setattr(row.sampling.params, "frequency_penalty", float("-inf")),
    "sampling.max_tokens": lambda row: row.sampling.params.ClearField("max_tokens"),
    "sampling.stop_token_ids": lambda row: row.sampling.params.stop_token_ids.extend(range(65)),
    "sampling.seed": lambda row: row.sampling.params.ClearField("seed"),
    "sampling.top_k": lambda row: row.sampling.params.ClearField("top_k"),
    "sampling.logprobs": lambda row: setattr(row.sampling.params, "logprobs", 65),
    "sampling.prompt_logprobs": lambda row: setattr(row.sampling.params, "prompt_logprobs", 65),
    "sampling.stop": lambda row: row.sampling.params.stop.append("x"),
    "sampling.logit_bias": lambda row: row.sampling.params.logit_bias.update({2: 1.0}),
    "sampling.logit_bias_values": lambda row: row.sampling.logit_bias_ids.append(1),
    "sampling.logit_bias_ids": lambda row: (
        row.sampling.logit_bias_ids.extend([2, 2]),
        row.sampling.logit_bias_values.extend([1.0, 1.0]),
    ),
}


def batch_message(*rows: prefill_pb2.PrefillRow) -> bytes:
    batch = prefill_pb2.PrefillBatch(fingerprint=encode_fingerprint(PLAIN), rows=rows)
    return seal(prefill_pb2.HandoffCommand(prefill_batch=batch))


@pytest.mark.parametrize("field", ROW_FAULTS)
def test_a_faulty_row_fails_alone_naming_the_field(field: str) -> None:
    faulty = encode_row(PLAIN_ROW)
    ROW_FAULTS[field](faulty)
    command = decode_command(batch_message(faulty, encode_row(LOGPROBS_ROW)))
    assert isinstance(command, PrefillBatch)
    failed, served = command.rows
    assert isinstance(failed, RowFailed)
    assert (failed.row, failed.reason, failed.retryable) == (0, RowFailure.INVALID_ROW, False)
    assert failed.message.startswith(f"{field}: ")
    assert served == LOGPROBS_ROW


def test_only_a_row_without_output_may_have_all_its_kv_left_out() -> None:
    for max_tokens, num_held, is_served in ((0, 3, True), (0, 4, False), (1, 3, False)):
        row = replace(
            PLAIN_ROW,
            sampling=ResolvedSampling(seed=1, max_tokens=max_tokens),
            num_held_tokens=(("target", num_held),),
        )
        command = decode_command(batch_message(encode_row(row)))
        assert isinstance(command, PrefillBatch)
        assert (command.rows == (row,)) is is_served


COMMAND_FAULTS = [
    ("command", prefill_pb2.HandoffCommand()),
    ("prefill_batch.fingerprint", prefill_pb2.HandoffCommand(prefill_batch={})),
    ("prefill_batch.rows", prefill_pb2.HandoffCommand(prefill_batch={"fingerprint": encode_fingerprint(PLAIN)})),
]


@pytest.mark.parametrize(("field", "message"), COMMAND_FAULTS)
def test_a_command_with_a_fault_is_refused_naming_the_field(field: str, message: prefill_pb2.HandoffCommand) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_command(seal(message))
    assert caught.value.field == field
