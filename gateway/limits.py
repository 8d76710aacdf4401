"""Limits on the time and memory that one HTTP client can take by its connections, its prompts and its
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.events import Delta, Event
from common.config.settings import GatewaySettings
from gateway.errors import context_exceeded, invalid
from gateway.plan import ChatInput, Plan, TokenIdsInput
from gateway.served_model import ModelCard

MAX_LOGPROBS = 1 << 18
"""The most log-probabilities that an answer keeps. Writing them as JSON takes about 20 MB and 0.3 s."""
LOGPROB_BYTES = 512  # measured: 170 to 600 while the answer grows and is sent, as objects of all APIs and as JSON


class KeptLogprobs:
    """Counts one answer's log-probabilities. `hold`, which `OpenRequests.keeping` yields, takes memory for them."""

    def __init__(self, plan: Plan, hold: Callable[[int], None]) -> None:
        self._plan = plan
        self._hold = hold
        self._num = 0

    def add_prompts(self, num_tokens: int) -> None:
        """Counts the prompts' log-probabilities before they come. The prompts together have `num_tokens` tokens.

        Raises ApiError: 400 if they are too many, 429 if there is no memory for them.
        """
        plan = self._plan
        asked = {"logprobs": plan.num_echoed_logprobs, "prompt_logprobs": plan.num_prompt_logprobs}
        of_token = {param: num_top + 1 for param, num_top in asked.items() if num_top is not None}
        num_times = 1 if isinstance(plan.prompts[0], ChatInput) else plan.n  # chats have them once for all choices
        if of_token:
            most = max(of_token, key=lambda param: of_token[param])
            self._add(num_tokens * num_times * sum(of_token.values()), param=most)

    def add(self, event: Event) -> None:
        """Counts the log-probabilities of an event's output tokens. Raises ApiError like `add_prompts`."""
        if isinstance(event, Delta) and event.logprobs:
            param = "best_of" if self._plan.hides_logprobs else self._plan.params.get("sampling.logprobs", "logprobs")
            self._add(sum(1 + len(position.top) for position in event.logprobs), param=param)

    def _add(self, num: int, *, param: str) -> None:
        self._num += num
        if self._num > MAX_LOGPROBS:
            raise invalid(param, f"the answer has more than {MAX_LOGPROBS} log-probabilities: ask for fewer, or stream")
        self._hold(num * LOGPROB_BYTES)


MAX_SENT_BYTES = 32 << 20
"""The most bytes in the prompts of all choices together. With 32 choices a prompt may have a megabyte, some 250,000
tokens.
"""


def check_prompts(plan: Plan, card: ModelCard) -> None:
    """Raises ApiError if the prompts are too large in bytes, or if token ids exceed the model's context.

    The token count of a text is not checked, because only the decode service knows it.
    """
    for index, prompt in enumerate(plan.prompts):
        is_cut = plan.truncate_prompt_tokens is not None
        if isinstance(prompt, TokenIdsInput) and not is_cut and len(prompt.token_ids) >= card.max_context_tokens:
            param = plan.params_of(index).get("prompt", "prompt")
            raise context_exceeded(
                param,
                prompt=param,
                max_context_tokens=card.max_context_tokens,
                num_prompt_tokens=len(prompt.token_ids),
            )
    num_bytes = sum(prompt.num_bytes for prompt in plan.prompts)
    if num_bytes * plan.best_of > MAX_SENT_BYTES:
        param = "best_of" if plan.best_of > plan.n else "n"
        raise invalid(param, f"{num_bytes} bytes of prompts, {plan.best_of} times, are more than {MAX_SENT_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The limits of a connection.

    head          must be complete `head_timeout_s` after its first byte; the first head of a connection,
                  `head_timeout_s` after the connection was opened (with TLS: after the handshake)
    body          must be complete `body_timeout_s` after the head; after the first `body_grace_s` it must come at
                  `min_body_rate` bytes a second or more, measured over `body_window_s`
    no request    the connection is closed after `keep_alive_s`
    no reading    a client that reads nothing of a pending answer for `client_stall_timeout_s` is dropped
    """

    max_request_bytes: int
    max_choices: int
    request_timeout_s: float | None
    client_stall_timeout_s: float
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    body_grace_s: float = 15.0
    body_window_s: float = 5.0
    min_body_rate: int = 1024
    keep_alive_s: int = 75
    max_head_bytes: int = 32 << 10

    @classmethod
    def of(cls, settings: GatewaySettings) -> HttpLimits:
        return cls(
            max_request_bytes=settings.max_request_bytes,
            max_choices=settings.max_choices,
            request_timeout_s=settings.request_timeout_s,
            client_stall_timeout_s=settings.client_stall_timeout_s,
        )
