"""HandoffRow and its sampling to and from `baton.v1`."""

from __future__ import annotations

import math
from itertools import pairwise

from baton.v1 import prefill_pb2
from common.model.sampling_params import MAX_END_TOKEN_IDS, MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS, ResolvedSampling
from common.peer_text import peer_text
from common.rpc.messages import require
from common.wire.handoff import HandoffRow

_NO_LOGPROBS = -1


def encode_row(row: HandoffRow) -> prefill_pb2.PrefillRow:
    """Floats travel as float32, which is what both engines compute with."""
    return prefill_pb2.PrefillRow(
        request_id=row.request_id,
        attempt=row.attempt,
        choice_index=row.choice_index,
        token_ids=row.token_ids,
        prompt_len=row.prompt_len,
        num_held_tokens=dict(row.num_held_tokens),
        sampling=_encode_sampling(row.sampling),
        deadline_unix_ms=row.deadline_unix_ms,
        traceparent=row.traceparent,
    )


def decode_row(message: prefill_pb2.PrefillRow) -> HandoffRow:
    """Raises ProtocolError naming the field. What depends on the model (vocabulary, context) is not checked here."""
    require(bool(message.request_id), "request_id", "is empty")
    require(len(message.token_ids) > 0, "token_ids", "is empty")
    require(
        1 <= message.prompt_len <= len(message.token_ids),
        "prompt_len",
        f"{message.prompt_len} is not in 1..{len(message.token_ids)}, the number of token_ids",
    )
    for group, num_held in message.num_held_tokens.items():
        require(num_held == 0, "num_held_tokens", f"{group!r}: prefix reuse is not served")
    require(message.HasField("sampling"), "sampling", "is absent")
    return HandoffRow(
        request_id=peer_text(message.request_id),
        attempt=message.attempt,
        choice_index=message.choice_index,
        token_ids=tuple(message.token_ids),
        prompt_len=message.prompt_len,
        num_held_tokens=tuple(sorted(message.num_held_tokens.items())),
        sampling=_decode_sampling(message.sampling),
        deadline_unix_ms=message.deadline_unix_ms,
        traceparent=message.traceparent,
    )


def _encode_sampling(sampling: ResolvedSampling) -> prefill_pb2.ResolvedSampling:
    return prefill_pb2.ResolvedSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        eos_token_ids=sampling.eos_token_ids,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        logit_bias_values=[value for _, value in sampling.logit_bias],
        num_logprobs=_NO_LOGPROBS if sampling.num_logprobs is None else sampling.num_logprobs,
    )


def _decode_sampling(message: prefill_pb2.ResolvedSampling) -> ResolvedSampling:
    for name, value, low, high in (
        ("temperature", message.temperature, 0.0, math.inf),
        ("top_p", message.top_p, 0.0, 1.0),
        ("min_p", message.min_p, 0.0, 1.0),
        ("repetition_penalty", message.repetition_penalty, 0.0, math.inf),
        ("presence_penalty", message.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", message.frequency_penalty, -math.inf, math.inf),
    ):
        require(math.isfinite(value) and low <= value <= high, f"sampling.{name}", f"{value} is out of range")
    require(message.top_p > 0, "sampling.top_p", "is zero")
    require(message.repetition_penalty > 0, "sampling.repetition_penalty", "is zero")
    require(message.max_tokens >= 1, "sampling.max_tokens", "is zero")
    num_end_ids = len({*message.stop_token_ids, *message.eos_token_ids})
    require(num_end_ids <= MAX_END_TOKEN_IDS, "sampling.stop_token_ids", f"has more than {MAX_END_TOKEN_IDS}")
    require(
        _NO_LOGPROBS <= message.num_logprobs <= MAX_LOGPROBS,
        "sampling.num_logprobs",
        f"{message.num_logprobs} is not in {_NO_LOGPROBS}..{MAX_LOGPROBS}",
    )
    bias_ids, bias_values = message.logit_bias_ids, message.logit_bias_values
    require(len(bias_ids) == len(bias_values), "sampling.logit_bias_values", "does not match logit_bias_ids")
    require(len(bias_ids) <= MAX_LOGIT_BIAS_ENTRIES, "sampling.logit_bias_ids", "has too many entries")
    require(
        all(one < other for one, other in pairwise(bias_ids)),
        "sampling.logit_bias_ids",
        "is not in ascending order",
    )
    require(all(map(math.isfinite, bias_values)), "sampling.logit_bias_values", "is not finite")
    return ResolvedSampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(bias_ids, bias_values, strict=True)),
        num_logprobs=None if message.num_logprobs == _NO_LOGPROBS else message.num_logprobs,
    )
