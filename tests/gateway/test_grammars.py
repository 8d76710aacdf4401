"""Tests of the fields that constrain the output: those of OpenAI, vLLM, SGLang and llama.cpp, and the client's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.apis.chat import parse_chat
from gateway.apis.completions import parse_completion
from gateway.errors import ApiError
from gateway.plan import Plan
from tests.gateway.gateway_here import GatewayHere

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["ab", "cd"]}}, "required": ["kind"]}
ANY = {"type": "object"}
EBNF = 'root ::= "a" | "b"'
LARK = 'start: "a" | "b"'
KINDS = ("json_schema", "regex", "choice", "ebnf", "lark")


def chat(**fields: Any) -> Plan:
    return parse_chat(json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x"}], **fields}).encode())


def completion(**fields: Any) -> Plan:
    return parse_completion(json.dumps({"model": "demo", "prompt": "x", **fields}).encode())


def asked(plan: Plan) -> dict[str, Any]:
    options: dict[str, Any] = {kind: plan.sampling[kind] for kind in KINDS if kind in plan.sampling}  # type: ignore[literal-required]
    return {kind: json.loads(value) if kind == "json_schema" else value for kind, value in options.items()}


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", {"json_schema": ANY}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format", {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "response_format", {"json_schema": SCHEMA}),
        (
            {"response_format": {"type": "json_object", "value": None, "schema": None}},
            "response_format",
            {"json_schema": ANY},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format",
            {"json_schema": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", {"json_schema": SCHEMA}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "structured_outputs.json",
            {"json_schema": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}},
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": "[ ]?"}},
            "structured_outputs.json_object",
            {"json_schema": {**ANY, "x-guidance": {"whitespace_pattern": "[ ]?"}}},
        ),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", {"json_schema": ANY}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "structured_outputs.regex", {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": EBNF}}, "structured_outputs.grammar", {"ebnf": EBNF}),
        ({"structured_outputs": {"grammar": LARK}}, "structured_outputs.grammar", {"lark": LARK}),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, "guided_json", {"json_schema": SCHEMA}),
        ({"guided_json": {}}, "guided_json", {"json_schema": {}}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"},
            "guided_json",
            {"json_schema": {**SCHEMA, "x-guidance": {"whitespace_pattern": "[ ]?"}}},
        ),
        ({"guided_regex": "a+", "regex": None}, "guided_regex", {"regex": "a+"}),
        ({"guided_choice": ["a"], "response_format": {"type": "text"}}, "guided_choice", {"choice": ["a"]}),
        ({"guided_grammar": EBNF}, "guided_grammar", {"ebnf": EBNF}),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", {"json_schema": SCHEMA}),
        ({"json_schema": SCHEMA}, "json_schema", {"json_schema": SCHEMA}),
        ({"regex": "a+"}, "regex", {"regex": "a+"}),
        ({"ebnf": EBNF}, "ebnf", {"ebnf": EBNF}),
        ({"grammar": "# a\n" + EBNF}, "grammar", {"ebnf": "# a\n" + EBNF}),
        ({"grammar": LARK}, "grammar", {"lark": LARK}),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_every_way_to_say_it_is_one_option(fields: dict[str, Any], param: str, expected: dict[str, Any]) -> None:
    (kind,) = expected
    for plan in (chat(**fields), completion(**fields)):
        assert asked(plan) == expected
        assert plan.params[f"sampling.{kind}"] == param


@pytest.mark.parametrize(
    ("fields", "open_objects"),
    [({}, None), ({"disable_additional_properties": True}, False), ({"disable_additional_properties": False}, True)],
)
def test_vllms_switch_says_whether_objects_are_open(fields: dict[str, Any], open_objects: bool | None) -> None:
    assert chat(structured_outputs={"json": SCHEMA, **fields}).sampling.get("open_objects") == open_objects


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a", "ebnf": EBNF}, "ebnf: does not go with regex"),
        (
            {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
            "guided_json: does not go with response_format",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            r"structured_outputs\.choice: does not go with struct",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, r"structured_outputs\.structural_tag: "),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}},
            "structured_outputs: disable_any_whitespace does not go with whitespace_pattern",
        ),
        ({"response_format": {"type": "structural_tag"}}, r"response_format\.type: "),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format: "),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format: "),
        ({"guided_choice": ["a", 1]}, r"guided_choice\[1\]: "),
        ({"guided_choice": "a"}, "guided_choice: "),
        ({"regex": 1}, "regex: "),
        ({"guided_json": 7}, "guided_json: "),
        ({"json_schema": [{}]}, "json_schema: "),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": "a"}},
            "structured_outputs.whitespace_pattern: may match spaces, tabs and line ends only",
        ),
        ({"guided_json": {}, "guided_whitespace_pattern": "a"}, "guided_whitespace_pattern: may match spaces, "),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern: goes with guided_json$"),
        *(({name: ""}, f"{name}: must not be empty$") for name in ("regex", "ebnf", "json_schema")),
        *(({f"guided_{name}": ""}, f"guided_{name}: must not be empty$") for name in ("json", "regex", "grammar")),
        ({"guided_choice": []}, "guided_choice: must not be empty$"),
        ({"structured_outputs": {"choice": []}}, r"structured_outputs\.choice: must not be empty$"),
        ({"structured_outputs": {}}, "structured_outputs: needs json, regex, "),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs: needs json, regex, "),
        ({"response_format": {"type": "json_schema", "schema": ""}}, r"response_format\.schema: must not be empty$"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_two_of_them_and_what_is_none_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    for parse in (chat, completion):
        with pytest.raises(ApiError, match=f"^{message}"):
            parse(**fields)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", None),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", None),
        ({"guided_choice": ["a", ""]}, "guided_choice", None),
        ({"grammar": 'root ::= "a'}, "grammar", None),
        ({"grammar": "\n" * 200_000}, "grammar", None),
        ({"regex": r"[^\s\S]"}, "regex", "no text matches it"),
        ({"grammar": r"start: /[^\s\S]/"}, "grammar", "no text matches it"),
        ({"grammar": "start: nothing"}, "grammar", 'at 1(8): unknown name: "nothing"'),
        ({"regex": "(a"}, "regex", "unclosed group, at (a"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "("}},
            "structured_outputs.whitespace_pattern",
            "unclosed group, at (",
        ),
        ({"json_schema": "[" * 5000}, "json_schema", "nests too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_served_is_refused_by_the_field_that_asked_in_words_on_one_line(
    gateway: GatewayHere, fields: dict[str, Any], param: str, words: str | None
) -> None:
    answer = gateway.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 4, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words is None or answer.error["message"] == f"{param}: {words}"


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["ab", "cd"]}, ["ab", "cd"]),
        ({"structured_outputs": {"regex": "(ab|cd)c"}}, ["abc", "cdc"]),
        ({"grammar": 'root ::= "(" inner ")"\ninner ::= "ab"'}, ["(ab)"]),
        ({"ebnf": 'root ::= "ab" | "cd"'}, ["ab", "cd"]),
        ({"response_format": {"type": "json_schema", "schema": {"enum": [7, "a"]}}}, ["7", '"a"']),
    ],
)
def test_an_answer_is_what_was_asked_for(gateway: GatewayHere, fields: dict[str, Any], texts: list[str]) -> None:
    answer = gateway.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 9, **fields})
    (choice,) = answer.json["choices"]
    assert choice["text"] in texts
    assert choice["finish_reason"] == "stop"
