"""The sampling parameters of one request, with all defaults applied."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from common.errors import InvalidRequest
from common.grammar.grammar import Grammar, TokenRules
from common.grammar.reasoning import Reasoning

MAX_LOGIT_BIAS_ENTRIES = 512
MAX_END_TOKEN_IDS = 64
MAX_LOGPROBS = 64
MAX_BAD_WORDS = 128
SPELLINGS_PER_BAD_WORD = 3
"""At the beginning of a text, after a space, and after a line break."""
MAX_UINT32 = (1 << 32) - 1
_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")


@dataclass(frozen=True, slots=True)
class NumberOption:
    """The definition of a sampling option that is a number: its default, range and help text.

    Values lie in [low, high]. If `is_models`, the model's generation_config.json comes before the default.
    """

    name: str
    kind: type[int] | type[float]
    default: float
    low: float
    high: float
    is_models: bool
    help: str

    @property
    def default_text(self) -> str:
        """The value of a request that gives none, in words."""
        return f"the model's, else {self.default}" if self.is_models else str(self.default)

    def fault(self, value: float, *, sent: float | None = None) -> str | None:
        """Returns what is wrong with the value, in words for an error that names the option, or None if the value is
        valid.

        If the value was rounded to a float32, `sent` is the number before that, which counts.
        """
        told = value if sent is None else sent
        if math.isfinite(value) and self.low <= told <= self.high:
            return None
        shown = str(told) if self.kind is int else shown_number(told)
        return f"{shown} is not in [{self.low:g}, {self.high:g}]"


def shown_number(value: float) -> str:
    """Returns the shortest text that tells the number from all others: from all float32s if it is one itself."""
    if abs(value) <= _LARGEST_FLOAT32 and _as_float32(value) == value:
        for digits in (7, 8, 9):
            text = f"{value:.{digits}g}"
            if _as_float32(float(text)) == value:
                return text
    return str(value).removesuffix(".0")


def as_written(value: float) -> float:
    """Returns the shortest decimal number of which protobuf made this float32; another number unchanged."""
    return float(shown_number(value)) if type(value) is float else value


def _as_float32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def _number(default: float, *, low: float, high: float, is_models: bool = False, help: str) -> Any:
    about = {"low": low, "high": high, "is_models": is_models, "help": help}
    return field(default=default, metadata={"default": default, **about})


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """The sampling parameters that both engines use. Stop strings are not among them: the decode service's edge handles
    these.

    `seed` is an unsigned 64-bit number; the edge draws one if the request has none. `eos_token_ids` is empty if EOS is
    ignored. `num_logprobs` is None without logprobs, else the number of top entries besides the chosen token.
    `num_prompt_logprobs` is the same for the tokens of the prompt. With `max_tokens` 0 only the prompt is computed.
    `logit_bias` holds (token id, value) pairs in ascending order of id. With `reasoning`, `grammar` applies only to the
    answer after the reasoning.
    """

    seed: int
    max_tokens: int
    temperature: float = _number(1.0, low=0.0, high=100.0, is_models=True, help="Higher is more varied; 0 is greedy.")
    top_p: float = _number(
        1.0,
        low=0.0,
        high=1.0,
        is_models=True,
        help="Draw from the likeliest tokens that hold this share; 0 is the likeliest.",
    )
    top_k: int = _number(
        0, low=0, high=MAX_UINT32, is_models=True, help="Draw from this many likeliest tokens; 0 is all."
    )
    min_p: float = _number(
        0.0, low=0.0, high=1.0, is_models=True, help="Draw from tokens this likely, the likeliest being 1; 0 is all."
    )
    min_tokens: int = _number(0, low=0, high=MAX_UINT32, help="Tokens of output, at least.")
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = _number(
        1.0, low=1e-3, high=100.0, is_models=True, help="Above 1, tokens that were there are less likely."
    )
    presence_penalty: float = _number(0.0, low=-2.0, high=2.0, help="Taken from the logit of each token of the output.")
    frequency_penalty: float = _number(0.0, low=-2.0, high=2.0, help="The same, for each time it is there.")
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    reasoning: Reasoning | None = None
    token_rules: TokenRules | None = None

    @property
    def constraint_field(self) -> str:
        """The name, for errors, of the request's field that constrains its output: the grammar's, if several do."""
        constraint = self.grammar or self.token_rules
        return "sampling.reasoning" if constraint is None else constraint.request_field

    def constraint_error(self, why: str) -> InvalidRequest:
        """Returns the error of a constrained request whose matcher has failed."""
        constraint = self.grammar or self.token_rules
        assert constraint is not None
        return constraint.failed(why)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether an option, such as top_k, excludes some tokens from being drawn."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def constrains_text(self) -> bool:
        """Whether a grammar, or a limit on reasoning, says what the output's text may be."""
        return self.grammar is not None or (self.reasoning is not None and self.reasoning.max_tokens is not None)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar, a limit on reasoning or rules about tokens limit which tokens may be drawn."""
        return self.constrains_text or self.token_rules is not None

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """All ids that end the output, each once, in a fixed order."""
        return tuple(dict.fromkeys((*self.eos_token_ids, *self.stop_token_ids)))


NUMBER_OPTIONS: Mapping[str, NumberOption] = {
    each.name: NumberOption(
        name=each.name,
        kind=float if each.type == "float" else int,
        **each.metadata,
    )
    for each in fields(ResolvedSampling)
    if each.metadata
}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one output token under the model's unmodified distribution."""

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]
