"""Anthropic's Messages API: parses requests for messages, writes the messages, and parses requests to count prompt
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from baton.events import Delta, Event, Finished, FinishReason
from common.text.chat_messages import Tool, ToolChoice, no_tool
from gateway.apis.api import Admitted, Api
from gateway.apis.chat import Messages
from gateway.apis.content_blocks import ROLES, BlockWriter, chat_of, content_of
from gateway.conversation import (
    MAX_TOOLS,
    TEXT_OR_PARTS,
    at_most,
    kind_not_served,
    messages_schema,
)
from gateway.errors import ApiError, invalid, messages_error
from gateway.fields import GenerationFields, RequestFields, parse_fields
from gateway.grammar_fields import Constraint, SchemaText, StrictFields
from gateway.parsing.parser import OutputParser
from gateway.plan import ChatInput, Plan
from gateway.reasoning import Effort, ReasoningFields, Thinking, effort_wish
from gateway.request_record import MESSAGES_PATH
from gateway.sending import ServerEvent
from gateway.tools import ToolUse, function_schema, parse_function, tool_names, tools_schema

_MAX_NAME_CHARS = 128
_TOOL_HINTS = frozenset({"type", "cache_control", "eager_input_streaming"})
"""A tool's fields that change nothing here, except `type`, which is checked."""
_TOOLS = tools_schema(function_schema("input_schema", "input_schema", beside={"type": {"enum": ["custom", None]}}))
_NOT_SERVED = WithJsonSchema({"enum": [], "description": "Not served."})
_SYSTEM_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})


class BudgetedThinking(Thinking):
    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError('budget_tokens goes with the type "enabled", which needs it')
        return self


