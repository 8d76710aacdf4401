"""Tests of grammars at the edge: a grammar that is served reaches the engine with its matcher, and any other is refused
with the field's name.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from baton.v1 import inference_pb2, types_pb2
from common.grammar.grammar import MAX_CHARS, Grammar, GrammarKind
from common.grammar.matcher import num_words
from common.telemetry.timeline import TOKENIZE, Timeline
from common.text.grammars import (
    LEXER_BYTES,
    MAX_CACHED_BYTES,
    GrammarRefused,
    Grammars,
    LlgMatcher,
    OutputRefused,
    SharedLexer,
    Work,
)
from common.text.json_objects import moves_references
from common.text.tokenizer import TextTokenizer
from tests.decode_edge.edge_under_test import Edge, error_of, events_of, running_edge, vocab_size
from tests.decode_edge.tokenizers_for_tests import (
    allowed,
    byte_fallback,
    byte_level,
    eos_id,
    grammars_of,
    ids_of_pieces,
    with_space_mark,
)

JSON_SCHEMA, REGEX, CHOICE, EBNF = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.EBNF
SLOW = {"type": "integer", "multipleOf": 999_983}
WIDE = {"properties": {str(key): {} for key in range(501)}}
PROMPT = inference_pb2.TokenIds(ids=[1, 2])
ODD_TEXTS = ['a"b', "a\\n", "a\nb", "a<eos>€", "a|b", "/a/", "😀", " a", "a\t\x00", "a", "ab", "// a", "%ignore /a/"]


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("json_schema", "{", "is not JSON"),
        ("json_schema", "[]", "is not a JSON object"),
        ("json_schema", "[" * 60_000, "nests too deeply"),
        ("json_schema", json.dumps({"type": "banana"}), "banana"),
        ("json_schema", json.dumps(WIDE), "has 501 keys, more than"),
        ("json_schema", json.dumps({"enum": ["x" * 70_000]}), "characters, more than"),
        ("json_schema", json.dumps({"const": "\ud800"}), "not JSON serializable"),
        ("json_schema", json.dumps({"type": "integer", "x-guidance": {"spaces": 1}}), "x-guidance"),
        ("json_schema", json.dumps({"properties": {"const": SLOW}}), "multipleOf"),
        ("json_schema", json.dumps({"$ref": "#/examples/0", "examples": [SLOW]}), "multipleOf"),
        ("json_schema", json.dumps({"$ref": "#/$defs/a%2Fdefault", "$defs": {"a": {"default": SLOW}}}), "multipleOf"),
        ("regex", "", "is empty"),
        ("regex", "(a", "unclosed group, at (a"),
        ("regex", "a(?=b)", "look-around"),
        ("lark", "start: nothing", "nothing"),
        ("lark", 'start: "{" %json ' + json.dumps(SLOW), "multipleOf"),
        ("lark", 'start: %json {"x-guidance": {"whitespace_pattern": 1}}', "x-guidance"),
        ("lark", 'start: %json {"x-guidance": {"whitespace_pattern": "[ x]"}}', "spaces, tabs and line ends only"),
        ("lark", 'start: %json {"x-guidance": {"whitespace_pattern": "("}}', "whitespace_pattern: unclosed group"),
        ("lark", 'start: %json {"uniqueItems": true}', "at 1(8): uniqueItems: is not supported"),
        ("lark", "start: %json [", "is not JSON"),
        ("lark", 'start: %json {"enum": ["' + "x" * 70_000 + '"]}', "characters, more than"),
        ("lark", "start: " + '"a" ' * 5000, "characters, more than"),
        ("choice", types_pb2.Choice(), "has no text"),
        ("choice", types_pb2.Choice(texts=["a", ""]), "a text is empty"),
        ("choice", types_pb2.Choice(texts=["x" * 70_000]), "characters, more than"),
        ("ebnf", 'root ::= "a" b', "needs b"),
        ("ebnf", 'root ::= root "a"', "root has no sentence"),
    ],
)
async def test_a_grammar_that_is_not_served_is_refused_by_name(edge: Edge, field: str, text: Any, words: str) -> None:
    call = edge.generate(token_ids=PROMPT, sampling=types_pb2.SamplingParams(**{field: text}))
    code, _, metadata = await error_of(call)
    assert (code, metadata) == (grpc.StatusCode.INVALID_ARGUMENT, {"field": f"sampling.{field}"})
    assert words in await call.details()


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (SLOW, "multipleOf"),
        ({"properties": {"a": {"items": SLOW}}}, "properties.a.items.multipleOf"),
        (
            {"anyOf": [{}, {"properties": {"minProperties": {"minProperties": 2}}}]},
            "anyOf.1.properties.minProperties.minProperties",
        ),
        ({"$defs": {"a": {"x-guidance": {}}}, "$ref": "#/$defs/a"}, "$defs.a.x-guidance"),
        ({"properties": {"const": {"const": {"a": ["\0"]}}}}, "properties.const.const"),
        ({"prefixItems": [{"enum": ["a"]}, {"enum": ["a", "\0"]}]}, "prefixItems.1.enum"),
        ({"items": {"pattern": "(?x)a"}}, "items.pattern"),
        ({"properties": {"a": WIDE}}, "properties.a.properties"),
        ({"items": {"patternProperties": {"(?x)a": {}}}}, "items.patternProperties"),
        ({"properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
        ({"items": {"patternProperties": {"(": {}}}}, "items.patternProperties"),
        ({"items": 5}, "items"),
        ({"properties": {"a": {"additionalProperties": 5}}}, "properties.a.additionalProperties"),
        ({"items": {"anyOf": [{}, 5]}}, "items.anyOf.1"),
        ({"allOf": [{"type": []}]}, "allOf.0.type"),
        ({"items": {"prefixItems": 5}}, "items.prefixItems"),
        ({"items": {"properties": 5}}, "items.properties"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": 5}}, "$defs.a"),
        ({"properties": {"a": {"type": "strin"}}}, "properties.a.type"),
        ({"properties": {"a": {"required": "z"}}}, "properties.a.required"),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "string", "format": "nope"}}}, "$defs.a.format"),
        ({"items": {"$ref": "#/nowhere"}}, "items.$ref"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"const": 1, "type": "string"}}}, "properties.a"),
        ({"$ref": "#/examples/1", "examples": [{}, {"a": SLOW}]}, "examples.1.a.multipleOf"),
        ({"$ref": "#/examples/0", "examples": [{"pattern": "a"}]}, "examples.0.pattern"),
        ({"$ref": "#/examples/0", "examples": [{"patternProperties": {}}]}, "examples.0.patternProperties"),
    ],
)
def test_an_error_names_the_place_of_a_keyword_in_the_schema(schema: dict[str, object], place: str) -> None:
    text = json.dumps(schema)
    assert refusal(Grammar(JSON_SCHEMA, text)).startswith(f"{place}: ")
    assert refusal(Grammar(GrammarKind.LARK, f"start: %json {text}")).startswith(f"at 1(8): {place}: ")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"type": 5}, "type: 5 is none of string, number, integer, boolean, null, array, object, nor a list of them"),
        ({"required": [5]}, "required: [5] is not a list of texts"),
        ({"enum": 5}, "enum: 5 is not a list"),
        ({"pattern": 5}, "pattern: 5 is not a text"),
        ({"pattern": "a("}, "pattern: unclosed group, at ("),
        ({"$ref": "other.json"}, "$ref: other.json is another document, which is not read"),
        ({"const": 1, "type": "string"}, "no value fits type and const"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "no value fits it: minLength (2) is greater than maxLen"),
        ({"$ref": "#/allOf/x", "allOf": []}, "$ref: #/allOf/x leads nowhere"),
        (Grammar(GrammarKind.LARK, 'start: %json {"$ref": "#x"}'), "at 1(8): $ref: #x leads nowhere"),
        ({"pattern": "(Anchor 'x'"}, "pattern: unclosed group, at (Anchor 'x'"),
        (Grammar(REGEX, "(Anchor 'x'"), "unclosed group, at (Anchor 'x'"),
        (Grammar(REGEX, "(Resource 'x' is not present in a registry"), "unclosed group, at (Resource 'x'"),
        (Grammar(REGEX, r"\ba"), r"\b and other borders of words are not supported"),
        (Grammar(REGEX, "a$b"), "^ and $ are supported only at its ends"),
        (Grammar(REGEX, r"\d(?P<a"), "unclosed capture group name, at its end"),
        (
            Grammar(GrammarKind.LARK, 'start: %json {"$id": "http://a/b", "$ref": "c"}'),
            "at 1(8): $ref or $schema: http://a/c",
        ),
        (Grammar(GrammarKind.LARK, "start: /a(/"), "at 1(8): unclosed group, at ("),
        (Grammar(GrammarKind.LARK, 'start: "a" <nope>'), "at 1(8): the model has no special token <nope>"),
    ],
    ids=str,
)
def test_a_refusal_says_what_was_sent_and_what_is_accepted(grammar: Grammar | dict[str, object], words: str) -> None:
    asked = grammar if isinstance(grammar, Grammar) else Grammar(JSON_SCHEMA, json.dumps(grammar))
    assert refusal(asked).startswith(words)


@pytest.mark.parametrize(("num_keys", "required"), [(500, []), (501, ["500"])])
def test_an_output_under_a_wide_schema_goes_on_to_its_end(num_keys: int, required: list[str]) -> None:
    tokenizer = byte_level()
    end = eos_id(tokenizer)
    grammars = grammars_of(tokenizer)
    schema = {
        "properties": {str(key): {"type": "integer"} for key in range(num_keys)},
        "required": required,
        "additionalProperties": False,
    }
    output = {str(key): key for key in (0, 250, num_keys - 1)}
    matcher = grammars.matcher(Grammar(JSON_SCHEMA, json.dumps({"type": "object", **schema})))
    assert all(map(matcher.accept, tokenizer.encode(json.dumps(output))))
    assert allowed(matcher, tokenizer) == [end]


KEYS = [f"{number:03x}" for number in range(3600)]
OF_ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}

WITH_IDS = {
    "allOf": [{"id": "http://x/a", "allOf": [{"$ref": "#/definitions/b"}], "definitions": {"b": {}}}],
    "definitions": {"b": {"$ref": "#"}},
}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (OF_ITSELF, "required"),
        ({**OF_ITSELF, "required": []}, ""),
        ({**OF_ITSELF, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, ""),
        ({**OF_ITSELF, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}}}, "required"),
        ({"type": "array", "items": {"$ref": "#"}}, ""),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "minItems"),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1}, ""),
        ({**WITH_IDS, "$schema": "http://json-schema.org/draft-04/schema#"}, ""),
        ({"$ref": "#a", "$defs": {"a": {**OF_ITSELF, "$anchor": "a", "properties": {"a": {"$ref": "#a"}}}}}, "$ref"),
    ],
)
def test_a_schema_that_no_finite_text_fits_is_refused(schema: dict[str, object], keyword: str) -> None:
    grammar = Grammar(JSON_SCHEMA, json.dumps(schema))
    if not keyword:
        assert grammars_of(byte_level()).matcher(grammar)
    else:
        assert refusal(grammar).startswith(f"{keyword}: leads to itself without end")


@pytest.mark.parametrize(
    "schema",
    [{"properties": {key: {} for key in KEYS}, "required": KEYS, "type": "object"}, {"allOf": [{}] * 16_000}],
    ids=["required", "allOf"],
)
def test_a_large_schema_is_checked_in_little_time(schema: dict[str, object]) -> None:
    text = json.dumps(schema)
    assert 64_000 <= len(text) <= MAX_CHARS[JSON_SCHEMA]
    grammars = grammars_of(byte_level())
    grammars.load()
    began_s = time.thread_time()
    assert grammars.matcher(Grammar(JSON_SCHEMA, text))
    assert time.thread_time() - began_s < 2.0  # a quadratic search takes more


def test_references_in_schemas_with_ids_are_looked_for_once() -> None:
    schema: dict[str, object] = {"properties": {key: {} for key in KEYS}}
    for number in range(300):
        schema = {"$id": str(number), "items": schema}
    began_s = time.thread_time()
    assert not moves_references(schema)
    assert time.thread_time() - began_s < 0.5  # a quadratic search takes more


def nested(schema: dict[str, object], depth: int) -> dict[str, object]:
    for _ in range(depth):
        schema = {"oneOf": [{"type": "integer"}, {"type": "object", "properties": {"k": schema}}]}
    return schema


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        (
            {"none": {"const": 1, "type": "string"}, **{key: {} for key in KEYS}},
            "no value fits it: required property 'none' is unsatisfiable",
        ),
        (
            {"none": nested({"oneOf": [{"type": "integer"}, {"type": "number"}]}, depth=22)},
            "oneOf constraints are not supported",
        ),
    ],
    ids=["no value", "no place"],
)
def test_the_fault_of_a_large_schema_is_searched_for_a_little_time(properties: dict[str, object], words: str) -> None:
    schema = {"properties": properties, "required": ["none"], "type": "object", "$defs": {"a": {"enum": [0] * 8_000}}}
    began_s = time.thread_time()
    assert refusal(Grammar(JSON_SCHEMA, json.dumps(schema))).startswith(words)
    assert time.thread_time() - began_s < 2.0  # a quadratic search takes more


def test_the_place_of_a_keyword_is_cut_at_its_beginning() -> None:
    schema: dict[str, object] = SLOW
    for _ in range(400):
        schema = {"properties": {"name": schema}}
    place, _, why = refusal(Grammar(JSON_SCHEMA, json.dumps(schema))).partition(": ")
    assert place.startswith("...") and place.endswith(".properties.name.multipleOf") and len(place) < 250
    assert "999983" in why


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *(
            ("json_schema", json.dumps(schema))
            for schema in (
                {"const": {"multipleOf": 0, "x-guidance": 1}},
                {"enum": [{"minProperties": 2}]},
                {"type": "string", "default": {"multipleOf": 0}, "examples": [{"x-guidance": 1}]},
                {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "default": SLOW}}},
                {"type": "object", "properties": {"x-guidance": {"type": "string"}}},
            )
        ),
        *(
            ("lark", text)
            for text in ('start: "%json {"', "start: /%json [{]/", 'start: "a" # %json {', 'start: "a" // %json {')
        ),
    ],
)
async def test_what_looks_like_a_keyword_or_a_schema_is_served(edge: Edge, field: str, text: str) -> None:
    edge.generate(token_ids=PROMPT, sampling=types_pb2.SamplingParams(**{field: text}))
    assert (await edge.engine.submitted()).matcher is not None


OF_A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
Z = {"type": "object", "properties": {"z": {"type": "integer"}}}
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (OF_A, True),
        ({**OF_A, "required": ["a"]}, True),
        ({"items": OF_A, "type": "array"}, True),
        ({"anyOf": [OF_A, {"type": "null"}]}, True),
        ({"anyOf": [OF_A, {**OF_A, "required": ["a"]}], "description": "one of two"}, True),
        ({"allOf": [OF_A]}, True),
        ({"$ref": "#/$defs/x~1y", "$defs": {"x/y": OF_A}}, True),
        ({**OF_A, "properties": {"a": OF_A}}, True),
        ({"type": "object"}, False),
        ({**OF_A, "additionalProperties": True}, False),
        ({**OF_A, "additionalProperties": {"type": "integer"}}, False),
        ({**OF_A, "patternProperties": {"^z": {"type": "integer"}}, "additionalProperties": False}, False),
        ({**OF_A, "required": ["z"]}, False),
        ({"allOf": [OF_A, Z]}, False),
        ({**OF_A, "anyOf": [Z, {"required": ["a"]}]}, False),
        ({"allOf": [OF_A, B]}, True),
        ({**OF_A, "anyOf": [{"required": ["a"]}, B]}, True),
        ({"allOf": [{"$ref": "#/$defs/x"}, B], "$defs": {"x": OF_A}}, True),
        ({"allOf": [{"$ref": "#x"}, B], "$defs": {"x": {**OF_A, "$anchor": "x"}}}, True),
        ({"allOf": [OF_A, {"$id": "x", "$ref": "#/$defs/x", "$defs": {"x": Z}}], "$defs": {"x": B}}, False),
        ({"allOf": [OF_A, {"id": "x", "$ref": "#/$defs/x", "$defs": {"x": Z}}], "$defs": {"x": B}, **DRAFT_4}, False),
        ({**OF_A, "$defs": {"x": {**OF_A, "$id": "x", "id": "y"}}, "$ref": "#/$defs/x"}, True),
        ({**OF_A, "$defs": {"x": {"id": "y", "$ref": "#/$defs/z"}, "z": OF_A}, "$ref": "#/$defs/x"}, True),
        ({"allOf": [{"$ref": "#/$defs/x"}, {"required": ["z"]}], "$defs": {"x": OF_A}}, False),
    ],
)
def test_an_object_that_declares_properties_is_closed_unless_it_says_otherwise(
    schema: dict[str, object], is_closed: bool
) -> None:
    tokenizer = byte_level()
    texts = ['{"z": 1}', '[{"z": 1}]', '{"a": {"z": 1}}', '{"a": 1, "z": 1}', '[{"a": 1, "z": 1}]']
    for text in (json.dumps(schema), f"start: %json {json.dumps(schema)}"):
        grammar = Grammar(GrammarKind.LARK if text.startswith("start") else JSON_SCHEMA, text)
        assert any(fits(grammar, each, tokenizer) for each in texts) != is_closed
        opened = replace(grammar, opens_objects=True)
        says = {"additionalProperties", "patternProperties"}.isdisjoint(schema)
        assert not says or any(fits(opened, each, tokenizer) for each in texts)
        assert any(fits(grammar, each, tokenizer) for each in ('{"a": 1}', '{"a": {"a": 1}}', '[{"a": 1}]', *texts))


@pytest.mark.parametrize(
    ("options", "fitting", "other"),
    [
        ({}, '{"a": 1 }', '{"a":     1}'),
        ({"whitespace_pattern": "[ ]?"}, '{"a": 1}', '{"a":  1}'),
        ({"whitespace_pattern": r"(?: |\n)?"}, '{"a":\n1}', '{"a": \n1}'),
        ({"whitespace_flexible": False}, '{"a":1}', '{"a": 1}'),
        ({"whitespace_pattern": r"\s*"}, '{"a": \n   1}', '{"a":\u00a01}'),
    ],
)
def test_a_schema_says_which_spaces_there_are(options: dict[str, object], fitting: str, other: str) -> None:
    tokenizer, text = byte_level(), json.dumps({**OF_A, "x-guidance": options})
    for grammar in (Grammar(JSON_SCHEMA, text), Grammar(GrammarKind.LARK, f"start: %json {text}")):
        assert fits(grammar, fitting, tokenizer) and not fits(grammar, other, tokenizer)


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        (r"\d\D", "5٣", ["٣a", "55"]),
        (r"[\d_]", "_", ["٣"]),
        (r"\w\W", "aé", ["éa", "a_"]),
        (r"\s\S", "\u00a0a", ["a\u00a0"]),
        (r"a\/\d|\\\\d", "a/1", ["a/٣"]),
    ],
)
def test_classes_of_characters_mean_one_thing_everywhere(pattern: str, fitting: str, others: list[str]) -> None:
    tokenizer = byte_level()
    schema = Grammar(JSON_SCHEMA, json.dumps({"type": "string", "pattern": f"^({pattern})$"}))
    lark = Grammar(GrammarKind.LARK, f"start: /{pattern}/ // a comment\n")
    for text, is_fitting in ((fitting, True), *((other, False) for other in others)):
        for grammar in (Grammar(REGEX, pattern), lark):
            assert fits(grammar, text, tokenizer) == is_fitting, (grammar.kind, text)
        assert fits(schema, json.dumps(text, ensure_ascii=False), tokenizer) == is_fitting, text


async def test_a_schema_in_a_grammar_has_bounded_spaces(edge: Edge) -> None:
    grammar = Grammar(
        GrammarKind.LARK, 'start: %json {"type": "object", "properties": {}, "additionalProperties": false}'
    )
    grammars = grammars_of(edge.tokenizer)
    assert grammars.matcher(grammar, edge.tokenizer.encode("{    }")) is not None
    with pytest.raises(OutputRefused):
        grammars.matcher(grammar, edge.tokenizer.encode("{     }"))


def test_an_id_without_a_token_is_not_allowed_where_a_special_token_is() -> None:
    tokenizer = byte_level()
    size, end = vocab_size(tokenizer), eos_id(tokenizer)
    pad = Grammar(GrammarKind.LARK, f"start: /a*/ <[{end + 1}]>")
    matcher = Grammars(lambda: tokenizer, vocab_size=size + 1, eos_token_ids=[end]).matcher(pad)
    mask = np.zeros(num_words(size + 1), np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert (bits[end + 1], bits[size]) == (1, 0)


async def test_a_grammar_does_not_go_with_an_output_that_ignores_its_end(edge: Edge) -> None:
    call = edge.generate(token_ids=PROMPT, sampling=types_pb2.SamplingParams(regex="a", ignore_eos=True))
    assert (await error_of(call))[2] == {"field": "sampling.ignore_eos"}


async def test_the_engine_gets_a_matcher_that_has_accepted_what_was_brought(edge: Edge) -> None:
    a, b = (edge.tokenizer.encode(letter)[0] for letter in "ab")
    edge.generate(token_ids=PROMPT, generated_token_ids=[a], sampling=types_pb2.SamplingParams(regex="ab"))
    submit = await edge.engine.submitted()
    assert submit.sampling.grammar == Grammar(GrammarKind.REGEX, "ab")
    assert allowed(submit.matcher, edge.tokenizer) == [b]


@pytest.mark.parametrize(
    ("brought", "options", "words"),
    [("aa", {"regex": "ab"}, "the grammar forbids token"), ("ab", {"bad_words": ["ab"]}, "")],
)
async def test_brought_output_that_may_not_be_is_refused(
    edge: Edge, brought: str, options: dict[str, Any], words: str
) -> None:
    token_ids = [edge.tokenizer.encode(letter)[0] for letter in brought]
    call = edge.generate(token_ids=PROMPT, generated_token_ids=token_ids, sampling=types_pb2.SamplingParams(**options))
    assert (await error_of(call))[2] == {"field": "generated_token_ids"}
    assert words in await call.details()


@pytest.mark.parametrize(
    ("brought", "options", "fits"),
    [
        ("$", {"regex": "ab"}, False),
        ("a$", {"regex": "ab"}, False),
        ("ab$", {"regex": "ab"}, True),
        ("$", {"regex": "(ab)?"}, True),
        ("$", {"regex": "(ab)?", "min_tokens": 1}, False),
        ("$", {"bad_words": ["a"]}, True),
        ("xy", {"regex": "ab", "max_tokens": 2}, False),
        ("ab", {"regex": "ab", "max_tokens": 2}, True),
        ("ax", {"regex": "ab", "stop": ["ax"]}, False),
    ],
)
async def test_a_complete_output_fits_its_grammar_too(
    edge: Edge, brought: str, options: dict[str, Any], fits: bool
) -> None:
    ids = {"$": eos_id(edge.tokenizer)}
    token_ids = [ids[each] if each in ids else edge.tokenizer.encode(each)[0] for each in brought]
    call = edge.generate(token_ids=PROMPT, generated_token_ids=token_ids, sampling=types_pb2.SamplingParams(**options))
    if fits:
        assert (await events_of(call))[-1].finished.usage.num_completion_tokens == len(token_ids)
    else:
        assert (await error_of(call))[2] == {"field": "generated_token_ids"}


@pytest.mark.parametrize(
    ("lark", "output", "next_pieces"),
    [
        ('start: "a" <[END]> "b"', "a", None),
        ('start: "a" <[END]>', "a", ["END"]),
        ('start: "a" (<[END]> | "b")', "a", ["END", "b"]),
        ('start: "a" (<[END]> "c" | "b")', "a", ["b"]),
        ('start: ("a" <[END]>)+', "a", ["END"]),
        ('start: "a" <[*]> "b"?', "a", ["END"]),
    ],
)
def test_an_end_token_in_a_grammar_is_the_grammars_end(lark: str, output: str, next_pieces: list[str] | None) -> None:
    tokenizer = byte_level()
    end = eos_id(tokenizer)
    grammar = Grammar(GrammarKind.LARK, lark.replace("END", str(end)))
    matcher = grammars_of(tokenizer).matcher(grammar, tokenizer.encode(output))
    found = allowed(matcher, tokenizer)
    wanted = [end if piece == "END" else tokenizer.encode(piece)[0] for piece in next_pieces or ()]
    assert set(wanted) <= set(found) and (end in found) == (end in wanted)
    assert bool(matcher.failure) == (next_pieces is None)
    if next_pieces is None:
        assert found == [] and "before the end of the grammar" in matcher.failure


async def test_the_engine_gets_a_matcher_of_the_words_and_tokens_that_are_ruled_out(edge: Edge) -> None:
    a, b, c, space_a = (edge.tokenizer.encode(text)[0] for text in ("a", "b", "c", " a"))
    options = types_pb2.SamplingParams(bad_words=["ab"], allowed_token_ids=[c, b, a, space_a, b], regex="[abc ]*")
    edge.generate(token_ids=PROMPT, generated_token_ids=[c, a], sampling=options)
    submit = await edge.engine.submitted()
    assert submit.sampling.token_rules.allowed_ids == tuple(sorted((a, b, c, space_a)))
    assert allowed(submit.matcher, edge.tokenizer) == sorted((a, c, space_a))


async def test_rules_about_tokens_are_applied_beside_the_event_loop(log: list[dict[str, Any]]) -> None:
    timeline = Timeline()
    async with running_edge(log, timeline=timeline) as edge:
        timeline.start(max_events=100)
        edge.generate(token_ids=PROMPT, sampling=types_pb2.SamplingParams(allowed_token_ids=[7]))
        submit = await edge.engine.submitted()
        assert allowed(submit.matcher, edge.tokenizer) == [7]
        events = {track.name: track.events for track in timeline.stop().take_tracks()}
    assert [event.name for event in events[TOKENIZE]] == ["replay"]


@pytest.mark.parametrize(
    ("new_tokenizer", "text", "pieces"),
    [
        (byte_level, "ab", [["a", "b"], ["Ġ", "a", "b"]]),
        (with_space_mark, "yes", [["▁yes"], ["yes"]]),
        (with_space_mark, "\n", [["▁", "\n"], ["\n"]]),
    ],
)
def test_a_word_is_spelled_as_it_is_after_a_space_and_without_one(
    new_tokenizer: Callable[[], TextTokenizer], text: str, pieces: list[list[str]]
) -> None:
    tokenizer = new_tokenizer()
    assert list(dict.fromkeys(tokenizer.spellings(text))) == [tuple(ids_of_pieces(tokenizer, each)) for each in pieces]


@pytest.mark.parametrize("new_tokenizer", [byte_level, byte_fallback, with_space_mark])
@pytest.mark.parametrize(
    ("kind", "text", "outputs"),
    [
        (REGEX, "yes", ["yes"]),
        (REGEX, "yes|no", ["yes", "no"]),
        (REGEX, " yes", [" yes"]),
        (REGEX, "a<eos>€", ["a<eos>€"]),
        (JSON_SCHEMA, json.dumps({"const": "stop end"}), ["stop end"]),
        (JSON_SCHEMA, json.dumps({"enum": ["yes", 12, {"a": "b"}]}), ["yes", 12, {"a": "b"}]),
        (CHOICE, json.dumps(["yes", "no", " yes", "a<eos>€"]), ["yes", "no", " yes", "a<eos>€"]),
        (
            EBNF,
            'root ::= "(" root ")" | "yes" | "<eos>"',
            [f"{'(' * n}{a}{')' * n}" for n in range(99) for a in ("yes", "<eos>")],
        ),
    ],
)
def test_every_token_that_is_allowed_leads_on_to_an_output_that_fits(
    new_tokenizer: Callable[[], TextTokenizer], kind: GrammarKind, text: str, outputs: list[object]
) -> None:
    tokenizer = new_tokenizer()
    end = eos_id(tokenizer)
    grammars = grammars_of(tokenizer)
    for seed in range(20):
        draw, matcher, output = random.Random(seed), grammars.matcher(Grammar(kind, text)), b""
        while (token_id := draw.choice(allowed(matcher, tokenizer))) != end:
            assert matcher.accept(token_id)
            output += tokenizer.bytes_of(token_id)
        assert (json.loads(output) if kind is JSON_SCHEMA else output.decode()) in outputs


def test_a_text_to_choose_is_written_as_it_is() -> None:
    tokenizer = byte_level()
    end = eos_id(tokenizer)
    grammars = grammars_of(tokenizer)
    for text in (*ODD_TEXTS, "a.b", "b", "a|", "", "aa"):
        matcher = grammars.matcher(Grammar.of_choices(ODD_TEXTS))
        fits = all(map(matcher.accept, text.encode())) and end in allowed(matcher, tokenizer)
        assert fits == (text in ODD_TEXTS), text


def test_a_text_that_is_forced_comes_in_its_usual_tokens() -> None:
    tokenizer = with_space_mark()
    grammars = grammars_of(tokenizer)
    a, ay, yes = ids_of_pieces(tokenizer, ["a", "ay", "yes"])
    assert allowed(grammars.matcher(Grammar(REGEX, "ayes|no")), tokenizer)[-1] == ay
    assert allowed(grammars.matcher(Grammar(REGEX, "ayes")), tokenizer) == [a]
    assert allowed(grammars.matcher(Grammar(REGEX, "ayes"), [a]), tokenizer) == [yes]


def test_a_grammar_is_compiled_once_and_then_found() -> None:
    tokenizer = byte_level()
    compiled_s: list[float] = []
    found: list[None] = []
    grammars = Grammars(
        lambda: tokenizer,
        vocab_size=vocab_size(tokenizer),
        eos_token_ids=[eos_id(tokenizer)],
        on_found=lambda: found.append(None),
        on_compiled=compiled_s.append,
    )
    for text in ("ab", "ab", "a", "ab"):
        grammars.matcher(Grammar(REGEX, text))
    assert (len(compiled_s), len(found)) == (2, 2)
    with pytest.raises(GrammarRefused):
        grammars.matcher(Grammar(REGEX, "(a"))
    assert len(compiled_s) == 3 and min(compiled_s) > 0


@pytest.fixture
def masks_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a lexer's limits, which a slow machine does not reach in the time that masks have."""
    monkeypatch.setattr(Work, "is_too_much", False)


