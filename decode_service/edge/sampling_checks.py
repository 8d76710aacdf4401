"""Checks the range of every sampling value. Failed checks raise InvalidRequest, naming the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from baton.v1 import types_pb2
from common.errors import InvalidRequest
from common.grammar.grammar import TokenRules
from common.grammar.reasoning import Reasoning
from common.sampling.params import (
    MAX_BAD_WORDS,
    MAX_END_TOKEN_IDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    NUMBER_OPTIONS,
    NumberOption,
    ResolvedSampling,
    shown_number,
)
from common.wire.codec_commands import grammar_of, reasoning_of

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_SHOWN_SPECIAL_TOKENS = 32
MAX_SHOWN_CHARS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """The checked sampling values of a request. `seed` and `max_tokens` are None if the request does not set them.

    `skips_special_tokens` and `shown_special_tokens` say which special tokens the text shows, and `includes_stop`
    whether it shows the stop string or token that ends the output. `resolved` has all other values, with placeholders
    for `seed` and `max_tokens`, and without token rules for `bad_words`, which need a tokenizer.
    """

    seed: int | None
    max_tokens: int | None
    speculates: bool
    stop_strings: tuple[str, ...]
    skips_special_tokens: bool
    shown_special_tokens: tuple[str, ...]
    includes_stop: bool
    bad_words: tuple[str, ...]
    resolved: ResolvedSampling

    def resolve(self, max_tokens: int, seed: int) -> ResolvedSampling:
        return replace(self.resolved, max_tokens=max_tokens, seed=seed)


def check_sampling(
    params: types_pb2.SamplingParams,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    *,
    defaults: Mapping[str, float],
) -> SamplingRequest:
    """Checks the sampling values of a request and returns them. `defaults` are the model's own values for absent
    options.
    """
    if params.HasField("n") and params.n != 1:
        raise InvalidRequest(
            "sampling.n", f"only 1 is served, not {params.n}: send several requests, each with a choice_index"
        )
    grammar = grammar_of(params)
    if grammar is not None and params.ignore_eos:
        raise InvalidRequest("sampling.ignore_eos", "does not go with a grammar, which says where the output ends")
    numbers: Mapping[Any, NumberOption] = NUMBER_OPTIONS
    given = [option for name, option in numbers.items() if params.HasField(name)]
    resolved = ResolvedSampling(
        seed=0,
        max_tokens=1,
        stop_token_ids=_stop_token_ids(params, vocab_size, len(eos_token_ids)),
        eos_token_ids=() if params.ignore_eos else tuple(eos_token_ids),
        logit_bias=_logit_bias(params, vocab_size),
        num_logprobs=_num_logprobs(params, "logprobs", vocab_size),
        num_prompt_logprobs=_num_logprobs(params, "prompt_logprobs", vocab_size),
        grammar=grammar,
        reasoning=_reasoning(params),
        token_rules=_token_rules(params, vocab_size),
        **{**defaults, **{option.name: _number(params, option) for option in given}},
    )
    return SamplingRequest(
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        speculates=params.speculate if params.HasField("speculate") else True,
        stop_strings=_stop_strings(params.stop),
        skips_special_tokens=params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        shown_special_tokens=_shown_special_tokens(params.shown_special_tokens),
        includes_stop=params.include_stop_str_in_output,
        bad_words=_bad_words(params.bad_words),
        resolved=replace(resolved, top_k=min(resolved.top_k, vocab_size)),
    )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    checked = tuple(token_ids)
    for index, token_id in enumerate(checked):
        if token_id >= vocab_size:
            raise InvalidRequest(field, f"id {token_id} at index {index} is not in the vocabulary of {vocab_size}")
    return checked


def _number(params: types_pb2.SamplingParams, option: NumberOption) -> Any:
    value = getattr(params, option.name)
    if (fault := option.fault(value)) is not None:
        raise InvalidRequest(f"sampling.{option.name}", fault)
    return value


def _reasoning(params: types_pb2.SamplingParams) -> Reasoning | None:
    reasoning = reasoning_of(params)
    if reasoning is not None and (fault := reasoning.fault()) is not None:
        raise InvalidRequest(f"sampling.reasoning.{fault[0]}", fault[1])
    return reasoning


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("sampling.stop", f"{len(stop)} strings are more than {MAX_STOP_STRINGS}")
    _check_lengths("sampling.stop", stop, least=1, most=MAX_STOP_STRING_CHARS)
    return tuple(dict.fromkeys(stop))


def _check_lengths(field: str, texts: Sequence[str], *, least: int, most: int) -> None:
    for index, text in enumerate(texts):
        if not least <= len(text) <= most:
            raise InvalidRequest(
                field, f"has {len(text)} characters at index {index}, each must have {least} to {most}"
            )


def _shown_special_tokens(names: Sequence[str]) -> tuple[str, ...]:
    if len(names) > MAX_SHOWN_SPECIAL_TOKENS:
        too_many = f"{len(names)} names are more than {MAX_SHOWN_SPECIAL_TOKENS}"
        raise InvalidRequest("sampling.shown_special_tokens", too_many)
    _check_lengths("sampling.shown_special_tokens", names, least=0, most=MAX_SHOWN_CHARS)
    return tuple(names)


def _bad_words(bad_words: Sequence[str]) -> tuple[str, ...]:
    if len(bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest("sampling.bad_words", f"{len(bad_words)} texts are more than {MAX_BAD_WORDS}")
    _check_lengths("sampling.bad_words", bad_words, least=1, most=MAX_BAD_WORD_CHARS)
    return tuple(bad_words)


def _token_rules(params: types_pb2.SamplingParams, vocab_size: int) -> TokenRules | None:
    if (num_ids := len(params.allowed_token_ids)) > vocab_size:
        too_many = f"{num_ids} ids are more than the vocabulary of {vocab_size}"
        raise InvalidRequest("sampling.allowed_token_ids", too_many)
    allowed_ids = check_token_ids("sampling.allowed_token_ids", params.allowed_token_ids, vocab_size)
    return TokenRules(tuple(sorted(set(allowed_ids)))) if allowed_ids else None


def _stop_token_ids(params: types_pb2.SamplingParams, vocab_size: int, num_eos: int) -> tuple[int, ...]:
    if (num_ids := len(params.stop_token_ids)) > (most := MAX_END_TOKEN_IDS - num_eos):
        raise InvalidRequest("sampling.stop_token_ids", f"{num_ids} ids are more than {most}")
    return tuple(dict.fromkeys(check_token_ids("sampling.stop_token_ids", params.stop_token_ids, vocab_size)))


def _logit_bias(params: types_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if (num_entries := len(params.logit_bias)) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequest("sampling.logit_bias", f"{num_entries} entries are more than {MAX_LOGIT_BIAS_ENTRIES}")
    for token_id, value in params.logit_bias.items():
        if token_id >= vocab_size:
            raise InvalidRequest("sampling.logit_bias", f"id {token_id} is not in the vocabulary of {vocab_size}")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            told = f"{shown_number(value)} of id {token_id}"
            raise InvalidRequest("sampling.logit_bias", f"{told} is not in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
    return tuple(sorted(params.logit_bias.items()))


def _num_logprobs(
    params: types_pb2.SamplingParams, name: Literal["logprobs", "prompt_logprobs"], vocab_size: int
) -> int | None:
    if not params.HasField(name):
        return None
    number: int = getattr(params, name)
    if number > min(MAX_LOGPROBS, vocab_size):
        raise InvalidRequest(f"sampling.{name}", f"{number} is more than {min(MAX_LOGPROBS, vocab_size)}")
    return number
