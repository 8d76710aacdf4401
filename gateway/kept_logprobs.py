"""Bounds the log-probabilities that an answer keeps until its end, each with those of the likely tokens.

A whole answer keeps those of its prompts and of its output. A stream sends them on, and keeps those that its last event
repeats.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.events import Delta, Event
from gateway.errors import invalid
from gateway.plan import ChatPrompt, Plan

MAX_LOGPROBS = 1 << 18
"""The most log-probabilities that an answer keeps. Writing them as JSON takes about 20 MB and 0.3 s."""
LOGPROB_BYTES = 512  # measured: 170 to 600 while the answer grows and is sent, as objects of all APIs and as JSON


class KeptLogprobs:
    """Counts the log-probabilities of one answer. `hold` takes memory for them, as `OpenRequests.keeping` yields it."""

    def __init__(self, plan: Plan, hold: Callable[[int], None]) -> None:
        self._plan = plan
        self._hold = hold
        self._num = 0

    def add_prompts(self, num_tokens: int) -> None:
        """Counts those of the prompts, which have `num_tokens` tokens together, before any of them has come.

        Raises ApiError: 400 if they are too many, 429 if there is no memory for them.
        """
        plan = self._plan
        asked = {"logprobs": plan.num_echoed_logprobs, "prompt_logprobs": plan.num_prompt_logprobs}
        of_token = {param: num_top + 1 for param, num_top in asked.items() if num_top is not None}
        num_times = 1 if isinstance(plan.prompts[0], ChatPrompt) else plan.n  # the answer to a chat has them once
        if of_token:
            most = max(of_token, key=lambda param: of_token[param])
            self._add(num_tokens * num_times * sum(of_token.values()), param=most)

    def add(self, event: Event) -> None:
        """Counts those of an event's tokens of the output. Raises ApiError as `add_prompts`."""
        if isinstance(event, Delta) and event.logprobs:
            param = "best_of" if self._plan.hides_logprobs else self._plan.params.get("sampling.logprobs", "logprobs")
            self._add(sum(1 + len(position.top) for position in event.logprobs), param=param)

    def _add(self, num: int, *, param: str) -> None:
        self._num += num
        if self._num > MAX_LOGPROBS:
            raise invalid(param, f"the answer has more than {MAX_LOGPROBS} log-probabilities: ask for fewer, or stream")
        self._hold(num * LOGPROB_BYTES)
