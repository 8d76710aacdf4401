"""Tests that a chat template reveals the form in which its model writes reasoning and tool calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.config.settings import DecodeSettings
from common.text.output_formats import HARMONY, HERMES, LLAMA3, MISTRAL, NONE, OutputFormat, Section, format_of_template
from decode_service.edge.assembly import output_format_of
from tests.decode_edge.tokenizers_for_tests import byte_level


@pytest.mark.parametrize(
    ("template", "form"),
    [
        pytest.param("{{ '<|im_start|>' }}<tool_call>{{ call.arguments | tojson }}</tool_call>", HERMES, id="hermes"),
        pytest.param("<|im_start|>assistant<think></think><tool_call>{{ '<function=' }}", HERMES, id="qwen coder"),
        pytest.param("<|start_header_id|>ipython{{ '<|python_tag|>' + name }}", LLAMA3, id="llama 3.1"),
        pytest.param('<|start_header_id|>{"name": f, "parameters": {}}', LLAMA3, id="llama 3.2"),
        pytest.param('<|start_header_id|>{"name": f, "parameters": {}}<tool_call>', HERMES, id="hermes on llama 3"),
        pytest.param("[INST]{{ content }}[/INST][TOOL_CALLS]{{ name }}[ARGS]", MISTRAL, id="mistral"),
        pytest.param("<|start|>assistant<|channel|>final<|message|>{{ content }}<|end|>", HARMONY, id="gpt-oss"),
        pytest.param("{% for m in messages %}{{ m.content }}{% endfor %}", HERMES, id="no tools"),
    ],
)
def test_a_template_tells_the_family(template: str, form: OutputFormat) -> None:
    assert replace(format_of_template(template), reasoning=form.reasoning) == form


@pytest.mark.parametrize(
    ("template", "reasoning"),
    [
        ("<|im_start|>assistant<think></think><tool_call>", HERMES.reasoning),
        ("<|im_start|>{{ content.split('</think>')[-1] }}", HERMES.reasoning),
        ("<|im_start|>{{ content }}<tool_call>", None),
        ("[SYSTEM_PROMPT][THINK][/THINK][TOOL_CALLS]", MISTRAL.reasoning),
        ("[INST]<think>[/INST][TOOL_CALLS]", None),
        ("<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}<|end|>", HARMONY.reasoning),
    ],
)
def test_a_template_tells_whether_there_is_reasoning(template: str, reasoning: Section | None) -> None:
    assert format_of_template(template).reasoning == reasoning


@pytest.mark.parametrize(
    ("setting", "form"), [("auto", replace(HERMES, reasoning=None)), ("mistral", MISTRAL), ("none", NONE)]
)
def test_the_setting_replaces_what_the_template_tells(setting: str, form: OutputFormat) -> None:
    settings = DecodeSettings.model_validate({"model": "demo", "output_format": setting})
    assert output_format_of(settings, byte_level()) == form


@pytest.mark.parametrize(
    ("tool", "form"),
    [("{{ tool | tojson }}", MISTRAL), ("{{ tool.function.name }}", HERMES)],
    ids=["used", "it leaves out parameters"],
)
def test_a_template_of_tools_tells_the_family_if_it_is_used(tool: str, form: OutputFormat) -> None:
    settings = DecodeSettings.model_validate({"model": "demo"})
    each = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = f"[TOOL_CALLS]{{% for tool in tools or [] %}}{tool}{{% endfor %}}{each}"
    told = output_format_of(
        settings, byte_level(chat_template={"default": f"<think></think>{each}", "tool_use": tools})
    )
    assert (told.name, told.reasoning is None) == (form.name, form is MISTRAL)


def test_a_model_without_a_template_has_no_format() -> None:
    settings = DecodeSettings.model_validate({"model": "demo"})
    assert output_format_of(settings, byte_level(chat_template=None)) is NONE
