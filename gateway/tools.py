"""The tools of a conversation's request: what the model may call, and what it must."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import WithJsonSchema
from pydantic.json_schema import JsonSchemaValue

from common.text.chat_messages import Tool, ToolChoice, no_tool
from gateway.conversation import kind_not_served, refuse_other_fields
from gateway.errors import invalid, none_of, not_served, shown

_NAME = re.compile("[a-zA-Z0-9_-]+")
_FUNCTION_HINTS = {"cache_control", "return"}
"""Fields of a function that change nothing here. transformers describes what a Python function returns."""
_BESIDE = ("type", "cache_control")
_CHOICES = ("none", "auto", "required")
_STRING: JsonSchemaValue = {"type": "string"}
_FUNCTION_TYPE: JsonSchemaValue = {"type": {"enum": ["function", None]}}
_NAMED: JsonSchemaValue = {"type": "object", "required": ["name"], "properties": {"name": _STRING}}


def function_schema(schema_field: str, *needed: str, beside: JsonSchemaValue | None = None) -> JsonSchemaValue:
    """Returns the JSON schema of what `parse_function` takes, for the OpenAPI document. It must have the fields in
    `needed` besides the name. `beside` are the schemas of fields that `parse_function` does not read.
    """
    fields = {
        "name": _STRING,
        "description": {"type": ["string", "null"]},
        schema_field: {"type": "object" if schema_field in needed else ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    }
    return {"type": "object", "required": ["name", *needed], "properties": {**(beside or {}), **fields}}


def _choice_schema(inner: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the JSON schema of a choice. `inner` are the schemas of its fields besides `type`."""
    kind = {"enum": ["function", "allowed_tools", None]}
    return {"anyOf": [{"enum": list(_CHOICES)}, {"type": "object", "properties": {"type": kind, **inner}}]}


def tools_schema(tool: JsonSchemaValue) -> WithJsonSchema:
    """Returns the JSON schema of a list of tools."""
    return WithJsonSchema({"type": "array", "items": tool})


_ALLOWED = {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": {"type": "object"}}}
TOOLS = tools_schema(
    {
        "type": "object",
        "required": ["function"],
        "properties": {**_FUNCTION_TYPE, "function": function_schema("parameters")},
    }
)
FLAT_TOOLS = tools_schema(function_schema("parameters", beside=_FUNCTION_TYPE))
CHOICE = WithJsonSchema(
    _choice_schema({"function": _NAMED, "allowed_tools": {"type": "object", "properties": _ALLOWED}})
)
FLAT_CHOICE = WithJsonSchema(_choice_schema({"name": _STRING, **_ALLOWED}))
"""The JSON schemas of the fields `tools` and `tool_choice`, in both forms that `parse_tools` takes."""


@dataclass(frozen=True)  # without slots, for the cached property
class ToolUse:
    """The tools that the model is told of, and which of them it may or must call."""

    tools: tuple[Tool, ...]
    choice: ToolChoice

    @cached_property
    def functions(self) -> Mapping[str, dict[str, Any]]:
        """The JSON schemas of the arguments of the functions that may be called, by name."""
        names = self.choice.names
        return {tool.name: tool.schema for tool in self.tools if not names or tool.name in names}


def parse_tools(
    tools: Sequence[Any] | None, tool_choice: Any, parallel_tool_calls: bool | None, *, is_flat: bool = False
) -> ToolUse | None:
    """Parses three fields of a request. Returns None if the model is told of no tools.

    A chat request has a function's fields in an object `function`, and the allowed tools in an object `allowed_tools`.
    If `is_flat`, these fields stand beside `type` instead. Raises ApiError, which names the wrong field.
    """
    inner = "" if is_flat else ".function"
    parsed = tuple(_tool(f"tools[{index}]", tool, is_flat=is_flat) for index, tool in enumerate(tools or ()))
    names = tool_names(parsed, inner)
    choice = _choice(tool_choice, names, allows_several=parallel_tool_calls is not False, is_flat=is_flat)
    return ToolUse(parsed, choice) if parsed and choice is not None else None


def tool_names(tools: Sequence[Tool], inner: str = "") -> Sequence[str]:
    """Returns the names of the tools. Raises ApiError if two are the same; `inner` is where a tool has its name."""
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools[{index}]{inner}.name", f"{name!r} is another tool's too")
    return names


def parse_function(
    place: str, function: Mapping[str, Any], *, schema_field: str = "parameters", max_name_chars: int = 64
) -> Tool:
    """Parses a function's name, its description, `strict`, and the JSON schema of its arguments.

    Raises ApiError, which names the wrong field at `place`.
    """
    refuse_other_fields(place, function, {"name", "description", "strict", schema_field, *_FUNCTION_HINTS})
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{place}.description", "must be a string")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{place}.strict", "must be true or false")
    parameters = _parameters(f"{place}.{schema_field}", function.get(schema_field))
    name = _name(f"{place}.name", function.get("name"), max_name_chars)
    return Tool(name, description or "", parameters, bool(strict))


