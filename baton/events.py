"""The events of a generation: one Started, any number of PromptLogprobs, any number of Delta, one Finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic

from typing_extensions import TypeVar

from common.request_stats import SpeculationCounts, Timings

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
    """The log-probabilities at one output position: the chosen token's, and those of the likeliest
    tokens, best first.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt with its log-probability, and those of the likeliest tokens in its place, best first.

    `token` is as in TokenLogprob. `rank` counts the likelier tokens of its place and itself. The prompt's first token
    has no log-probability: its `logprob` and `rank` are None.
    """

    token_id: int
    token: bytes
    logprob: float | None
    rank: int | None
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a generation. The first `num_reasoning_tokens` of the completion's are its reasoning."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int = 0


def tokens_per_forward(counts: Iterable[SpeculationCounts]) -> float:
    """Returns the mean tokens per forward of the target model over several requests; 1 if no draft was made or
    accepted.
    """
    each = list(counts)
    num_steps = sum(count.num_verify_steps for count in each)
    return 1 + sum(count.num_accepted_tokens for count in each) / num_steps if num_steps else 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """The first event: the request was admitted.

    `seed` is the seed in use; the server draws one if the request has none. `is_reasoning_open` says that the prompt
    has opened the reasoning that the output begins with.
    """

    request_id: str
    num_prompt_tokens: int
    seed: int
    is_reasoning_open: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The next tokens of the prompt, from position `start` on, if `prompt_logprobs` asked for them. All tokens of the
    prompt come before the first Delta.
    """

    start: int
    tokens: tuple[PromptToken, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The output since the last event, never cumulative. Text may come later than its token ids."""

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
    """The whole output of a generation. `logprobs` has one entry per token id if they were asked for, else it is empty.
    So has `prompt_logprobs` for the tokens of the prompt.

    `parsed` is the object that the text is, if the request had a JSON schema: an object of the schema's class, if it is
    one, else what `json.loads` returns. It is None if the output was cut before the model ended it, if the request
    brought a part of it along, and with `include_stop_str_in_output`, because then the text has more.
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
