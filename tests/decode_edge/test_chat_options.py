"""Tests that all parts of a chat besides its messages reach the model: tools, variables of the template, and a last
message to continue.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from common.text.chat_messages import ChatMessage, TemplateOptions, Tool, ToolCall, chat_from_json, chat_to_json
from common.text.chat_template import ChatRefused, ChatTemplate, ChatTemplates

USER, SYSTEM, ASSISTANT = ChatMessage("user", "hi"), ChatMessage("system", "be kind"), ChatMessage("assistant", "yes")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "größe": {"enum": ["C", "F"]}}}
WEATHER = Tool("get_weather", 'Looks up the "weather".\nFast.', json.dumps(SCHEMA))
CLOCK = Tool("clock")
CALLING = ChatMessage("assistant", tool_calls=[ToolCall("clock", "", "x"), ToolCall("get_weather", '{"city": 1}', "y")])
ANSWERS = [ChatMessage("tool", each, tool_call_id=id) for each, id in (("noon", "x"), ("rain", "y"))]
RESPONSES = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
ASKING = EACH + "{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"


def rendered(source: str, *messages: ChatMessage, **options: Any) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}).render(messages, TemplateOptions(**options))


def refusal(source: str, *messages: ChatMessage, **options: Any) -> ChatRefused:
    with pytest.raises(ChatRefused) as refused:
        rendered(source, *messages, **options)
    return refused.value


def test_tools_are_rendered_as_transformers_does() -> None:
    function = {"name": WEATHER.name, "description": WEATHER.description, "parameters": SCHEMA}
    (expected,), _ = render_jinja_template(
        [[{"role": "user", "content": "hi"}]],
        tools=[{"type": "function", "function": function}],
        chat_template=TOOLS + EACH,
        add_generation_prompt=True,
    )
    assert rendered(TOOLS + EACH, USER, tools=(WEATHER,)) == expected


def test_a_template_that_needs_tools_serves_chats_with_tools() -> None:
    source = TOOLS.replace(" or []", "") + EACH
    assert rendered(source, USER, tools=(CLOCK,)).endswith("<user>hi")
    assert "fails on it: TypeError" in str(refusal(source, USER))


WITH_TOOLS = TemplateOptions((CLOCK,))
TOOL_USE = "[tools]" + TOOLS + ASKING


def test_chats_with_tools_have_a_template_of_their_own() -> None:
    templates = ChatTemplates(ASKING, {}, TOOL_USE)
    assert templates.render([USER], WITH_TOOLS) == ChatTemplate(TOOL_USE, {}).render([USER], WITH_TOOLS)
    assert templates.render([USER]) == "<user>hi<assistant>"
    said = [USER, CALLING, *ANSWERS]
    assert templates.render(said) == ChatTemplate(ASKING, {}).render(said)


@pytest.mark.parametrize(
    "tool_use", ["{% for t in tools", EACH, "{{ tools | tojson }}"], ids=["syntax", "tools", "user"]
)
def test_a_template_of_tools_that_does_not_write_them_is_not_used(tool_use: str) -> None:
    templates, of_all = ChatTemplates(ASKING, {}, tool_use), ChatTemplate(ASKING, {})
    for options in (WITH_TOOLS, TemplateOptions()):
        assert templates.render([USER], options) == of_all.render([USER], options)


def test_a_request_sets_the_variables_of_the_template_that_its_chat_gets() -> None:
    templates = ChatTemplates("{{ mood }}{{ both }}" + ASKING, {}, "{{ effort }}{{ both }}" + TOOL_USE)
    assert templates.variables == ["both", "effort", "mood"]
    for own, other, options in (("mood", "effort", TemplateOptions()), ("effort", "mood", WITH_TOOLS)):
        kwargs = json.dumps({own: "x", "both": "y"})
        assert templates.render([USER], replace(options, chat_template_kwargs=kwargs)).startswith("xy")
        with pytest.raises(ChatRefused, match=f"does not read '{other}'"):
            templates.render([USER], replace(options, chat_template_kwargs=json.dumps({other: "x"})))


def test_tools_are_not_kept_after_their_chat() -> None:
    """Tools may be large, and every chat may have others."""
    parameters = json.dumps({"type": "object", "properties": {"x" * 9: {}}})
    template = ChatTemplate(TOOLS + EACH, {})
    template.render([USER], TemplateOptions(tools=(replace(CLOCK, parameters=parameters),)))
    assert sys.getrefcount(parameters) == 2, "this variable and the argument"


def test_a_tool_without_description_or_parameters_has_none() -> None:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    expected = {"type": "function", "function": {"name": "clock", "parameters": nothing}}
    assert json.loads(rendered(TOOLS + EACH, USER, tools=(CLOCK,)).partition("<")[0]) == expected


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("{{ tools[0] | tojson if tools }}", "chat.tools[1]"),
        ("{% for t in tools or [] %}{{ (t | tojson)[:170] }}{% endfor %}", "chat.tools[0]"),
        (TOOLS.replace("tojson", "tojson | replace('Fast.', '')"), "chat.tools[0]"),
        (TOOLS.replace("tojson", "tojson | replace('größe', '')"), "chat.tools[0]"),
        (TOOLS.replace("tojson", "tojson | replace('clock', '')"), "chat.tools[1]"),
        ("{% if messages[0].role == 'user' %}" + TOOLS + "{% endif %}", "chat.tools[0]"),
    ],
    ids=["the first", "cut", "a description", "a parameter", "a name", "without a system message"],
)
def test_tools_that_a_template_leaves_out_are_refused_by_name(source: str, field: str) -> None:
    error = refusal(source + EACH, SYSTEM, USER, tools=(WEATHER, CLOCK))
    assert (error.field, "leaves out" in str(error)) == (field, True)


@pytest.mark.parametrize("before", [[], [SYSTEM]], ids=["no system message", "a system message"])
def test_a_template_without_tools_tells_them_in_a_system_message(before: list[ChatMessage]) -> None:
    text = rendered(ASKING, *before, USER, CALLING, *ANSWERS, ChatMessage("user", "so?"), tools=(WEATHER, CLOCK))
    system, *rest = text.removeprefix("<system>").split("<user>")
    assert system.startswith("be kind\n\nYou can call functions" if before else "You can call functions")
    lines = system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == [WEATHER.as_read(), CLOCK.as_read()]
    assert rest == [
        'hi<assistant><tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": 1}}\n</tool_call>',
        f"{RESPONSES}\nso?<assistant>",
    ]


def test_calls_of_a_history_are_told_so_even_without_tools_in_the_request() -> None:
    text = rendered(ASKING, USER, CALLING, *ANSWERS)
    assert "<system>" not in text
    assert '<assistant><tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n' in text


def test_a_template_that_drops_the_message_with_the_tools_is_refused() -> None:
    source = "{% for m in messages if m.role != 'system' or m.content | length < 50 %}{{ m.content }}{% endfor %}"
    assert refusal(source, USER, tools=(CLOCK,)).field == "chat.tools"
    for shorter in ("50", "1"):
        error = refusal(source.replace("50", shorter), SYSTEM, USER, tools=(CLOCK,))
        assert error.field == "chat.messages[0]"


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}{% endfor %}"
)
UNTOLD_SYSTEM = ASKING.replace("in messages", "in messages if m.role != 'system'")


@pytest.mark.parametrize("source", [NO_SYSTEM + TURNS + ASKING, UNTOLD_SYSTEM], ids=["refused", "left out"])
def test_a_template_without_system_messages_tells_tools_in_the_first_user_message(source: str) -> None:
    later = ChatMessage("user", "so?")
    text = rendered(source, USER, CALLING, *ANSWERS, ASSISTANT, later, tools=(WEATHER, CLOCK))
    first, *rest = text.removeprefix("<user>").split("<user>")
    assert first.startswith("You can call functions") and "\n\nhi<assistant><tool_call>" in first
    assert all(json.dumps(tool.as_read(), ensure_ascii=False) in first for tool in (WEATHER, CLOCK))
    assert rest == [f"{RESPONSES}<assistant>yes", "so?<assistant>"]


@pytest.mark.parametrize("source", [TURNS + ASKING, TOOLS + TURNS + ASKING], ids=["no tools", "tools"])
def test_a_user_may_speak_after_an_answer_where_a_template_wants_turns(source: str) -> None:
    text = rendered(source, USER, CALLING, *ANSWERS, ChatMessage("user", "so?"), ASSISTANT, USER)
    assert text.endswith(f"</tool_call><user>{RESPONSES}\nso?<assistant>yes<user>hi<assistant>")


def test_a_template_without_system_messages_has_a_user_tell_where_none_speaks_yet() -> None:
    text = rendered(UNTOLD_SYSTEM, ASSISTANT, tools=(CLOCK,))
    assert text.startswith("<user>You can call functions") and text.endswith("<assistant>yes<assistant>")


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        (TOOLS + ASKING, "<tool>noon<tool>rain"),
        (TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.name or '' }}{{ m.content }}{% endfor %}<assistant>", None),
        (TOOLS + ASKING.replace("in messages", "in messages if m.role != 'tool'"), f"<user>{RESPONSES}"),
        (TOOLS + TURNS + ASKING, f"<user>{RESPONSES}"),
    ],
    ids=["answers", "answers with names", "no answers", "turns"],
)
@pytest.mark.parametrize("tools", [(WEATHER, CLOCK), ()], ids=["tools", "no tools in the request"])
def test_a_template_with_tools_but_no_calls_gets_calls_in_ordinary_messages(
    source: str, answers: str | None, tools: tuple[Tool, ...]
) -> None:
    named = [replace(answer, name="clock") for answer in ANSWERS] if answers is None else ANSWERS
    assert rendered(source, USER, replace(CALLING, content="I look."), *named, tools=tools) == (
        "".join(json.dumps(tool.as_read(), ensure_ascii=False) for tool in tools)
        + '<user>hi<assistant>I look.\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": 1}}\n</tool_call>'
        + (answers or "<tool>clocknoon<tool>clockrain")
        + "<assistant>"
    )


@pytest.mark.parametrize(
    ("needs", "options"),
    [
        ("{% if tools %}", {"tools": (WEATHER, CLOCK)}),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% else %}", {}),
    ],
    ids=["tools", "a system message"],
)
def test_calls_that_a_template_writes_in_some_chats_only_keep_its_form(needs: str, options: dict[str, Any]) -> None:
    source = ASKING.replace(
        "{% endfor %}", needs + "{{ m.tool_calls | tojson if m.tool_calls }}{% endif %}{% endfor %}"
    )
    text = rendered(TOOLS + source, SYSTEM, USER, CALLING, *ANSWERS, **options)
    assert '"name": "clock"' in text and "<tool_call>" not in text


def test_a_message_that_is_dropped_is_named_by_its_place_in_the_request() -> None:
    source = "{% for m in messages if m.content != 'no' %}{{ m.content }}{% endfor %}"
    error = refusal(source, USER, CALLING, *ANSWERS, ChatMessage("assistant", "no"), USER, tools=(CLOCK,))
    assert str(error).startswith("messages[4]: the model's chat template leaves out")


def test_a_request_sets_variables_of_the_template() -> None:
    source = EACH + "{% if thinks is defined and not thinks %}[no thoughts]{% endif %}{{ documents | tojson }}"
    assert rendered(source, USER) == "<user>hinull"
    kwargs = json.dumps({"thinks": False, "documents": ["é"]})
    assert rendered(source, USER, chat_template_kwargs=kwargs) == '<user>hi[no thoughts]["é"]'


@pytest.mark.parametrize("name", ["thinks", "messages", "tools", "add_generation_prompt", "eos_token"])
def test_a_variable_that_is_not_read_or_not_the_request_s_is_refused(name: str) -> None:
    error = refusal(TOOLS + ASKING + "{{ eos_token }}", USER, chat_template_kwargs=json.dumps({name: 1}))
    assert (error.field, repr(name) in str(error)) == ("chat.chat_template_kwargs", True)


def test_of_a_variable_that_is_not_read_the_refusal_names_those_that_are() -> None:
    for source, told in (("{{ moods }}{{ thinks }}", "'moods', 'thinks'"), ("", "no variable of a request")):
        error = refusal(EACH + source, USER, chat_template_kwargs='{"think": true}')
        assert str(error).endswith(f"does not read 'think', it reads {told}")


def test_a_template_is_tried_with_the_variables_that_the_request_sets() -> None:
    source = "A helpful assistant.{% for m in messages if not short or m.role != 'system' %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {})
    said = [ChatMessage("system", "help"), USER]
    template.render(said)
    with pytest.raises(ChatRefused, match=r"^messages\[0\]: "):
        template.render(said, TemplateOptions(chat_template_kwargs='{"short": true}'))


@pytest.mark.parametrize(("words", "text"), [("The sky is", "The sky is"), ("The sky is ", "The sky is "), ("a", "a")])
@pytest.mark.parametrize("written", ["m.content", "m.content | trim"])
def test_the_prompt_ends_in_the_message_that_the_output_continues(words: str, text: str, written: str) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ " + written + " }}</s>{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    said = ChatMessage("assistant", words)
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(source, USER, ASSISTANT, USER, said, **options) == (
        f"<user>hi</s><assistant>yes</s><user>hi</s><assistant>{text}"
    )


def test_a_message_that_a_template_cuts_cannot_be_continued() -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    said = ChatMessage("assistant", "y" * 20)
    error = refusal("{% for m in messages %}{{ m.content[:20] }}{% endfor %}", USER, said, **options)
    assert error.field == "chat.continue_final_message"


def test_the_prompt_ends_with_the_last_message_if_no_answer_is_begun() -> None:
    assert rendered(ASKING, USER, add_generation_prompt=False) == "<user>hi"


def test_a_chat_s_json_has_all_of_it() -> None:
    options = TemplateOptions((WEATHER, CLOCK), '{"a": 1}', continue_final_message=True, add_generation_prompt=False)
    messages, read = chat_from_json(json.loads(chat_to_json([SYSTEM, CALLING, *ANSWERS], options)))
    assert (messages[:1], messages[2:], read) == ([SYSTEM], ANSWERS, options)
    assert list(messages[1].tool_calls) == list(CALLING.tool_calls)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (ChatMessage("assistant", "yes", reasoning="hm"), "hm|hm"),
        (replace(CALLING, reasoning="hm"), "hm|hm"),
        (replace(CALLING, content="I look.", reasoning="hm"), "hm|"),
        (ASSISTANT, "|"),
    ],
    ids=["words", "calls", "both", "none"],
)
def test_earlier_reasoning_has_the_names_that_templates_read(message: ChatMessage, expected: str) -> None:
    source = EACH.replace("{% endfor %}", "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}")
    source += "[{{ messages[1].reasoning_content }}|{{ messages[1].thinking }}]"
    assert rendered(source, USER, message).endswith(f"[{expected}]")


def test_earlier_reasoning_may_be_left_out() -> None:
    message = ChatMessage("assistant", "yes", reasoning="hm")
    assert rendered(EACH, USER, message) == "<user>hi<assistant>yes"
    assert chat_from_json(json.loads(chat_to_json([USER, message])))[0] == [USER, message]
