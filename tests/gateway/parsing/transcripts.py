"""Outputs as models of each family write them, and what each contains: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.text.output_formats import HARMONY, HERMES, JSON, LLAMA3, MISTRAL, NONE, OutputFormat
from gateway.parsing.events import CallArguments, CallBegun, ContentText, ReasoningText
from gateway.parsing.parser import OutputParser

FUNCTIONS: Mapping[str, Any] = {
    "look_up": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "days": {"type": "integer"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}


@dataclass(frozen=True, slots=True)
class Said:
    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def parsed(
    form: OutputFormat,
    pieces: Iterable[str],
    *,
    is_open: bool = False,
    functions: Mapping[str, Any] = FUNCTIONS,
    has_only_calls: bool = False,
    only_whole_calls: bool = False,
) -> Said:
    """Parses an output that comes in these pieces, and returns its reasoning, content and calls. Fails if the events
    come in an order that makes no sense.
    """
    parser = OutputParser(
        form,
        functions=functions,
        is_reasoning_open=is_open,
        has_only_calls=has_only_calls,
        only_whole_calls=only_whole_calls,
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.end()
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ReasoningText(text):
                assert text
                reasoning += event.as_line
            case ContentText(text):
                assert text
                content += event.as_line
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    assert parser.num_calls == len(calls)
    return Said(reasoning, content, tuple(calls))


@dataclass(frozen=True, slots=True)
class Transcript:
    """An output, in pieces that are whole markers or words, and the reasoning, content and calls that it contains."""

    name: str
    form: OutputFormat
    pieces: Sequence[str]
    said: Said
    is_open: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


ROME = '{"city": "Rome \\"}]\\" \\u00e9 é 😀 </tool_call> <|call|> [ARGS]", "days": 2}'
NONE_OF = "{}"
_NAME, _ARGUMENTS, _PARAMETERS = '"name"', '"arguments"', '"parameters"'


def call(name: str, arguments: str, key: str = _ARGUMENTS) -> list[str]:
    return ["{", _NAME, ": ", f'"{name}"', ", ", key, ": ", arguments, "}"]


TRANSCRIPTS = [
    Transcript("words", HERMES, ["  Hello", " <b>", "there", "</b>\n"], Said(content="  Hello <b>there</b>\n")),
    Transcript("none", NONE, ["<think>", "a", "</think>", "b "], Said(content="<think>a</think>b ")),
    Transcript(
        "hermes",
        HERMES,
        ["Let me see.\n", "<tool_call>", "\n", *call("look_up", ROME), "\n", "</tool_call>"],
        Said(content="Let me see.", calls=(("look_up", ROME),)),
    ),
    Transcript(
        "qwen, with reasoning and two calls",
        HERMES,
        [
            *("<think>", "\n", "Which city? ", "<tool_call>", " perhaps", "\n", "</think>", "\n\n"),
            *("<tool_call>", "\n", *call("look_up", ROME), "\n", "</tool_call>", "\n"),
            *("<tool_call>", "\n", *call("stop", NONE_OF), "\n", "</tool_call>"),
        ],
        Said(reasoning="Which city? <tool_call> perhaps", calls=(("look_up", ROME), ("stop", NONE_OF))),
    ),
    Transcript(
        "reasoning that the prompt opened",
        HERMES,
        ["Hm. ", "<think>", " So.\n", "</think>", "\n\n", "Yes. ", "</think>"],
        Said(reasoning="Hm. <think> So.", content="Yes. </think>"),
        is_open=True,
    ),
    Transcript(
        "reasoning that the prompt and the output opened",
        HERMES,
        ["\n", "<think>", "\n", "Hm.", "\n", "</think>", "\n", "Yes."],
        Said(reasoning="Hm.", content="Yes."),
        is_open=True,
    ),
    Transcript("no reasoning", HERMES, ["<think>", "\n\n", "</think>", "\n\n", "Yes."], Said(content="Yes.")),
    Transcript(
        "arguments first, more keys, words around",
        HERMES,
        [
            *("One ", "<tool_call>", "{", _ARGUMENTS, ":", ROME, ",", _NAME, ":", '"look_up"', ", ", '"id"', ":"),
            *(r'"call \"1\" \\"', "}", "</tool_call>", " two ", "<tool_call>", "{", _NAME, ":", '"stop"', "}"),
            *("</tool_call>", " three"),
        ],
        Said(content="One\ntwo\nthree", calls=(("look_up", ROME), ("stop", NONE_OF))),
    ),
    Transcript(
        "qwen coder",
        HERMES,
        [
            *("<tool_call>", "\n", "<function=", "look_up", ">", "\n"),
            *("<parameter=", "city", ">", "\n", '7 "or"', "\n\n", "</parameter>", "\n"),
            *("<parameter=", "note", ">", "\n", "null", "\n", "</parameter>", "\n"),
            *("<parameter=", "days", ">", "\n", "2", "\n", "</parameter>", "\n"),
            *("<parameter=", "other", ">", "\n", "NaN", "\n", "</parameter>", "\n"),
            *("</function>", "\n", "</tool_call>"),
        ],
        Said(calls=(("look_up", '{"city": "7 \\"or\\"\\n", "note": null, "days": 2, "other": "NaN"}'),)),
    ),
    Transcript(
        "llama 3",
        LLAMA3,
        ["<|python_tag|>", *call("look_up", ROME, _PARAMETERS), "; ", *call("stop", NONE_OF, _PARAMETERS)],
        Said(calls=(("look_up", ROME), ("stop", NONE_OF))),
    ),
    Transcript(
        "llama 3, bare",
        LLAMA3,
        ["\n", "{", '"type"', ": ", '"function"', ", ", _NAME, ": ", '"look_up"', ", ", _PARAMETERS, ":", ROME, "}"],
        Said(calls=(("look_up", ROME),)),
    ),
    Transcript(
        "mistral, a list",
        MISTRAL,
        ["Well. ", "[TOOL_CALLS]", " [", *call("look_up", ROME), ", ", *call("stop", NONE_OF), "]"],
        Said(content="Well.", calls=(("look_up", ROME), ("stop", NONE_OF))),
    ),
    Transcript(
        "mistral, names",
        MISTRAL,
        [
            *("[THINK]", "Hm.", "[/THINK]", "[TOOL_CALLS]", "look_up", "[CALL_ID]", "abcdefghi", "[ARGS]", ROME),
            *("[TOOL_CALLS]", "stop", "[ARGS]", NONE_OF),
        ],
        Said(reasoning="Hm.", calls=(("look_up", ROME), ("stop", NONE_OF))),
    ),
    Transcript(
        "harmony",
        HARMONY,
        [
            *("<|channel|>", "analysis", "<|message|>", "Hm. ", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "commentary", "<|message|>", "I look. ", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "commentary", " to=functions.look_up ", "<|constrain|>", "json", "<|message|>", ROME),
            *("<|call|>", "<|start|>", "assistant", " to=functions.stop", "<|channel|>", "commentary json"),
            *("<|message|>", NONE_OF, "<|call|>", "<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>"),
            *("So.", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "It is <|so", "."),
        ],
        Said("Hm.\nSo.", "I look.\nIt is <|so.", (("look_up", ROME), ("stop", NONE_OF))),
    ),
    Transcript(
        "harmony, without calls",
        HARMONY,
        [
            *("<|channel|>", "analysis", "<|message|>", "Hm.", " \n", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "final", "<|message|>", "Yes.", "\n", "<|return|>"),
        ],
        Said("Hm.", "Yes."),
    ),
    Transcript(
        "harmony, two texts of each kind",
        HARMONY,
        [
            *("<|channel|>", "analysis", "<|message|>", "Hm. ", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "analysis", "<|message|>", "So.", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "commentary", "<|message|>", "I see. ", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "final", "<|message|>", "Yes.", "<|return|>"),
        ],
        Said("Hm.\nSo.", "I see.\nYes."),
    ),
    Transcript(
        "json",
        JSON,
        [*call("look_up", ROME), "\n", *call("stop", NONE_OF)],
        Said("", "", (("look_up", ROME), ("stop", NONE_OF))),
    ),
    Transcript(
        "json, a list",
        JSON,
        [" [", *call("look_up", ROME), ",", *call("stop", NONE_OF), "] ", "Done."],
        Said(content="Done.", calls=(("look_up", ROME), ("stop", NONE_OF))),
    ),
]
