"""The events of a generation: one Started, any number of PromptLogprobs, any number of Delta, one Finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic

from typing_extensions import TypeVar

from common.telemetry.stats import SpeculationCounts, Timings

ParsedT = TypeVar("ParsedT", default=Any)


class FinishReason(Enum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability.

    `token` is the token's bytes in the text, which need not be valid UTF-8, or the name of a special token.
    """

    token_id: int
    logprob: float
    token: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The log-probabilities at one output position: that of the chosen token, and those of the likeliest tokens, best
    first.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt with its log-probability, and `top`, the likeliest tokens at its position, best first.

    `token` is the token's bytes, as in TokenLogprob. `rank` is 1 for the likeliest token at that position. The prompt's
    first token has no log-probability: its `logprob` and `rank` are None.
    """

    token_id: int
    token: bytes
    logprob: float | None
    rank: int | None
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of tokens of a generation. The first `num_reasoning_tokens` of the completion are its reasoning."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int = 0


def tokens_per_forward(counts: Iterable[SpeculationCounts]) -> float:
    """Returns the mean number of tokens that each forward of the target model gave over several requests; 1 if no draft
    was made or accepted.
    """
    each = list(counts)
    num_steps = sum(count.num_verify_steps for count in each)
    return 1 + sum(count.num_accepted_tokens for count in each) / num_steps if num_steps else 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """The first event: the request was admitted.

    `seed` is the seed in use; the server draws one if the request has none. `is_reasoning_open` says whether the prompt
    ends inside a reasoning section, so that the output begins with reasoning. `prompt_token_ids` is empty unless the
    request asks for them.
    """

    request_id: str
    num_prompt_tokens: int
    seed: int
    is_reasoning_open: bool = False
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The next tokens of the prompt with their log-probabilities, from position `start` on. They are sent only if the
    request set `prompt_logprobs`. All tokens of the prompt come before the first Delta.
    """

    start: int
    tokens: tuple[PromptToken, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The output since the event before, never cumulative. Text may come in a later event than its token ids."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation. `matched_stop` is the stop string or stop token id that ended the output, or
    None.
    """

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    speculation: SpeculationCounts | None


Event = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion(Generic[ParsedT]):
    """The whole output of a generation. `logprobs` has one entry for each token id, and `prompt_logprobs` one for each
    token of the prompt; each is empty if the request did not ask for it.

    If the request had a JSON schema, `parsed` is the output as an object: of the schema's class if the schema is one,
    else what `json.loads` returns. It is None if the output was cut before the model ended it, if the model called
    tools, if the request brought a part of the output along, and with `include_stop_str_in_output`, because the text
    then also has the stop string.
    """

    request_id: str
    seed: int
    text: str
    token_ids: tuple[int, ...]
    prompt_logprobs: tuple[PromptToken, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    speculation: SpeculationCounts | None
    parsed: ParsedT | None = None
