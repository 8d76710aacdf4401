"""A chat template tells in which form its model writes calls, and whether a prompt has opened the reasoning."""

from __future__ import annotations

import pytest

from common.text.output_formats import HARMONY, HERMES, LLAMA3, MISTRAL, OutputFormat, format_of_template


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
    assert format_of_template(template) is form


@pytest.mark.parametrize(
    ("form", "prompt", "is_open"),
    [
        (HERMES, "<|im_start|>assistant\n<think>\n", True),
        (HERMES, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        (HERMES, "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        (MISTRAL, "[/INST][THINK]", True),
        (HARMONY, "<|start|>assistant<think>", False),
    ],
)
def test_a_prompt_may_open_the_reasoning(form: OutputFormat, prompt: str, is_open: bool) -> None:
    assert form.is_reasoning_open(prompt) is is_open
