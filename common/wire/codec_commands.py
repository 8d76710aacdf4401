"""Encodes the commands of a handoff call, with the rows that they carry, as bytes of `baton.v1.HandoffCommand`, and
decodes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from baton.v1 import prefill_pb2, types_pb2
from common.errors import RowFailure
from common.grammar.grammar import Grammar, GrammarKind, TokenRules
from common.grammar.reasoning import Reasoning
from common.peer_text import peer_text
from common.priority import WORST_PRIORITY
from common.rpc.messages import ProtocolError, require, require_at_most
from common.sampling.params import (
    MAX_BAD_WORDS,
    MAX_END_TOKEN_IDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    NUMBER_OPTIONS,
    SPELLINGS_PER_BAD_WORD,
    ResolvedSampling,
)
from common.wire.codec_fingerprint import decode_fingerprint, encode_fingerprint
from common.wire.fingerprint import Fingerprint
from common.wire.framing import seal, unseal
from common.wire.handoff import (
    MAX_CACHE_SALT_CHARS,
    MAX_CALL_FIELDS,
    MAX_CALL_ROWS,
    MAX_CLIENT_CHARS,
    MAX_ROW_TOKENS,
    HandoffRow,
    RowFailed,
)

_EDGE_ONLY = (
    "stop",
    "ignore_eos",
    "n",
    "speculate",
    "logit_bias",
    "skip_special_tokens",
    "shown_special_tokens",
    "include_stop_str_in_output",
    "bad_words",
)
"""Fields of SamplingParams that no row has."""
_OTHER_FIELDS = 1024
"""The most protobuf fields besides rows: enough for a fingerprint of 64 layer groups and seed columns."""
_MAX_HELD_GROUPS = 16
_MAX_ENTRIES = 65_536
"""The most entries of the other lists of a row. `_decode_row` then checks the exact limit of each list."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The first command of a Handoff call: rows to prefill.

    If the receiver cannot decode a row, `rows` has a RowFailed in its place, and the other rows are prefilled.
    `pool_secret` is what the decode service has read at the start of the prefill service's KV pool, which proves that
    it can read there; empty if it cannot.
    """

    fingerprint: Fingerprint
    rows: tuple[HandoffRow | RowFailed, ...]
    pool_secret: bytes = b""


@dataclass(frozen=True, slots=True)
class CancelRows:
    """The command to cancel rows of its Handoff call, given by their index in the call."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseSegments:
    """The command that gives lent KV segments back to the prefill service, whose pool holds them.

    `numbers` has the number of each segment's ticket.
    """

    numbers: tuple[int, ...]


HandoffCommand = PrefillBatch | CancelRows | ReleaseSegments


def encode_prefill_batch(fingerprint: Fingerprint, rows: Sequence[HandoffRow], *, pool_secret: bytes = b"") -> bytes:
    """Returns the bytes of the command to prefill `rows`. PrefillBatch explains `pool_secret`."""
    batch = prefill_pb2.PrefillBatch(
        fingerprint=encode_fingerprint(fingerprint),
        rows=[encode_row(row) for row in rows],
        pool_secret=pool_secret,
    )
    return seal(prefill_pb2.HandoffCommand(prefill_batch=batch))


def encode_cancel_rows(rows: Sequence[int]) -> bytes:
    """Returns the bytes of the command to cancel rows, given by index."""
    return seal(prefill_pb2.HandoffCommand(cancel_rows=prefill_pb2.CancelRows(rows=rows)))


def encode_release_segments(numbers: Sequence[int]) -> bytes:
    """Returns the bytes of the command that gives lent KV segments back. `numbers` are the segments' ticket numbers."""
    return seal(prefill_pb2.HandoffCommand(release_segments=prefill_pb2.ReleaseSegments(numbers=numbers)))


def decode_command(data: bytes, *, max_rows: int = MAX_CALL_ROWS) -> HandoffCommand:
    """Returns the command in `data`.

    Raises ProtocolError, which names the field, if the command is invalid; if it has too many fields, it is not parsed.
    Raises FingerprintMismatch for a PrefillBatch of another protocol version.
    """
    message, payload = unseal(prefill_pb2.HandoffCommand, data, most_fields=MAX_CALL_FIELDS + _OTHER_FIELDS)
    require(not len(payload), "payload", "is no command's")
    match message.WhichOneof("command"):
        case "prefill_batch":
            batch = message.prefill_batch
            require(batch.HasField("fingerprint"), "prefill_batch.fingerprint", "is absent")
            require(len(batch.rows) > 0, "prefill_batch.rows", "is empty")
            require_at_most(max_rows, "prefill_batch.rows", len(batch.rows))
            for index, row in enumerate(batch.rows):
                _require_short_lists(f"prefill_batch.rows[{index}]", row)
            return PrefillBatch(
                fingerprint=decode_fingerprint(batch.fingerprint),
                rows=tuple(_row_or_failure(index, row) for index, row in enumerate(batch.rows)),
                pool_secret=batch.pool_secret,
            )
        case "cancel_rows":
            cancel = message.cancel_rows
            require_at_most(max_rows, "cancel_rows.rows", len(cancel.rows))
            return CancelRows(rows=tuple(cancel.rows))
        case "release_segments":
            release = message.release_segments
            require(len(release.numbers) > 0, "release_segments.numbers", "is empty")
            require_at_most(_MAX_ENTRIES, "release_segments.numbers", len(release.numbers))
            return ReleaseSegments(numbers=tuple(release.numbers))
        case _:
            raise ProtocolError("command", "is none of the known kinds")