def _tool(place: str, tool: Any, *, is_flat: bool) -> Tool:
    if not isinstance(tool, dict):
        raise invalid(place, "must be an object with type and " + ("name" if is_flat else "function"))
    if tool.get("type") not in (None, "function"):
        raise kind_not_served(f"{place}.type", tool.get("type"), '"function" is')
    if is_flat and tool.get("function") is not None:
        raise not_served(f"{place}.function", "its fields beside type are")
    if is_flat:
        return parse_function(place, {name: value for name, value in tool.items() if name not in _BESIDE})
    for name in ("name", "description", "parameters", "strict"):
        if tool.get(name) is not None and name not in _BESIDE:
            raise not_served(f"{place}.{name}", f"{name} inside function is")
    refuse_other_fields(place, tool, {*_BESIDE, "function"})
    function, place = tool.get("function"), f"{place}.function"
    if not isinstance(function, dict):
        raise invalid(place, "must be an object with a name")
    return parse_function(place, function)


def _parameters(place: str, schema: Any) -> str:
    """Returns the schema as JSON text, or "" if it is absent or empty, which means that the function takes no
    arguments.
    """
    if schema is None or schema == {}:
        return ""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise invalid(place, 'must be a JSON schema with "type": "object"')
    return json.dumps(schema)


def _choice(choice: Any, names: Sequence[str], *, allows_several: bool, is_flat: bool) -> ToolChoice | None:
    """Returns the choice, or None if no tool may be called."""
    match choice:
        case "none":
            return None
        case None | "auto":
            return ToolChoice(parallel=allows_several)
        case str() if choice != "required":
            raise none_of("tool_choice", choice, _CHOICES)
        case str() | dict() if not names:
            raise invalid("tool_choice", "is only allowed when tools are specified")
        case "required":
            return ToolChoice(required=True, parallel=allows_several)
        case dict() if choice.get("type") in (None, "function"):
            name = _chosen("tool_choice", choice, names, is_flat=is_flat)
            return ToolChoice(required=True, names=(name,), parallel=False)
        case {"type": "allowed_tools"}:
            inner = "" if is_flat else ".allowed_tools"
            allowed = choice if is_flat else choice.get("allowed_tools")
            return _allowed(f"tool_choice{inner}", allowed, names, allows_several=allows_several, is_flat=is_flat)
        case dict():
            raise kind_not_served("tool_choice.type", choice.get("type"), '"function" and "allowed_tools" are')
        case _:
            raise invalid("tool_choice", "must be a string or an object")


def _allowed(place: str, allowed: Any, names: Sequence[str], *, allows_several: bool, is_flat: bool) -> ToolChoice:
    match allowed:
        case {"mode": "auto" | "required" as mode, "tools": list(tools)}:
            if not tools:
                raise invalid(f"{place}.tools", "must not be empty")
            chosen = [
                _chosen(f"{place}.tools[{index}]", each, names, is_flat=is_flat) for index, each in enumerate(tools)
            ]
            return ToolChoice(required=mode == "required", names=tuple(chosen), parallel=allows_several)
    raise invalid(place, "must have a mode, auto or required, and a list of tools")


def _chosen(place: str, choice: Any, names: Sequence[str], *, is_flat: bool) -> str:
    """Returns the function's name in a choice; it must be a tool's name."""
    form = '{"type": "function", "name": ...}' if is_flat else '{"type": "function", "function": {"name": ...}}'
    if not isinstance(choice, dict) or choice.get("type") not in (None, "function"):
        raise invalid(place, f"must be {form}")
    inner, function = ("", choice) if is_flat else (".function", choice.get("function"))
    match function:
        case {"name": str(name)}:
            if name not in names:
                raise invalid(f"{place}{inner}.name", no_tool(name, names))
            return name
    raise invalid(place, f"must be {form}")


def _name(place: str, name: Any, max_chars: int) -> str:
    if name is None:
        raise invalid(place, "is required", code="missing_required_parameter")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > max_chars:
        is_long = isinstance(name, str) and len(name) > max_chars
        sent = f"{len(name)} characters" if is_long else shown(name)
        allowed = f"1 to {max_chars} letters, digits, underscores and hyphens"
        raise invalid(place, f"must be {allowed}{f', not {sent}' if sent else ''}")
    return name
