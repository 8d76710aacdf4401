"""Builds the GenerateRequest that the two clients send."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from baton.errors import invalid_field
from baton.v1 import inference_pb2, types_pb2
from common.grammar.reasoning import Reasoning
from common.sampling.params import NUMBER_OPTIONS
from common.text.chat_messages import ChatMessage, Tool, ToolChoice
from common.text.output_formats import FINAL, START

_GRAMMARS = ("json_schema", "regex", "choice", "ebnf", "lark")
_OUT_OF_RANGE = "Value out of range: "
_ODD_TYPES = ("bad argument type", "asdict() should be called", "Field baton.v1.")
"""How errors begin that protobuf and Python raise for a value of a wrong type."""
_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_FIXED64: (0, (1 << 64) - 1),
}
_SMALLEST_FLOAT, _LARGEST_FLOAT = float.fromhex("0x1p-149"), float.fromhex("0x1.fffffep+127")
_NOT_SCALAR = ("token_ids", "chat", "generated_token_ids")
_LISTS = ("stop", "stop_token_ids", "shown_special_tokens", "bad_words", "allowed_token_ids")


class SchemaModel(Protocol):
    """The interface of classes that describe the JSON of their objects, such as pydantic's models."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...

    @classmethod
    def model_validate_json(cls, json_data: str) -> Self: ...


ModelT = TypeVar("ModelT", bound=SchemaModel)

JsonSchema = str | Mapping[str, Any] | type[SchemaModel]
"""A JSON schema: as JSON text, as a mapping, or as a class that has one, such as a pydantic model."""


class UnparsedOptions(TypedDict, total=False):
    """All sampling options except `json_schema`, on which the type of a parsed answer depends.

    If a key is absent or None, the server's default applies. That of `shown_special_tokens` is the client's: what
    `reasoning` and `json_schema` need.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    n: int | None
    regex: str | None
    choice: Sequence[str] | None
    ebnf: str | None
    lark: str | None
    reasoning: Reasoning | None
    open_objects: bool | None
    speculate: bool | None
    skip_special_tokens: bool | None
    shown_special_tokens: Sequence[str] | None
    include_stop_str_in_output: bool | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None


class SamplingOptions(UnparsedOptions, total=False):
    """The sampling options of `generate` and `complete`, with the defaults of UnparsedOptions."""

    json_schema: JsonSchema | None


class ChatOptions(TypedDict, total=False):
    """The options of a chat prompt. `Client.generate` explains them."""

    tools: Iterable[Tool] | None
    tool_choice: ToolChoice | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None


class PromptOptions(ChatOptions, total=False):
    """The options of a generation except those of sampling. `Client.generate` explains them."""

    token_ids: Iterable[int] | None
    chat: Iterable[ChatMessage] | None
    request_id: str | None
    generated_token_ids: Iterable[int]
    choice_index: int | None
    priority: int | None
    tenant: str | None
    cache_salt: str | None
    cache_prompt: bool | None
    truncate_prompt_tokens: int | None
    return_prompt_token_ids: bool | None


class CompleteOptions(PromptOptions, UnparsedOptions, total=False):
    """The arguments of `Client.complete` except the prompt and `json_schema`. `Client.generate` explains them."""

    timeout_s: float | None


class GenerateOptions(PromptOptions, SamplingOptions, total=False):
    """The options of a GenerateRequest. `Client.generate` explains them."""


def generate_request(prompt: str | None, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Builds the request message. Raises InvalidArgument, naming the field, for values that protobuf cannot carry, and
    TypeError for an option that does not exist.

    Whether values are in range is left to the server.
    """
    token_ids, chat = options.get("token_ids"), options.get("chat")
    if sum(source is not None for source in (prompt, token_ids, chat)) != 1:
        raise invalid_field("prompt", "give exactly one of prompt, token_ids and chat")
    request = inference_pb2.GenerateRequest()
    if prompt is not None:
        with _naming("prompt"):
            request.text = prompt
    elif token_ids is not None:
        request.token_ids.SetInParent()
        _fill("token_ids", request.token_ids.ids, token_ids)
    chat_options: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in options.items():
        if name in ChatOptions.__annotations__:
            chat_options[name] = value
        elif name not in PromptOptions.__annotations__:
            sampling[name] = value
        elif name not in _NOT_SCALAR and value is not None:
            with _naming(name, request.DESCRIPTOR.fields_by_name[name].type):
                setattr(request, name, value)
    _fill_chat(request, chat, chat_options)
    _fill("generated_token_ids", request.generated_token_ids, options.get("generated_token_ids", ()))
    request.sampling.CopyFrom(_sampling_params(sampling))
    return request


