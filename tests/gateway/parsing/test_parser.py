"""Tests that outputs are parsed in the same way however they are cut into pieces, and that nothing in them is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.settings import OutputFormatName
from common.text.output_formats import FORMATS, HARMONY, HERMES, JSON, LLAMA3, MISTRAL, OutputFormat
from gateway.parsing.events import CallArguments, CallBegun, ContentText
from gateway.parsing.parser import OutputParser
from tests.gateway.parsing.transcripts import FUNCTIONS, ROME, TRANSCRIPTS, Said, Transcript, parsed

_BY_NAME = {each.name: each for each in TRANSCRIPTS}
each_transcript = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=_BY_NAME)


@each_transcript
def test_what_an_output_says(transcript: Transcript) -> None:
    assert parsed(transcript.form, [transcript.text], is_open=transcript.is_open) == transcript.said


@each_transcript
def test_an_output_says_the_same_cut_at_any_character(transcript: Transcript) -> None:
    text = transcript.text
    for cut in range(len(text)):
        assert parsed(transcript.form, [text[:cut], text[cut:]], is_open=transcript.is_open) == transcript.said
    assert parsed(transcript.form, text, is_open=transcript.is_open) == transcript.said, "each character by itself"


@st.composite
def cut_texts(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@each_transcript
def test_an_output_that_ends_early_says_the_beginning(transcript: Transcript) -> None:
    """Names and arguments of calls that were already reported are never taken back."""
    text, said = transcript.text, transcript.said
    for end in range(len(text)):
        beginning = parsed(transcript.form, [text[:end]], is_open=transcript.is_open)
        assert len(beginning.calls) <= len(said.calls)
        for (name, arguments), (whole_name, whole) in zip(beginning.calls, said.calls, strict=False):
            assert name == whole_name
            assert whole.startswith(arguments)
        assert all(beginning.calls[place] == said.calls[place] for place in range(len(beginning.calls) - 1))


# ---- what is no call, and what is malformed ---------------------------------------------------------------------


def marks_of(form: OutputFormat) -> list[str]:
    """Returns the marks of a format: the pieces that all of its transcripts have in common, such as markers, syntax and
    names.
    """
    return sorted({piece for each in TRANSCRIPTS if each.form is form for piece in each.pieces if piece != ROME})


_WORD = re.compile(r"w\d+w")


def words(text: str) -> list[str]:
    return sorted(_WORD.findall(text))


def words_of(said: Said) -> list[str]:
    return words(" ".join([said.reasoning, said.content, *(part for call in said.calls for part in call)]))


@st.composite
def soups(draw: st.DrawFn, form: OutputFormat) -> str:
    """Draws an output with marks of a format in any order, with words between and inside them. Each word occurs
    once.
    """
    marks = [mark for mark in marks_of(form) if mark not in ('"id"', '"type"', "[CALL_ID]")]
    kinds = st.sampled_from([*marks, *marks, "{w}", '"{w}"', '{{"a": "{w}"', '{{"a": [{w}]}}', "}", "]", "\\"])
    drawn = draw(st.lists(kinds, max_size=24))
    return "".join(_filled(piece, number) for number, piece in enumerate(drawn))


def _filled(piece: str, number: int) -> str:
    return piece.replace("{w}", f"w{number}w").replace("{{", "{").replace("}}", "}") if "{w}" in piece else piece


@st.composite
def mutated(draw: st.DrawFn, transcript: Transcript) -> str:
    """Draws a transcript in which pieces are missing, doubled, swapped or replaced by others. Each word occurs once."""
    pieces = [piece.replace("Rome", "w0w") for piece in transcript.pieces]
    marks = marks_of(transcript.form)
    for number in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(pieces) - 1))
        match draw(st.sampled_from(["drop", "word", "mark", "swap", "cut"])):
            case "drop" if "w0w" not in pieces[place] and len(pieces) > 1:
                del pieces[place]
            case "word":
                pieces.insert(place, f" w{number + 1}w ")
            case "mark":
                pieces.insert(place, draw(st.sampled_from(marks)))
            case "swap":
                other = draw(st.integers(0, len(pieces) - 1))
                pieces[place], pieces[other] = pieces[other], pieces[place]
            case "cut":
                pieces = pieces[: place + 1]
            case _:
                pass
    return "".join(pieces)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_no_word_of_any_output_is_lost(form: OutputFormat) -> None:
    @given(cut_texts(soups(form)), st.booleans(), st.booleans())
    def check(pieces: list[str], is_open: bool, only_whole_calls: bool) -> None:
        text = "".join(pieces)
        said = parsed(form, pieces, is_open=is_open, only_whole_calls=only_whole_calls)
        assert said == parsed(form, [text], is_open=is_open, only_whole_calls=only_whole_calls)
        assert words_of(said) == words(text)

    check()


@each_transcript
def test_no_word_of_a_malformed_output_is_lost(transcript: Transcript) -> None:
    @settings(max_examples=50)
    @given(cut_texts(mutated(transcript)), st.booleans())
    def check(pieces: list[str], only_whole_calls: bool) -> None:
        text = "".join(pieces)
        said = parsed(transcript.form, pieces, is_open=transcript.is_open, only_whole_calls=only_whole_calls)
        assert said == parsed(transcript.form, [text], is_open=transcript.is_open, only_whole_calls=only_whole_calls)
        assert words_of(said) == words(text)

    check()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param(HERMES, '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>', id="undeclared"),
        pytest.param(HERMES, "<tool_call>\nlook_up(city='Rome')\n</tool_call>", id="no JSON"),
        pytest.param(HERMES, '<tool_call>\n{"name": "look_up", "arguments": [1]}\n</tool_call>', id="a list"),
        pytest.param(HERMES, '<tool_call>\n{"name": "look_up", "other": {}}\n</tool_call>', id="another key"),
        pytest.param(HERMES, '<tool_call>\n{"arguments": {}}\n</tool_call>', id="no name"),
        pytest.param(HERMES, '<tool_call>\n{"name": "look_up"', id="unfinished"),
        pytest.param(HERMES, '<tool_call>\n{"name": "look\nup"}', id="no string"),
        pytest.param(HERMES, "Say <tool_call> to call.", id="a marker alone"),
        pytest.param(HERMES, "<tool_cal", id="half a marker"),
        pytest.param(HERMES, " <thin", id="half a marker of reasoning"),
        pytest.param(
            HERMES,
            "<tool_call><function=look_up><parameter=city>a</parameter><parameter=city>b</parameter></function>",
            id="a parameter twice",
        ),
        pytest.param(HERMES, "<tool_call><function=look_up><parameter=city>a</parameter>", id="an unfinished tag"),
        pytest.param(LLAMA3, '{"name": "Rome", "parameters": 3}', id="an object that is no call"),
        pytest.param(LLAMA3, '{"title": "a name", "name": "look_up"}', id="an object with other keys"),
        pytest.param(LLAMA3, '<|python_tag|>brave.call(query="x")', id="code"),
        pytest.param(LLAMA3, 'So: {"name": "stop", "parameters": {}}', id="JSON after words"),
        pytest.param(MISTRAL, "[TOOL_CALLS]nobody[ARGS]{}", id="an undeclared name"),
        pytest.param(MISTRAL, "[TOOL_CALLS]stop[OTHER]{}", id="another marker"),
        pytest.param(MISTRAL, "[TOOL_CALLS]stop now", id="no arguments"),
        pytest.param(JSON, "[1](http://x) is a link.", id="a link"),
        pytest.param(HARMONY, '<|channel|>commentary to=functions.nobody json<|message|>{"a": 1}', id="a recipient"),
        pytest.param(HARMONY, "<|channel|>weather<|message|>Sun.", id="a channel"),
        pytest.param(HARMONY, "<|start|>user<|message|>Sun.", id="a role"),
        pytest.param(HARMONY, f"<|channel|>{300 * 'a'}<|message|>Sun.", id="a long header"),
        pytest.param(HARMONY, "Sun.", id="no header"),
    ],
)
def test_what_is_no_call_is_words(form: OutputFormat, text: str) -> None:
    assert parsed(form, [text]) == parsed(form, text) == Said(content=text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            '<tool_call>{"name": "stop", "arguments": {"a": [1}}</tool_call>',
            Said(content="}}</tool_call>", calls=(("stop", '{"a": [1'),)),
            id="a bracket that closes nothing",
        ),
        pytest.param(
            '<tool_call>{"name": "stop", "arguments": {"a": "b',
            Said(calls=(("stop", '{"a": "b'),)),
            id="unfinished arguments",
        ),
        pytest.param(
            '<tool_call>{"name": "stop", "arguments": {}}</tool',
            Said(calls=(("stop", "{}"),)),
            id="an unfinished end",
        ),
        pytest.param(
            '<tool_call>{"name": "stop", "arguments": {}} Bye.',
            Said(content="Bye.", calls=(("stop", "{}"),)),
            id="no end",
        ),
        pytest.param(
            '<tool_call>{"name": "stop", "arguments": {}, "why": 1}</tool_call>',
            Said(content=', "why": 1}</tool_call>', calls=(("stop", "{}"),)),
            id="another key after the arguments",
        ),
        pytest.param(
            '<tool_call>{"name": "nobody<tool_call>{"name": "stop", "arguments": {}}</tool_call>',
            Said(content='<tool_call>{"name": "nobody<tool_call>{"name": "stop", "arguments": {}}</tool_call>'),
            id="a call in a name",
        ),
        pytest.param(
            '<tool_call>{<tool_call>{"name": "stop", "arguments": {}}</tool_call>',
            Said(content="<tool_call>{", calls=(("stop", "{}"),)),
            id="a call after no call",
        ),
    ],
)
def test_what_is_left_of_a_malformed_call(text: str, said: Said) -> None:
    assert parsed(HERMES, [text]) == parsed(HERMES, text) == said


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, r'<tool_call>{"name": "look_up", "arguments": "{\n\"city\": \"\\u00e9\"}"}</tool_call>'),
        (HERMES, r'<tool_call>{"arguments": "{\n\"city\": \"\\u00e9\"}", "name": "look_up"}</tool_call>'),
        (LLAMA3, r'{"name": "look_up", "parameters": "{\n\"city\": \"\\u00e9\"}"}'),
    ],
)
@pytest.mark.parametrize("only_whole_calls", [False, True])
def test_arguments_may_be_the_text_of_an_object(form: OutputFormat, text: str, only_whole_calls: bool) -> None:
    said = Said(calls=(("look_up", '{\n"city": "\\u00e9"}'),))
    for pieces in ([text], text):
        assert parsed(form, pieces, only_whole_calls=only_whole_calls) == said
    for other in ("Rome", "[1]"):
        text = f'<tool_call>{{"name": "look_up", "arguments": "{other}"}}</tool_call>'
        assert parsed(HERMES, [text], only_whole_calls=only_whole_calls) == Said(content=text)


@pytest.mark.parametrize(
    "header",
    [
        "commentary to=functions.look_up <|constrain|>json",
        "commentary to=functions.look_up <|constrain|> json",
        "commentary to=functions.look_up code",
        "analysis to=functions.look_up code",
        "commentary to=look_up",
        "commentary to=functions.look_up<|channel|>commentary <|constrain|>json",
    ],
)
def test_a_message_to_a_function_is_a_call_whatever_else_its_header_says(header: str) -> None:
    text = f'<|channel|>{header}<|message|>{{"days": 2}}<|call|>'
    assert parsed(HARMONY, [text]) == parsed(HARMONY, text) == Said(calls=(("look_up", '{"days": 2}'),))


_ZIP = {"type": "string", "pattern": "^[0-9]{5}$"}
_STRING, _INTEGER, _NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "written", "argument"),
    [
        (_STRING, "12345", '"12345"'),
        ({"$ref": "#/$defs/Zip"}, "12345", '"12345"'),
        ({"$ref": "#/$defs/a~1b%20c"}, "12345", '"12345"'),
        ({"$ref": "#/$defs/Same"}, "12345", '"12345"'),
        ({"$ref": "#/$defs/Count"}, "12345", "12345"),
        ({"$ref": "#/$defs/Nobody"}, "12345", "12345"),
        ({"$ref": "#anchor"}, "12345", '"12345"'),
        ({"$ref": "identifier"}, "12345", '"12345"'),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": ["1", "2"]}, "3", '"3"'),
        ({"enum": [1, "2", None]}, "1", "1"),
        ({"enum": [1, "2", None]}, "2", '"2"'),
        ({"enum": [1, "2", None]}, "null", "null"),
        ({"enum": [True, "1"]}, "1", '"1"'),
        ({"const": "true"}, "true", '"true"'),
        ({"const": True}, "true", "true"),
        ({"anyOf": [{"enum": ["auto"]}, _INTEGER]}, "5", "5"),
        ({"anyOf": [{"enum": ["auto"]}, _INTEGER]}, "auto", '"auto"'),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, _NULL]}, "12345", '"12345"'),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, _NULL]}, "null", "null"),
        ({"oneOf": [{"const": "1"}, {"const": "2"}]}, "2", '"2"'),
        ({"allOf": [{"$ref": "#/$defs/Zip"}], "description": "d"}, "12345", '"12345"'),
        ({"allOf": [{"type": ["string", "integer"]}, _INTEGER]}, "5", "5"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "integer"]}, "5", '"5"'),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"$ref": "#/$defs/Zip", "nullable": True}, "null", "null"),
        (_INTEGER, "2.5", "2.5"),
        (_INTEGER, "five", '"five"'),
        ({"type": "number"}, "5", "5"),
        ({"not": {"type": "number"}}, "5", '"5"'),
        ({"not": {"type": "string"}}, "5", "5"),
        ({"minLength": 1}, "5", '"5"'),
        ({"minimum": 1}, "5", "5"),
        ({"properties": {"a": {"minLength": 1}}}, '{"a": 5}', '{"a": 5}'),
        ({"anyOf": [_INTEGER, _NULL], "format": "int32"}, "5", "5"),
        ({"format": "double"}, "1.5", "1.5"),
        ({"items": _STRING, "maxLength": 3}, "[1]", "[1]"),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "True", "true"),
        ({"anyOf": [{"type": "boolean"}, _NULL]}, "None", "null"),
        ({"enum": [False, 1]}, "False", "false"),
        ({"type": ["boolean", "string"]}, "True", '"True"'),
        ({"type": ["string", "null"]}, "None", '"None"'),
        (_INTEGER, "True", '"True"'),
        ({}, "True", '"True"'),
        ({"type": "array", "items": _STRING}, '["1"]', '["1"]'),
        ({"type": "object"}, '{"a": "1"}', '{"a": "1"}'),
        (
            {"anyOf": [{"patternProperties": {"^x": _INTEGER}, "additionalProperties": False}, _STRING]},
            '{"x1": 1}',
            '{"x1": 1}',
        ),
        ({}, "5", "5"),
        ({"description": "whatever"}, "null", "null"),
        (True, "[1]", "[1]"),
        (None, "word", '"word"'),
    ],
    ids=str,
)
def test_a_parameter_has_the_type_that_its_schema_says(schema: object, written: str, argument: str) -> None:
    defs = {"Zip": _ZIP, "Same": {"$ref": "#/$defs/Zip"}, "Count": _INTEGER, "a/b c": _ZIP}
    defs |= {"Anchored": {**_ZIP, "$anchor": "anchor"}, "Identified": {**_ZIP, "$id": "identifier"}}
    defs["Loop"] = {"allOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}
    text = f"<tool_call><function=f><parameter=p>\n{written}\n</parameter></function></tool_call>"
    for function in (
        {"type": "object", "properties": {"p": schema}, "$defs": defs},
        {"additionalProperties": schema, "$defs": defs},
        {"$ref": "#/$defs/Arguments", "$defs": {**defs, "Arguments": {"properties": {"p": schema}}}},
        {"anyOf": [{"properties": {"p": schema}}, {"properties": {"q": _STRING}}], "$defs": defs},
        {
            "oneOf": [{"additionalProperties": False, "properties": {"q": {}}}, {"properties": {"p": schema}}],
            "$defs": defs,
        },
        {"patternProperties": {"^p": schema}, "additionalProperties": _NULL, "$defs": defs},
        {"properties": {"p": schema}, "patternProperties": {"^x-": _NULL}, "$defs": defs},
        {"if": {"required": ["q"]}, "then": {"properties": {"p": schema}}, "$defs": defs},
        {"dependentSchemas": {"q": {"properties": {"p": schema}}}, "$defs": defs},
        {"properties": {"p": schema}, "anyOf": [{"properties": {"p": _NULL}}, {"required": ["q"]}], "$defs": defs},
    ):
        assert parsed(HERMES, [text], functions={"f": function}) == Said(calls=(("f", f'{{"p": {argument}}}'),))


_CALLS_ALONE = {
    "hermes": (HERMES, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "stop"}'),
    "coder": (HERMES, "<tool_call>\n<function=look_up>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"),
    "llama3": (LLAMA3, '{"name": "stop", "parameters": {}}; {"name": "look_up", "parameters": {"days": 2}}'),
    "llama3, marked": (LLAMA3, '<|python_tag|>{"name": "look_up", "parameters": {"days": 2}}'),
    "mistral": (MISTRAL, '[TOOL_CALLS][{"name": "stop", "arguments": {}}, {"name": "look_up", "arguments": {}}]'),
    "mistral, names": (MISTRAL, '[TOOL_CALLS]stop[ARGS]{}[TOOL_CALLS]look_up[ARGS]{"days": 2}'),
    "harmony": (HARMONY, "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{}<|call|>"),
    "json": (JSON, '{"name": "stop", "arguments": {}}\n{"name": "look_up", "arguments": {"days": 2}}'),
}


@pytest.mark.parametrize(("form", "text"), _CALLS_ALONE.values(), ids=_CALLS_ALONE)
@pytest.mark.parametrize("only_whole_calls", [False, True])
def test_required_calls_leave_no_marks_in_the_content_wherever_they_end(
    form: OutputFormat, text: str, only_whole_calls: bool
) -> None:
    for end in range(len(text) + 1):
        beginning = f"\n{text[:end]}"
        said = parsed(form, [beginning], has_only_calls=True, only_whole_calls=only_whole_calls)
        assert said == parsed(form, beginning, has_only_calls=True, only_whole_calls=only_whole_calls)
        assert said.content == ""
        without = parsed(form, [beginning], only_whole_calls=only_whole_calls)
        assert said.calls == without.calls


def test_required_calls_keep_reasoning_and_the_words_of_a_channel() -> None:
    cut = '<think>Hm.</think>\n<tool_call>\n{"na'
    assert parsed(HERMES, cut, has_only_calls=True) == Said(reasoning="Hm.")
    cut = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=func"
    assert parsed(HARMONY, cut, has_only_calls=True) == Said(content="I look.")


def test_a_required_call_that_is_whole_is_not_dropped_for_arguments_that_are_no_json() -> None:
    text = '<tool_call>\n{"name": "look_up", "arguments": {"days": 1e999}}\n</tool_call>'
    assert parsed(HERMES, text, has_only_calls=True, only_whole_calls=True) == Said(content=text)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_without_functions_there_are_no_calls(form: OutputFormat) -> None:
    for transcript in TRANSCRIPTS:
        if transcript.form is form:
            said = parsed(form, transcript.text, is_open=transcript.is_open, functions={})
            assert (said.reasoning, said.calls) == (transcript.said.reasoning, ())


def test_arguments_come_as_the_model_writes_them() -> None:
    parser = OutputParser(HERMES, functions=FUNCTIONS)
    assert parser.push('Well. <tool_call>{"name": "look_up", "argu') == [ContentText("Well.")]
    assert parser.push('ments": ') == []
    assert parser.push("{") == [CallBegun(0, "look_up"), CallArguments(0, "{")]
    assert parser.push('"city": "Ro') == [CallArguments(0, '"city": "Ro')]
    assert parser.push('me"}') == [CallArguments(0, 'me"}')]
    assert parser.push("}</tool_call>") == []
    assert parser.end() == []


def test_words_are_not_held_back_longer_than_they_may_begin_a_marker() -> None:
    parser = OutputParser(HERMES, functions=FUNCTIONS)
    assert parser.push("a <tool_") == [ContentText("a")]
    assert parser.push("box> \n") == [ContentText(" <tool_box>")]
    assert parser.push("b") == [ContentText(" \nb")]


def test_a_header_without_an_end_is_held_back_up_to_a_bound() -> None:
    parser = OutputParser(HARMONY, functions=FUNCTIONS)
    text = "<|channel|>" + 300 * "a"
    assert parser.push(text) == [ContentText(text)]


def test_an_answer_without_functions_is_not_held_back_at_all() -> None:
    parser = OutputParser(HERMES, functions={})
    assert parser.push("a \n") == [ContentText("a \n")]
    assert parser.push("<tool_") == [ContentText("<tool_")]


# ---- formats ----------------------------------------------------------------------------------------------------


def test_the_setting_names_all_formats() -> None:
    assert get_args(OutputFormatName) == ("auto", *FORMATS)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_no_marker_is_part_of_another(form: OutputFormat) -> None:
    """Otherwise the marker that is found would depend on how the output is cut into pieces."""
    markers: Sequence[str] = form.markers
    assert len(set(markers)) == len(markers)
    assert not [(a, b) for a in markers for b in markers if a != b and a in b]
