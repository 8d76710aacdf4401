"""Refuses prompts that are too large before requests are built from them: each choice sends its own prompt."""

from __future__ import annotations

from gateway.errors import context_exceeded, invalid
from gateway.plan import Plan, TokenIdsPrompt
from gateway.served_model import ModelCard

MAX_SENT_BYTES = 32 << 20
"""Bound on all choices' prompts together. With 32 choices a prompt may be a megabyte, some 250,000 tokens."""


def check_prompts(plan: Plan, card: ModelCard) -> None:
    """Raises ApiError. Only the decode service knows how many tokens a text has."""
    for prompt in plan.prompts:
        if isinstance(prompt, TokenIdsPrompt) and len(prompt.token_ids) >= card.max_context_tokens:
            raise context_exceeded(
                "prompt",
                prompt="prompt",
                max_context_tokens=card.max_context_tokens,
                num_prompt_tokens=len(prompt.token_ids),
            )
    num_bytes = sum(prompt.num_bytes for prompt in plan.prompts)
    if num_bytes * plan.n > MAX_SENT_BYTES:
        raise invalid("n", f"{num_bytes} bytes of prompts, {plan.n} times, are more than {MAX_SENT_BYTES}")
