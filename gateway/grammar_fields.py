"""The fields by which a request says what its output must be: OpenAI's, and those of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from common.grammar.grammar import MAX_CHARS, SCHEMA_OPTIONS, GrammarKind, whitespace_fault
from common.text.chat_messages import json_object
from gateway.errors import invalid

_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
OBJECT_SCHEMA = json.dumps({"type": "object"})


def _as_text(value: Any) -> Any:
    """Returns a JSON schema as text, if it is an object."""
    if not isinstance(value, dict | str | None):
        raise ValueError("must be a JSON schema: an object, or its text")
    return json.dumps(value) if isinstance(value, dict) else value


GrammarText = Annotated[str, Field(min_length=1)]
SchemaText = Annotated[GrammarText, BeforeValidator(_as_text, json_schema_input_type=dict[str, Any] | GrammarText)]
"""A JSON schema, which comes as an object or as its text."""


def _check_whitespace(pattern: str) -> str:
    if fault := whitespace_fault(pattern):
        raise ValueError(fault)
    return pattern


WhitespacePattern = Annotated[GrammarText, AfterValidator(_check_whitespace)]
"""A regular expression of the spaces between the parts of JSON."""
Texts = Annotated[list[str], Field(min_length=1)]
"""The texts to choose from."""


def _whole(value: Any) -> Any:
    """Returns 2 for 2.0, which are one number in JSON."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value


class StrictFields(BaseModel):
    """The fields of an object in a request. One that is null counts as absent, and 2.0 as 2."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_json_means(cls, fields: Any) -> Any:
        return {k: _whole(v) for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


class JsonSchema(StrictFields):
    """The schema of a `response_format`. The output always fits the schema, so `strict` changes nothing."""

    name: str = ""
    description: str | None = None
    content: Annotated[SchemaText | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictFields):
    """The field `response_format`, in OpenAI's form, or llama.cpp's or TGI's with the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    content: Annotated[SchemaText | None, Field(validation_alias=AliasChoices("schema", "value"))] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.json_schema is not None and (self.type != "json_schema" or self.content is not None):
            raise ValueError('json_schema goes with the type "json_schema" alone')
        if self.type == "json_schema" and self.json_schema is None and self.content is None:
            raise ValueError('the type "json_schema" needs json_schema')
        if self.type == "text" and self.content is not None:
            raise ValueError('a schema does not go with the type "text"')
        return self

    @property
    def schema_text(self) -> str:
        """The JSON schema that the answer must fit; empty if it may be anything."""
        if self.type == "text":
            return ""
        return (self.content if self.json_schema is None else self.json_schema.content) or OBJECT_SCHEMA


class StructuredOutputs(StrictFields):
    """vLLM's field `structured_outputs`. Three of its switches say how a JSON schema is meant."""

    schema_text: Annotated[SchemaText | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Texts | None = None
    grammar: GrammarText | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    disable_fallback: bool = False  # accepted: there is one grammar library
    whitespace_pattern: WhitespacePattern | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.schema_text or self.regex or self.choice or self.grammar or self.json_object):
            raise ValueError("needs json, regex, choice, grammar, or json_object that is true")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("disable_any_whitespace does not go with whitespace_pattern")
        if self.whitespace_pattern is not None and not (self.schema_text or self.json_object):
            raise ValueError("whitespace_pattern goes with json and json_object")
        return self

    def meant(self, schema_text: str | None) -> str | None:
        """Returns a schema's text with what these switches say about its spaces."""
        if self.disable_any_whitespace:
            return _with_options(schema_text, whitespace_flexible=False)
        if self.whitespace_pattern is not None:
            return _with_options(schema_text, whitespace_pattern=self.whitespace_pattern)
        return schema_text


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the output: an option of SamplingOptions with its value, and the `field` that asked for it. The
    field `spaces`, if any, says how a schema's spaces are written.
    """

    option: Literal["json_schema", "regex", "choice", "ebnf", "lark"]
    value: Any
    field: str
    spaces: str | None = None


class GrammarFields(StrictFields):
    """The fields that may say what the output must be. Only one may do so, and empty texts and lists are refused.

    Only an empty `grammar` counts as absent.
    """

    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_whitespace_pattern: WhitespacePattern | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Texts | None = None
    guided_grammar: GrammarText | None = None
    json_schema: SchemaText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    grammar: str | None = None  # clients of llama.cpp's server send "" for none

    @cached_property
    def constraint(self) -> Constraint | None:
        """What the output must be, or None. Raises ApiError, naming a field, if two ask for something."""
        if self.guided_whitespace_pattern is not None and not self.guided_json:
            raise invalid("guided_whitespace_pattern", "goes with guided_json")
        found = [each for each in self._constraints() if each.value]
        if len(found) > 1:
            raise invalid(found[1].field, f"does not go with {found[0].field}")
        return found[0] if found else None

    def _constraints(self) -> Iterator[Constraint]:
        yield Constraint("json_schema", self.json_schema, "json_schema")
        if (pattern := self.guided_whitespace_pattern) is None:
            yield Constraint("json_schema", self.guided_json, "guided_json")
        else:
            spaced = _with_options(self.guided_json, whitespace_pattern=pattern)
            yield Constraint("json_schema", spaced, "guided_json", "guided_whitespace_pattern")
        yield Constraint("regex", self.regex, "regex")
        yield Constraint("regex", self.guided_regex, "guided_regex")
        yield Constraint("choice", self.guided_choice, "guided_choice")
        yield Constraint("ebnf", self.ebnf, "ebnf")
        yield Constraint(_language(self.grammar), self.grammar, "grammar")
        yield Constraint(_language(self.guided_grammar), self.guided_grammar, "guided_grammar")
        if (asked := self.structured_outputs) is not None:
            spaces = None if asked.whitespace_pattern is None else "structured_outputs.whitespace_pattern"
            yield Constraint("json_schema", asked.meant(asked.schema_text), "structured_outputs.json", spaces)
            whole = asked.meant(OBJECT_SCHEMA) if asked.json_object else ""
            yield Constraint("json_schema", whole, "structured_outputs.json_object", spaces)
            yield Constraint("regex", asked.regex, "structured_outputs.regex")
            yield Constraint("choice", asked.choice, "structured_outputs.choice")
            yield Constraint(_language(asked.grammar), asked.grammar, "structured_outputs.grammar")


def _with_options(schema_text: str | None, **options: Any) -> str | None:
    """Returns a schema's text with more options for the grammar library. What is no schema is refused later."""
    if not schema_text or len(schema_text) > MAX_CHARS[GrammarKind.JSON_SCHEMA]:
        return schema_text
    schema = json_object(schema_text)
    if schema is None:
        return schema_text
    before = schema.get(SCHEMA_OPTIONS)
    options = {**(before if isinstance(before, dict) else {}), **options}
    return json.dumps({**schema, SCHEMA_OPTIONS: options}, ensure_ascii=False)


def _language(grammar: str | None) -> Literal["ebnf", "lark"]:
    """Returns whether `grammar` is EBNF or Lark. vLLM takes both in one field.

    Only the first characters are searched, as many as an EBNF grammar may have, because this runs on the event loop.
    The decode service refuses longer EBNF grammars.
    """
    return "ebnf" if _EBNF_RULE.search(grammar or "", 0, MAX_CHARS[GrammarKind.EBNF]) else "lark"
