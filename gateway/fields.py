"""The fields that the generating endpoints accept, and the rules by which other fields are refused.

A field that is null counts as absent. The decode service checks ranges, and its errors name the field.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

import jiter
from pydantic import (
    BeforeValidator,
    Field,
    SkipValidation,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from baton.requests import SamplingOptions
from common.grammar.grammar import SCHEMA_OPTIONS
from common.sampling.params import MAX_LOGIT_BIAS_ENTRIES, MAX_UINT32, NUMBER_OPTIONS, NumberOption
from gateway.errors import ApiError, invalid, not_served, shown
from gateway.grammar_fields import Constraint, GrammarFields, ResponseFormat, StrictFields

MAX_FIELDS = 256
"""The most fields in a request. It is high because clients of some servers send every known field with its default."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_REPEATED = re.compile('Detected duplicate key "(.*)" at line ')
"""Matches the JSON parser's error message for a name that comes twice in one object."""
_HALF_PAIR = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F]..)")
"""Matches half of a surrogate pair as JSON writes it, where no backslash stands for itself."""
_HARMLESS = frozenset(
    {
        "client_metadata",
        "guided_decoding_backend",
        "cache_control",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_reasoning",
        "user",
    }
)
"""Fields that are accepted and ignored: they concern billing, caching, storage and libraries, not the output."""
ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's fields
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
    # Fields of other servers
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "extra_body": ({},),
    "id_slot": (-1,),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "repeat_penalty": (1,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_routed_experts": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([], ""),
    "tfs_z": (1,),
    "timings_per_token": (False,),
    "top_a": (0,),
    "transforms": ([],),
    "truncation_side": ("left",),
    "typical_p": (1,),
    "use_audio_in_video": (False,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "xtc_probability": (0,),
}
"""Fields that are not supported, each with the neutral values that are accepted nevertheless. Null is always accepted.

An endpoint may add fields through `asks_for_nothing`.
"""
_SWITCHES = {"tools": "tool_choice", "functions": "function_call"}
"""Unsupported list fields, each with the name of another field. They are accepted if that one is "none"."""

_OF_WORDS = ("literal_error", "int_type", "float_type", "bool_type")
"""Pydantic's errors for fields that take a number, or one of a few words."""

_NEWER = {"functions": "tools", "function_call": "tool_choice"}
"""OpenAI's older names of fields."""


def _as_list(value: Any) -> Any:
    """Turns the `stop` field into a list. An empty string counts as absent."""
    if isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list):
        raise ValueError("input should be a string or a list of strings")
    return value


_TEXTS = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})


def _bounded(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise ValueError(f"{len(value)} entries are more than {MAX_LOGIT_BIAS_ENTRIES}")
    return value


def _all_tokens(value: Any) -> Any:
    if type(value) is int and value < -1:
        raise ValueError(f"{value} is not in [-1, {MAX_UINT32}]")
    return 0 if type(value) is int and value == -1 else value


NumChoices = Annotated[int, Field(ge=1, lt=1 << 32)]  # bounded, because Python shows no number of 4301 digits


class StreamOptions(StrictFields):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # accepted, because no stream of the gateway is obfuscated


class RequestFields(StrictFields):
    """The fields of a request's body."""

    asks_for_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """More unsupported fields with their neutral values, for this endpoint only."""
    names_here: ClassVar[Mapping[str, str]] = {}
    """A mapping from fields of other endpoints to what they are called in this one, for errors."""


class GenerationFields(GrammarFields, RequestFields):
    """The request fields that all generating endpoints accept."""

    model: str
    stream: bool = False
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_bounded)] | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_as_list), _TEXTS] | None = None
    # Fields beyond OpenAI's.
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    speculate: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True, min_length=1)] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_prompt: bool | None = None
    truncate_prompt_tokens: int | None = None
    numbers: SkipValidation[Mapping[str, float]] = Field(default_factory=dict)
    """The request's options that are in NUMBER_OPTIONS, by name. In the request body each is a field of its own."""

    @property
    def grammar_params(self) -> Mapping[str, str]:
        """A mapping from the gRPC field of the output's constraint, and of its schema's spaces, to the HTTP field that
        set it; empty without a constraint.
        """
        if (constraint := self.constraint) is None:
            return {}
        field = f"sampling.{constraint.option}"
        spaces = (
            {} if constraint.spaces is None else {f"{field}.{SCHEMA_OPTIONS}.whitespace_pattern": constraint.spaces}
        )
        return {field: constraint.field, **spaces}

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingOptions:
        """Returns the sampling options for the decode service. Raises ApiError, which names the wrong field."""
        options: SamplingOptions = SamplingOptions(
            seed=None if self.seed is None else self.seed % (1 << 64),
            max_tokens=max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logit_bias=_logit_bias(self.logit_bias),
            logprobs=logprobs,
            speculate=self.speculate,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            **self.numbers,  # type: ignore[typeddict-item]
        )
        if (constraint := self.constraint) is not None:
            options[constraint.option] = constraint.value
        if (asked := self.structured_outputs) is not None and asked.disable_additional_properties is not None:
            options["open_objects"] = not asked.disable_additional_properties
        return options


