"""JSON schemas, each with instances that fit it and instances that do not, by the categories of the JSON Schema Test
Suite (draft 2020-12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """A schema. `refused` is a word that the refusal's reason must contain, or "" if the schema is served.

    Instances in `narrow` fit the schema, but the served grammar forbids them. `is_drawn` is False if jsonschema cannot
    check outputs, because Python's `re` cannot read the pattern.
    """

    category: str
    schema: Any
    valid: Sequence[Any] = ()
    invalid: Sequence[Any] = ()
    narrow: Sequence[Any] = ()
    refused: str = ""
    is_drawn: bool = True

    def __str__(self) -> str:
        return self.category


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_AB = {"a": INTEGER, "b": INTEGER}


def _object(required: Sequence[str] = (), /, *, closed: bool = False, **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    if closed:
        schema["additionalProperties"] = False
    return schema


def _format(name: str, valid: Sequence[Any], invalid: Sequence[Any]) -> Case:
    return Case(f"format {name}", {"type": "string", "format": name}, valid, invalid)


CASES = (
    # type
    Case("type string", STRING, ["a", 'é\n"\\/', "\u2028", "😀"], [1, None]),
    Case("type integer", INTEGER, [0, -5, 10**12], [1.5, "1"], narrow=[1.0]),
    Case("type number", NUMBER, [0, -1.5, 1e20, 1.0], ["1"]),
    Case("type boolean", {"type": "boolean"}, [True], [0]),
    Case("type null", {"type": "null"}, [None], [0]),
    Case("type list", {"type": ["string", "null", "integer"]}, ["a", None, 3], [1.5, []]),
    Case("type array", {"type": "array"}, [[], [1, "a", {}]], [{}]),
    Case("type object", {"type": "object"}, [{}, {"a": [1]}], [[]]),
    Case("boolean_schema anything", {}, [1, "a", {"b": []}, None]),
    # enum, const
    Case("enum", {"enum": ["a", 1, None, True, {"x": 1}, [1, 2]]}, ["a", 1, None, True, {"x": 1}, [1, 2]], ["b", 2]),
    Case("enum escaped", {"enum": ['a"b', "tab\t", "ünï", "/slash"]}, ['a"b', "tab\t", "ünï", "/slash"], ["ab"]),
    Case("enum with type", {"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    Case("const object", {"const": {"a": [1, 2, {"b": None}]}}, [{"a": [1, 2, {"b": None}]}], [{}]),
    Case("const number", {"const": 1.5}, [1.5], [1]),
    Case("const control character", {"const": "a\u0001"}, refused="const"),
    Case("enum control character", {"enum": ["b", {"c": ["a\u007f"]}]}, refused="enum"),
    Case("const short escapes", {"const": "\b\f\n\r\t"}, ["\b\f\n\r\t"], [""]),
    # objects
    Case("properties", _object(a=INTEGER), [{"a": 1}, {}], [{"a": "x"}], narrow=[{"a": 1, "b": "x"}]),
    Case("properties false", _object(a=False, b=INTEGER), [{"b": 1}], [{"a": 1}]),
    Case(
        "properties escaped",
        _object(['a"b', "c\\d", "é"], **{'a"b': STRING, "c\\d": INTEGER, "é": INTEGER}),
        [{'a"b': "x", "c\\d": 1, "é": 2}],
        [{}],
    ),
    Case(
        "properties in another order",
        _object(["a", "b"], closed=True, a=STRING, b=INTEGER),
        [{"a": "x", "b": 1}],
        [{"a": 1, "b": 1}],
        narrow=[{"b": 1, "a": "x"}],
    ),
    Case(
        "properties named like keywords",
        _object(["$ref", "not"], closed=True, **{"$ref": STRING, "not": INTEGER}),
        [{"$ref": "#", "not": 1}],
        [{"$ref": 1, "not": 1}],
    ),
    Case(
        "required",
        _object(["a", "c"], a=STRING, b=INTEGER, c=NUMBER),
        [{"a": "x", "c": 1}, {"a": "x", "b": 1, "c": 2.5}],
        [{"a": "x"}, {}],
        narrow=[{"a": "x", "c": 1, "zz": 1}],
    ),
    Case("required undeclared", _object(["b"], a=STRING), [{"b": 1}, {"a": "x", "b": 1}], [{"a": "x"}, {}]),
    Case("required alone", {"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    Case("properties without type", {"required": ["a"], "properties": {"a": STRING}}, [{"a": "x"}], [{}], [3, "a"]),
    Case("additionalProperties without type", {"additionalProperties": INTEGER}, [{"z": 1}], [{"z": "a"}], [3, []]),
    Case("items without type", {"items": INTEGER}, [[1]], [["a"]], [3, {}]),
    Case("prefixItems without type", {"prefixItems": [{"properties": _AB}]}, [[{"a": 1}]], [[{"a": "x"}]], [3, [3]]),
    Case(
        "one of those without type", {"anyOf": [{"properties": _AB}, {"type": "null"}]}, [None, {"a": 1}], [], [3, []]
    ),
    Case(
        "one without type beside types",
        {"type": ["object", "null"], "allOf": [{"properties": _AB, "required": ["a"]}]},
        [None, {"a": 1}],
        [3, {}],
    ),
    Case(
        "several without type that describe one value",
        {"allOf": [{"$ref": "#/$defs/x"}, {"type": ["array", "null"]}], "$defs": {"x": {"properties": _AB}}},
        [None, [3]],
        [3, {}],
    ),
    Case("itself in one without type", {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, refused="required"),
    Case("itself in items without type", {"items": {"$ref": "#"}, "minItems": 1}, refused="minItems"),
    Case(
        "a reference to one without type",
        {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"properties": _AB}}},
        [[{"a": 1}]],
        [[{"a": "x"}]],
        [[3]],
    ),
    Case(
        "required after optional",
        _object(["d"], closed=True, a=INTEGER, b=INTEGER, c=INTEGER, d=INTEGER),
        [{"d": 1}, {"a": 1, "d": 1}, {"b": 1, "c": 2, "d": 3}],
        [{"a": 1}],
    ),
    Case(
        "additionalProperties false", _object(closed=True, a=STRING), [{}, {"a": "x"}], [{"b": 1}, {"a": "x", "c": 2}]
    ),
    Case(
        "additionalProperties schema",
        {**_object(a=STRING), "additionalProperties": INTEGER},
        [{"a": "x", "b": 1}, {"b": 2}],
        [{"b": "x"}],
    ),
    Case(
        "patternProperties",
        {"type": "object", "patternProperties": {"^s_": STRING, "^i_": INTEGER}, "additionalProperties": False},
        [{"s_a": "x", "i_b": 1}],
        [{"s_a": 1}, {"zz": 1}],
    ),
    Case(
        "patternProperties with properties",
        {**_object(name=STRING), "patternProperties": {"^x-": NUMBER}},
        [{"name": "a", "x-1": 1}],
        [{"x-1": "a"}],
    ),
    Case(
        "patternProperties without quotes",
        {"type": "object", "patternProperties": {'^[^"]+$': INTEGER}, "additionalProperties": False},
        [{"a\\": 1}],
        [{'"': 1}, {"a": "x"}],
    ),
    Case("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}, refused="propertyNames"),
    Case("minProperties", {"type": "object", "minProperties": 2}, refused="minProperties"),
    Case(
        "minProperties of required keys",
        {**_object(**_AB), "required": ["a", "b"], "minProperties": 2},
        [{"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    Case(
        "maxProperties of all keys",
        {**_object(**_AB), "additionalProperties": False, "maxProperties": 2},
        [{}, {"b": 2}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    Case(
        "maxProperties of keys that may be left out",
        {**_object(**_AB, c=INTEGER), "maxProperties": 2},
        refused="maxProperties: is not supported with keys that may be left out",
    ),
    Case("minProperties with a point", {"type": "object", "minProperties": 2.0}, refused="minProperties: more than 1"),
    Case(
        "no count", {**_object(a=INTEGER), "required": ["a"], "minProperties": -1}, refused="minProperties: -1 is not"
    ),
    Case(
        "maxProperties of one of two",
        _object(a={**_object(**_AB, c=INTEGER), "maxProperties": 2}, b={"type": "object", "minProperties": 1}),
        refused="properties.a.maxProperties: is not supported",
    ),
    Case(
        "oneOf of one of two",
        _object(
            a={"oneOf": [{**INTEGER, "multipleOf": 2}, {**INTEGER, "multipleOf": 3}]}, b={"oneOf": [STRING, INTEGER]}
        ),
        refused="properties.a.oneOf: its branches may overlap",
    ),
    Case(
        "two patterns of one",
        {"type": "object", "patternProperties": {"^[-a]$": INTEGER, r"^[\-a]$": STRING}},
        refused="patternProperties: two of its patterns are the same",
    ),
    Case("a class that is not closed", {**STRING, "pattern": r"^x[-+\]"}, refused="pattern: a class is not closed"),
    Case(
        "a class that begins with its end", {**STRING, "pattern": "^[^]+[a]$"}, refused="pattern: a class begins with ]"
    ),
    Case("a question in brackets", {**STRING, "pattern": r"^\(?x\)?$"}, ["x", "(x)"], ["y"]),
    Case("counts with a point", {"type": "string", "minLength": 1.0, "maxLength": 1e0}, ["a"], ["", "ab"]),
    Case("a count that is none", {"type": "string", "maxLength": 1.5}, refused="maxLength: 1.5 is not a whole number"),
    Case(
        "a bound that is none", _object(a={**NUMBER, "minimum": "3"}), refused="properties.a.minimum: is not a number"
    ),
    Case("uniqueItems", _object(a={"type": "array", "uniqueItems": True}), refused="properties.a.uniqueItems: is not"),
    Case(
        "a format that is too long",
        {**STRING, "format": "date", "maxLength": 3},
        refused="no text that can be written fits its keywords",
    ),
    Case("minProperties 1", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    Case("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    Case("maxProperties with properties", {**_object(**_AB), "maxProperties": 1}, [{}, {"b": 2}], [{"a": 1, "b": 2}]),
    Case("dependentRequired", {**_object(**_AB), "dependentRequired": {"a": ["b"]}}, refused="dependentRequired"),
    Case(
        "dependentSchemas",
        {**_object(**_AB), "dependentSchemas": {"a": {"required": ["b"]}}},
        refused="dependentSchemas",
    ),
    Case("dependencies", {**_object(**_AB), "dependencies": {"a": ["b"]}}, refused="dependencies"),
    Case(
        "unevaluatedProperties",
        {"allOf": [_object(a=STRING)], "type": "object", "unevaluatedProperties": False},
        refused="unevaluatedProperties",
    ),
    Case(
        "unevaluatedProperties true",
        {**_object(a=INTEGER), "unevaluatedProperties": True},
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{"a": "x"}],
    ),
    # arrays
    Case("items", {"type": "array", "items": INTEGER}, [[], [1, 2]], [["a"]]),
    Case("minItems", {"type": "array", "items": INTEGER, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    Case("maxItems", {"type": "array", "items": INTEGER, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    Case("minItems of anything", {"type": "array", "minItems": 2}, [[1, "a"]], [[], [1]]),
    Case("prefixItems", {"type": "array", "prefixItems": [STRING, INTEGER]}, [["a", 1, None], []], [[1], ["a", "b"]]),
    Case(
        "prefixItems without more",
        {"type": "array", "prefixItems": [STRING, INTEGER], "items": False},
        [["a", 1], ["a"], []],
        [["a", 1, 2], [1]],
    ),
    Case(
        "prefixItems with items",
        {"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 1},
        [["a"], ["a", 1, 2]],
        [[], ["a", "b"]],
    ),
    Case("a percent sign in a name", {"$ref": "#/$defs/a%b", "$defs": {"a%b": INTEGER}}, [1], ["a"]),
    Case(
        "a default with many digits",
        {**INTEGER, "default": 2**53 + 1, "examples": [2**70], "x-id": 2**53 + 1},
        [1],
        ["a"],
    ),
    Case("a default that is no JSON", {**INTEGER, "default": math.inf}, refused="default: is a number that JSON lacks"),
    Case(
        "a list that is no JSON",
        {**NUMBER, "x-list": {"a": [math.nan]}},
        refused="x-list.a.0: is a number that JSON lacks",
    ),
    Case(
        "keywords that say nothing",
        {
            "type": "array",
            "items": {
                **_object(**_AB),
                "propertyNames": STRING,
                "dependentRequired": {"a": []},
                "dependentSchemas": {"a": True},
                "then": False,
            },
            "uniqueItems": False,
            "unevaluatedItems": {},
            "contains": INTEGER,
            "minContains": 0,
            "if": {"minItems": 3},
            "else": True,
            "not": False,
        },
        [[], [{"a": 1}, {"a": 1}]],
        [[1], {}],
    ),
    Case("contains", {"type": "array", "contains": INTEGER}, refused="contains"),
    Case("minContains", {"type": "array", "contains": INTEGER, "minContains": 2}, refused="contains"),
    Case(
        "unevaluatedItems",
        {"type": "array", "prefixItems": [STRING], "unevaluatedItems": False},
        refused="unevaluatedItems",
    ),
    # strings
    Case("minLength", {"type": "string", "minLength": 3}, ["abc", "日本語", "a\nb"], ["ab", "", "\n\n"]),
    Case("maxLength", {"type": "string", "maxLength": 3}, ["", "abc", "😀😀😀", '"""'], ["abcd"]),
    Case("pattern", {"type": "string", "pattern": "^[a-z]{2,4}$"}, ["ab", "abcd"], ["a", "ABC", "abcde"]),
    Case("pattern not anchored", {"type": "string", "pattern": "[0-9]"}, ["a1b", "1"], ["ab", ""]),
    Case("pattern anchored at its beginning", {"type": "string", "pattern": "^ab"}, ["abc", "ab"], ["xab"]),
    Case("pattern classes", {"type": "string", "pattern": "^\\d{3}-\\w+$"}, ["123-ab_1"], ["12-a", "1234"]),
    Case("pattern escapes", {"type": "string", "pattern": '^"[\\\\/]"$'}, ['"/"', '"\\"'], ["x"]),
    Case("pattern without quotes", {"type": "string", "pattern": '^[^"]{2}$'}, ["ab", "\\\n"], ['a"', '""']),
    Case("pattern without backslashes", {"type": "string", "pattern": r"^[^\\]{2}$"}, ["ab", '""'], ["a\\", "\\\\"]),
    Case("pattern not printable", {"type": "string", "pattern": r"^[^ -~]{2}$"}, ["éé", "\n\t"], ["aa", '""', "\\\\"]),
    Case(
        "pattern of controls",
        {"type": "string", "pattern": r"^\p{Cc}[\b\cI]$"},
        ["\n\t"],
        ['""', "\\\\", "aa"],
        is_drawn=False,
    ),
    Case(
        "pattern of no letters",
        {"type": "string", "pattern": r"^\P{L}\W\D$"},
        ['"\\.', "\n\t "],
        ["abc", "a.."],
        is_drawn=False,
    ),
    Case(
        "pattern of sets",
        {"type": "string", "pattern": r"^[\]a][^\]a][^a&&b][^a-z--x][^[][\w-]$"},
        ["]bc}x-", "ab^|^a"],
        ["]]c}x-", "]b&}x-", "]bcBx-", "]bc}[-", "]bc}x+"],
        is_drawn=False,  # Python warns of it
    ),
    Case("pattern of a pair", {"type": "string", "pattern": r"^\ud83d\ude00$"}, ["\U0001f600"], ["a"], is_drawn=False),
    Case(
        "pattern with a control character",
        {"type": "string", "pattern": "^a\\x01$"},
        refused="no text that can be written",
    ),
    Case("pattern with a flag", {"type": "string", "pattern": "(?x) a # ["}, refused="flag x"),
    Case("pattern dot", {"type": "string", "pattern": "^.{3}$"}, ["abc", "日本語"], ["ab", "abcd"]),
    Case("pattern alternation", {"type": "string", "pattern": "^a|b$"}, ["ac", "cb"], ["c"]),
    Case("pattern look-ahead", {"type": "string", "pattern": "^(?=.*[0-9]).{4,}$"}, refused="look-around"),
    Case(
        "pattern with length",
        {"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 4},
        ["aa", "aaaa"],
        ["a", "aaaaa", "bb"],
    ),
    # format
    _format(
        "date-time",
        ["2024-05-17T12:34:56Z", "2024-02-29T00:00:00.123+02:00"],
        ["2024-05-17", "x", "2023-02-29T00:00:00Z", "2024-05-17T12:34:60Z"],
    ),
    _format(
        "date",
        ["2024-05-17", "2024-02-29", "2000-02-29", "2400-02-29", "2023-12-31"],
        ["2024-13-40", "2023-02-30", "x", "2023-02-29", "1900-02-29", "2022-04-31"],
    ),
    Case("date with a pattern", {"type": "string", "format": "date", "pattern": "^20"}, ["2024-02-29"], ["1996-02-29"]),
    Case(
        "date beside other conditions",
        {"type": ["string", "null"], "format": "date", "allOf": [{"pattern": "9$"}]},
        ["2024-02-29", None],
        ["2023-02-29", "2023-02-28", 9],
    ),
    _format("time", ["12:34:56Z"], ["25:00:00Z", "12:34:60Z"]),
    _format("email", ["a@b.com"], ["ab"]),
    _format("ipv4", ["1.2.3.4"], ["1.2.3.400"]),
    _format("ipv6", ["::1", "2001:db8::ff"], ["x"]),
    _format("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    _format("uri", ["http://a.b/c"], ["\\\\"]),
    _format("hostname", ["a.example.com"], ["-a-"]),
    _format("duration", ["P1DT2H"], ["1D"]),
    Case("format regex", {"type": "string", "format": "regex"}, refused="format"),
    Case("format json-pointer", {"type": "string", "format": "json-pointer"}, refused="format"),
    # numbers
    Case("minimum", {"type": "integer", "minimum": 3}, [3, 99], [2, -1]),
    Case("maximum", {"type": "integer", "maximum": 3}, [3, -99], [4]),
    Case("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, [4, 5], [3, 6]),
    Case(
        "minimum of a number",
        {"type": "number", "minimum": -1.5, "maximum": 2.25},
        [0, -1.5, 2.25, 0.1],
        [2.26, -1.6, 3],
    ),
    Case(
        "exclusiveMinimum of a number",
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        [0.5, 0.001],
        [0, 1, 1.0, 0.0],
    ),
    Case("minimum without type", {"minimum": 5}, [5, "x"], [4]),
    Case("multipleOf", {"type": "integer", "multipleOf": 7}, [0, 7, -14], [1, 8]),
    Case("multipleOf with many digits", {**NUMBER, "multipleOf": 1e-30}, refused="multipleOf: 1e-30 has too many"),
    Case("minimum near zero", {**NUMBER, "minimum": 1e-99}, refused="minimum: 1e-99 is too near to zero"),
    Case("minimum of a number far from zero", {"minimum": 1e18}, refused="minimum: 1e+18 is too far from zero"),
    Case("integers from 1e18 on", {**INTEGER, "minimum": 10**18}, [10**18, 2**62], [10**18 - 1, 2**63]),
    Case("integers above 1e18", {**INTEGER, "exclusiveMinimum": 1e18}, [2**62], [10**18], narrow=[10**18 + 1]),
    Case("a bound of what is no number", {"type": "string", "maxLength": 1, "exclusiveMinimum": 2e18}, ["a"], [2**62]),
    Case("numbers above 1e18", {**NUMBER, "exclusiveMinimum": 1e18}, refused="exclusiveMinimum: 1e+18 is too far"),
    Case("integers to -1e18", {"type": ["integer", "null"], "maximum": -1e18}, [-(10**18), -(2**62)], [1 - 10**18]),
    Case("integers of 64 bits", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, 2**53], [2**63]),
    Case("integers below 1e30", {"type": ["integer", "null"], "minimum": -1e30, "maximum": 1e30}, [0, None], [0.5]),
    Case("const of 61 bits", {"const": 2**60}, [2**60], [2**60 + 1]),
    Case("const beyond doubles", {"const": 2**53 + 1}, refused="const: 9007199254740993 has more digits"),
    Case("const of 64 bits", {"const": 2**63}, refused="const"),
    Case("enum beyond doubles", {"enum": ["a", [{"id": 2**53 + 1}]]}, refused="enum"),
    Case("bound beyond doubles", {"type": "integer", "minimum": 2**53 + 1}, refused="minimum"),
    Case(
        "bound beyond 64 bits",
        {"type": "number", "maximum": 1e30},
        refused="maximum: 1e+30 is at or beyond",
    ),
    Case("integers that are all too large", {"type": "integer", "minimum": 1e30}, refused="minimum"),
    Case("const that is no number", {"const": float("nan")}, refused="const: is a number that JSON lacks"),
    Case(
        "bound that is no number",
        {"type": "number", "maximum": float("inf")},
        refused="maximum: is a number that JSON lacks",
    ),
    Case(
        "length that is no number",
        {"type": "string", "maxLength": float("inf")},
        refused="maxLength: is a number that JSON lacks",
    ),
    Case("reference to a name with a hash", {"$ref": "#/$defs/a#b", "$defs": {"a#b": INTEGER}}, [1], ["1"]),
    Case("reference to a generic type", {"$ref": "#/$defs/A[ä b]", "$defs": {"A[ä b]": INTEGER}}, [1], ["1"]),
    Case("multipleOf of a number", {"type": "number", "multipleOf": 0.25}, [0.25], [0.3], narrow=[1.5]),
    Case(
        "multipleOf in a range", {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 20}, [5, 20], [0, 3, 25]
    ),
    Case("multipleOf large", {"type": "integer", "multipleOf": 999_983}, refused="multipleOf"),
    # combinations
    Case("anyOf", {"anyOf": [STRING, {"type": "integer", "minimum": 2}]}, ["a", 2], [1]),
    Case(
        "anyOf beside properties",
        {**_object(["a"], a=STRING), "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        [{"a": "x", "b": 1}],
        [{"a": "x"}],
    ),
    Case("oneOf disjoint", {"oneOf": [STRING, INTEGER]}, ["a", 1], [1.5]),
    Case(
        "oneOf that may overlap",
        {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
        refused="oneOf: its branches may overlap",
    ),
    Case(
        "oneOf with a discriminator",
        {
            "oneOf": [
                _object(["k", "x"], closed=True, k={"const": "a"}, x=INTEGER),
                _object(["k", "y"], closed=True, k={"const": "b"}, y=STRING),
            ]
        },
        [{"k": "a", "x": 1}, {"k": "b", "y": "s"}],
        [{"k": "a", "y": "s"}],
    ),
    Case(
        "allOf",
        {"allOf": [_object(["a"], a=STRING), _object(["b"], b=INTEGER)]},
        [{"a": "x", "b": 1}],
        [{"a": "x"}, {"b": 1}],
    ),
    Case("allOf of ranges", {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 5}]}, [2, 5], [1, 6]),
    Case("allOf of strings", {"type": "string", "allOf": [{"minLength": 2}, {"pattern": "^a"}]}, ["ab"], ["a", "bb"]),
    Case("allOf that nothing fits", {"allOf": [STRING, INTEGER]}, refused="no value fits"),
    Case("not", {"type": "string", "not": {"const": "a"}}, refused="not"),
    Case(
        "if-then-else",
        {
            **_object(["k"], k={"enum": ["a", "b"]}),
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"required": ["x"]},
        },
        refused="if",
    ),
    # references
    Case(
        "ref",
        {"$defs": {"p": {"type": "integer", "minimum": 1}}, **_object(["a"], a={"$ref": "#/$defs/p"})},
        [{"a": 1}],
        [{"a": 0}],
    ),
    Case("ref beside keywords", {"$defs": {"p": INTEGER}, "$ref": "#/$defs/p", "minimum": 5}, [5], [4]),
    Case(
        "ref recursive",
        {
            "$defs": {
                "n": _object(
                    ["v", "next"], closed=True, v=INTEGER, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
                )
            },
            "$ref": "#/$defs/n",
        },
        [{"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1}],
    ),
    Case(
        "ref to the root",
        _object(closed=True, c={"type": "array", "items": {"$ref": "#"}}),
        [{"c": [{}, {"c": []}]}],
        [{"c": [1]}],
    ),
    Case("ref escaped", {"$defs": {"a/b~c": INTEGER}, "$ref": "#/$defs/a~1b~0c"}, [1], ["x"]),
    Case(
        "ref into another schema, beside a date",
        {
            "type": "object",
            "properties": {
                "a": {"items": INTEGER},
                "b": {"$ref": "#/properties/a/items"},
                "c": {"type": "string", "format": "date"},
            },
            "additionalProperties": False,
        },
        [{"b": 1, "c": "2024-02-29"}],
        [{"c": "2023-02-29"}],
    ),
    Case(
        "date where a ref leads to a value",
        {"$ref": "#/examples/0", "examples": [{"type": "string", "format": "date"}]},
        refused="examples.0.format",
    ),
    Case(
        "ref to itself", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, refused="$ref: leads to itself"
    ),
    Case("ref that is empty", {"$ref": ""}, refused="$ref: leads to itself"),
    Case(
        "id inside, where a ref leads to what is in it",
        {
            "$id": "https://x/order",
            **_object(["item"], item={"$ref": "item"}),
            "$defs": {
                "item": {
                    "$id": "item",
                    **_object(["name"], name={"$ref": "#/$defs/name"}),
                    "$defs": {"name": STRING},
                },
                "name": {"$ref": "#"},
            },
        },
        [{"item": {"name": "a"}}],
        [{"item": {"name": {"item": {}}}}, {"item": {}}],
    ),
    Case("no schema in a keyword of somebody's own", {**INTEGER, "x-ui": {"items": 5, "pattern": "("}}, [1], ["a"]),
    Case("ref to nothing", {"$ref": "#/$defs/a"}, refused="$ref: #/$defs/a leads nowhere"),
    Case("ref to nothing that nothing reads", {**INTEGER, "$defs": {"a": {"$ref": "#/$defs/b"}}}, [1], ["a"]),
    Case("ref in a keyword of somebody's own", {**INTEGER, "x-meta": {"$ref": "#/nowhere"}}, [1], ["a"]),
    Case("ref to no anchor", {"$ref": "#a"}, refused="$ref: #a leads nowhere"),
    Case(
        "refRemote",
        {"$ref": "http://example.com/a.json"},
        refused="$ref: http://example.com/a.json is another document",
    ),
    Case("anchor", {"$defs": {"a": {"$anchor": "foo", "type": "integer"}}, "$ref": "#foo"}, [1], ["x"]),
    Case("dynamicRef", {"$defs": {"a": {"$dynamicAnchor": "n"}}, "$dynamicRef": "#n"}, refused="dynamicRef"),
    Case(
        "definitions",
        {"definitions": {"p": {"type": "boolean"}}, "type": "array", "items": {"$ref": "#/definitions/p"}},
        [[True]],
        [[1]],
    ),
    # what says nothing about instances
    Case("unknownKeyword", {"type": "string", "frobnicate": 3}, ["a"], [1]),
    Case("content", {"type": "string", "contentEncoding": "base64"}, ["YQ=="]),
    Case(
        "default", {"type": "string", "title": "x", "default": "z", "examples": ["a"], "deprecated": True}, ["a"], [1]
    ),
    # as clients send them
    Case(
        "clients' schemas",
        {
            "$defs": {
                "Address": _object(
                    ["street", "zip"], closed=True, street=STRING, zip={"type": "string", "pattern": r"^\d{5}$"}
                ),
                "Item": _object(
                    ["kind", "price"],
                    closed=True,
                    kind={"enum": ["book", "film"]},
                    price={"type": "number", "minimum": 0},
                    tags={"type": "array", "items": STRING, "maxItems": 3},
                ),
            },
            **_object(
                ["id", "address", "items"],
                closed=True,
                id={"type": "string", "format": "uuid"},
                address={"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]},
                items={"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1},
            ),
        },
        [
            {
                "id": "123e4567-e89b-12d3-a456-426614174000",
                "address": {"street": "Main Street 1", "zip": "12345"},
                "items": [{"kind": "book", "price": 1.5, "tags": ["new"]}],
            }
        ],
        [{"id": "123e4567-e89b-12d3-a456-426614174000", "address": None, "items": []}],
    ),
)
