"""What a request says about how the model shall reason, in the fields of all endpoints that generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.errors import invalid, not_served
from gateway.grammar_fields import StrictFields

Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NumTokens = Annotated[int, Field(ge=0, lt=1 << 32)]
Limit = Annotated[
    NumTokens | None,
    BeforeValidator(
        lambda limit: None if limit == -1 else limit,
        json_schema_input_type=Annotated[int, Field(ge=-1, lt=1 << 32)] | None,
    ),
]
"""A number of tokens; null and -1 mean no limit."""

_SWITCHES = ("enable_thinking", "thinking")
"""The variables by which chat templates switch reasoning. A template reads one of them at most."""
TEMPLATE_VARIABLES = ("reasoning_effort", *_SWITCHES)
"""The variables that clients set for every model, and that are left out where the template does not read them."""


class Thinking(StrictFields):
    """Whether the model shall reason, and with how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NumTokens | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "disabled" and self.budget_tokens is not None:
            raise ValueError("disabled has no budget_tokens")
        return self


@dataclass(frozen=True, slots=True)
class ReasoningWish:
    """What one field of a request says about reasoning.

    `variables` are for the chat template. `max_tokens` limits the reasoning; None does not. `switch` says whether the
    field asks for reasoning or forbids it; None does neither.
    """

    field: str
    variables: Mapping[str, Any]
    max_tokens: int | None = None
    switch: bool | None = None

    @property
    def is_any(self) -> bool:
        """Whether the field says anything."""
        return bool(self.variables) or self.max_tokens is not None or self.switch is not None

    @property
    def asks(self) -> bool | None:
        """Whether the field asks for reasoning (True) or forbids it (False). None if it does neither."""
        return False if self.max_tokens == 0 else self.switch

    @property
    def is_degree(self) -> bool:
        """Whether the field says how much to reason, if at all."""
        return self.asks is None and (self.max_tokens is not None or "reasoning_effort" in self.variables)

    def differs_from(self, other: ReasoningWish) -> bool:
        """Whether the fields give one thing two values, other than whether to reason."""
        both = (self.variables.keys() & other.variables.keys()) - {*_SWITCHES}
        is_other_limit = bool(self.max_tokens and other.max_tokens) and self.max_tokens != other.max_tokens
        return is_other_limit or any(self.variables[name] != other.variables[name] for name in both)

    def contradicts(self, other: ReasoningWish) -> bool:
        """Whether one field asks for reasoning and the other forbids it."""
        return {self.asks, other.asks} == {True, False}

    def below(self, given: Mapping[str, Any]) -> ReasoningWish:
        """Returns the wish without what the `given` template variables, which take precedence, already decide."""
        taken = {*given, *_SWITCHES} if given.keys() & {*_SWITCHES} else {*given}
        variables = {name: value for name, value in self.variables.items() if name not in taken}
        if self.switch is None or taken.isdisjoint(_SWITCHES):
            return replace(self, variables=variables)
        return replace(self, variables=variables, max_tokens=self.max_tokens or None, switch=None)

    def is_heeded(self, variables: Set[str], *, reasons: bool) -> bool:
        """Whether a model does what the field says, if its chat template reads `variables`, and if it reasons."""
        if self.max_tokens == 0 or not variables.isdisjoint(self.variables):
            return True
        return reasons and (bool(self.switch) or self.max_tokens is not None)


def effort_wish(field: str, effort: Effort | None) -> ReasoningWish:
    if effort == "none":
        return ReasoningWish(field, {}, max_tokens=0, switch=False)
    return ReasoningWish(field, {} if effort is None else {"reasoning_effort": effort})


def switch_wish(field: str, is_on: bool | None, max_tokens: int | None = None) -> ReasoningWish:
    return ReasoningWish(field, {} if is_on is None else dict.fromkeys(_SWITCHES, is_on), max_tokens, is_on)


def verbosity_wish(field: str, verbosity: Verbosity | None) -> ReasoningWish:
    """Returns the wish for an answer of this length. It concerns the answer, but templates are told of it likewise."""
    return ReasoningWish(field, {} if verbosity in (None, "medium") else {"verbosity": verbosity})


def limit_wish(field: str, max_tokens: int | None) -> ReasoningWish:
    return ReasoningWish(field, {}, max_tokens)


def thinking_wish(thinking: Thinking | None) -> ReasoningWish:
    """Returns what Anthropic's field `thinking` wishes."""
    match thinking:
        case None:
            return limit_wish("thinking", None)
        case Thinking(type="adaptive"):  # the chat template does this by itself
            return ReasoningWish("thinking", {}, thinking.budget_tokens, switch=True)
        case _:
            is_on = thinking.type == "enabled"
            return switch_wish("thinking", is_on, thinking.budget_tokens if is_on else 0)


class ReasoningOptions(StrictFields):
    """How the model reasons. A `summary` is accepted, but an answer has the reasoning itself."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Limit = None
    exclude: bool = False
    summary: Literal["auto", "concise", "detailed"] | None = None


class ReasoningFields(StrictFields):
    """The fields of all endpoints with conversations or prompts that say how to reason and how long to answer."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    enable_thinking: bool | None = None
    thinking_token_budget: Limit = None
    thinking: Thinking | None = None
    verbosity: Verbosity | None = None

    @property
    def hides_reasoning(self) -> bool:
        """Whether the answer shall leave the reasoning out."""
        return self.reasoning.exclude or (self.thinking is not None and self.thinking.display == "omitted")

    def wishes(self, *others: ReasoningWish) -> tuple[ReasoningWish, ...]:
        """Returns what these fields, and `others`, say about reasoning. Raises ApiError if two differ."""
        options = self.reasoning
        return wishes_of(
            self.chat_template_kwargs,
            verbosity_wish("verbosity", self.verbosity),
            *others,
            effort_wish("reasoning.effort", options.effort),
            switch_wish("enable_thinking", self.enable_thinking),
            switch_wish("reasoning.enabled", options.enabled, 0 if options.enabled is False else None),
            limit_wish("thinking_token_budget", self.thinking_token_budget),
            limit_wish("reasoning.max_tokens", options.max_tokens),
            thinking_wish(self.thinking),
        )

    def wishes_of_text(self, *others: ReasoningWish) -> tuple[ReasoningWish, ...]:
        """Returns what `wishes` does, for a prompt that is no chat. Raises ApiError also for a variable of the chat
        template that says nothing about reasoning.
        """
        if not {*TEMPLATE_VARIABLES}.issuperset(self.chat_template_kwargs or {}):
            raise not_served("chat_template_kwargs", "a prompt that is no chat has no template")
        return self.wishes(*others)


def wishes_of(kwargs: Mapping[str, Any] | None, *wishes: ReasoningWish) -> tuple[ReasoningWish, ...]:
    """Returns the wishes of a request's fields and of its `kwargs`, the chat_template_kwargs, which take precedence.

    Raises ApiError if two fields differ.
    """
    given = kwargs or {}
    _refuse_pairs(wishes, ReasoningWish.differs_from)
    fields = [each.below(given) for each in wishes]
    templates = [ReasoningWish(f"chat_template_kwargs.{k}", {k: given[k]}) for k in TEMPLATE_VARIABLES if k in given]
    return tuple(each for each in (*fields, *templates) if each.is_any)


def heeded_of(wishes: Sequence[ReasoningWish], variables: Set[str], *, reasons: bool) -> tuple[ReasoningWish, ...]:
    """Returns the wishes that a model heeds, if its chat template reads `variables`, and if it reasons. How much to
    reason means nothing beside a budget of 0.

    Raises ApiError if one of these wishes asks for reasoning and another forbids it.
    """
    heeded = tuple(each for each in wishes if each.is_heeded(variables, reasons=reasons))
    _refuse_pairs(heeded, ReasoningWish.contradicts)
    is_off = any(each.max_tokens == 0 for each in heeded)
    return tuple(each for each in heeded if not (is_off and each.is_degree))


def _refuse_pairs(wishes: Sequence[ReasoningWish], is_refused: Callable[[ReasoningWish, ReasoningWish], bool]) -> None:
    for earlier, later in combinations(wishes, 2):
        if is_refused(later, earlier):
            raise invalid(later.field, f"differs from {earlier.field}")