def tokenize_request(
    *,
    prompt: str | None,
    chat: Iterable[ChatMessage] | None,
    add_special_tokens: bool | None,
    with_pieces: bool,
    tenant: str | None,
    chat_options: Mapping[str, Any],
) -> inference_pb2.TokenizeRequest:
    """Builds the request message. Raises InvalidArgument unless exactly one of `prompt` and `chat` is given."""
    if (prompt is None) == (chat is None):
        raise invalid_field("prompt", "give exactly one of prompt and chat")
    request = inference_pb2.TokenizeRequest(with_pieces=with_pieces)
    if prompt is not None:
        with _naming("prompt"):
            request.text = prompt
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    _set_tenant(request, tenant)
    _fill_chat(request, chat, chat_options)
    return request


def detokenize_request(token_ids: Iterable[int], *, tenant: str | None) -> inference_pb2.DetokenizeRequest:
    """Builds the request message. Raises InvalidArgument for values that are not token ids."""
    request = inference_pb2.DetokenizeRequest()
    _fill("token_ids", request.token_ids, token_ids)
    _set_tenant(request, tenant)
    return request


def _set_tenant(request: inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest, tenant: str | None) -> None:
    if tenant is not None:
        with _naming("tenant"):
            request.tenant = tenant


def _fill_chat(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    chat: Iterable[ChatMessage] | None,
    options: Mapping[str, Any],
) -> None:
    if chat is not None:
        request.chat.SetInParent()
        with _naming("chat"):
            messages = list(chat)
        for index, message in enumerate(messages):
            with _naming(f"chat.messages[{index}]"):
                _add_message(request.chat, message)
    for name, option in options.items():
        if option is None:
            continue
        if chat is None:
            raise invalid_field(f"chat.{name}", "goes with chat only")
        with _naming(f"chat.{name}"):
            _set_chat_option(request.chat, name, option)


def _add_message(chat: inference_pb2.Chat, message: ChatMessage) -> None:
    added = chat.messages.add(
        role=message.role,
        content=message.content,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )
    for call in message.tool_calls:
        added.tool_calls.add(name=call.name, arguments=call.arguments, id=call.id)


