"""How one request's tokens are drawn, with every default applied."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOGIT_BIAS_ENTRIES = 512
MAX_END_TOKEN_IDS = 64
MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """What both engines compute with; stop strings stay at the edge.

    `seed` is an unsigned 64-bit number, drawn at the edge when the request had none. `eos_token_ids` is empty when EOS
    is ignored. `num_logprobs` is None without logprobs, else the number of top entries beside the chosen token's.
    `logit_bias` holds (token id, value) pairs in ascending order of id.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every id that ends the output, each once, in a fixed order."""
        return tuple(dict.fromkeys((*self.eos_token_ids, *self.stop_token_ids)))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one output token under the model's unmodified distribution."""

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]
