"""Grammars at the edge: what is served reaches the engine with its matcher, the rest is refused by name."""

from __future__ import annotations

import json
from typing import Any

import grpc
import numpy as np
import pytest

from baton.v1 import inference_pb2, types_pb2
from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import num_words
from tests.decode_edge.edge_under_test import Edge, error_of, vocab_size

PROMPT = inference_pb2.TokenIds(ids=[1, 2])


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("json_schema", "{", "is not JSON"),
        ("json_schema", "[]", "is not a JSON object"),
        ("json_schema", "[" * 60_000, "is not JSON"),
        ("json_schema", json.dumps({"type": "banana"}), "banana"),
        ("json_schema", json.dumps({"not": {}}), '"not"'),
        ("json_schema", json.dumps({"type": "array", "uniqueItems": True}), "uniqueItems"),
        ("json_schema", json.dumps({"type": "integer", "multipleOf": 999_983}), "multipleOf"),
        ("json_schema", json.dumps({"type": "object", "minProperties": 2}), "minProperties"),
        ("json_schema", json.dumps({"enum": ["x" * 70_000]}), "characters, more than"),
        ("regex", "(a", "regex parse error"),
        ("regex", "a(?=b)", "look-around"),
        ("lark", "start: nothing", "nothing"),
    ],
)
async def test_a_grammar_that_is_not_served_is_refused_by_name(edge: Edge, field: str, text: str, words: str) -> None:
    call = edge.generate(token_ids=PROMPT, sampling=types_pb2.SamplingParams(**{field: text}))
    code, _, metadata = await error_of(call)
    assert (code, metadata) == (grpc.StatusCode.INVALID_ARGUMENT, {"field": f"sampling.{field}"})
    assert words in await call.details()


async def test_a_grammar_does_not_go_with_an_output_that_ignores_its_end(edge: Edge) -> None:
    call = edge.generate(token_ids=PROMPT, sampling=types_pb2.SamplingParams(regex="a", ignore_eos=True))
    assert (await error_of(call))[2] == {"field": "sampling.ignore_eos"}


async def test_the_engine_gets_a_matcher_that_has_accepted_what_was_brought(edge: Edge) -> None:
    a, b = (edge.tokenizer.encode(letter)[0] for letter in "ab")

    def allowed(matcher: Any) -> set[int]:
        mask = np.zeros(num_words(vocab_size(edge.tokenizer)), np.int32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    edge.generate(token_ids=PROMPT, generated_token_ids=[a], sampling=types_pb2.SamplingParams(regex="ab"))
    submit = await edge.engine.submitted()
    assert submit.sampling.grammar == Grammar(GrammarKind.REGEX, "ab")
    assert allowed(submit.matcher) == {b}


async def test_brought_output_that_the_grammar_forbids_is_refused(edge: Edge) -> None:
    a = edge.tokenizer.encode("a")[0]
    call = edge.generate(token_ids=PROMPT, generated_token_ids=[a, a], sampling=types_pb2.SamplingParams(regex="ab"))
    assert (await error_of(call))[2] == {"field": "generated_token_ids"}
    assert "the grammar forbids token" in await call.details()
