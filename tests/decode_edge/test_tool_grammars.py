"""Tests of grammars for outputs that call tools: the calls as each family of models writes them fit its grammar, and no
other text does.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from baton.v1 import inference_pb2
from common.errors import InvalidRequest
from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.reasoning import Reasoning
from common.text.chat_messages import Tool, ToolChoice
from common.text.grammars import GrammarRefused
from common.text.output_formats import FORMATS
from common.text.tokenizer import TextTokenizer
from common.text.tool_grammars import ToolGrammars
from decode_service.edge.request_checks import ModelLimits, check_request
from tests.decode_edge.tokenizers_for_tests import allowed, byte_level, eos_id, grammars_of

SIZE = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"], "additionalProperties": False}
ADD, CLOCK = Tool("add", parameters=json.dumps(SIZE)), Tool("clock")
STRICT = Tool("add", parameters=json.dumps(SIZE), strict=True)
ANY, ONE = ToolChoice(), ToolChoice(parallel=False)
REQUIRED, REQUIRED_ONE = ToolChoice(required=True), ToolChoice(required=True, parallel=False)
MARKERS = {
    "mistral": ("[TOOL_CALLS]",),
    "later mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "harmony": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
}


@cache
class Family:
    """A family of models, with a tokenizer whose special tokens are the family's markers."""

    def __init__(self, name: str) -> None:
        backend = byte_level()._pretrained.backend_tokenizer
        backend.add_special_tokens(list(MARKERS.get(name, ())))
        self.tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))
        self.writes = ToolGrammars(FORMATS[name.removeprefix("later ")], self.tokenizer.special_tokens)
        self.end = eos_id(self.tokenizer)
        self.grammars = grammars_of(self.tokenizer)

    def fits(self, grammar: Grammar | None, text: str, reasoning: Reasoning | None = None) -> bool:
        """Returns whether the grammar allows an output of this text that ends by itself."""
        assert grammar is not None
        matcher = self.grammars.matcher(grammar, (), reasoning)
        return all(map(matcher.accept, self.tokenizer.encode(text))) and self.end in allowed(matcher, self.tokenizer)


CALLS = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    "llama3": '{"name": "NAME", "parameters": ARGUMENTS}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    "later mistral": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
    "json": '{"name": "NAME", "arguments": ARGUMENTS}',
}
TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"size": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"size": 1}}; {"name": "clock", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"size": 1}}, {"name": "clock", "arguments": {}}]',
    "later mistral": '[TOOL_CALLS]add[ARGS]{"size": 1}[TOOL_CALLS]clock[ARGS]{}',
    "json": '{"name": "add", "arguments": {"size": 1}}\n{"name": "clock", "arguments": {}}',
}
WORDS = {"harmony": "<|channel|>final<|message|>I < you"}
families = pytest.mark.parametrize("name", CALLS)


def call(name: str, function: str = "add", arguments: str = '{"size": 2}') -> str:
    return CALLS[name].replace("NAME", function).replace("ARGUMENTS", arguments)


def words(name: str) -> str:
    return WORDS.get(name, "I < you")


@families
def test_required_calls_have_a_tool_s_name_and_arguments_that_fit(name: str) -> None:
    family = Family(name)
    grammar = family.writes.grammar([ADD, CLOCK], REQUIRED, None)
    assert family.fits(grammar, call(name))
    assert family.fits(grammar, call(name, "clock", "{}"))
    assert not family.fits(grammar, call(name, "add", '{"size": 3}'))
    assert not family.fits(grammar, call(name, "clock", '{"size": 1}'))
    assert not family.fits(grammar, call(name, "other", "{}"))
    assert not family.fits(grammar, words(name))
    assert not family.fits(grammar, "")


@pytest.mark.parametrize("name", TWO_CALLS)
def test_there_are_several_calls_unless_one_is_asked_for(name: str) -> None:
    family = Family(name)
    for choice, is_several in ((REQUIRED, True), (REQUIRED_ONE, False), (ONE, False)):
        assert family.fits(family.writes.grammar([ADD, CLOCK], choice, None), TWO_CALLS[name]) is is_several
    assert family.fits(family.writes.grammar([STRICT, CLOCK], ANY, None), TWO_CALLS[name])