class ChosenTool(StrictFields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('a name goes with the type "tool", which needs it')
        return self


class OutputSchema(StrictFields):
    type: Literal["json_schema"]
    content: Annotated[SchemaText, Field(alias="schema")]


class OutputConfig(StrictFields):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class ConversationFields(ReasoningFields, RequestFields):
    """The fields of which the prompt is made. Tokens are counted from the same ones."""

    model: str
    messages: Annotated[Messages, messages_schema(ROLES, {"anyOf": TEXT_OR_PARTS})]
    system: Annotated[Any, _SYSTEM_SCHEMA] = None
    tools: Annotated[list[Any], at_most(MAX_TOOLS), _TOOLS] | None = None
    tool_choice: ChosenTool | None = None
    thinking: BudgetedThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None  # the older name of output_config.format
    cache_control: dict[str, Any] | None = None  # accepted, because what may be cached is cached anyway
    reasoning_effort: Effort | None = None
    thread: Annotated[Any, _NOT_SERVED] = None

    asks_for_nothing: ClassVar = {
        "container": (),
        "diagnostics": ({},),
        "fallbacks": ([],),
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }


class MessageFields(GenerationFields, ConversationFields):
    max_tokens: int
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None

    def _constraints(self) -> Iterator[Constraint]:
        if self.output_config is not None and (form := self.output_config.format) is not None:
            yield Constraint("json_schema", form.content, "output_config.format")
        if self.output_format is not None:
            yield Constraint("json_schema", self.output_format.content, "output_format")
        yield from super()._constraints()


class MessageAnswer:
    """An Answer that is one message."""

    def __init__(self, admitted: Admitted) -> None:
        plan, (started,) = admitted.plan, admitted.started
        self._admitted = admitted
        self._parser = OutputParser(
            admitted.card.output_format,
            functions=plan.functions,
            is_reasoning_open=started.is_reasoning_open,
            has_only_calls=plan.requires_calls,
            only_whole_calls=True,
        )
        self._blocks = BlockWriter(includes_thinking=plan.includes_reasoning)
        self._texts: list[str] = []
        self._finished: Finished | None = None

    def opening(self) -> Sequence[ServerEvent]:
        return _named([{"type": "message_start", "message": self._message([])}])

    def add(self, index: int, event: Event) -> Sequence[ServerEvent]:
        match event:
            case Delta() if not self._admitted.plan.is_streamed:
                self._texts.append(event.text)
            case Delta():
                # A call is held back until it is whole. Pings show that the stream lives meanwhile.
                return _named(self._blocks.add(self._parser.push(event.text)) or [{"type": "ping"}])
            case Finished():
                self._finished = event
        return ()

    def ending(self) -> Sequence[ServerEvent]:
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return _named([*self._last_events(), end, {"type": "message_stop"}])

    def failing(self, error: ApiError) -> Sequence[ServerEvent]:
        return _named([messages_error(error, self._admitted.request_id)])

    def whole(self) -> Mapping[str, Any]:
        events = self._blocks.add(self._parser.push("".join(self._texts)))
        return {**self._message(content_of([*events, *self._last_events()])), **self._stop()}

    def _last_events(self) -> list[dict[str, Any]]:
        return [*self._blocks.add(self._parser.end()), *self._blocks.end()]

    def _message(self, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._admitted.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._admitted.card.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, str | None]:
        """Returns why the output ended. A call wins over a stop sequence, because the call needs its result."""
        assert self._finished is not None
        if self._finished.reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._parser.num_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        matched = self._finished.matched_stop
        if self._finished.reason is FinishReason.STOP_STRING and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Returns the token counts so far. The cached prompt tokens are known only at the output's end."""
        counts = self._admitted.tally.counts
        return {
            "input_tokens": counts.num_prompt - counts.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.num_cached,
            "output_tokens": counts.num_completion,
            "output_tokens_details": {"thinking_tokens": counts.num_reasoning, **counts.drafts},
        }


def _named(events: Iterable[Mapping[str, Any]]) -> Sequence[ServerEvent]:
    return [ServerEvent(event, event["type"]) for event in events]


def parse_message(body: bytes) -> Plan:
    """Parses the body of a request for a message. Raises ApiError, which names the wrong field."""
    fields = parse_fields(body, MessageFields)
    if fields.stop is not None and fields.stop_sequences not in (None, fields.stop):
        raise invalid("stop", "differs from stop_sequences, its other name")
    prompt, params = conversation_prompt(fields)
    sampling = fields.sampling(max_tokens=fields.max_tokens, logprobs=None)
    if fields.stop_sequences is not None:
        sampling["stop"] = fields.stop_sequences
        params["sampling.stop"] = "stop_sequences"
    return Plan(
        model=fields.model,
        prompts=(prompt,),
        sampling=sampling,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        cache_prompt=fields.cache_prompt,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        is_streamed=fields.stream,
        includes_reasoning=not fields.hides_reasoning,
        params={
            "sampling.reasoning.max_tokens": "thinking.budget_tokens",
            "sampling.reasoning.end": "thinking.budget_tokens",
            **fields.grammar_params,
            **params,
        },
    )


MESSAGES = Api(
    path=MESSAGES_PATH,
    fields=MessageFields,
    parse=parse_message,
    parses_output=True,
    begin=MessageAnswer,
)


def conversation_prompt(fields: ConversationFields) -> tuple[ChatInput, dict[str, str]]:
    """Returns the prompt, and a mapping from field names in the gRPC request to those in this request.

    Raises ApiError, which names the wrong field.
    """
    if fields.thread is not None:
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError(400, "thread: is not served", param="thread", details=details)  # clients go on without it
    messages, params = chat_of(fields.system, fields.messages)
    if not messages:
        raise invalid("messages", "there is nothing to answer, only empty messages of the system")
    last = messages[-1]
    if last.role == "assistant" and not (last.content.strip() or last.tool_calls):
        messages = messages[:-1]  # nothing to go on with: a new answer
        if all(each.role == "system" for each in messages):
            raise invalid("messages", "there is nothing to answer, only an empty message of the assistant")
    options: dict[str, Any] = {}
    effort = None if fields.output_config is None else fields.output_config.effort
    wishes = fields.wishes(
        effort_wish("output_config.effort", effort), effort_wish("reasoning_effort", fields.reasoning_effort)
    )
    if messages[-1].role == "assistant":
        options["continue_final_message"] = True
    params |= {
        "prompt": "messages",
        "chat": "messages",
        "chat.continue_final_message": "messages",
        **{f"chat.tools[{i}].parameters": f"tools[{i}].input_schema" for i in range(len(fields.tools or ()))},
    }
    tools = _tool_use(fields.tools or (), fields.tool_choice)
    prompt = ChatInput(messages, tools, options, fields.chat_template_kwargs or {}, wishes)
    return prompt, {**prompt.params_of_wishes, **params}


def _tool_use(tools: Sequence[Any], chosen: ChosenTool | None) -> ToolUse | None:
    """Returns None if the model is told of no tools."""
    parsed = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    names = tool_names(parsed)
    if chosen is None:
        return ToolUse(parsed, ToolChoice()) if parsed else None
    if not parsed and chosen.type in ("any", "tool"):
        raise invalid("tool_choice", "is only allowed when tools are specified")
    if chosen.name is not None and chosen.name not in names:
        raise invalid("tool_choice.name", no_tool(chosen.name, names))
    if not parsed or chosen.type == "none":
        return None
    choice = ToolChoice(
        required=chosen.type != "auto",
        names=() if chosen.name is None else (chosen.name,),
        parallel=chosen.type != "tool" and not chosen.disable_parallel_tool_use,
    )
    return ToolUse(parsed, choice)


def _tool(place: str, tool: Any) -> Tool:
    if not isinstance(tool, dict):
        raise invalid(place, "must be an object with name and input_schema")
    if tool.get("type") not in (None, "custom"):
        raise kind_not_served(f"{place}.type", tool.get("type"), '"custom" is')
    if tool.get("input_schema") is None:
        raise invalid(f"{place}.input_schema", "is required", code="missing_required_parameter")
    function = {name: value for name, value in tool.items() if name not in _TOOL_HINTS}
    return parse_function(place, function, schema_field="input_schema", max_name_chars=_MAX_NAME_CHARS)
