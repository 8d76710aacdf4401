"""Closes the objects of a JSON schema: those that declare properties have no others, unless the schema says otherwise.

JSON Schema leaves such objects open, and a model then goes on to invent keys. Where several schemas describe one object
together, the outermost is closed for the properties that all of them declare. An object stays open if it requires
properties that it does not declare. All stay open if a reference is not understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

_SAYS_OTHERWISE = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_ALTERNATIVES = ("anyOf", "oneOf")
_ADDS = frozenset(
    {*_SAYS_OTHERWISE, "properties", "required", "propertyNames", "minProperties", "dependentRequired"}
    | {"dependentSchemas", "dependencies", "if", "then", "else", "not"}
)
"""Keywords by which a schema constrains an object besides `allOf`, `anyOf`, `oneOf` and `$ref`."""
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_MAX_NAMED = 1000
"""The most schemas that are looked at for one object."""


def close_objects(schema: dict[str, Any], schemas: Iterable[dict[str, Any]]) -> None:
    """Adds `additionalProperties: false` where the module's rules close an object. `schemas` are `schema` and all
    schemas inside it.
    """
    schemas = list(schemas)
    if any("$ref" in part and referred(schema, part["$ref"]) is None for part in schemas):
        return
    joint: dict[int, list[dict[str, Any]]] = {}
    members: set[int] = set()
    for part in schemas:
        named = list(_named(part, schema))
        alternatives = sum(keyword in part for keyword in _ALTERNATIVES)
        others = len(named) - sum(len(part[each]) for each in _ALTERNATIVES if isinstance(part.get(each), list))
        if named and (not _ADDS.isdisjoint(part) or alternatives + others > 1):
            joint[id(part)] = _all_named(part, schema)
            members.update(id(each) for each in joint[id(part)][1:])
    closed = [(part, joint.get(id(part), [part])) for part in schemas if id(part) not in members]
    for part, described in [each for each in closed if _is_closed(each[1])]:
        if len(described) > 1:
            names: dict[str, Any] = {name: {} for each in described for name in each.get("properties", {})}
            part["properties"] = {**names, **part.get("properties", {})}
        part["additionalProperties"] = False


def _is_closed(described: Iterable[dict[str, Any]]) -> bool:
    """Returns whether an object that these schemas describe together is meant to have their properties only."""
    described = list(described)
    declared = [each["properties"] for each in described if "properties" in each]
    required = [each.get("required", []) for each in described]
    if not declared or not all(isinstance(each, dict) for each in declared) or len(described) >= _MAX_NAMED:
        return False
    if any(not isinstance(names, list) for names in required):
        return False
    names = {name for each in declared for name in each}
    is_said = any(not _SAYS_OTHERWISE.isdisjoint(each) for each in described)
    return not is_said and all(isinstance(name, str) and name in names for each in required for name in each)


def _all_named(part: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns `part` and all schemas that it names, directly or not, for the same value."""
    found = {id(part): part}
    waiting = [part]
    while waiting and len(found) < _MAX_NAMED:
        for each in _named(waiting.pop(), schema):
            if id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return list(found.values())


def _named(part: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schemas that `part` names for the same value, for example by `allOf` or `$ref`."""
    for keyword in ("allOf", *_ALTERNATIVES):
        if isinstance(members := part.get(keyword), list):
            yield from (each for each in members if isinstance(each, dict))
    for keyword in ("if", "then", "else", "not"):
        if isinstance(member := part.get(keyword), dict):
            yield member
    for keyword in ("dependentSchemas", "dependencies"):
        if isinstance(by_name := part.get(keyword), dict):
            yield from (each for each in by_name.values() if isinstance(each, dict))
    if (found := referred(schema, part.get("$ref"))) is not None:
        yield found


def referred(schema: dict[str, Any], reference: Any) -> dict[str, Any] | None:
    """Returns the schema that a `$ref` in `schema` leads to, or None if it is not understood."""
    found = referred_value(schema, reference)
    return found if isinstance(found, dict) else None


def names_in(reference: str) -> list[str]:
    """Returns the names that lead from the root to what a `$ref` refers to."""
    return [name.replace("~1", "/").replace("~0", "~") for name in unquote(reference).split("/")[1:]]


def referred_value(schema: dict[str, Any], reference: Any) -> Any:
    """Returns what a `$ref` in `schema` leads to, be it a schema or not, or None if it is not understood."""
    if not isinstance(reference, str) or not (reference in ("", "#") or reference.startswith("#/")):
        return None
    found: Any = schema
    for name in names_in(reference):
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
