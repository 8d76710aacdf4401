"""Refuses prompts that are too much for the gateway's event loop and memory. A prompt is sent once for each choice."""

from __future__ import annotations

from gateway.errors import context_exceeded, invalid
from gateway.plan import Plan, TokenIdsPrompt
from gateway.served_model import ModelCard

MAX_SENT_BYTES = 32 << 20
"""The most bytes in the prompts of all choices together. With 32 choices a prompt may have a megabyte, some 250,000
tokens.
"""


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
