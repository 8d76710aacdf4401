"""Refuses prompts, and log-probabilities of prompts, that are too much for the gateway's event loop and memory.

A prompt is sent once for each choice, and each choice of a completion comes with the log-probabilities of its prompt.
"""

from __future__ import annotations

from gateway.errors import context_exceeded, invalid
from gateway.plan import ChatPrompt, Plan, TokenIdsPrompt
from gateway.served_model import ModelCard

MAX_SENT_BYTES = 32 << 20
"""The most bytes in the prompts of all choices together. With 32 choices a prompt may have a megabyte, some 250,000
tokens.
"""

MAX_PROMPT_LOGPROBS = 1 << 18
"""The most log-probabilities of prompts in an answer that is not streamed. Writing them as
JSON takes about 20 MB and 0.3 s.
"""
_LOGPROB_BYTES = 512  # measured: 300 to 600, as objects of both APIs and as JSON


def check_prompts(plan: Plan, card: ModelCard) -> None:
    """Raises ApiError if the prompts are too large in bytes, or if token ids exceed the model's context.

    The token count of a text is not checked, because only the decode service knows it.
    """
    for prompt in plan.prompts:
        is_cut = plan.truncate_prompt_tokens is not None
        if isinstance(prompt, TokenIdsPrompt) and not is_cut and len(prompt.token_ids) >= card.max_context_tokens:
            raise context_exceeded(
                "prompt",
                prompt="prompt",
                max_context_tokens=card.max_context_tokens,
                num_prompt_tokens=len(prompt.token_ids),
            )
    num_bytes = sum(prompt.num_bytes for prompt in plan.prompts)
    if num_bytes * plan.best_of > MAX_SENT_BYTES:
        param = "best_of" if plan.best_of > plan.n else "n"
        raise invalid(param, f"{num_bytes} bytes of prompts, {plan.best_of} times, are more than {MAX_SENT_BYTES}")


def prompt_logprob_bytes(plan: Plan, num_prompt_tokens: int) -> int:
    """Returns about how many bytes the log-probabilities of its prompts take in a whole answer, each with those of the
    likely tokens. Raises ApiError if they are too many.

    `num_prompt_tokens` counts the tokens of all prompts together.
    """
    asked = {"logprobs": plan.num_echoed_logprobs, "prompt_logprobs": plan.num_prompt_logprobs}
    of_token = {param: num_top + 1 for param, num_top in asked.items() if num_top is not None}
    num_times = 1 if isinstance(plan.prompts[0], ChatPrompt) else plan.n  # the answer to a chat has them once
    num = num_prompt_tokens * num_times * sum(of_token.values())
    if num > MAX_PROMPT_LOGPROBS:
        raise invalid(
            max(of_token, key=lambda param: of_token[param]),
            f"{num} log-probabilities of prompts in all choices are more than {MAX_PROMPT_LOGPROBS}",
        )
    return num * _LOGPROB_BYTES
