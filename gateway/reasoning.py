"""What a request says about how the model shall reason, in the fields of all endpoints that answer conversations."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.errors import invalid
from gateway.grammar_fields import StrictFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NumTokens = Annotated[int, Field(ge=0, lt=1 << 32)]

_SWITCHES = ("enable_thinking", "thinking")
"""The variables by which chat templates switch reasoning. A template reads one of them at most."""
TEMPLATE_VARIABLES = ("reasoning_effort", *_SWITCHES)
"""The variables that clients set for every model, and that are left out where the template does not read them."""


class Thinking(StrictFields):
    """Whether the model shall reason, and with how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NumTokens | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def max_tokens(self) -> int | None:
        """The limit on reasoning tokens, None if there is none."""
        return 0 if self.type == "disabled" else self.budget_tokens


@dataclass(frozen=True, slots=True)
class ReasoningWish:
    """What one field of a request says about reasoning.

    `variables` are for the chat template. `max_tokens` limits the reasoning; None does not. `asks` says whether the
    field asks for reasoning.
    """

    field: str
    variables: Mapping[str, Any]
    max_tokens: int | None = None
    asks: bool = False

    def is_heeded(self, variables: Set[str], *, reasons: bool) -> bool:
        """Whether a model does what the field says, if its chat template reads `variables`, and if it reasons."""
        if not variables.isdisjoint(self.variables):
            return True
        is_limit_of_0 = self.max_tokens == 0 and not self.asks
        return is_limit_of_0 or (reasons and (self.asks or self.max_tokens is not None))


def wish(
    field: str,
    *,
    effort: Effort | None = None,
    is_on: bool | None = None,
    max_tokens: int | None = None,
    asks: bool = False,
) -> ReasoningWish:
    """Returns the wish of a field that says an effort, switches reasoning, limits it, or says nothing."""
    variables: dict[str, Any] = {} if effort in (None, "none") else {"reasoning_effort": effort}
    if is_on is not None:
        variables |= dict.fromkeys(_SWITCHES, is_on)
    limit = 0 if effort == "none" else max_tokens
    return ReasoningWish(field, variables, limit, asks=asks or bool(is_on) or bool(limit))


def wish_of_thinking(thinking: Thinking | None) -> ReasoningWish:
    """Returns the wish of the field `thinking`."""
    if thinking is None:
        return wish("thinking")
    is_on = None if thinking.type == "adaptive" else thinking.type == "enabled"
    return wish("thinking", is_on=is_on, max_tokens=thinking.max_tokens, asks=thinking.type != "disabled")


def wishes_of(kwargs: Mapping[str, Any] | None, *wishes: ReasoningWish) -> tuple[ReasoningWish, ...]:
    """Returns the wishes of a request's fields and of its `kwargs`, the chat_template_kwargs, which count more.

    Raises ApiError if two fields differ.
    """
    given = kwargs or {}
    kept: list[ReasoningWish] = []
    for later in wishes:
        for earlier in kept:
            both = later.variables.keys() & earlier.variables.keys()
            limits = {later.max_tokens, earlier.max_tokens} - {None}
            if len(limits) > 1 or any(later.variables[name] != earlier.variables[name] for name in both):
                raise invalid(later.field, f"differs from {earlier.field}")
        kept.append(later)
    fields = [replace(each, variables={k: v for k, v in each.variables.items() if k not in given}) for each in kept]
    templates = [ReasoningWish(f"chat_template_kwargs.{k}", {k: given[k]}) for k in TEMPLATE_VARIABLES if k in given]
    return tuple(each for each in (*fields, *templates) if each.variables or each.max_tokens is not None or each.asks)
