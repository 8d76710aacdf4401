"""The /v1/responses endpoint, without stored state: parses items and writes items."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, AliasChoices, Field, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue

from baton.events import Delta, Event, Finished, FinishReason, PositionLogprobs
from common.text.chat_messages import ChatMessage, ToolCall
from gateway.apis.api import Admitted, Api, TokenCounts
from gateway.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    TEXT_OR_PARTS,
    ChatTurn,
    at_most,
    joined,
    kind_not_served,
    new_call_id,
    not_empty,
    params_of,
    refuse_other_fields,
    string,
    system_message,
    text_of,
)
from gateway.errors import ApiError, invalid, none_of, not_served
from gateway.fields import GenerationFields, parse_fields
from gateway.grammar_fields import OBJECT_SCHEMA, Constraint, StrictFields
from gateway.logprobs import token_logprobs
from gateway.parsing.events import CallArguments, CallBegun, ContentText, OutputEvent, ReasoningText
from gateway.parsing.parser import OutputParser
from gateway.plan import ChatInput, Plan
from gateway.reasoning import ReasoningFields, ReasoningOptions, Verbosity, verbosity_wish
from gateway.sending import ServerEvent
from gateway.tools import FLAT_CHOICE, FLAT_TOOLS, parse_tools

_INPUT_SCHEMA: JsonSchemaValue = {
    "description": "must be a string or a list of items",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
                    "role": {"enum": ["system", "developer", "user", "assistant"]},
                    "content": {"anyOf": [*TEXT_OR_PARTS, {"type": "null"}]},
                    "call_id": {"type": "string"},
                    "name": {"type": "string"},
                    "arguments": {"type": "string"},
                    "output": {"anyOf": TEXT_OR_PARTS},
                },
            },
        },
    ],
}
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_MAX_METADATA, _MAX_METADATA_NAME_CHARS, _MAX_METADATA_VALUE_CHARS = 16, 64, 512
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_FIELDS_OF_ITEMS = {
    kind: {"type", "id", "status", "cache_control", "metadata", *fields}
    for kind, fields in {
        "message": ("role", "content", "phase"),
        "function_call": ("call_id", "name", "arguments", "parsed_arguments"),
        "function_call_output": ("call_id", "name", "output"),
        "reasoning": ("summary", "content", "encrypted_content"),
    }.items()
}


class TextFormat(StrictFields):
    """The format of an answer's text. A text always fits its schema, so `strict` changes nothing."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    content: Annotated[dict[str, Any] | None, Field(validation_alias=AliasChoices("schema", "value"))] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and self.content is None:
            raise ValueError('the type "json_schema" needs a schema')
        if self.type == "text" and self.content is not None:
            raise ValueError('a schema does not go with the type "text"')
        return self

    @property
    def schema_text(self) -> str:
        """The JSON schema that the text must fit; empty if it may be anything."""
        if self.content is None:
            return OBJECT_SCHEMA if self.type == "json_object" else ""
        return json.dumps(self.content)

    @property
    def as_json(self) -> dict[str, Any]:
        if self.content is None:
            return {"type": self.type}
        given = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": self.type, "schema": self.content, **given}


class TextOptions(StrictFields):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponseReasoningOptions(ReasoningOptions):
    """How the model reasons. A `summary` is accepted, but the answer has the reasoning itself."""

    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictFields):
    include_obfuscation: bool = False  # accepted, because no stream of the gateway is obfuscated


def _check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    for name, value in metadata.items():
        if len(name) > _MAX_METADATA_NAME_CHARS:
            raise ValueError(f"has a name of {len(name)} characters, more than {_MAX_METADATA_NAME_CHARS}")
        if len(value) > _MAX_METADATA_VALUE_CHARS:
            raise ValueError(f"{name!r} has {len(value)} characters, more than {_MAX_METADATA_VALUE_CHARS}")
    return metadata


class ResponseFields(ReasoningFields, GenerationFields):
    input: Annotated[Any, at_most(MAX_MESSAGES - 1), WithJsonSchema(_INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[str] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Any], at_most(MAX_TOOLS), FLAT_TOOLS] = Field(default_factory=list)
    tool_choice: Annotated[Any, FLAT_CHOICE] = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ResponseReasoningOptions = ResponseReasoningOptions()
    metadata: Annotated[dict[str, str], at_most(_MAX_METADATA), AfterValidator(_check_metadata)] = Field(
        default_factory=dict
    )
    stream_options: ResponseStreamOptions | None = None

    asks_for_nothing: ClassVar = {
        "background": (False,),
        "background_options": ({},),
        "context_management": ([],),
        "conversation": (),
        "image": ({},),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "reasoning_effort": ("none",),
        "store": (False, True),  # nothing is stored, and the answer says so
        "truncation": ("disabled",),
    }

    names_here: ClassVar = {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }

    def _constraints(self) -> Iterator[Constraint]:
        if self.text.format is not None:
            yield Constraint("json_schema", self.text.format.schema_text, "text.format")
        yield from super()._constraints()


