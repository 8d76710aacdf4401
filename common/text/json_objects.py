"""Walks JSON schemas, follows their references, names types that go without saying, and closes objects: those that
declare properties have no others, unless the schema says otherwise.

JSON Schema leaves such objects open, and a model then goes on to invent keys. Where several schemas describe one object
together, the outermost is closed for the properties that all of them declare. An object stays open if it requires
properties that it does not declare. All stay open if a reference is not understood, or leads from an id inside the
schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, TypeAlias
from urllib.parse import unquote

SAID_OF_VALUES = frozenset({"default", "examples"})
"""Keywords that say nothing about an output. llguidance reads their numbers nevertheless."""
_VALUES = frozenset({"const", "enum", *SAID_OF_VALUES})
"""Keywords whose values are not schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name. A name may be spelled like a keyword."""
_SAYS_OTHERWISE = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
KINDS = ("type", "const", "enum", "allOf", "anyOf", "oneOf", "$ref")
"""Keywords that say which kinds of values fit a schema."""
_DESCRIBES = {"object": ("properties", "additionalProperties"), "array": ("items", "prefixItems")}
"""Types, and the keywords that describe values of them, as xgrammar reads a schema without a type."""
_ALTERNATIVES = ("anyOf", "oneOf")
_ADDS = frozenset(
    {*_SAYS_OTHERWISE, "properties", "required", "propertyNames", "minProperties", "dependentRequired"}
    | {"dependentSchemas", "dependencies", "if", "then", "else", "not"}
)
"""Keywords by which a schema constrains an object besides `allOf`, `anyOf`, `oneOf` and `$ref`."""
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_MAX_NAMED = 1000
"""The most schemas that are looked at for one object."""
Place: TypeAlias = "tuple[Place, str] | None"
"""The place of a value in a schema: the place of what contains it, and its name or index there. None: the schema
itself.
"""
Part: TypeAlias = tuple[Place, dict[str, Any]]
"""An object in a schema, and its place."""


def name_types(schema: dict[str, Any], schemas: Iterable[dict[str, Any]]) -> None:
    """Adds the `type` of the schemas that describe an object or an array without naming it. `schemas` are `schema` and
    all schemas inside it.

    JSON Schema lets anything else pass there, which nobody means who describes properties or items. Those that describe
    a value together with others are left as they are: the others may say what it is, such as null.
    """
    schemas, references = list(schemas), References(schema)
    if not _are_understood(schemas, references):
        return
    beside: set[int] = set()
    for part in schemas:
        named = list(_named(part, references))
        kinds = [keyword for keyword in KINDS if keyword in part]
        if named and (len(kinds) > 1 or len(part.get("allOf", ())) > 1):
            beside.update(id(each) for each in _all_named(part, references)[1:])
    for part in schemas:
        if id(part) in beside or any(keyword in part for keyword in KINDS):
            continue
        for kind, keywords in _DESCRIBES.items():
            if any(keyword in part for keyword in keywords):
                part["type"] = kind
                break


def close_objects(schema: dict[str, Any], schemas: Iterable[dict[str, Any]]) -> None:
    """Adds `additionalProperties: false` where the module's rules close an object. `schemas` are `schema` and all
    schemas inside it.
    """
    schemas, references = list(schemas), References(schema)
    if not _are_understood(schemas, references):
        return
    joint: dict[int, list[dict[str, Any]]] = {}
    members: set[int] = set()
    for part in schemas:
        named = list(_named(part, references))
        alternatives = sum(keyword in part for keyword in _ALTERNATIVES)
        others = len(named) - sum(len(part[each]) for each in _ALTERNATIVES if isinstance(part.get(each), list))
        if named and (not _ADDS.isdisjoint(part) or alternatives + others > 1):
            joint[id(part)] = _all_named(part, references)
            members.update(id(each) for each in joint[id(part)][1:])
    closed = [(part, joint.get(id(part), [part])) for part in schemas if id(part) not in members]
    for part, described in [each for each in closed if _is_closed(each[1])]:
        if len(described) > 1:
            names: dict[str, Any] = {name: {} for each in described for name in each.get("properties", {})}
            part["properties"] = {**names, **part.get("properties", {})}
        part["additionalProperties"] = False


def _are_understood(schemas: Iterable[dict[str, Any]], references: References) -> bool:
    """Returns whether all references in these schemas are followed to where they lead."""
    are_found = all(references.referred(part["$ref"]) is not None for part in schemas if "$ref" in part)
    return are_found and not moves_references(references.schema)


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


def _all_named(part: dict[str, Any], references: References) -> list[dict[str, Any]]:
    """Returns `part` and all schemas that it names, directly or not, for the same value."""
    found = {id(part): part}
    waiting = [part]
    while waiting and len(found) < _MAX_NAMED:
        for each in _named(waiting.pop(), references):
            if id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return list(found.values())


def _named(part: dict[str, Any], references: References) -> Iterator[dict[str, Any]]:
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
    if (found := references.referred(part.get("$ref"))) is not None:
        yield found


def moves_references(schema: dict[str, Any]) -> bool:
    """Returns whether a schema inside has an id, and references in it that lead from there. `References` follows them
    from the root.
    """
    keyword = "id" if "draft-04" in str(schema.get("$schema")) else "$id"
    without: set[int] = set()  # schemas inside one that has an id and no reference
    for place, part in schemas_in(schema):
        if place is None or id(part) in without or not isinstance(part.get(keyword), str):
            continue
        for _, each in schemas_in(part):
            if "$ref" in each:
                return True
            without.add(id(each))
    return False


class References:
    """Finds the schemas that references in `schema` lead to: JSON pointers, and names that an `$anchor` or `$id` gives.
    Names are looked for once, when the first reference is no pointer.
    """

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self._found: dict[str, tuple[Place, Any] | None] = {}

    def found(self, reference: Any) -> tuple[Place, Any] | None:
        """Returns what a `$ref` leads to, be it a schema or not, and its place, or None if it is not understood."""
        if not isinstance(reference, str):
            return None
        if reference not in self._found:
            self._found[reference] = self._look_for(reference)
        return self._found[reference]

    def _look_for(self, reference: str) -> tuple[Place, Any] | None:
        if reference not in ("", "#") and not reference.startswith("#/"):
            return self._named.get(reference)
        place: Place = None
        found: Any = self.schema
        for name in unquote(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
                found = found[int(name)]
            else:
                return self._named.get(reference)
            place = (place, name)
        return place, found

    def referred(self, reference: Any) -> dict[str, Any] | None:
        """Returns the schema that a `$ref` leads to, or None if it is not understood."""
        _, value = self.found(reference) or (None, None)
        return value if isinstance(value, dict) else None

    @cached_property
    def _named(self) -> dict[str, Part]:
        named: dict[str, Part] = {}
        for place, part in schemas_in(self.schema):
            for keyword, before in (("$id", ""), ("$anchor", "#")):
                if isinstance(name := part.get(keyword), str):
                    named.setdefault(before + name, (place, part))
        return named


def schemas_in(schema: dict[str, Any]) -> Iterator[Part]:
    """Yields the schema and all schemas inside it."""
    waiting: list[tuple[Place, Any]] = [(None, schema)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, list):
            waiting += inside(place, part)
        elif isinstance(part, dict):
            yield place, part
            for keyword, value in part.items():
                if keyword in _BY_NAME and isinstance(value, dict):
                    waiting += inside((place, keyword), value)
                elif keyword not in _VALUES:
                    waiting.append(((place, keyword), value))


def inside(place: Place, value: dict[str, Any] | list[Any]) -> Iterator[tuple[Place, Any]]:
    """Yields what an object or a list at a place contains, each with its own place."""
    named = value.items() if isinstance(value, dict) else enumerate(value)
    return (((place, str(name)), each) for name, each in named)