class ChoicesFields(GenerationFields):
    """The request fields of the endpoints whose answers have choices."""

    stream_options: StreamOptions | None = None
    n: NumChoices = 1
    best_of: NumChoices | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    # Fields beyond OpenAI's.
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool = False

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_usage_in_chunks(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, echoed: int | None = None) -> SamplingOptions:
        """Returns the sampling options for the decode service. Raises ApiError, which names the wrong field.

        If the answer echoes the prompt with log-probabilities, `echoed` is the number of likely tokens that are wanted
        at each token of the prompt, else None. The field `prompt_logprobs` may ask for log-probabilities of the prompt
        too; then the larger number counts.
        """
        if not self.stream and (self.includes_usage or self.has_usage_in_chunks):
            raise invalid("stream_options", "is for streams only")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not for streams")
        asked = [number for number in (self.prompt_logprobs, echoed) if number is not None]
        options = super().sampling(max_tokens=max_tokens, logprobs=logprobs)
        options["prompt_logprobs"] = max(asked, default=None)
        return options

    def _constraints(self) -> Iterator[Constraint]:
        if self.response_format is not None:
            yield Constraint("json_schema", self.response_format.schema_text, "response_format")
        yield from super()._constraints()


_NUMBER_TYPES: Mapping[str, Any] = {
    "top_k": Annotated[int, BeforeValidator(_all_tokens)]  # also accepts -1 for all tokens
}
_NUMBER_FIELDS: dict[str, Any] = {
    name: (_NUMBER_TYPES.get(name, option.kind), None) for name, option in NUMBER_OPTIONS.items()
}
_Numbers = create_model("_Numbers", __base__=StrictFields, **_NUMBER_FIELDS)

FieldsT = TypeVar("FieldsT", bound=RequestFields)
_MAY_BE_INFINITE = (re.compile(rb"[0-9.][eE]\+?0*[1-9][0-9]{2}"), re.compile(rb"(?<![0-9])[0-9]{200}"))
"""Find the numbers of a body that may be larger than any double. They search texts in it too, in little time."""


