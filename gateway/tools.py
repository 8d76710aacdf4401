"""The tools of a chat request: what the model may call, and what it must."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.text.chat_messages import Tool, ToolChoice
from gateway.errors import ApiError, invalid, not_served

_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_TOOL_FIELDS, _FUNCTION_FIELDS = {"type", "function"}, {"name", "description", "parameters", "strict"}
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model is told of, and which of them it may or must call."""

    tools: tuple[Tool, ...]
    choice: ToolChoice

    @property
    def functions(self) -> Mapping[str, dict[str, Any]]:
        """The JSON schemas of the arguments of the functions that may be called, by name."""
        names = self.choice.names
        return {tool.name: tool.schema for tool in self.tools if not names or tool.name in names}


def parse_tools(tools: Sequence[Any] | None, tool_choice: Any, parallel_tool_calls: bool | None) -> ToolUse | None:
    """Parses three fields of a request. Returns None if the model is told of no tools.

    Raises ApiError, which names the wrong field.
    """
    parsed = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools or ()))
    names = [tool.name for tool in parsed]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools[{index}].function.name", "is another tool's too")
    choice = _choice(tool_choice, names, allows_several=parallel_tool_calls is not False)
    return ToolUse(parsed, choice) if parsed and choice is not None else None


def _tool(place: str, tool: Any) -> Tool:
    if not isinstance(tool, dict):
        raise invalid(place, "must be an object with type and function")
    if tool.get("type") != "function":
        raise _type_not_served(f"{place}.type", tool.get("type"), '"function" is')
    _refuse_other_fields(place, tool, _TOOL_FIELDS)
    function, place = tool.get("function"), f"{place}.function"
    if not isinstance(function, dict):
        raise invalid(place, "must be an object with a name")
    _refuse_other_fields(place, function, _FUNCTION_FIELDS)
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{place}.description", "must be a string")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{place}.strict", "must be true or false")
    parameters = _parameters(f"{place}.parameters", function.get("parameters"))
    return Tool(_name(f"{place}.name", function.get("name")), description or "", parameters, bool(strict))


def _parameters(place: str, schema: Any) -> str:
    """Returns the schema as JSON text, or "" if it is absent or empty, which means that the function takes no
    arguments.
    """
    if schema is None or schema == {}:
        return ""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise invalid(place, 'must be a JSON schema with "type": "object"')
    return json.dumps(schema)


def _choice(choice: Any, names: Sequence[str], *, allows_several: bool) -> ToolChoice | None:
    """Returns the choice, or None if no tool may be called."""
    match choice:
        case "none":
            return None
        case None | "auto":
            return ToolChoice(parallel=allows_several)
        case str() if choice != "required":
            raise invalid("tool_choice", f"is none of {', '.join(_CHOICES)}")
        case str() | dict() if not names:
            raise invalid("tool_choice", "is only allowed when tools are specified")
        case "required":
            return ToolChoice(required=True, parallel=allows_several)
        case {"type": "function"}:
            return ToolChoice(required=True, names=(_named("tool_choice", choice, names),), parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            place = "tool_choice.allowed_tools.tools"
            if not allowed:
                raise invalid(place, "must not be empty")
            allowed_names = tuple(_named(f"{place}[{index}]", each, names) for index, each in enumerate(allowed))
            return ToolChoice(required=mode == "required", names=allowed_names, parallel=allows_several)
        case {"type": "allowed_tools"}:
            raise invalid("tool_choice.allowed_tools", "must have a mode, auto or required, and a list of tools")
        case dict():
            raise _type_not_served("tool_choice.type", choice.get("type"), '"function" and "allowed_tools" are')
        case _:
            raise invalid("tool_choice", "must be a string or an object")


def _named(place: str, choice: Any, names: Sequence[str]) -> str:
    """Returns the name in {"type": "function", "function": {"name": ...}}, which must be a tool's."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise invalid(f"{place}.function.name", "is no tool's name")
            return name
    raise invalid(place, 'must be {"type": "function", "function": {"name": ...}}')


def _name(place: str, name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(place, "must be 1 to 64 letters, digits, underscores and hyphens")
    return name


def _type_not_served(place: str, kind: Any, but: str) -> ApiError:
    named = kind if isinstance(kind, str) and re.fullmatch("[a-z_0-9]{1,32}", kind) else "this type"
    return invalid(place, f"{named} is not served, {but}", code="unsupported_parameter")


def _refuse_other_fields(place: str, value: Mapping[str, Any], fields: set[str]) -> None:
    for name, asked in value.items():
        if name not in fields and asked is not None:
            raise not_served(f"{place}.{name}"[:128])
