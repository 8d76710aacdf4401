"""The range of every sampling value. Everything here raises InvalidRequest naming the field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.v1 import types_pb2
from common.errors import InvalidRequest
from common.model.sampling_params import MAX_END_TOKEN_IDS, MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS, ResolvedSampling

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MIN_TEMPERATURE = 1e-3  # below it, 0 aside, logits divided by it leave float16 and say the same as greedy
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 1e-3
MAX_REPETITION_PENALTY = 1e2


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Checked, with every default but those of `seed` and `max_tokens`, which are None when absent."""

    seed: int | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens: int
    speculates: bool
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    num_logprobs: int | None

    def resolve(self, max_tokens: int, seed: int) -> ResolvedSampling:
        return ResolvedSampling(
            seed=seed,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            eos_token_ids=self.eos_token_ids,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            num_logprobs=self.num_logprobs,
        )


def check_sampling(params: types_pb2.SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> SamplingRequest:
    if params.HasField("n") and params.n != 1:
        raise InvalidRequest(
            "sampling.n", f"only 1 is served, not {params.n}: send several requests, each with a choice_index"
        )
    if params.HasField("response_format"):
        raise InvalidRequest("sampling.response_format", "is not served")
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidRequest("sampling.max_tokens", "must be at least 1")
    temperature = params.temperature if params.HasField("temperature") else 1.0
    if temperature != 0.0:
        _check_range("sampling.temperature", temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, or_zero=True)
    return SamplingRequest(
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=_top_p(params),
        top_k=min(params.top_k, vocab_size),
        min_p=_in_range("sampling.min_p", params.min_p, 0.0, 1.0),
        min_tokens=params.min_tokens,
        speculates=params.speculate if params.HasField("speculate") else True,
        stop_strings=_stop_strings(params.stop),
        stop_token_ids=_stop_token_ids(params, vocab_size, len(eos_token_ids)),
        eos_token_ids=() if params.ignore_eos else tuple(eos_token_ids),
        repetition_penalty=_repetition_penalty(params),
        presence_penalty=_in_range("sampling.presence_penalty", params.presence_penalty, -2.0, 2.0),
        frequency_penalty=_in_range("sampling.frequency_penalty", params.frequency_penalty, -2.0, 2.0),
        logit_bias=_logit_bias(params, vocab_size),
        num_logprobs=_num_logprobs(params, vocab_size),
    )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    checked = tuple(token_ids)
    for index, token_id in enumerate(checked):
        if token_id >= vocab_size:
            raise InvalidRequest(field, f"id {token_id} at index {index} is not in the vocabulary of {vocab_size}")
    return checked


def _check_range(field: str, value: float, low: float, high: float, *, or_zero: bool = False) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(field, f"{value} is not {'0 or ' if or_zero else ''}in [{low:g}, {high:g}]")


def _in_range(field: str, value: float, low: float, high: float) -> float:
    """An absent field reads as 0, which is the default of every field checked with this."""
    _check_range(field, value, low, high)
    return value


def _top_p(params: types_pb2.SamplingParams) -> float:
    if not params.HasField("top_p"):
        return 1.0
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest("sampling.top_p", f"{params.top_p} is not in (0, 1]")
    return params.top_p


def _repetition_penalty(params: types_pb2.SamplingParams) -> float:
    if not params.HasField("repetition_penalty"):
        return 1.0
    _check_range(
        "sampling.repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    )
    return params.repetition_penalty


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("sampling.stop", f"{len(stop)} strings are more than {MAX_STOP_STRINGS}")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequest("sampling.stop", f"each must have 1 to {MAX_STOP_STRING_CHARS} characters")
    return tuple(dict.fromkeys(stop))


def _stop_token_ids(params: types_pb2.SamplingParams, vocab_size: int, num_eos: int) -> tuple[int, ...]:
    if len(params.stop_token_ids) + num_eos > MAX_END_TOKEN_IDS:
        raise InvalidRequest("sampling.stop_token_ids", f"more than {MAX_END_TOKEN_IDS - num_eos} ids")
    return tuple(dict.fromkeys(check_token_ids("sampling.stop_token_ids", params.stop_token_ids, vocab_size)))


def _logit_bias(params: types_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(params.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequest("sampling.logit_bias", f"more than {MAX_LOGIT_BIAS_ENTRIES} entries")
    check_token_ids("sampling.logit_bias", params.logit_bias, vocab_size)
    for value in params.logit_bias.values():
        _check_range("sampling.logit_bias", value, -100.0, 100.0)
    return tuple(sorted(params.logit_bias.items()))


def _num_logprobs(params: types_pb2.SamplingParams, vocab_size: int) -> int | None:
    if not params.HasField("logprobs"):
        return None
    if params.logprobs > min(MAX_LOGPROBS, vocab_size):
        raise InvalidRequest("sampling.logprobs", f"{params.logprobs} is more than {min(MAX_LOGPROBS, vocab_size)}")
    return params.logprobs
