"""Tests that the OpenAPI document describes what the gateway accepts: the routes, and the fields by which it parses
bodies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.apis.chat import parse_chat
from gateway.apis.completions import parse_completion
from gateway.apis.messages import parse_message
from gateway.apis.responses import parse_response
from gateway.errors import ApiError
from tests.gateway.gateway_here import GatewayHere

MESSAGES = [{"role": "user", "content": "x"}]
KEYS = {
    "document": {"openapi", "info", "paths", "components", "security"},
    "operation": {"operationId", "parameters", "requestBody", "responses", "security"},
}


@pytest.fixture
def document(edge: GatewayHere) -> Any:
    answer = edge.ask("GET", "/openapi.json")
    assert answer.status == 200
    return answer.json


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    return ((path, method, each) for path, methods in document["paths"].items() for method, each in methods.items())


def every(value: Any) -> Iterator[Any]:
    yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from every(each)


def test_it_has_the_form_of_an_openapi_document(document: Any) -> None:
    assert re.fullmatch(r"3\.1\.\d", document["openapi"])
    assert set(document) == KEYS["document"] and {"title", "version"} == set(document["info"])
    ids = []
    for path, method, operation in operations(document):
        assert path.startswith("/") and method in ("get", "post") and set(operation) <= KEYS["operation"]
        ids.append(operation["operationId"])
        declared = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
        assert declared == set(re.findall(r"\{(.*?)\}", path))
        assert all("$ref" in each or each["description"] for each in operation["responses"].values())
        assert "requestBody" not in operation or method == "post"
    assert len(set(ids)) == len(ids)
    for value in every(document):
        if isinstance(value, dict) and "$ref" in value:
            assert value["$ref"].startswith("#/")
            found = document
            for part in value["$ref"][2:].split("/"):
                found = found[part]


def test_every_path_in_it_is_served_and_those_with_a_body_say_which(edge: GatewayHere, document: Any) -> None:
    bodies = {path for path, _, operation in operations(document) if "requestBody" in operation}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"} <= bodies
    assert {"/v1/messages", "/v1/messages/count_tokens"} <= bodies
    assert {"/v1/models", "/v1/models/{model}", "/health/ready", "/openapi.json", "/"} <= set(document["paths"])
    for path, method, _ in operations(document):
        answer = edge.ask(method.upper(), path.format(model="demo"))
        assert answer.status == 503 or "is not served" not in answer.body.decode(errors="replace"), path
        assert answer.status != 405


@pytest.mark.parametrize(
    ("parse", "name", "body"),
    [
        (parse_completion, "CompletionFields", {"model": "demo", "prompt": "x"}),
        (parse_chat, "ChatFields", {"model": "demo", "messages": MESSAGES}),
        (parse_message, "MessageFields", {"model": "demo", "max_tokens": 8, "messages": MESSAGES}),
        (parse_response, "ResponseFields", {"model": "demo", "input": "x"}),
    ],
)
def test_a_body_has_exactly_the_fields_that_are_taken(
    document: Any, parse: Callable[[bytes], Any], name: str, body: dict[str, Any]
) -> None:
    def code_of(**fields: Any) -> str | None:
        try:
            parse(json.dumps({**body, **fields}).encode())
        except ApiError as error:
            return error.code
        return None

    schema = document["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == set(body)
    for field, content in schema["properties"].items():
        assert code_of(**{field: ["odd"]}) != "unknown_parameter", field
        for value in content.get("enum", ()):
            assert code_of(**{field: value}) is None, (field, value)
        if "default" in content:
            assert code_of(**{field: content["default"]}) is None, field
    assert code_of(nonsense=1) == "unknown_parameter" and "nonsense" not in schema["properties"]
    assert "numbers" not in schema["properties"]
    temperature, top_k, penalty = (schema["properties"][name] for name in ("temperature", "top_k", "presence_penalty"))
    assert temperature.items() >= {"type": ["number", "null"], "minimum": 0.0, "maximum": 100.0}.items()
    assert top_k["anyOf"][1:] == [{"enum": [-1]}, {"type": "null"}]
    for content, default in ((temperature, "the model's, else 1.0"), (top_k, "the model's, else 0"), (penalty, "0.0")):
        assert "default" not in content and content["description"].endswith(f" The default is {default}.")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ChatFields", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}),
        ("ChatFields", {"guided_json": {"type": "object"}}),
        ("CompletionFields", {"structured_outputs": {"json": {"type": "object"}}}),
        ("ChatFields", {"thinking_token_budget": -1, "reasoning": {"max_tokens": -1}}),
        ("CompletionFields", {"logprobs": False}),
        ("MessageFields", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    ],
)
def test_what_is_taken_is_described(document: Any, name: str, fields: dict[str, Any]) -> None:
    parse, more = {
        "ChatFields": (parse_chat, {"messages": MESSAGES}),
        "CompletionFields": (parse_completion, {"prompt": "x"}),
        "MessageFields": (parse_message, {"messages": MESSAGES, "max_tokens": 8}),
    }[name]
    body = {"model": "demo", **more, **fields}
    parse(json.dumps(body).encode())
    described = Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})
    assert [error.json_path for error in described.iter_errors(body)] == []


def test_what_is_not_taken_is_not_described(document: Any) -> None:
    for name in ("MessageFields", "ConversationFields"):
        assert document["components"]["schemas"][name]["properties"]["thread"]["enum"] == [None]


def test_messages_and_items_have_the_fields_that_are_taken(document: Any) -> None:
    schemas = document["components"]["schemas"]
    chat, message = (schemas[name]["properties"]["messages"]["items"] for name in ("ChatFields", "MessageFields"))
    item = schemas["ResponseFields"]["properties"]["input"]["anyOf"][1]["items"]
    calls = ["tool_calls", "tool_call_id"]
    assert list(chat["properties"]) == ["role", "content", *calls, "refusal", "reasoning_content", "reasoning"]
    assert list(message["properties"]) == ["role", "content"]
    assert list(item["properties"]) == ["type", "role", "content", "call_id", "name", "arguments", "output"]
    call = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    assert set(chat["properties"]["tool_calls"]["anyOf"][0]["items"]["properties"]) == set(call)
    parse_chat(json.dumps({"model": "demo", "messages": [{"role": "assistant", "tool_calls": [call]}]}).encode())
    says_nothing = [{"role": "assistant", "content": None}]
    assert {"type": "null"} in chat["properties"]["content"]["anyOf"]
    parse_chat(json.dumps({"model": "demo", "messages": says_nothing}).encode())
    assert {"type": "null"} not in message["properties"]["content"]["anyOf"]
    with pytest.raises(ApiError):
        parse_message(json.dumps({"model": "demo", "max_tokens": 8, "messages": says_nothing}).encode())


def test_tools_have_the_fields_that_are_taken(document: Any) -> None:
    def fields_of(name: str, field: str) -> dict[str, Any]:
        fields: dict[str, Any] = document["components"]["schemas"][name]["properties"]
        return fields[field]

    beside = {"name": {"type": "string"}, "description": {"type": ["string", "null"]}}
    last = {"strict": {"type": ["boolean", "null"]}}
    function = {**beside, "parameters": {"type": ["object", "null"]}, **last}
    kind = {"type": {"enum": ["function", None]}}
    for name in ("ChatFields", "TokenizeFields"):
        tool = fields_of(name, "tools")["anyOf"][0]["items"]
        assert (tool["properties"].keys(), tool["required"]) == ({"type", "function"}, ["function"])
        assert (tool["properties"]["function"]["properties"], tool["properties"]["type"]) == (function, kind["type"])
    flat = fields_of("ResponseFields", "tools")["items"]
    assert (flat["properties"], flat["required"]) == ({**kind, **function}, ["name"])
    for name in ("MessageFields", "ConversationFields"):
        tool = fields_of(name, "tools")["anyOf"][0]["items"]
        taken = {"type": {"enum": ["custom", None]}, **beside, "input_schema": {"type": "object"}, **last}
        assert (tool["properties"], tool["required"]) == (taken, ["name", "input_schema"])
    for name, inner in (
        ("ChatFields", {"function", "allowed_tools"}),
        ("TokenizeFields", {"function", "allowed_tools"}),
        ("ResponseFields", {"name", "mode", "tools"}),
    ):
        words, choice, null = fields_of(name, "tool_choice")["anyOf"]
        assert (words["enum"], choice["properties"].keys()) == (["none", "auto", "required"], {"type", *inner})
        assert null == {"type": "null"}