@pytest.mark.usefixtures("masks_may_take_long")
def test_what_outputs_make_of_a_grammar_is_bounded_and_harms_no_later_output() -> None:
    """Each output under this expression adds new states to the grammar's lexer, which all outputs share."""
    tokenizer = byte_level()
    grammars = grammars_of(tokenizer)
    grammar, draw, failure = Grammar(REGEX, "(a|b)*a(a|b){18}"), random.Random(0), ""
    first = allowed(grammars.matcher(grammar), tokenizer)
    before = resident_bytes()
    while not failure:
        matcher = grammars.matcher(grammar)
        for token_id in draw.choices(tokenizer.encode("ab"), k=1000):
            matcher.accept(token_id)
        allowed(matcher, tokenizer)
        failure = matcher.failure
    assert "too many states" in failure
    assert resident_bytes() - before < LEXER_BYTES
    assert allowed(grammars.matcher(grammar), tokenizer) == first


@pytest.mark.usefixtures("masks_may_take_long")
def test_a_lexer_that_a_copy_took_to_its_limit_fails_the_others_by_name_and_no_later_output() -> None:
    """The library gives only that copy an error. Other matchers refuse tokens that they allowed, without a word."""
    tokenizer = byte_level()
    end = eos_id(tokenizer)
    grammars = grammars_of(tokenizer)
    schema = {"type": "string", "pattern": r"((((\d|\d)*\d)*(.*(a)*)*){1,450})*"}
    grammar, draw = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), random.Random(0)
    matcher, quote = grammars.matcher(grammar), tokenizer.encode('"')
    first = allowed(matcher, tokenizer)
    assert all(map(matcher.accept, quote))
    while not matcher.failure:
        token_id = draw.choice(sorted({*allowed(matcher, tokenizer)} - {end, *quote}))
        copy = matcher.copy()
        assert copy.accept(token_id)
        allowed(copy, tokenizer)
        assert matcher.accept(token_id) == (not matcher.failure) == (not copy.failure)
    assert "lexer error" in matcher.failure
    assert allowed(grammars.matcher(grammar), tokenizer) == first


