"""Checks a GenerateRequest and converts it to the edge's values. Failed checks raise InvalidRequest.

`check_request` needs no tokenizer and takes little time. `check_lengths` follows when the prompt's token ids are known.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.v1 import inference_pb2
from common.errors import ContextExceeded, InvalidRequest
from common.priority import WORST_PRIORITY
from common.sampling.params import ResolvedSampling
from common.text.chat_messages import (
    NO_OBJECT,
    NO_OPTIONS,
    ROLES,
    ChatMessage,
    TemplateOptions,
    Tool,
    ToolCall,
    ToolChoice,
    json_object,
    no_tool,
)
from common.text.output_formats import HERMES
from common.text.tool_grammars import ToolGrammars
from common.wire.handoff import MAX_CACHE_SALT_CHARS
from decode_service.edge.sampling_checks import SamplingRequest, check_sampling, check_token_ids

MAX_REQUEST_ID_CHARS = 128
MAX_TENANT_CHARS = 128
MAX_CHOICES = 128
MAX_TOOL_CALLS = MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 256
_TOOL_NAME = re.compile("[a-zA-Z0-9_.:/-]{1,256}")
MAX_OPTIONS_CHARS = 1 << 18
"""The most characters of a chat's tools and of its `chat_template_kwargs`. Parsing so much takes a few milliseconds."""
MAX_CONTEXTS = 4
"""The longest text that is tokenised, in tokens, as a multiple of the model's context."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the model and the service, which requests must keep, and the model's own defaults for sampling
    options, where it has any.

    `max_context_tokens` bounds prompt and output together. `best_priority` is the lowest number that requests may ask
    for. `opens_objects` is the default of a request's option `open_objects`.
    """

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best_priority: int = 0
    opens_objects: bool = False


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenIdsPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]
    options: TemplateOptions = NO_OPTIONS

    @property
    def continued(self) -> str:
        """The text of the unfinished answer that the output continues, or "" if the output begins an answer."""
        return self.messages[-1].content if self.options.continue_final_message else ""


Prompt = TextPrompt | TokenIdsPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose values were checked, except for lengths that depend on the prompt's tokens.

    `request_id` is None if the client chose none. `generated_token_ids` were delivered by an earlier stream.
    `cache_salt` names the namespace of the prefix cache that the request uses; "" is the common one. With None the
    request neither uses nor leaves cached KV. If `max_prompt_tokens` is set, only so many of the prompt's last tokens
    count.
    """

    request_id: str | None
    prompt: Prompt
    generated_token_ids: tuple[int, ...]
    sampling: SamplingRequest
    choice_index: int
    priority: int
    tenant: str | None
    cache_salt: str | None
    max_prompt_tokens: int | None
    returns_prompt_token_ids: bool


GENERIC_TOOL_GRAMMARS = ToolGrammars(HERMES, {})
"""Grammars for models whose own form of calls is not known."""


def check_request(
    request: inference_pb2.GenerateRequest, limits: ModelLimits, tool_grammars: ToolGrammars = GENERIC_TOOL_GRAMMARS
) -> CheckedRequest:
    if request.HasField("lora"):
        raise InvalidRequest("lora", "is not served")
    num_generated = len(request.generated_token_ids)
    if num_generated >= limits.max_context_tokens:
        raise ContextExceeded(
            "generated_token_ids",
            f"{num_generated} tokens do not fit a context of {limits.max_context_tokens}",
            max_context_tokens=limits.max_context_tokens,
        )
    max_prompt_tokens = _max_prompt_tokens(request, limits)
    prompt = _prompt(request, limits, max_prompt_tokens)
    sampling = check_sampling(
        request.sampling, limits.vocab_size, limits.eos_token_ids, defaults=limits.sampling_defaults
    )
    grammar = sampling.resolved.grammar
    if isinstance(prompt, ChatPrompt) and prompt.options.tools:
        choice = _tool_choice(request.chat.tool_choice, prompt.options.tools)
        grammar = tool_grammars.grammar(prompt.options.tools, choice, grammar)
        if grammar is not None and request.sampling.ignore_eos:
            raise InvalidRequest("sampling.ignore_eos", "does not go with tools whose calls are bound to fit")
    elif isinstance(prompt, ChatPrompt) and not prompt.options.continue_final_message:
        grammar = tool_grammars.answer(grammar)
    if grammar is not None:
        is_said = request.sampling.HasField("open_objects")
        opens_objects = request.sampling.open_objects if is_said else limits.opens_objects
        grammar = replace(grammar, opens_objects=opens_objects)
    sampling = replace(sampling, resolved=replace(sampling.resolved, grammar=grammar))
    return CheckedRequest(
        request_id=_request_id(request),
        prompt=prompt,
        max_prompt_tokens=max_prompt_tokens,
        returns_prompt_token_ids=request.return_prompt_token_ids,
        generated_token_ids=check_token_ids("generated_token_ids", request.generated_token_ids, limits.vocab_size),
        sampling=sampling,
        choice_index=_choice_index(request),
        priority=_priority(request, limits),
        tenant=tenant_of(request),
        cache_salt=_cache_salt(request),
    )


def tenant_key(tenant: str) -> str:
    """Returns the name under which a tenant shares the service. It differs from every client's name."""
    return f"tenant {tenant}"


