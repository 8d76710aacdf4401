"""Prompts that are refused before anything is built of them: each choice sends its prompt by itself."""

from __future__ import annotations

from gateway.errors import CONTEXT_LENGTH_EXCEEDED, invalid
from gateway.plan import Plan, TokenIdsPrompt
from gateway.served_model import ModelCard

MAX_SENT_BYTES = 32 << 20
"""Of all choices' prompts together. The largest of 32 choices may be a megabyte, some 250,000 tokens."""


def check_prompts(plan: Plan, card: ModelCard) -> None:
    """Raises ApiError. How many tokens a text has, the decode service alone can say."""
    for prompt in plan.prompts:
        if isinstance(prompt, TokenIdsPrompt) and len(prompt.token_ids) >= card.max_context_tokens:
            raise invalid(
                "prompt",
                f"{len(prompt.token_ids)} tokens leave no room for output in a context of {card.max_context_tokens}",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
    num_bytes = sum(prompt.num_bytes for prompt in plan.prompts)
    if num_bytes * plan.n > MAX_SENT_BYTES:
        raise invalid("n", f"{num_bytes} bytes of prompts, {plan.n} times, are more than {MAX_SENT_BYTES}")