class TimedMatcher:
    """Stands for the library's matcher. Its calls take the seconds of the processor that `calls_s` lists, in turn."""

    def __init__(self, calls_s: Iterable[float]) -> None:
        self.now_s = 0.0
        self._calls_s = iter(calls_s)

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        self.now_s += next(self._calls_s)

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        self.now_s += next(self._calls_s)
        return 1

    def compute_ff_tokens(self) -> list[int]:
        self.now_s += next(self._calls_s)
        return []

    def is_error(self) -> bool:
        return False


def num_calls_until_failure(calls_s: Sequence[float]) -> int:
    """Returns how many calls a matcher makes before it fails: all of them if it does not fail."""
    library, mask = TimedMatcher(calls_s), np.zeros(1, np.int32)
    matcher = LlgMatcher(library, frozenset(), Work(lambda: library.now_s), SharedLexer())
    for number in range(len(calls_s)):
        if matcher.failure:
            return number
        (matcher.forced, lambda: matcher.fill(mask), lambda: matcher.accept(1))[number % 3]()
    return len(calls_s)


def test_slow_calls_fail_a_matcher_only_where_they_are_many() -> None:
    assert num_calls_until_failure([0.0005] * 1000) == 1000
    assert num_calls_until_failure([9.0] * 20 + [0.0001] * 980) == 1000
    assert num_calls_until_failure([9.0, *[0.0001] * 6] * 50) == 350
    assert num_calls_until_failure([9.0, *[0.0001] * 6] * 1000) < 750
    assert num_calls_until_failure([0.03] * 1000) < 30
    assert num_calls_until_failure([0.0015] * 1000) < 60
    assert num_calls_until_failure([0.03, 0.0001, 0.0001] * 1000) < 200


def test_the_grammars_that_are_kept_may_grow_within_the_bound_on_all() -> None:
    tokenizer = byte_level()
    grammars = grammars_of(tokenizer)
    used = [Grammar(REGEX, f"a{{{number}}}") for number in range(1, 65)]
    for grammar in used:
        grammars.matcher(grammar)
    kept = [grammar in grammars for grammar in used]
    assert kept[-1] and sum(kept) == MAX_CACHED_BYTES // LEXER_BYTES


def fits(grammar: Grammar, text: str, tokenizer: TextTokenizer) -> bool:
    """Returns whether the text is a whole output of the grammar."""
    try:
        matcher = grammars_of(tokenizer).matcher(grammar, tokenizer.encode(text))
    except OutputRefused:
        return False
    return eos_id(tokenizer) in allowed(matcher, tokenizer)


def refusal(grammar: Grammar) -> str:
    tokenizer = byte_level()
    grammars = grammars_of(tokenizer)
    with pytest.raises(GrammarRefused) as refused:
        grammars.matcher(grammar)
    return str(refused.value)


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss
