"""The plan for one HTTP request: the generations that answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from baton.requests import SamplingOptions
from common.text.chat_messages import ChatMessage
from gateway.reasoning import TEMPLATE_VARIABLES, ReasoningWish, heeded_of
from gateway.served_model import ModelCard
from gateway.tools import ToolUse


@dataclass(frozen=True, slots=True)
class TextInput:
    text: str

    @property
    def arguments(self) -> dict[str, Any]:
        return {"prompt": self.text}

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class TokenIdsInput:
    token_ids: tuple[int, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        return {"token_ids": self.token_ids}

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ChatInput:
    messages: tuple[ChatMessage, ...]
    tools: ToolUse | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """The request's options for the chat template, as further `arguments`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The variables that the chat template gets besides the messages."""
    wishes: tuple[ReasoningWish, ...] = ()
    """What the request says about reasoning. Wishes that the model cannot heed are left out."""
    places: tuple[str, ...] = ()
    """Each message's place in the request, such as "messages[1]", if it is not the message's place here."""

    def served_by(self, card: ModelCard, ignored: list[str]) -> ChatInput:
        """Returns the prompt for this model. Adds the fields that mean nothing to it to `ignored`. Raises ApiError if
        two that it heeds contradict each other.
        """
        reasons = card.output_format.reasoning is not None
        heeded = heeded_of(self.wishes, card.template_variables, reasons=reasons)
        ignored += sorted(wish.field for wish in self.wishes if wish not in heeded)
        told = {name: value for wish in heeded for name, value in wish.variables.items()}
        told = {name: value for name, value in told.items() if name in card.template_variables}
        others = {name: value for name, value in self.variables.items() if name not in TEMPLATE_VARIABLES}
        return replace(self, variables={**told, **others}, wishes=heeded)

    @property
    def params_of_wishes(self) -> dict[str, str]:
        """The request's fields to name in errors about the limit on reasoning, and about variables of the template if
        it has no other of them.
        """
        params: dict[str, str] = {}
        for wish in self.wishes:
            if wish.max_tokens is not None:
                params |= dict.fromkeys(("sampling.reasoning.max_tokens", "sampling.reasoning.end"), wish.field)
            if wish.variables and not self.variables:
                params["chat.chat_template_kwargs"] = wish.field
        return params

    @property
    def arguments(self) -> dict[str, Any]:
        tools = {} if self.tools is None else {"tools": self.tools.tools, "tool_choice": self.tools.choice}
        variables = {"chat_template_kwargs": self.variables} if self.variables else {}
        return {"chat": self.messages, **tools, **self.options, **variables}

    @property
    def num_tools(self) -> int:
        return 0 if self.tools is None else len(self.tools.tools)

    @property
    def num_bytes(self) -> int:
        texts = [text for message in self.messages for text in message.texts]
        texts += [text for tool in (self.tools.tools if self.tools else ()) for text in tool.texts]
        return sum(len(text.encode()) for text in texts)


Prompt = TextInput | TokenIdsInput | ChatInput
"""The prompt of a generation.

`arguments` are the arguments of `AsyncClient.generate` that carry it, and `num_bytes` is its approximate size.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A parsed request: `n` choices of each prompt, ordered by prompt.

    If `echoes_prompt`, each choice begins with its prompt. If `num_echoed_logprobs` is not None, the echoed prompt
    comes with the log-probabilities of its tokens, and of as many likely tokens at each place. If `num_prompt_logprobs`
    is not None, the answer has such log-probabilities of the prompt in a field of their own.

    `wishes` are what the request says of reasoning although its prompts are no chats.

    Each prompt is generated from `best_of` times, and its choices are the best `n` of these generations. If
    `hides_logprobs`, log-probabilities are used to find the best, and are not in the answer. `params` maps a field's
    name in the gRPC request to its name in the HTTP request, where the two differ. `repeated` has what the answer
    repeats of the request, `num_repeated_bytes` as JSON.
    """

    model: str
    prompts: tuple[Prompt, ...]
    wishes: tuple[ReasoningWish, ...] = ()
    n: int = 1
    best_of: int = 1
    sampling: SamplingOptions
    priority: int | None
    cache_salt: str | None
    cache_prompt: bool | None
    truncate_prompt_tokens: int | None
    is_streamed: bool
    includes_usage: bool = False
    has_usage_in_chunks: bool = False
    returns_token_ids: bool = False
    echoes_prompt: bool = False
    num_echoed_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    params: Mapping[str, str]
    includes_reasoning: bool = True
    hides_logprobs: bool = False
    repeated: Mapping[str, Any] = field(default_factory=dict)
    num_repeated_bytes: int = 0

    def served_by(self, card: ModelCard, ignored: list[str]) -> Plan:
        """Returns the plan for this model. Adds the fields that mean nothing to it to `ignored`. Raises ApiError if
        two that it heeds contradict each other.
        """
        ignored += sorted(wish.field for wish in self.wishes)
        prompts = tuple(each.served_by(card, ignored) if isinstance(each, ChatInput) else each for each in self.prompts)
        return replace(self, prompts=prompts)

    def params_of(self, prompt_index: int) -> Mapping[str, str]:
        """Returns `params`, with the place of this prompt if there are several."""
        if len(self.prompts) == 1:
            return self.params
        return {**self.params, **dict.fromkeys(("prompt", "token_ids"), f"prompt[{prompt_index}]")}

    @property
    def max_reasoning_tokens(self) -> int | None:
        """The limit on reasoning tokens, None if there is none."""
        prompt = self.prompts[0]
        wishes = prompt.wishes if isinstance(prompt, ChatInput) else ()
        return next((wish.max_tokens for wish in wishes if wish.max_tokens is not None), None)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_generations(self) -> int:
        return len(self.prompts) * self.best_of

    @property
    def functions(self) -> Mapping[str, Any]:
        """The JSON schemas of the arguments of the functions that the model may call, by name."""
        prompt = self.prompts[0]
        return prompt.tools.functions if isinstance(prompt, ChatInput) and prompt.tools else {}

    @property
    def requires_calls(self) -> bool:
        """Whether an output has to consist of calls."""
        prompt = self.prompts[0]
        return isinstance(prompt, ChatInput) and prompt.tools is not None and prompt.tools.choice.required

    def prompt_of(self, index: int) -> Prompt:
        """Returns the prompt of the choice with this index."""
        return self.prompts[index // self.n]