def check_tokenize(request: inference_pb2.TokenizeRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "chat":
            return _chat(request.chat)
        case _:
            raise InvalidRequest("prompt", "one of text and chat must be set")


def check_detokenize(request: inference_pb2.DetokenizeRequest, limits: ModelLimits) -> None:
    """Checks the number of ids, which may be millions, but not each of them."""
    num_ids, most = len(request.token_ids), MAX_CONTEXTS * limits.max_context_tokens
    if num_ids > most:
        raise InvalidRequest("token_ids", f"{num_ids} tokens are more than {most}, {MAX_CONTEXTS} contexts")


def check_lengths(checked: CheckedRequest, prompt_token_ids: Sequence[int], limits: ModelLimits) -> ResolvedSampling:
    """Checks the request's lengths and returns its sampling parameters, for the prefill and the decode engine alike.

    `max_tokens` defaults to the rest of the context, and `seed` to a random number. Raises InvalidRequest or
    ContextExceeded.
    """
    if not prompt_token_ids:
        raise InvalidRequest("prompt", "is empty")
    room = _room(len(prompt_token_ids), limits)
    check_token_ids("prompt", prompt_token_ids, limits.vocab_size)
    sampling = checked.sampling
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > room:
        raise ContextExceeded(
            "sampling.max_tokens",
            f"{len(prompt_token_ids)} prompt tokens and {max_tokens} output tokens exceed the context of "
            f"{limits.max_context_tokens}",
            max_context_tokens=limits.max_context_tokens,
            num_prompt_tokens=len(prompt_token_ids),
            max_tokens=max_tokens,
        )
    if (num_generated := len(checked.generated_token_ids)) > max_tokens:
        if sampling.max_tokens is None:
            raise ContextExceeded(
                "generated_token_ids",
                f"{len(prompt_token_ids)} prompt tokens and {num_generated} brought ones exceed the context of "
                f"{limits.max_context_tokens}",
                max_context_tokens=limits.max_context_tokens,
                num_prompt_tokens=len(prompt_token_ids),
                max_tokens=num_generated,
            )
        raise InvalidRequest("generated_token_ids", f"{num_generated} tokens are more than max_tokens, {max_tokens}")
    min_tokens = sampling.resolved.min_tokens
    if min_tokens > max_tokens:
        raise InvalidRequest("sampling.min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    resolved = sampling.resolve(max_tokens, secrets.randbits(64) if sampling.seed is None else sampling.seed)
    if checked.generated_token_ids:  # the log-probabilities of the prompt came before them
        resolved = replace(resolved, num_prompt_logprobs=None)
    return resolved


def _room(num_prompt_tokens: int, limits: ModelLimits) -> int:
    """Returns how many tokens of the context the prompt leaves for output. Raises ContextExceeded if there is none."""
    room = limits.max_context_tokens - num_prompt_tokens
    if room < 1:
        raise ContextExceeded(
            "prompt",
            f"{num_prompt_tokens} tokens leave no room for output in a context of {limits.max_context_tokens}",
            max_context_tokens=limits.max_context_tokens,
            num_prompt_tokens=num_prompt_tokens,
        )
    return room


def _request_id(request: inference_pb2.GenerateRequest) -> str | None:
    if not request.HasField("request_id"):
        return None
    request_id = request.request_id
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequest("request_id", f"must be 1 to {MAX_REQUEST_ID_CHARS} printable characters")
    return request_id


def _choice_index(request: inference_pb2.GenerateRequest) -> int:
    if request.choice_index >= MAX_CHOICES:
        raise InvalidRequest("choice_index", f"{request.choice_index} is not in [0, {MAX_CHOICES - 1}]")
    return request.choice_index


def _priority(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> int:
    if not limits.best_priority <= request.priority <= WORST_PRIORITY:
        raise InvalidRequest(
            "priority",
            f"{request.priority} is not in [{limits.best_priority}, {WORST_PRIORITY}]; lower is served earlier",
        )
    return request.priority


def tenant_of(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest,
) -> str | None:
    if not request.HasField("tenant"):
        return None
    if not 1 <= len(request.tenant) <= MAX_TENANT_CHARS or not request.tenant.isprintable():
        raise InvalidRequest("tenant", f"must be 1 to {MAX_TENANT_CHARS} printable characters")
    return request.tenant


def _cache_salt(request: inference_pb2.GenerateRequest) -> str | None:
    if request.HasField("cache_salt") and not 1 <= len(request.cache_salt) <= MAX_CACHE_SALT_CHARS:
        num_chars = len(request.cache_salt)
        raise InvalidRequest("cache_salt", f"has {num_chars} characters, must have 1 to {MAX_CACHE_SALT_CHARS}")
    caches = request.cache_prompt if request.HasField("cache_prompt") else True
    return request.cache_salt if caches else None


def _max_prompt_tokens(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> int | None:
    if not request.HasField("truncate_prompt_tokens"):
        return None
    most = request.truncate_prompt_tokens
    if most == -1:
        return max(1, limits.max_context_tokens - max(1, request.sampling.max_tokens))
    if not 1 <= most <= limits.max_context_tokens:
        raise InvalidRequest("truncate_prompt_tokens", f"{most} is not -1 or in [1, {limits.max_context_tokens}]")
    return most


def _prompt(request: inference_pb2.GenerateRequest, limits: ModelLimits, max_prompt_tokens: int | None) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidRequest("prompt", "is empty")
            return TextPrompt(request.text)
        case "token_ids":
            if not (num_ids := len(request.token_ids.ids)):
                raise InvalidRequest("prompt", "is empty")
            num_kept = min(num_ids, max_prompt_tokens or num_ids)
            _room(num_kept, limits)  # before a copy is made, because there may be millions of ids
            token_ids = request.token_ids.ids[num_ids - num_kept :]
            return TokenIdsPrompt(check_token_ids("token_ids", token_ids, limits.vocab_size))
        case "chat":
            return _chat(request.chat)
        case _:
            raise InvalidRequest("prompt", "one of text, token_ids and chat must be set")


def _chat(chat: inference_pb2.Chat) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest("prompt", "chat has no messages")
    return ChatPrompt(
        tuple(_in_order_of_calls([_message(f"chat.messages[{i}]", each) for i, each in enumerate(chat.messages)])),
        _chat_options(chat),
    )


def _chat_options(chat: inference_pb2.Chat) -> TemplateOptions:
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequest("chat.tools", f"{len(chat.tools)} are more than {MAX_TOOLS}")
    kwargs = chat.chat_template_kwargs
    tools = tuple(Tool(each.name, each.description, each.parameters, each.strict) for each in chat.tools)
    for field, num_chars in (
        ("tools", sum(len(text) for tool in tools for text in tool.texts)),
        ("chat_template_kwargs", len(kwargs)),
    ):
        if num_chars > MAX_OPTIONS_CHARS:
            raise InvalidRequest(f"chat.{field}", f"{num_chars} characters are more than {MAX_OPTIONS_CHARS}")
    if kwargs and json_object(kwargs) is None:
        raise InvalidRequest("chat.chat_template_kwargs", NO_OBJECT)
    for index, tool in enumerate(tools):
        place = f"chat.tools[{index}]"
        if not _TOOL_NAME.fullmatch(tool.name):
            allowed = "1 to 256 letters, digits, and characters of _.:/-"
            sent = repr(tool.name) if len(tool.name) <= MAX_TOOL_NAME_CHARS else f"{len(tool.name)} characters"
            raise InvalidRequest(f"{place}.name", f"must be {allowed}, not {sent}")
        if any(tool.name == other.name for other in tools[:index]):
            raise InvalidRequest(f"{place}.name", f"{tool.name!r} is another tool's too")
        if tool.parameters and json_object(tool.parameters) is None:
            raise InvalidRequest(f"{place}.parameters", NO_OBJECT)
        if tool.schema.get("type", "object") != "object":
            raise InvalidRequest(f"{place}.parameters", "is no schema of objects")
    if chat.HasField("tool_choice") and not tools:
        raise InvalidRequest("chat.tool_choice", "there are no tools")
    return TemplateOptions(
        tools, kwargs, chat.continue_final_message, add_generation_prompt=_adds_generation_prompt(chat)
    )


def _tool_choice(choice: inference_pb2.ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    names = [tool.name for tool in tools]
    for index, name in enumerate(choice.names):
        if name not in names:
            raise InvalidRequest(f"chat.tool_choice.names[{index}]", no_tool(name, names))
    return ToolChoice(
        required=choice.required,
        names=tuple(choice.names),
        parallel=choice.parallel if choice.HasField("parallel") else True,
    )


def _adds_generation_prompt(chat: inference_pb2.Chat) -> bool:
    if not chat.continue_final_message:
        return chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    if chat.add_generation_prompt:
        raise InvalidRequest("chat.add_generation_prompt", "does not go with continue_final_message")
    last = chat.messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content.strip():
        found = f"a {last.role}'s" if last.role != "assistant" else "one that calls" if last.tool_calls else "empty"
        wanted = "the last message must be an assistant's, with words and without calls"
        raise InvalidRequest("chat.continue_final_message", f"{wanted}: it is {found}")
    return False


def _message(place: str, message: inference_pb2.ChatMessage) -> ChatMessage:
    if message.role not in ROLES:
        raise InvalidRequest(f"{place}.role", f"{message.role!r} is none of {', '.join(ROLES)}")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{place}.tool_calls", "are an assistant's alone")
    if message.reasoning and message.role != "assistant":
        raise InvalidRequest(f"{place}.reasoning", "is an assistant's alone")
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        num_calls = len(message.tool_calls)
        raise InvalidRequest(f"{place}.tool_calls", f"{num_calls} calls are more than {MAX_TOOL_CALLS}")
    for field in ("tool_call_id", "name"):
        value = getattr(message, field)
        if value and message.role != "tool":
            raise InvalidRequest(f"{place}.{field}", "is a tool's alone")
        _check_name(f"{place}.{field}", value)
    return ChatMessage(
        message.role,
        message.content,
        tuple(_tool_call(f"{place}.tool_calls[{i}]", each) for i, each in enumerate(message.tool_calls)),
        message.tool_call_id,
        message.name,
        message.reasoning,
    )


def _tool_call(place: str, call: inference_pb2.ToolCall) -> ToolCall:
    if not call.name:
        raise InvalidRequest(f"{place}.name", "is empty")
    _check_name(f"{place}.name", call.name)
    _check_name(f"{place}.id", call.id)
    return ToolCall(call.name, call.arguments, call.id)


def _check_name(place: str, name: str) -> None:
    if len(name) > MAX_TOOL_NAME_CHARS:
        raise InvalidRequest(place, f"has {len(name)} characters, more than {MAX_TOOL_NAME_CHARS}")


def _in_order_of_calls(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    index = 0
    while index < len(messages):
        first = index + (messages[index].role != "tool")
        end = first
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        yield from messages[index:first]
        yield from _answers(messages[index].tool_calls, messages[first:end], first)
        index = end


def _answers(calls: Sequence[ToolCall], answers: Sequence[ChatMessage], first: int) -> Sequence[ChatMessage]:
    """Returns the tool answers in the order of their calls, each with its function's name.

    Templates that write no call ids identify an answer by that name. `first` is the index in the conversation of the
    first answer's message. Raises InvalidRequest if calls and answers do not match.
    """
    if not calls and not any(answer.tool_call_id for answer in answers):
        return answers
    waiting = {call.id: number for number, call in enumerate(calls)}
    if len(waiting) < len(calls):
        ids = [call.id for call in calls]
        twice = next(call_id for call_id in ids if ids.count(call_id) > 1)
        raise InvalidRequest(f"chat.messages[{first - 1}].tool_calls", f"several have the id {twice!r}")
    answered: dict[int, ChatMessage] = {}
    for index, answer in enumerate(answers, first):
        number = waiting.pop(answer.tool_call_id, None)
        if number is None:
            which = "is of no call in the assistant's message before it, or of one that is answered"
            raise InvalidRequest(f"chat.messages[{index}].tool_call_id", f"{answer.tool_call_id!r} {which}")
        answered[number] = replace(answer, name=answer.name or calls[number].name)
    if answered and waiting:
        raise InvalidRequest(
            f"chat.messages[{first - 1}].tool_calls[{min(waiting.values())}]", "has no answer, and others have"
        )
    return [answered[number] for number in sorted(answered)]