@families
def test_only_the_named_functions_are_called(name: str) -> None:
    family = Family(name)
    for required in (True, False):
        grammar = family.writes.grammar([ADD, CLOCK], ToolChoice(required, ("clock",)), None)
        assert family.fits(grammar, call(name, "clock", "{}"))
        assert not family.fits(grammar, call(name))
        assert family.fits(grammar, words(name)) is not required


@families
def test_an_output_that_may_call_strict_tools_is_words_or_calls_that_fit(name: str) -> None:
    family = Family(name)
    grammar = family.writes.grammar([STRICT, CLOCK], ANY, None)
    assert family.fits(grammar, words(name))
    assert family.fits(grammar, call(name))
    assert family.fits(grammar, call(name, "clock", '{"any": [1]}'))
    assert not family.fits(grammar, call(name, "add", '{"size": 3}'))
    assert not family.fits(grammar, call(name, "other", "{}"))


def test_words_may_come_before_a_call_and_after_it() -> None:
    family = Family("hermes")
    text = f"I see. {call('hermes')} and\n{call('hermes')}."
    assert family.fits(family.writes.grammar([STRICT], ANY, None), text)
    assert not family.fits(family.writes.grammar([STRICT], ANY, None), "I see. <tool_call> or so")
    assert not family.fits(family.writes.grammar([STRICT], ONE, None), text)
    one = f"I see. {call('hermes')}"
    assert family.fits(family.writes.grammar([STRICT], ONE, None), one)
    later = Family("later mistral")
    assert later.fits(later.writes.grammar([STRICT], ANY, None), f"I see.{call('later mistral')}")


@pytest.mark.parametrize(
    ("name", "reasoning", "thought"),
    [
        ("hermes", Reasoning("<think>", "</think>"), "<think>hm</think>\n\n"),
        ("hermes", Reasoning("<think>", "</think>", is_open=True), "hm\n</think>"),
        ("json", Reasoning("<think>", "</think>", is_open=True), "{hm</think>\n\n"),
        (
            "harmony",
            Reasoning("<|channel|>analysis<|message|>", "<|end|>"),
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
        ),
    ],
)
def test_required_calls_come_after_the_reasoning(name: str, reasoning: Reasoning, thought: str) -> None:
    family = Family(name)
    grammar = family.writes.grammar([ADD], REQUIRED, None)
    assert family.fits(grammar, thought + call(name), reasoning)
    assert not family.fits(grammar, thought + words(name), reasoning)
    if name == "harmony":
        for choice in (REQUIRED, ANY):
            assert family.fits(family.writes.grammar([STRICT], choice, None), thought + call(name)), "by its channel"


@families
def test_what_an_answer_must_be_does_not_bind_calls(name: str) -> None:
    family = Family(name)
    answer = Grammar(GrammarKind.JSON_SCHEMA, '{"enum": [7]}')
    says = words(name).replace("I < you", "7")
    grammar = family.writes.grammar([ADD], ANY, answer)
    assert family.fits(grammar, says) and family.fits(grammar, call(name))
    assert not family.fits(grammar, words(name))
    assert not family.fits(family.writes.grammar([ADD], REQUIRED, answer), says)


@pytest.mark.parametrize(
    ("answer", "fitting", "other"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"enum": [7, "</>"]}'), ["7", '"</>"'], "8"),
        (Grammar(GrammarKind.REGEX, r"a/[0-9]+|\/b\\n"), ["a/12", r"/b\n"], "a"),
        (Grammar.of_choices(["yes", 'n"o']), ["yes", 'n"o'], "n"),
    ],
)
def test_in_channels_an_answer_without_tools_has_its_header(answer: Grammar, fitting: list[str], other: str) -> None:
    family = Family("harmony")
    grammar, final = family.writes.answer(answer), "<|channel|>final<|message|>"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for text in fitting:
        assert family.fits(grammar, final + text) and family.fits(grammar, thought + final + text)
        assert family.fits(grammar, thought + final + text, Reasoning("<|channel|>analysis<|message|>", "<|end|>"))
        assert not family.fits(grammar, text)
    assert not family.fits(grammar, final + other)
    assert grammar is not None and grammar.request_field == answer.request_field


