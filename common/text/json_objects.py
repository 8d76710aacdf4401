"""Closes the objects of a JSON schema: those that declare properties have no others, unless the schema says otherwise.

JSON Schema leaves such objects open, and a model then goes on to invent keys. Where several schemas describe one object
together, each of them declares only a part of its properties, so none of them is closed. Neither is one that requires
properties that it does not declare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

_SAYS_OTHERWISE = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_ALTERNATIVES = ("anyOf", "oneOf")
_ADDS = frozenset(
    {*_SAYS_OTHERWISE, "properties", "required", "propertyNames", "minProperties", "dependentRequired"}
    | {"dependentSchemas", "dependencies", "if", "then", "else", "not"}
)
"""Keywords by which a schema says something about an object beside the schemas that it names."""


def close_objects(schema: dict[str, Any], schemas: Iterable[dict[str, Any]]) -> None:
    """Adds `additionalProperties: false` where it is meant. `schemas` are `schema` and all schemas inside it."""
    schemas = list(schemas)
    joint: set[int] = set()
    for part in schemas:
        named = list(_named(part, schema))
        alternatives = sum(keyword in part for keyword in _ALTERNATIVES)
        others = len(named) - sum(len(part[each]) for each in _ALTERNATIVES if isinstance(part.get(each), list))
        if named and (not _ADDS.isdisjoint(part) or alternatives + others > 1):
            _join(part, schema, joint)
    for part in schemas:
        declared, required = part.get("properties"), part.get("required", [])
        if id(part) in joint or not _SAYS_OTHERWISE.isdisjoint(part) or not isinstance(declared, dict):
            continue
        if isinstance(required, list) and all(name in declared for name in required):
            part["additionalProperties"] = False


def _join(part: dict[str, Any], schema: dict[str, Any], joint: set[int]) -> None:
    """Adds a schema to those that describe an object together with others, and all schemas that it names."""
    waiting = [part]
    while waiting:
        each = waiting.pop()
        if id(each) not in joint:
            joint.add(id(each))
            waiting += _named(each, schema)


def _named(part: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schemas that describe the same value as `part`, which names them."""
    for keyword in ("allOf", *_ALTERNATIVES):
        if isinstance(members := part.get(keyword), list):
            yield from (each for each in members if isinstance(each, dict))
    for keyword in ("if", "then", "else", "not"):
        if isinstance(member := part.get(keyword), dict):
            yield member
    for keyword in ("dependentSchemas", "dependencies"):
        if isinstance(by_name := part.get(keyword), dict):
            yield from (each for each in by_name.values() if isinstance(each, dict))
    if isinstance(reference := part.get("$ref"), str) and (found := _referred(schema, reference)) is not None:
        yield found


def _referred(schema: dict[str, Any], reference: str) -> dict[str, Any] | None:
    """Returns the schema that a `$ref` leads to, or None if there is none here."""
    start, _, path = unquote(reference).partition("#")
    found: Any = schema
    for name in [] if start or not path else path.removeprefix("/").split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found if isinstance(found, dict) and not start else None
