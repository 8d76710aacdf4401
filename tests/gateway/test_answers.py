"""The contract of answers: in each API's form, an output has its reasoning, content and calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.v1.inference_pb2 import FINISH_REASON_LENGTH
from common.text.output_formats import HARMONY, HERMES, JSON, LLAMA3, MISTRAL, OutputFormat
from gateway.apis.api import Api
from gateway.apis.chat import CHAT
from gateway.apis.messages import MESSAGES
from gateway.apis.responses import RESPONSES
from tests.gateway.answers import answered, chat_of, chat_said, message_of, message_said, response_of, response_said
from tests.gateway.parsing.transcripts import TRANSCRIPTS, Said, Transcript

Made = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
Read = Callable[[Mapping[str, Any]], tuple[Said, str]]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("api", "made_of", "said_by", "ends"),
    [
        pytest.param(CHAT, chat_of, chat_said, ("stop", "tool_calls"), id="chat"),
        pytest.param(MESSAGES, message_of, message_said, ("end_turn", "tool_use"), id="messages"),
        pytest.param(RESPONSES, response_of, response_said, ("completed", "completed"), id="responses"),
    ],
)
def test_an_answer_says_what_the_output_says_whole_and_streamed(
    api: Api, made_of: Made, said_by: Read, ends: tuple[str, str], transcript: Transcript
) -> None:
    said = transcript.said
    if api is MESSAGES:
        said = replace(said, calls=tuple((name, json.dumps(json.loads(each))) for name, each in said.calls))
    for pieces in (transcript.pieces, list(transcript.text)):
        whole, events = answered(api, pieces, form=transcript.form, is_open=transcript.is_open)
        assert said_by(whole) == said_by(made_of(events)) == (said, ends[bool(said.calls)])


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (HERMES, '<tool_call>\n{"name": "look_'),
        (HERMES, "<tool_call>\n<function=look_up>\n<parameter=city>\nRo"),
        (HERMES, "<tool_"),
        (LLAMA3, '{"name": "look_up", "para'),
        (MISTRAL, "[TOOL_CALLS]look_u"),
        (HARMONY, "<|channel|>commentary to=functions.look_up <|constr"),
        (JSON, '\n{"name": "lo'),
    ],
)
@pytest.mark.parametrize(
    ("api", "made_of", "said_by", "choice", "end"),
    [
        pytest.param(CHAT, chat_of, chat_said, "required", "length", id="chat"),
        pytest.param(MESSAGES, message_of, message_said, {"type": "any"}, "max_tokens", id="messages"),
        pytest.param(RESPONSES, response_of, response_said, "required", "incomplete", id="responses"),
    ],
)
def test_a_required_call_that_the_length_cut_off_leaves_nothing(
    api: Api, made_of: Made, said_by: Read, choice: Any, end: str, form: OutputFormat, output: str
) -> None:
    for pieces in ([output], list(output)):
        whole, events = answered(api, pieces, form=form, reason=FINISH_REASON_LENGTH, tool_choice=choice)
        assert said_by(whole) == said_by(made_of(events)) == (Said(), end)