def test_a_chat_without_tools_asks_for_an_answer_with_its_header() -> None:
    writes, limits = Family("harmony").writes, ModelLimits(9, 64, eos_token_ids=(1,))
    schema = Grammar(GrammarKind.JSON_SCHEMA, "{}")
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}

    def grammar_of(**prompt: Any) -> Grammar | None:
        request = inference_pb2.GenerateRequest(**prompt, sampling={"json_schema": "{}"})
        return check_request(request, limits, writes).sampling.resolved.grammar

    assert grammar_of(chat={"messages": [user]}) == writes.answer(schema) != schema
    assert grammar_of(chat={"messages": [user, assistant], "continue_final_message": True}) == schema
    assert grammar_of(text="hi") == schema


def test_without_channels_and_in_a_grammar_s_own_language_an_answer_has_no_header() -> None:
    schema, lark = Grammar(GrammarKind.JSON_SCHEMA, "{}"), Grammar(GrammarKind.LARK, 'start: "a"')
    assert Family("hermes").writes.answer(schema) is schema
    assert Family("harmony").writes.answer(lark) is lark


def test_an_answer_of_another_kind_does_not_go_with_calls() -> None:
    writes = Family("hermes").writes
    regex = Grammar(GrammarKind.REGEX, "a")
    with pytest.raises(InvalidRequest) as refusal:
        writes.grammar([ADD], ANY, regex)
    assert refusal.value.field == "sampling.regex"
    assert writes.grammar([ADD], REQUIRED, regex) == writes.grammar([ADD], REQUIRED, None)


def test_an_output_is_free_if_nothing_has_to_fit() -> None:
    assert Family("hermes").writes.grammar([ADD, CLOCK], ANY, None) is None


def test_a_family_whose_calls_are_not_known_cannot_be_bound() -> None:
    writes = Family("none").writes
    assert writes.grammar([ADD], ANY, None) is None
    with pytest.raises(InvalidRequest) as refusal:
        writes.grammar([ADD], REQUIRED, None)
    assert refusal.value.field == "chat.tool_choice"


@families
def test_whatever_is_drawn_under_a_required_grammar_is_a_call_that_fits(name: str) -> None:
    family = Family(name)
    grammar = family.writes.grammar([ADD, CLOCK], REQUIRED_ONE, None)
    assert grammar is not None
    expected = [call(name, "add", '{"size": 1}'), call(name), call(name, "clock", "{}")]
    found = set()
    for seed in range(30):
        draw, matcher, output = random.Random(seed), family.grammars.matcher(grammar), b""
        while (token_id := draw.choice(allowed(matcher, family.tokenizer))) != family.end:
            assert matcher.accept(token_id)
            output += family.tokenizer.bytes_of(token_id)
        text = output.decode(errors="replace").rpartition("<|start|>assistant")[2]
        found.add("".join(text.split()))
    assert len(found) > 1 and found <= {"".join(each.split()) for each in expected}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"not": {}}, "not"),
        ({"properties": {"a": {"multipleOf": 999_983}}}, "multipleOf"),
        ({"minProperties": 2}, "minProperties"),
        ({"x-guidance": []}, "x-guidance"),
        ({"properties": {"a": {"enum": ["x" * 70_000]}}}, "characters, more than"),
    ],
)
def test_a_schema_that_is_not_served_is_refused_by_its_keyword(parameters: dict[str, Any], words: str) -> None:
    family = Family("hermes")
    grammar = family.writes.grammar([Tool("f", parameters=json.dumps(parameters))], REQUIRED, None)
    assert grammar is not None and grammar.request_field == "chat.tools"
    with pytest.raises(GrammarRefused, match=words):
        family.grammars.matcher(grammar)


def test_very_many_tools_are_served() -> None:
    family = Family("hermes")
    tools = [Tool(f"function_number_{number}", parameters=json.dumps(SIZE)) for number in range(128)]
    assert family.fits(family.writes.grammar(tools, REQUIRED, None), call("hermes", "function_number_127"))