def parse_fields(body: bytes, kind: type[FieldsT]) -> FieldsT:
    """Parses a request body into `kind`. Raises ApiError 400 for a field that is wrong, unknown, unsupported or
    repeated.

    A name that comes twice in one object is refused, because some servers take its first value and some its last.
    """
    try:
        values = _json_of(body)
    except ValueError as error:
        if repeated := _REPEATED.match(str(error)):
            raise invalid(repeated[1][:64], "comes twice in one object", code="invalid_json") from None
        if str(error).startswith("recursion limit exceeded"):
            raise invalid(None, "the body nests too deeply") from None
        raise invalid(None, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise invalid(None, "the body is not a JSON object", code="invalid_json")
    if len(values) > MAX_FIELDS:
        raise invalid(None, f"{len(values)} fields are more than {MAX_FIELDS}")
    may_lack_a_number = b"NaN" in body or b"Infinity" in body or any(each.search(body) for each in _MAY_BE_INFINITE)
    if may_lack_a_number and (place := _place_of_infinite(values)) is not None:
        raise invalid(_path(place), "is a number that JSON lacks, or larger than any double")
    harmless = _HARMLESS.difference(kind.model_fields, kind.asks_for_nothing)
    values = {name: value for name, value in values.items() if value is not None and name not in harmless}
    takes_numbers = "numbers" in kind.model_fields
    numbers = {name: value for name, value in values.items() if takes_numbers and name in NUMBER_OPTIONS}
    asked = {name: value for name, value in values.items() if name in kind.model_fields and name != "numbers"}
    for name in values:
        if name not in asked and name not in numbers:
            _refuse_what_asks(name, values, kind)
    try:
        given = _Numbers.model_validate(numbers).model_dump(exclude_unset=True)
        return kind.model_validate({**asked, **({"numbers": given} if takes_numbers else {})})
    except ValidationError as error:
        raise _api_error(error, values) from None


def _json_of(body: bytes) -> Any:
    """Parses JSON. Half of a surrogate pair becomes U+FFFD: agents that cut a tool's answer within an emoji send it, in
    each later request of the conversation too. Raises ValueError.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # some clients on Windows send it
    try:
        return jiter.from_json(body, catch_duplicate_keys=True)
    except ValueError as error:
        if "hex escape" not in str(error) or b"\xff" in body:
            raise
    marked = body.replace(rb"\\", b"\xff\xff")  # a byte that UTF-8 lacks
    whole = _HALF_PAIR.sub(rb"\\ufffd", marked).replace(b"\xff\xff", rb"\\")
    return jiter.from_json(whole, catch_duplicate_keys=True)


def _place_of_infinite(values: dict[str, Any] | list[Any]) -> list[int | str] | None:
    """Returns the place of a number in `values` that is NaN or infinite, or None if there is none."""
    for key, value in values.items() if type(values) is dict else enumerate(values):
        kind = type(value)
        if kind is float and not math.isfinite(value):
            return [key]
        if (kind is dict or kind is list) and value and (found := _place_of_infinite(value)) is not None:
            return [key, *found]
    return None


SCHEMAS = "#/components/schemas/"
"""Where the schemas of `body_schema` refer to each other, as in an OpenAPI document."""


@cache
def body_schema(kind: type[RequestFields]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the JSON schema of the bodies that `parse_fields` takes for `kind`, and the schemas that it refers to, by
    name.
    """
    schema = kind.model_json_schema(ref_template=SCHEMAS + "{model}")
    definitions = schema.pop("$defs", {})
    properties: dict[str, Any] = schema["properties"]
    if properties.pop("numbers", None) is not None:
        properties |= {name: _number_schema(option) for name, option in NUMBER_OPTIONS.items()}
    for name, nothings in {**ASKS_FOR_NOTHING, **kind.asks_for_nothing}.items():
        about = "Not served. These values ask for nothing and are accepted."
        properties.setdefault(name, {"enum": list(nothings), "description": about})
    for name in sorted(_HARMLESS):
        properties.setdefault(name, {"description": "Accepted and ignored."})
    required = schema.get("required", [])
    for name, content in properties.items():
        if name not in required:
            properties[name] = _or_null(content)
    return schema, definitions


def _number_schema(option: NumberOption) -> dict[str, Any]:
    kind = "integer" if option.kind is int else "number"
    within = {"type": kind, "minimum": option.low, "maximum": option.high}
    others = [-1] * (option.name in _NUMBER_TYPES)
    about = {"description": f"{option.help} The default is {option.default_text}."}
    return {**about, "anyOf": [within, {"enum": others}]} if others else {**about, **within}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a field that may be null too, which counts as absent."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    if "anyOf" in schema and {"type": "null"} not in schema["anyOf"]:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema


def _refuse_what_asks(name: str, values: Mapping[str, Any], kind: type[RequestFields]) -> None:
    """Raises ApiError if the field `name` is unknown, or if it is unsupported and its value would change the answer."""
    value, nothings = _without_null(values[name]), {**ASKS_FOR_NOTHING, **kind.asks_for_nothing}.get(name)
    if nothings is None:
        hint = f", its name here is {kind.names_here[name]}" if name in kind.names_here else ""
        raise invalid(name[:64], f"is unknown{hint}", code="unknown_parameter")
    if any(_is_same(value, nothing) for nothing in nothings):
        return
    if name in kind.names_here:
        raise not_served(name, f"{kind.names_here[name]} is")
    switch = _SWITCHES.get(name)
    is_replaced = _NEWER.get(name) in kind.model_fields
    if switch is None and not is_replaced:
        raise not_served(name, " or ".join(map(json.dumps, nothings)) + " is" if nothings else "")
    if switch is None or not isinstance(value, list) or values.get(switch) != "none":
        raise not_served(name, f"{_NEWER[name]} is" if is_replaced else f'unless {switch} is "none"')


def _without_null(value: Any) -> Any:
    """Returns the value without the fields of its objects that are null."""
    if isinstance(value, dict):
        return {name: _without_null(inner) for name, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _is_same(value: Any, other: Any) -> bool:
    """Compares two values as JSON does: 1 and 1.0 are equal, but neither equals true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _path(place: Sequence[int | str]) -> str:
    """Returns a place as error messages name it: "messages[0].role"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:129]


def _api_error(error: ValidationError, values: Mapping[str, Any]) -> ApiError:
    """Returns the first error as one that names the field. `values` are the request's fields as they were sent."""
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    match first["type"]:
        case "missing":
            return invalid(param, "is required", code="missing_required_parameter")
        case "extra_forbidden":
            return invalid(param, "is unknown", code="unknown_parameter")
        case "dict_type" | "model_type" | "model_attributes_type":
            message = "must be an object"
        case "too_short" | "string_too_short" if first["ctx"]["min_length"] == 1:
            message = "must not be empty"
        case _:
            message = str(first["msg"]).removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            takes_words = first["type"] in _OF_WORDS and isinstance(first["loc"][-1], str)
            is_text = isinstance(first["input"], str) and not takes_words  # and might be a prompt
            if message.startswith("input should be") and not is_text:
                message += f", not {value}" if (value := shown(_sent(first["input"], first["loc"], values))) else ""
    return invalid(param, message)


def _sent(value: Any, place: Sequence[int | str], values: Any) -> Any:
    """Returns the validated `value` at a place as it was sent in `values`: 16.0 is validated as 16."""
    for part in place:
        try:
            values = values[part]
        except (LookupError, TypeError):
            return value
    return values if _is_same(values, value) else value


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """Converts token ids, which are strings as keys of a JSON object, to integers. Raises ApiError for other keys."""
    if bias is None:
        return None
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise invalid("logit_bias", f"{key[:64]!r} is no token id, as its keys must be")
    return {int(token_id): value for token_id, value in bias.items()}