def _require_short_lists(path: str, row: prefill_pb2.PrefillRow) -> None:
    """Raises ProtocolError if a list of the row is too long to be read at all.

    The model's own limit of token ids is checked later.
    """
    require_at_most(MAX_ROW_TOKENS, f"{path}.token_ids", len(row.token_ids))
    require_at_most(_MAX_HELD_GROUPS, f"{path}.num_held_tokens", len(row.num_held_tokens))
    params = row.sampling.params
    lists = {"stop_token_ids": params.stop_token_ids, "eos_token_ids": row.sampling.eos_token_ids}
    lists |= {name: getattr(row.sampling, name) for name in ("logit_bias_ids", "logit_bias_values")}
    for name, entries in lists.items():
        require_at_most(_MAX_ENTRIES, f"{path}.sampling.{name}", len(entries))


def _row_or_failure(index: int, message: prefill_pb2.PrefillRow) -> HandoffRow | RowFailed:
    """Returns the row, or a RowFailed if it is invalid."""
    try:
        return _decode_row(message)
    except ProtocolError as error:
        return RowFailed(row=index, reason=RowFailure.INVALID_ROW, retryable=False, message=str(error))


def encode_row(row: HandoffRow) -> prefill_pb2.PrefillRow:
    """Returns the message of `row`. Floats are sent as float32, because both engines compute with that."""
    return prefill_pb2.PrefillRow(
        request_id=row.request_id,
        attempt=row.attempt,
        choice_index=row.choice_index,
        token_ids=row.token_ids,
        prompt_len=row.prompt_len,
        num_held_tokens=dict(row.num_held_tokens),
        sampling=_encode_sampling(row.sampling),
        time_left_ms=row.time_left_ms,
        traceparent=row.traceparent,
        cache_salt=row.cache_salt,
        priority=row.priority,
        client=row.client,
    )


def _decode_row(message: prefill_pb2.PrefillRow) -> HandoffRow:
    """Returns the row in `message`. Raises ProtocolError, which names the field, if it is invalid.

    Limits that depend on the model (vocabulary, context length) are not checked here.
    """
    require(bool(message.request_id), "request_id", "is empty")
    require(len(message.token_ids) > 0, "token_ids", "is empty")
    require(
        1 <= message.prompt_len <= len(message.token_ids),
        "prompt_len",
        f"{message.prompt_len} is not in 1..{len(message.token_ids)}, the number of token_ids",
    )
    held = {num for num in message.num_held_tokens.values() if num}
    require(len(held) <= 1, "num_held_tokens", "differs between layer groups")
    num_tokens = len(message.token_ids)
    require(message.HasField("sampling"), "sampling", "is absent")
    sampling = _decode_sampling(message.sampling)
    most_held = num_tokens - 1 if sampling.max_tokens else num_tokens
    require(all(num <= most_held for num in held), "num_held_tokens", f"leaves none of {num_tokens} tokens to send")
    num_salt_chars = len(message.cache_salt)
    require(
        num_salt_chars <= MAX_CACHE_SALT_CHARS,
        "cache_salt",
        f"has {num_salt_chars} characters, more than {MAX_CACHE_SALT_CHARS}",
    )
    require(
        abs(message.priority) <= WORST_PRIORITY,
        "priority",
        f"{message.priority} is not in -{WORST_PRIORITY}..{WORST_PRIORITY}",
    )
    require(len(message.client) <= MAX_CLIENT_CHARS, "client", f"has more than {MAX_CLIENT_CHARS} characters")
    return HandoffRow(
        request_id=peer_text(message.request_id),
        attempt=message.attempt,
        choice_index=message.choice_index,
        token_ids=tuple(message.token_ids),
        prompt_len=message.prompt_len,
        num_held_tokens=tuple(sorted(message.num_held_tokens.items())),
        sampling=sampling,
        time_left_ms=message.time_left_ms,
        traceparent=message.traceparent,
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        priority=message.priority,
        client=message.client,
    )