def _set_chat_option(chat: inference_pb2.Chat, name: str, value: Any) -> None:
    if name == "tools":
        for tool in value:
            chat.tools.add(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    elif name == "tool_choice":
        chat.tool_choice.CopyFrom(inference_pb2.ToolChoice(**dataclasses.asdict(value)))
    elif name == "chat_template_kwargs":
        chat.chat_template_kwargs = _json(dict(value))
    else:
        setattr(chat, name, value)


def _sampling_params(sampling: Mapping[str, Any]) -> types_pb2.SamplingParams:
    params = types_pb2.SamplingParams()
    for name, value in sampling.items():
        if value is None:
            continue
        if name not in SamplingOptions.__annotations__:
            raise TypeError(f"there is no option {name!r}")
        kind = params.DESCRIPTOR.fields_by_name[name].type
        with _naming(f"sampling.{name}", FieldDescriptor.TYPE_UINT32 if name == "logit_bias" else kind):
            if name == "logit_bias":
                params.logit_bias.update({token_id: _float32(bias) for token_id, bias in dict(value).items()})
            elif name in _LISTS:
                if name == "allowed_token_ids" and not value:
                    raise ValueError("is empty, which would allow no token")
                getattr(params, name).extend(_no_string(value))
            elif name == "reasoning":
                params.reasoning.CopyFrom(types_pb2.Reasoning(**dataclasses.asdict(value)))
            elif name in _GRAMMARS:
                _set_grammar(params, name, value)
            else:
                is_float = kind == FieldDescriptor.TYPE_FLOAT
                setattr(params, name, _float32(value) if is_float else value)
                # The service would tell the number to which protobuf rounds the value.
                if is_float and (fault := NUMBER_OPTIONS[name].fault(getattr(params, name), sent=value)) is not None:
                    raise ValueError(fault)
    if sampling.get("shown_special_tokens") is None:
        header = f"{START}{FINAL}" if params.HasField("json_schema") else ""  # a part of some models' answers
        params.shown_special_tokens.extend(filter(None, (params.reasoning.start, params.reasoning.end, header)))
    return params


def _set_grammar(params: types_pb2.SamplingParams, name: str, value: Any) -> None:
    if (other := params.WhichOneof("grammar")) is not None:
        raise ValueError(f"does not go with {other}")
    if name == "choice":
        params.choice.CopyFrom(types_pb2.Choice(texts=_no_string(value)))
    else:
        setattr(params, name, _schema_text(value) if name == "json_schema" else value)


def _schema_text(schema: JsonSchema) -> str:
    if isinstance(schema, str):
        return schema
    return _json(dict(schema) if isinstance(schema, Mapping) else schema.model_json_schema())


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        if str(error).startswith("Out of range float"):
            raise ValueError("has a number that JSON lacks") from None
        raise


def parser_of(json_schema: JsonSchema | None, request: inference_pb2.GenerateRequest) -> Callable[[str], Any] | None:
    """Returns the function that turns an answer's whole text into an object; None without a schema.

    If the schema is a class, the object is of that class, and the function raises the errors of its validation. If the
    text consists of calls of the request's tools, the function returns None.
    """
    if json_schema is None:
        return None
    parse: Callable[[str], Any]
    parse = json.loads if isinstance(json_schema, str | Mapping) else json_schema.model_validate_json
    names = [tool.name for tool in request.chat.tools]
    if not names:
        return parse
    return lambda text: None if _has_calls(text, names) else parse(text)


def _has_calls(text: str, names: Sequence[str]) -> bool:
    """Returns whether an output consists of tool calls, in whatever form. Otherwise it is an answer in JSON.

    `names` are the names of the request's tools.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return True  # calls with their markers, or several calls
    # The markers may be special tokens that the text does not show, and some models write none.
    calls = value if isinstance(value, list) else [value]
    return any(
        isinstance(call, dict) and call.get("name") in names and ("arguments" in call or "parameters" in call)
        for call in calls
    )


def _no_string(values: Any) -> Any:
    """Returns `values` unchanged. Raises TypeError for a string, which would pass for a list of its characters."""
    if isinstance(values, str):
        raise TypeError("give a list, not a string")
    return values


def _fill(field: str, repeated: object, ids: Iterable[int]) -> None:
    with _naming(field, FieldDescriptor.TYPE_UINT32):
        repeated.extend(ids)  # type: ignore[attr-defined]


@contextmanager
def _naming(field: str, kind: int = 0) -> Iterator[None]:
    """Raises InvalidArgument, which names the field, for the error of a value that protobuf does not take there. `kind`
    is the type of the field's numbers.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        raise invalid_field(field, f"is not Unicode: {error.reason} at index {error.start}") from error
    except AttributeError as error:
        raise invalid_field(field, "has a value of another type") from error
    except (TypeError, ValueError) as error:
        words = str(error)
        number = words.removeprefix(_OUT_OF_RANGE)
        if number != words and (bounds := _RANGES.get(kind)) is not None:
            words = f"{number} is not in [{bounds[0]}, {bounds[1]}]"
        elif words.startswith(_ODD_TYPES):
            words = "has a value of another type"
        raise invalid_field(field, words) from error


def _float32(value: Any) -> Any:
    """Returns a value for a field that is a float in protobuf, which makes zero of a tiny number. Raises ValueError for
    one of which it makes infinity.
    """
    if isinstance(value, int | float) and _LARGEST_FLOAT < abs(value) < math.inf:
        raise ValueError(f"{value} is too large for a float32")
    if isinstance(value, float) and 0.0 < abs(value) < _SMALLEST_FLOAT:
        return math.copysign(_SMALLEST_FLOAT, value)
    return value