def parse_response(body: bytes) -> Plan:
    """Parses the body of a request. Raises ApiError, which names the wrong field."""
    fields = parse_fields(body, ResponseFields)
    turns = tuple(joined(_turns(fields)))
    prompt = ChatInput(
        messages=tuple(turn.message for turn in turns),
        tools=parse_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls, is_flat=True),
        variables=fields.chat_template_kwargs or {},
        wishes=fields.wishes(verbosity_wish("text.verbosity", fields.text.verbosity)),
    )
    repeated, num_repeated_bytes = _repeated(fields)
    return Plan(
        model=fields.model,
        prompts=(prompt,),
        sampling=fields.sampling(max_tokens=fields.max_output_tokens, logprobs=_num_top_logprobs(fields)),
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        cache_prompt=fields.cache_prompt,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        is_streamed=fields.stream,
        includes_reasoning=not fields.hides_reasoning,
        repeated=repeated,
        num_repeated_bytes=num_repeated_bytes,
        params={
            "sampling.max_tokens": "max_output_tokens",
            "sampling.logprobs": "top_logprobs",
            **fields.grammar_params,
            **prompt.params_of_wishes,
            **params_of(turns, result_id="call_id", call_id="call_id"),
            "prompt": "input",
            "chat": "input",
            "chat.messages": "input",
        },
    )


def _num_top_logprobs(fields: ResponseFields) -> int | None:
    """Returns how many likely tokens come with each token, None if no log-probabilities are asked for."""
    for index, name in enumerate(fields.include):
        if name not in (_LOGPROBS, _ENCRYPTED):
            raise not_served(f"include[{index}]", f'"{_LOGPROBS}" and "{_ENCRYPTED}" are')
    if _LOGPROBS in fields.include:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise invalid("top_logprobs", f'needs "{_LOGPROBS}" in include')
    return None


def _repeated(fields: ResponseFields) -> tuple[Mapping[str, Any], int]:
    """Returns the answer's fields that repeat the request or are constant, and their size as JSON in bytes.

    Tools and a chosen one have a `type`, also if the request left it out, as OpenAI's types need it. Raises ApiError if
    the fields have a number that JSON cannot repeat.
    """
    form, choice = fields.text.format, fields.tool_choice or "auto"
    repeated = {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "store": False,
        "temperature": fields.numbers.get("temperature"),
        "text": {
            "format": {"type": "text"} if form is None else form.as_json,
            "verbosity": fields.text.verbosity or "medium",
        },
        "tool_choice": choice if isinstance(choice, str) else {**choice, "type": choice.get("type") or "function"},
        "tools": [{**tool, "type": "function"} for tool in fields.tools],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.numbers.get("top_p"),
        "truncation": "disabled",
    }
    return repeated, len(json.dumps(repeated))


# ---- the input -----------------------------------------------------------------------------------------------------


def _turns(fields: ResponseFields) -> Iterator[ChatTurn]:
    """Yields the conversation's messages, at most one for each item. Raises ApiError, which names the wrong item."""
    if fields.instructions and (message := system_message(fields.instructions)) is not None:
        yield ChatTurn(message, "instructions")
    if fields.input == "":
        raise invalid("input", "is empty")
    if isinstance(fields.input, str):
        yield ChatTurn(ChatMessage("user", fields.input), "input")
        return
    if not isinstance(fields.input, list):
        raise invalid("input", "must be a string or a list of items")
    if not fields.input:
        raise invalid("input", "is empty")
    for number, item in enumerate(fields.input):
        if (turn := _turn(f"input[{number}]", item)) is not None:
            yield turn


def _turn(place: str, item: Any) -> ChatTurn | None:
    """Returns an item's message. Returns None for a system message that is left out."""
    match _kind(place, item):
        case "reasoning":
            return ChatTurn(ChatMessage("assistant", reasoning=_reasoning(place, item)), place)
        case "message":
            role, words = _ROLES[item["role"]], text_of(f"{place}.content", item.get("content"), _PARTS)
            message = system_message(words) if role == "system" else ChatMessage(role, words)
            return None if message is None else ChatTurn(message, place)
        case "function_call":
            call = ToolCall(
                id=not_empty(f"{place}.call_id", item.get("call_id")),
                name=not_empty(f"{place}.name", item.get("name")),
                arguments=string(f"{place}.arguments", item.get("arguments"), "of JSON"),
            )
            return ChatTurn(ChatMessage("assistant", tool_calls=(call,)), place, (place,))
    output = text_of(f"{place}.output", item.get("output"), _PARTS)
    call_id = not_empty(f"{place}.call_id", item.get("call_id"))
    name = "" if item.get("name") is None else string(f"{place}.name", item["name"])
    return ChatTurn(ChatMessage("tool", output, tool_call_id=call_id, name=name), place)


