"""The events of a generation: one Started, any number of Delta, one Finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from common.request_stats import SpeculationCounts, Timings


class FinishReason(Enum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`token` has the token's bytes in text, which need not be UTF-8, or a special token's name."""

    token_id: int
    logprob: float
    token: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """One output token's log-probability, and the most likely tokens of its position, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int


def tokens_per_forward(counts: Iterable[SpeculationCounts]) -> float:
    """Tokens per forward of the target over several requests; 1 if no draft was accepted or made."""
    each = list(counts)
    num_steps = sum(count.num_verify_steps for count in each)
    return 1 + sum(count.num_accepted_tokens for count in each) / num_steps if num_steps else 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted. `seed` is the one in use, drawn by the server when the request brought none."""

    request_id: str
    num_prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new since the last event, never cumulative. Text may lag the ids."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """`matched_stop` is the stop string or the stop token id that ended the output, if one did."""

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    speculation: SpeculationCounts | None


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation. `logprobs` has one entry per token id when they were asked for, else none."""

    request_id: str
    seed: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    speculation: SpeculationCounts | None