def _encode_sampling(sampling: ResolvedSampling) -> prefill_pb2.ResolvedSampling:
    rules = sampling.token_rules or TokenRules()
    params = types_pb2.SamplingParams(
        **{name: getattr(sampling, name) for name in NUMBER_OPTIONS},
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.num_logprobs,
        allowed_token_ids=rules.allowed_ids,
        prompt_logprobs=sampling.num_prompt_logprobs,
    )
    if sampling.grammar is not None:
        _set_grammar(params, sampling.grammar)
    if (reasoning := sampling.reasoning) is not None:
        params.reasoning.CopyFrom(
            types_pb2.Reasoning(
                start=reasoning.start, end=reasoning.end, is_open=reasoning.is_open, max_tokens=reasoning.max_tokens
            )
        )
    return prefill_pb2.ResolvedSampling(
        params=params,
        eos_token_ids=sampling.eos_token_ids,
        logit_bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        logit_bias_values=[value for _, value in sampling.logit_bias],
        forbidden=[prefill_pb2.TokenSequence(ids=sequence) for sequence in rules.forbidden],
    )


def _decode_sampling(message: prefill_pb2.ResolvedSampling) -> ResolvedSampling:
    params = message.params
    always_sent: Sequence[Any] = ("seed", "max_tokens", *NUMBER_OPTIONS)
    for name in always_sent:
        require(params.HasField(name), f"sampling.{name}", "is absent")
    numbers = {name: getattr(params, name) for name in NUMBER_OPTIONS}
    for name, option in NUMBER_OPTIONS.items():
        fault = option.fault(numbers[name])
        require(fault is None, f"sampling.{name}", fault or "")
    num_end_ids = len({*params.stop_token_ids, *message.eos_token_ids})
    require(num_end_ids <= MAX_END_TOKEN_IDS, "sampling.stop_token_ids", f"has more than {MAX_END_TOKEN_IDS}")
    for name in ("logprobs", "prompt_logprobs"):
        num_top = getattr(params, name)
        require(num_top <= MAX_LOGPROBS, f"sampling.{name}", f"{num_top} is more than {MAX_LOGPROBS}")
    for name in _EDGE_ONLY:
        require(not getattr(params, name), f"sampling.{name}", "does not belong in a row")
    bias_ids, bias_values = message.logit_bias_ids, message.logit_bias_values
    require(len(bias_ids) == len(bias_values), "sampling.logit_bias_values", "does not match logit_bias_ids")
    require(len(bias_ids) <= MAX_LOGIT_BIAS_ENTRIES, "sampling.logit_bias_ids", "has too many entries")
    for name, ids in (("logit_bias_ids", bias_ids), ("allowed_token_ids", params.allowed_token_ids)):
        is_ascending = all(one < other for one, other in pairwise(ids))
        require(is_ascending, f"sampling.{name}", "is not in ascending order")
    require(all(map(math.isfinite, bias_values)), "sampling.logit_bias_values", "is not finite")
    reasoning = reasoning_of(params)
    if reasoning is not None and (wrong := reasoning.fault()) is not None:
        raise ProtocolError(f"sampling.reasoning.{wrong[0]}", wrong[1])
    require(reasoning is None or reasoning.is_open is not None, "sampling.reasoning.is_open", "is absent")
    return ResolvedSampling(
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        logit_bias=tuple(zip(bias_ids, bias_values, strict=True)),
        num_logprobs=params.logprobs if params.HasField("logprobs") else None,
        num_prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        grammar=grammar_of(params),
        reasoning=reasoning,
        token_rules=_decode_rules(message),
        **numbers,
    )


def _decode_rules(message: prefill_pb2.ResolvedSampling) -> TokenRules | None:
    most = MAX_BAD_WORDS * SPELLINGS_PER_BAD_WORD
    require(len(message.forbidden) <= most, "sampling.forbidden", f"has more than {most} sequences")
    require(all(sequence.ids for sequence in message.forbidden), "sampling.forbidden", "has an empty sequence")
    rules = TokenRules(
        tuple(message.params.allowed_token_ids), tuple(tuple(sequence.ids) for sequence in message.forbidden)
    )
    return None if rules == TokenRules() else rules


def grammar_of(params: types_pb2.SamplingParams) -> Grammar | None:
    """Returns the grammar in `params`, or None if there is none."""
    name = params.WhichOneof("grammar")
    if name is None:
        return None
    if name == GrammarKind.CHOICE.value:
        return Grammar.of_choices(params.choice.texts)
    return Grammar(GrammarKind(name), getattr(params, name), opens_objects=params.open_objects)


def reasoning_of(params: types_pb2.SamplingParams) -> Reasoning | None:
    """Returns where the output's reasoning is, or None if the request does not say. The values are not checked."""
    if not params.HasField("reasoning"):
        return None
    message = params.reasoning
    return Reasoning(
        message.start,
        message.end,
        is_open=message.is_open if message.HasField("is_open") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
    )


def _set_grammar(params: types_pb2.SamplingParams, grammar: Grammar) -> None:
    if grammar.kind is GrammarKind.CHOICE:
        params.choice.CopyFrom(types_pb2.Choice(texts=grammar.choices))
    else:
        setattr(params, grammar.kind.value, grammar.text)
        params.open_objects = grammar.opens_objects