def _kind(place: str, item: Any) -> str:
    """Returns an item's type. A message may omit it. Raises ApiError for types and fields that are not served."""
    if not isinstance(item, dict):
        raise invalid(place, "must be an item")
    kind = item.get("type") or ("message" if "role" in item else None)
    if (names := _FIELDS_OF_ITEMS.get(kind) if isinstance(kind, str) else None) is None:
        raise kind_not_served(f"{place}.type", kind, f"{', '.join(_FIELDS_OF_ITEMS)} are")
    refuse_other_fields(place, item, names)
    role = item.get("role")
    if kind == "message" and role is None:
        raise invalid(f"{place}.role", "is required", code="missing_required_parameter")
    if kind == "message" and not (isinstance(role, str) and role in _ROLES):
        raise none_of(f"{place}.role", role, _ROLES)
    assert isinstance(kind, str)
    return kind


def _reasoning(place: str, item: Mapping[str, Any]) -> str:
    """Returns the text of a reasoning item. Encrypted reasoning without text is refused, because it cannot be read."""
    text = text_of(f"{place}.content", item.get("content") or [], {"reasoning_text": "text"})
    text = text or text_of(f"{place}.summary", item.get("summary") or [], {"summary_text": "text"})
    if item.get("encrypted_content") and not text:
        raise not_served(f"{place}.encrypted_content", "content is")
    return text


# ---- the output ----------------------------------------------------------------------------------------------------

_Kind = Literal["reasoning", "message", "function_call"]
_ID_PREFIXES: Mapping[_Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_TEXT_EVENTS: Mapping[_Kind, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True, kw_only=True)
class _Item:
    """An item of the output, while the model writes it. `logprobs` are those of the tokens of a message."""

    kind: _Kind
    index: int
    name: str = ""
    call_id: str = field(default_factory=new_call_id)
    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    status: str = "in_progress"
    id: str = ""

    def __post_init__(self) -> None:
        self.id = f"{_ID_PREFIXES[self.kind]}_{uuid.uuid4().hex}"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def place(self) -> dict[str, Any]:
        """The fields of the events about this item's text."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    def part(self) -> dict[str, Any]:
        """Returns the content part that has the text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        logprobs = token_logprobs(self.logprobs)
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def written(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the event fields that have the item's whole text."""
        if self.kind == "function_call":
            return {"name": self.name, "arguments": self.text}
        return {name: part[name] for name in ("text", "logprobs") if name in part}

    def as_json(self, part: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the item. `part` is its content part, if that is at hand."""
        head = {"id": self.id, "type": self.kind, "status": self.status}
        content = [] if self.status == "in_progress" else [part or self.part()]
        match self.kind:
            case "reasoning":
                return {**head, "summary": [], "content": content, "encrypted_content": None}
            case "message":
                return {**head, "role": "assistant", "content": content}
        return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.text}


class ResponseAnswer:
    """The answer to a request: a response, whose output is a list of items."""

    def __init__(self, admitted: Admitted) -> None:
        plan, (started,) = admitted.plan, admitted.started
        self._tally = admitted.tally
        self._parser = OutputParser(
            admitted.card.output_format,
            functions=plan.functions,
            is_reasoning_open=started.is_reasoning_open,
            has_only_calls=plan.requires_calls,
        )
        self._head = {
            "id": f"resp_{admitted.request_id}",
            "object": "response",
            "created_at": admitted.created_s,
            "model": admitted.card.name,
            **plan.repeated,
        }
        self._includes_reasoning = plan.includes_reasoning
        self._items: list[_Item] = []
        self._waiting: list[PositionLogprobs] = []  # of tokens that may turn out to be words
        self._status = "in_progress"
        self._num_events = 0

    def opening(self) -> Sequence[ServerEvent]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response()) for name in names]

    def add(self, index: int, event: Event) -> Sequence[ServerEvent]:
        match event:
            case Delta():
                num_waited = len(self._waiting)
                self._waiting += event.logprobs
                events = self._write(self._parser.push(event.text), num_waited)
                if event.text and not self._parser.holds_text:
                    self._waiting.clear()
                return events
            case Finished():
                events = self._write(self._parser.end(), len(self._waiting))
                if self._waiting and self._items and self._items[-1].kind == "message":
                    events.append(self._more(""))
                self._status = "incomplete" if event.reason is FinishReason.LENGTH else "completed"
                return [*events, *self._finish()]
        return ()

    def ending(self) -> Sequence[ServerEvent]:
        return (self._event(f"response.{self._status}", response=self.whole()),)

    def failing(self, error: ApiError) -> Sequence[ServerEvent]:
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        told = {"code": codes.get(error.status, "server_error"), "message": str(error)}
        self._status = "failed"
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        return (self._event("response.failed", response=self._response(error=told)),)

    def whole(self) -> Mapping[str, Any]:
        return self._response(usage=_usage(self._tally.counts))

    def _write(self, parts: Iterable[OutputEvent], num_waited: int) -> list[ServerEvent]:
        """Adds parts of the output, and returns their events.

        The first `num_waited` waiting log-probabilities belong to earlier tokens. If the first part is not words,
        neither were these tokens, and their log-probabilities are dropped.
        """
        events: list[ServerEvent] = []
        for number, part in enumerate(parts):
            if number == 0 and not isinstance(part, ContentText):
                del self._waiting[:num_waited]
            match part:
                case ReasoningText() if not self._includes_reasoning:
                    pass
                case ReasoningText(text, is_new):
                    events += [*self._need("reasoning", is_new=is_new), self._more(text)]
                case ContentText(text, is_new):
                    events += [*self._need("message", is_new=is_new), self._more(text)]
                case CallBegun(_, name):
                    events += self._begin("function_call", name)
                case CallArguments(_, text):
                    events.append(self._more(text))
        return events

    def _need(self, kind: _Kind, *, is_new: bool) -> list[ServerEvent]:
        """Begins an item if the text is new or of another kind than the last item."""
        goes_on = self._items and self._items[-1].kind == kind and not is_new
        return [] if goes_on else self._begin(kind)

    def _begin(self, kind: _Kind, name: str = "") -> list[ServerEvent]:
        """Ends the last item, and begins the next one."""
        events = self._end_item("completed")
        item = _Item(kind=kind, index=len(self._items), name=name)
        self._items.append(item)
        events.append(self._event("response.output_item.added", output_index=item.index, item=item.as_json()))
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **item.place, part=item.part()))
        return events

    def _more(self, text: str) -> ServerEvent:
        """Adds text to the last item. A message also gets the waiting log-probabilities."""
        item = self._items[-1]
        item.texts.append(text)
        more: dict[str, Any] = {}
        if item.kind == "message":
            item.logprobs += self._waiting
            more["logprobs"], self._waiting = token_logprobs(self._waiting), []
        return self._event(f"{_TEXT_EVENTS[item.kind]}.delta", **item.place, delta=text, **more)

    def _end_item(self, status: str) -> list[ServerEvent]:
        if not self._items:
            return []
        item = self._items[-1]
        item.status = status
        part = item.part()
        events = [self._event(f"{_TEXT_EVENTS[item.kind]}.done", **item.place, **item.written(part))]
        if item.kind != "function_call":
            events.append(self._event("response.content_part.done", **item.place, part=part))
        events.append(self._event("response.output_item.done", output_index=item.index, item=item.as_json(part)))
        return events

    def _finish(self) -> list[ServerEvent]:
        """Ends the last item. A completed output gets an empty message if it has neither message nor call."""
        says_nothing = all(item.kind == "reasoning" for item in self._items)
        events = self._begin("message") if says_nothing and self._status == "completed" else []
        return [*events, *self._end_item(self._status)]

    def _response(self, **more: Any) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._head,
            "status": self._status,
            "error": None,
            "incomplete_details": cut,
            "output": [item.as_json() for item in self._items],
            "usage": None,
            **more,
        }

    def _event(self, kind: str, **fields: Any) -> ServerEvent:
        event = ServerEvent({"type": kind, "sequence_number": self._num_events, **fields}, kind)
        self._num_events += 1
        return event


def _usage(counts: TokenCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.num_prompt,
        "input_tokens_details": {"cached_tokens": counts.num_cached, "cache_write_tokens": 0},
        "output_tokens": counts.num_completion,
        "output_tokens_details": {"reasoning_tokens": counts.num_reasoning, **counts.drafts},
        "total_tokens": counts.num_prompt + counts.num_completion,
    }


RESPONSES = Api(
    path="/v1/responses",
    fields=ResponseFields,
    parse=parse_response,
    parses_output=True,
    repeats_streams=True,
    begin=ResponseAnswer,
)
