"""A model's chat template is rendered as by transformers, and no part of a message is dropped silently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import text
from transformers.utils.chat_template_utils import render_jinja_template

from common.text.chat_messages import ChatMessage, ToolCall
from common.text.chat_template import ChatRefused, ChatTemplate, TextTooLong
from common.text.tokenizer import TextTokenizer
from tests.support.models import make_tokenizer

USER, SYSTEM = ChatMessage("user", "hi"), ChatMessage("system", "be kind")
ASSISTANT, TOOL = ChatMessage("assistant", "yes"), ChatMessage("tool", "42")
EACH = "{% for m in messages %}<{{ m.role }}>"
STRINGS = EACH + "{{ m.content }}{% endfor %}"
PARTS = (
    EACH + "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
USERS_PARTS = (
    EACH + "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
FIRST_PART = EACH + "{{ m.content[0].text }}{% endfor %}"
FIRST_PART_OF_SYSTEM = (
    EACH + "{% if m.role == 'system' %}{{ m.content[0]['text'] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def rendered(source: str, *messages: ChatMessage) -> str:
    return ChatTemplate(source, {}).render(messages)


@pytest.mark.parametrize("source", [STRINGS, PARTS, EITHER, USERS_PARTS, FIRST_PART, FIRST_PART_OF_SYSTEM])
def test_every_word_is_kept_in_whatever_form_a_template_reads_it(source: str) -> None:
    assert (
        rendered(source, SYSTEM, USER, ASSISTANT, ChatMessage("user", "why?"))
        == "<system>be kind<user>hi<assistant>yes<user>why?"
    )


def test_a_template_that_reads_both_forms_gets_strings() -> None:
    assert ChatTemplate(EITHER, {}).parts_roles == frozenset()
    assert ChatTemplate(PARTS, {}).parts_roles >= {"user", "system", "assistant"}
    assert ChatTemplate(USERS_PARTS, {}).parts_roles == {"user"}


@pytest.mark.parametrize(
    "source",
    [
        "a fixed text",
        "{% for m in messages %}<{{ m.role }}>{% endfor %}",
        "{% for m in messages %}{{ m.text }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    ],
    ids=["fixed", "roles", "another field", "length", "sliced", "upper"],
)
def test_a_template_that_drops_what_a_user_says_is_refused_at_once(source: str) -> None:
    with pytest.raises(ChatRefused, match="leaves out what a user says"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "messages", "dropped"),
    [
        ("{{ messages[-1].content }}", [USER, ASSISTANT, ChatMessage("user", "why?")], "messages[0]"),
        ("{{ messages[-1].content }}", [SYSTEM, USER], "messages[0]"),
        ("{{ messages[0].content }}", [USER, ASSISTANT, ChatMessage("user", "why?")], "messages[1]"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", [SYSTEM, USER], "messages[0]"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            [USER, ASSISTANT, USER],
            "messages[1]",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            [USER, ASSISTANT, TOOL],
            "messages[2]",
        ),
        ("{% for m in messages[-2:] %}{{ m.content }}{% endfor %}", [USER, ASSISTANT, USER], "messages[0]"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.tool }}{{ m.content }}{% endfor %}",
            [TOOL, USER],
            "messages[0]",
        ),
    ],
)
def test_a_conversation_of_which_a_message_would_be_dropped_is_refused_by_its_place(
    source: str, messages: Sequence[ChatMessage], dropped: str
) -> None:
    template = ChatTemplate(source, {})
    assert "hi" in template.render([USER])
    with pytest.raises(ChatRefused) as refusal:
        template.render(messages)
    assert str(refusal.value).startswith(f"{dropped}: the model's chat template leaves out")


def test_what_says_nothing_may_be_left_out() -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert rendered(source, ChatMessage("system", " "), USER, ChatMessage("assistant", ""), USER) == "hihi"


LONG = ChatMessage("user", 'what is 2 < 3,\n\tand "why"?   \n' * 300 + "tell me")
CODE = ChatMessage("user", "def f():\n    return 1")


@pytest.mark.parametrize(
    ("change", "user"),
    [
        ("[:8000]", LONG),
        ("[-8000:]", LONG),
        (" | truncate(500)", LONG),
        ("[:100]", LONG),
        (".split('\n')[0]", LONG),
        (".split() | join(' ')", LONG),
        (" | wordwrap(40)", LONG),
        (".split() | join(' ')", CODE),
        (".replace('\n', '')", CODE),
        (" | replace('\n', ' ')", CODE),
        (" | replace('\n    ', '\n')", CODE),
        (" | indent", LONG),
        (" | striptags", LONG),
        (" | escape", LONG),
        (" | lower", ChatMessage("user", "Who is May?")),
        (" | replace('not', '')", ChatMessage("user", "do not stop")),
        (" | replace('/think', '')", ChatMessage("user", "look into /thinking/me")),
        (".split('</think>')[-1]", ChatMessage("user", "what is </think> for?")),
    ],
)
def test_a_template_that_cuts_or_changes_words_is_refused_by_the_message(change: str, user: ChatMessage) -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content" + change + " }}{% endfor %}", {})
    assert template.render([SYSTEM, USER]) == "<system>be kind<user>hi"
    with pytest.raises(ChatRefused) as refusal:
        template.render([SYSTEM, USER, ASSISTANT, user])
    expected = "messages[3]: the model's chat template leaves out or changes some of what the user says here"
    assert (str(refusal.value), refusal.value.field) == (expected, "chat.messages[3]")


@pytest.mark.parametrize(
    "source",
    [
        "{% for c in messages | map(attribute='content') | unique %}[{{ c }}]{% endfor %}",
        "{% for m in messages | sort(attribute='role') %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}{% if loop.last or m.content != 'no' %}[{{ m.content }}]{% endif %}{% endfor %}",
        "{% if messages | tojson | length > 200 %}{{ messages[-1].content }}{% else %}{{ messages }}{% endif %}",
    ],
    ids=["each once", "sorted", "a word", "long ones"],
)
def test_messages_that_are_dropped_or_moved_for_what_they_say_are_missed(source: str) -> None:
    no = ChatMessage("user", "no")
    with pytest.raises(ChatRefused, match=r"^messages\[\d\]: .* leaves out or changes some of what the "):
        rendered(source, no, ChatMessage("assistant", "so?"), no, ChatMessage("assistant", "well " * 40), no)


def test_an_answer_is_not_found_in_the_words_that_it_answers() -> None:
    source = "{% for m in messages if m.role == 'user' or m.content != 'yes' %}[{{ m.content }}]{% endfor %}"
    with pytest.raises(ChatRefused, match=r"^messages\[1\]: .* leaves out or changes some of what the assistant says"):
        rendered(source, ChatMessage("user", "yes or no?"), ASSISTANT)


def test_each_order_of_roles_is_tried_once() -> None:
    bos = CountedToken()
    template = ChatTemplate("{{ bos_token }}" + STRINGS, {"bos_token": bos})
    num_at_start = bos.num_rendered
    for word in ("ok", "yes", "go on", "tell me more of it") * 5:
        template.render([USER, ChatMessage("assistant", word), ChatMessage("user", word[::-1])])
    assert bos.num_rendered - num_at_start == 20 + 1


class CountedToken:
    num_rendered = 0

    def __str__(self) -> str:
        self.num_rendered += 1
        return "<s>"


@pytest.mark.parametrize("word", ["hi", "hi there you"])
def test_a_template_may_write_a_content_twice(word: str) -> None:
    said = ChatMessage("user", word)
    assert rendered("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", said) == word + word


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_a_short_content_that_is_dropped_for_its_role_is_missed(role: str) -> None:
    source = "You are a helpful one.{% for m in messages if m.role != '" + role + "' or m.content | length > 3 %}"
    template = ChatTemplate(source + "[{{ m.content }}]{% endfor %}", {})
    hello, what = ChatMessage("user", "hello"), ChatMessage("assistant", "what?")
    said = [hello, what, replace(TOOL, role=role, content="help"), hello]
    template.render(said)
    said[2] = replace(said[2], content="hel")
    with pytest.raises(ChatRefused, match=rf"^messages\[2\]: .* leaves out what the {role} says here"):
        template.render(said)


@pytest.mark.parametrize("word", ["help", "a", "sis"])
@pytest.mark.parametrize("written", ["m.content", "m.content | tojson(ensure_ascii=True)", "[m.content]"])
def test_a_short_word_that_is_dropped_is_not_found_in_the_template_s_own(word: str, written: str) -> None:
    source = "You are a helpful assistant.{% for m in messages if m.content | trim | length > 4 %}"
    template = ChatTemplate(source + "[{{ " + written + " }}]{% endfor %}", {})
    said = [ChatMessage("user", "hello"), ChatMessage("assistant", "what?"), ChatMessage("user", f" {word}\n")]
    template.render(said[:2])
    with pytest.raises(ChatRefused, match=r"^messages\[2\]: .* leaves out what the user says here"):
        template.render(said)


@pytest.mark.parametrize(
    "change", ["trim", "tojson", "tojson(ensure_ascii=True)", "escape", "string", "pprint"], ids=lambda change: change
)
def test_a_template_may_trim_or_quote_what_it_keeps(change: str) -> None:
    said = ChatMessage("user", ' \n¿\tQué es \\n?  "it\'s"\r\n' if change != "escape" else "hi")
    source = "{% for m in messages %}{{ m.content | " + change + " }}{% endfor %}"
    rendered(source, SYSTEM, said, ASSISTANT, said)


LINES = ChatMessage("user", "def f():\r\n    return 1\n\n\n    # no\r\rf()\n")


@pytest.mark.parametrize(
    "change",
    [
        ".replace('\r\n', '\n').replace('\n\n', '\n')",
        ".replace('\r\n', '\n').replace('\r', '\n')",
        ".replace('\r\n', '\n').replace('\n', '\r\n')",
        ".replace('\r\n', '\n').replace('\n\n', '\n') | tojson",
    ],
)
def test_a_template_may_change_line_ends_and_leave_out_blank_lines(change: str) -> None:
    rendered("{% for m in messages %}{{ m.content" + change + " }}{% endfor %}", SYSTEM, LINES, ASSISTANT, LINES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (r".replace('\\n', '\n')", r"show \nabla f in C:\new"),
        (r".replace('\\t', '\t')", r"C:\temp"),
        (r".replace('\\\\', '\\')", r"a \\ b, \\\\server\share"),
        (r".replace('\\\'', '\'')", r"say \'no\' to me"),
        (r".replace('\\r\\n', '\\n')", r"lines end with \r\n here"),
        (r".replace('\\u00e9', 'é')", r"what is \u00e9?"),
    ],
    ids=["line end", "tab", "backslashes", "quote", "line ends", "letter"],
)
def test_backslashes_that_somebody_wrote_are_not_taken_for_a_template_s(change: str, said: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content" + change + " }}{% endfor %}", {})
    with pytest.raises(ChatRefused, match=r"^messages\[0\]: .* leaves out or changes some of what the user says"):
        template.render([ChatMessage("user", said), ASSISTANT, USER])
    template.render([ChatMessage("user", said.replace("\\", "/")), ASSISTANT, USER])


WRITINGS = [
    ChatTemplate("{% for m in messages %}{{ " + written + " }}{% endfor %}", {})
    for written in ("m.content", "m.content | tojson", "m.content | tojson(ensure_ascii=True)", "[m.content]")
]


@pytest.mark.parametrize("template", WRITINGS, ids=["plain", "JSON", "JSON in ASCII", "Python"])
@given(said=text(alphabet="\\\\\\nrtbfuxU01ed8\n\r\t\x0c\x1b'\" /é\xa0\u2028😀a"))
def test_whatever_is_said_is_found_however_it_is_quoted(template: ChatTemplate, said: str) -> None:
    template.render([USER, ChatMessage("user", said), ASSISTANT])


def test_a_system_s_words_may_be_moved_to_a_user_s_turn() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}[{% if loop.last %}{{ messages[0].content }}\n{% endif %}"
        "{{ m.content }}]{% endfor %}"
    )
    assert rendered(source, SYSTEM, USER, ASSISTANT, ChatMessage("user", "why?")) == "[hi][yes][be kind\nwhy?]"


@pytest.mark.parametrize("switch", ["/think", "/no_think", "/nothink", "/system_override"])
def test_what_some_templates_take_for_a_switch_may_be_left_out(switch: str) -> None:
    source = "{% for m in messages %}{{ m.content | replace('" + switch + "', '') | trim }}{% endfor %}"
    said = ChatMessage("system", f"be kind {switch}\nand short"), ChatMessage("user", f"hi {switch}")
    assert rendered(source, *said) == "be kind \nand shorthi"
    assert rendered(STRINGS, *said) == f"<system>be kind {switch}\nand short<user>hi {switch}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (".split('</think>')[-1]", "hm</think>yes"),
        (".split('</think>')[-1].strip()", "<think>\nhm\n</think>\n\nyes"),
        (".split('</think>')[-1]", "<think>hm</think>yes"),
        (".split('[/THINK]')[-1]", "[THINK]hm[/THINK]yes"),
        (".split('</seed:think>')[-1]", "<seed:think>hm</seed:think>yes"),
        (".split('<answer>')[-1].split('</answer>')[0].strip()", "<think>hm</think>\n<answer>\nyes\n</answer>"),
    ],
)
def test_what_a_model_thought_may_be_cut_from_what_it_said(change: str, said: str) -> None:
    source = "{% for m in messages %}{{ m.content" + change + " }}{% endfor %}"
    assert rendered(source, USER, ChatMessage("assistant", said), USER) == "hiyeshi"


def test_what_a_model_said_after_its_thoughts_is_not_cut() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1][:100] }}{% endfor %}"
    with pytest.raises(ChatRefused, match=r"^messages\[1\]: .* some of what the assistant says"):
        rendered(source, USER, ChatMessage("assistant", f"hm</think>{LONG.content}"), USER)


def test_very_many_ends_of_thoughts_take_no_square_of_time() -> None:
    said = [USER, ChatMessage("assistant", "</think>" * 600_000 + "yes")]
    assert rendered(STRINGS, *said).endswith(">yes")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        ("{% for m in messages %}{{ m.thinking | tojson }}{% endfor %}", "fails on it: TypeError"),
        ("{{ message.content }}", "refuses it: 'message' is undefined"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "fails on it: RecursionError"),
        ("{{ messages[0].content + 1 }}", "fails on it: TypeError"),
        ("{{ 1 // 0 }}", "fails on it: ZeroDivisionError"),
        ("{{ range(10 ** 6) | list }}", "fails on it: OverflowError"),
        ("{{ messages.append(1) }}", "refuses it: "),
        ("{{ ''.__class__.__mro__ }}", "refuses it: "),
        ("{{ namespace(__class__=1) }}", "refuses it: "),
        ("{% for m in messages", "is none: TemplateSyntaxError"),
        ("{% no_such_tag %}", "is none: TemplateSyntaxError"),
        ("{{ messages | no_such_filter }}", "is none: TemplateAssertionError"),
    ],
)
def test_whatever_a_template_raises_refuses_the_conversation(source: str, reason: str) -> None:
    with pytest.raises(ChatRefused, match=f"^the model's chat template {reason}"):
        rendered(source, USER)


def test_the_reason_is_what_the_template_says_to_strings() -> None:
    source = "{{ raise_exception('too few roles' if messages[-1].content is string else 'no parts') }}"
    with pytest.raises(ChatRefused, match="refuses it: too few roles"):
        ChatTemplate(source, {})


def test_a_template_may_want_a_system_message_first() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PARTS
    template = ChatTemplate(source, {})
    assert template.render([SYSTEM, USER]) == "<system>be kind<user>hi"
    with pytest.raises(ChatRefused, match="no system"):
        template.render([USER])


def test_rendering_ends_where_the_text_is_too_long() -> None:
    template = ChatTemplate(STRINGS, {})
    assert template.render([USER], max_chars=8) == "<user>hi"
    with pytest.raises(TextTooLong):
        template.render([USER], max_chars=7)


LOOP, END = "{% for m in messages %}", "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        STRINGS,
        "{{ bos_token }}" + LOOP + "\n  {% if m.role == 'tool' %}{% continue %}{% endif %}\n[{{ m.content }}]\n" + END,
        "{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}" + END,
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'a': '<é>'} | tojson }}",
        LOOP + "{% generation %}{{ m.content }}{% set inside = 1 %}{% endgeneration %}{{ inside }}" + END,
        "{{ messages }}{{ strftime_now('%%') }}{{ dict(a=1) }}{{ dict.fromkeys(['b'], 2) }}",
        "{{ messages }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ unk_token is defined }}",
        "{%- for m in messages -%}\n   {{- m['role'] + ': ' + m['content'] | trim -}}\n{%- endfor -%}",
    ],
)
def test_the_text_is_the_one_that_transformers_renders(source: str) -> None:
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{"role": each.role, "content": each.content} for each in (USER, ASSISTANT)]
    (expected,), _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, **special_tokens
    )
    assert ChatTemplate(source, special_tokens).render([USER, ASSISTANT]) == expected


SUM = ToolCall("add", '{"a": 1, "to": {"é": [2.50]}}', "call00001")
CALLING = ChatMessage("assistant", tool_calls=[SUM])
ANSWER = ChatMessage("tool", "42", tool_call_id="call00001", name="add")
ASKED = [USER, CALLING, ANSWER]
CHATML = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}
        {{- '<' + message.role + '>' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}"""
NULLS = """{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- tool['type'] + ' ' + tool['function']['name'] + ' ' + tool['function']['arguments'] }}
        {%- endfor %}
    {%- else %}
        {{- '<' + message['role'] + '>' + message['content'] }}
    {%- endif %}
{%- endfor %}"""
IDS = """{%- for message in messages %}
    {%- if message['tool_calls'] is defined and message['tool_calls'] is not none %}
        {%- for tool_call in message['tool_calls'] %}
            {%- if tool_call.id is not defined or tool_call.id | length != 9 %}
                {{- raise_exception('ids have nine characters') }}
            {%- endif %}
            {{- tool_call | tojson }}
        {%- endfor %}
    {%- else %}
        {{- message['content'] + (message.name or '') + (message.tool_call_id or '') }}
    {%- endif %}
{%- endfor %}"""
PRINTED = (
    LOOP + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}" + END
)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            CHATML,
            "<user>hi<assistant><tool_call>"
            '{"name": "add", "arguments": {"a": 1, "to": {"é": [2.5]}}}</tool_call><tool_response>42</tool_response>',
        ),
        (NULLS, """<user>hifunction add {"a": 1, "to": {"é": [2.50]}}<tool>42"""),
        (
            IDS,
            'hi{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '
            '{"a": 1, "to": {"é": [2.5]}}}}42addcall00001',
        ),
        (PRINTED, """hiadd{"a": 1, "to": {"é": [2.50]}}42"""),
    ],
    ids=["object", "text, content null", "ids", "text"],
)
def test_a_call_of_a_tool_is_kept_in_whatever_form_a_template_reads_it(source: str, text: str) -> None:
    assert rendered(source, *ASKED) == text


def test_calls_of_tools_are_rendered_as_transformers_does() -> None:
    function = {"name": "add", "arguments": {"a": 1, "to": {"é": [2.5]}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "add", "content": "42"},
    ]
    (expected,), _ = render_jinja_template([messages], chat_template=CHATML, add_generation_prompt=True)
    assert rendered(CHATML, *ASKED) == expected


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": 1}', '{"a": 1}'),
        (" ", "{}"),
        ("[1]", '"[1]"'),
        ('{"a": ', '"{\\"a\\": "'),
        ('{"a": 1, "a": 2}', '"{\\"a\\": 1, \\"a\\": 2}"'),
        ('{"a": 1e999}', '"{\\"a\\": 1e999}"'),
        ('{"a": NaN}', '"{\\"a\\": NaN}"'),
        ("[" * 100_000, '"' + "[" * 100_000 + '"'),
    ],
    ids=["object", "none", "list", "cut", "twice", "infinite", "NaN", "deep"],
)
def test_arguments_that_an_object_would_not_keep_stay_text(arguments: str, read: str) -> None:
    text = rendered(CHATML, USER, ChatMessage("assistant", tool_calls=[ToolCall("f", arguments)]))
    assert text == '<user>hi<assistant><tool_call>{"name": "f", "arguments": ' + read + "}</tool_call>"


@pytest.mark.parametrize("written", ["arguments | tojson(sort_keys=True)", "arguments | string"])
def test_arguments_may_be_sorted_or_quoted(written: str) -> None:
    arguments = json.dumps({"b": 'it\'s \n "é"', "a": {"d": [-2.5, True, None], "c": 1e22}})
    called = ChatMessage("assistant", tool_calls=[ToolCall("f", arguments)])
    source = LOOP + "{{ m.content }};{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function." + written
    rendered(source + " }}{% endfor %}" + END, USER, called, called, USER, ChatMessage("assistant", "a b c d"), USER)


ARGUMENTS = json.dumps({"Zone": "z", "area": {"units": "C", "unitSystem": ["x", "z"]}, "Beta": 2})
CALLED = ChatMessage("assistant", tool_calls=[ToolCall("f", ARGUMENTS), ToolCall("f", ARGUMENTS)])


def test_arguments_may_come_in_any_order() -> None:
    source = LOOP + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% for k, v in c.function.arguments"
    source += " | dictsort %}{{ k }}:{{ v | dictsort if v is mapping else v }},{% endfor %}{% endfor %}" + END
    rendered(source, USER, CALLED, TOOL, ChatMessage("assistant", "z: 2 units, x C"), USER, CALLED, TOOL, USER)


def test_an_argument_that_equals_another_is_missed_too() -> None:
    source = LOOP + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}:{{ c.function.arguments | join }}"
    source += "{{ c.function.arguments.values() | unique | join }}{% endfor %}" + END
    template = ChatTemplate(source, {})
    said = [USER, ChatMessage("assistant", tool_calls=[ToolCall("f", '{"k": "12", "l": "34"}')])]
    assert template.render(said) == "hif:kl1234"
    with pytest.raises(ChatRefused, match=r"^messages\[1\].tool_calls\[0\]: .* some of the arguments"):
        template.render([USER, ChatMessage("assistant", tool_calls=[ToolCall("f", '{"k": "12", "l": "12"}')])])


@pytest.mark.parametrize(
    ("kept", "dropped"), [(10, 0), (0.5, 5), (10.25, 0.25), (-5, 5), (1e22, 22), (205, 5)], ids=str
)
def test_a_number_is_not_found_in_another(kept: float, dropped: float) -> None:
    source = CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={% if loop.first or v is string %}{{ v }}"
    source += "{% endif %};{% endfor %}{% endfor %}" + END
    arguments = json.dumps({"limit": kept, "offset": dropped})
    template = ChatTemplate(source, {})
    with pytest.raises(ChatRefused, match=r"^messages\[1\].tool_calls\[0\]: .* some of the arguments"):
        template.render([USER, ChatMessage("assistant", tool_calls=[ToolCall("f", arguments)])])


def test_an_argument_that_is_null_may_be_left_out_with_its_name() -> None:
    source = CALLS + "{% for k, v in c.function.arguments.items() if v is not none %}{{ k }}={{ v }},{% endfor %}"
    called = ChatMessage("assistant", tool_calls=[ToolCall("f", '{"limit": -10, "after": null}')])
    assert rendered(source + "{% endfor %}" + END, USER, called) == "hiflimit=-10,"


def test_very_many_arguments_are_found_in_their_order_only() -> None:
    source = LOOP + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | "
    numbers = {f"the name of argument {number}": number for number in range(10_000)}
    called = [USER, ChatMessage("assistant", tool_calls=[ToolCall("f", json.dumps(numbers))])]
    rendered(source + "tojson }}{% endfor %}" + END, *called)
    with pytest.raises(ChatRefused, match="some of the arguments"):
        rendered(source + "dictsort | reverse | list }}{% endfor %}" + END, *called)


CALLS = LOOP + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
ONE_ARGUMENT = CALLS + "{{ c.function.arguments.a }}{% endfor %}" + END
ONLY_OBJECTS = (
    CALLS + "{% if c.function.arguments is mapping %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}" + END
)
ONE_CALL = LOOP + "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}" + END
FIRST_ARGUMENTS = CALLS + "{{ (c.function.arguments | tojson)[:100] }}{% endfor %}" + END
CALLS_ALONE = LOOP + "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}" + END
CONTENT_ALONE = LOOP + "{% if m.content %}{{ m.content }}{% else %}{{ m.tool_calls | tojson }}{% endif %}" + END
NO_ANSWERS = CALLS_ALONE.replace("m.content", "m.content if m.role != 'tool'")
LONG_CALL = ToolCall("calculate", json.dumps({"terms": [{"value": number} for number in range(100)]}))
SAYING = ChatMessage("assistant", "let me see", [SUM])
CUT_BESIDE_CALLS = (
    LOOP + "{{ m.content[:8] if m.tool_calls else m.content }}{{ m.tool_calls | default([]) | tojson }}" + END
)
NOT_BOTH = "{% if m.content and m.tool_calls %}{{ raise_exception('not both') }}{% endif %}"
AS_THOUGHT = (  # as gpt-oss: the words stand before the call until there is an answer without calls
    LOOP + "{% set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}"
    "{% if m.tool_calls %}{% if not later | rejectattr('tool_calls') | list %}({{ m.content }}){% endif %}"
    "{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}" + END
)


@pytest.mark.parametrize(
    ("source", "messages", "dropped"),
    [
        (CUT_BESIDE_CALLS, [USER, SAYING], r"messages\[1\]: .* some of what the assistant says"),
        (ONE_ARGUMENT, ASKED, r"messages\[1\].tool_calls\[0\]: .* the arguments"),
        (FIRST_ARGUMENTS, [USER, ChatMessage("assistant", tool_calls=[LONG_CALL])], r"messages\[1\].*the arguments"),
        (
            CALLS.replace("name", "name[:5]") + "{{ c.function.arguments | tojson }}{% endfor %}" + END,
            [USER, ChatMessage("assistant", tool_calls=[LONG_CALL])],
            r"messages\[1\].*the function's name",
        ),
        (ONLY_OBJECTS, [USER, ChatMessage("assistant", tool_calls=[ToolCall("f", "[1]")])], ".* the arguments"),
        (
            NO_ANSWERS,
            ASKED,
            r"messages\[2\]: .* what the tool says",
        ),
    ],
    ids=[
        "words cut beside calls",
        "an argument",
        "cut arguments",
        "cut name",
        "objects",
        "answers",
    ],
)
def test_a_call_or_answer_that_would_be_dropped_is_refused_by_its_place(
    source: str, messages: Sequence[ChatMessage], dropped: str
) -> None:
    template = ChatTemplate(source, {})
    assert "hi" in template.render([USER])
    with pytest.raises(ChatRefused, match=dropped):
        template.render(messages)


@pytest.mark.parametrize(
    "source",
    [
        CALLS_ALONE,
        AS_THOUGHT,
        NULLS,
        CONTENT_ALONE,
        CHATML.replace("{%- for m", LOOP + NOT_BOTH + END + "{%- for m"),
    ],
    ids=["calls alone", "as thought", "nulls", "content alone", "not both"],
)
def test_words_beside_a_call_may_be_left_out_but_no_call_and_no_answer(source: str) -> None:
    said = [USER, SAYING, ANSWER, ChatMessage("assistant", "so 42"), ChatMessage("user", "why?")]
    text = rendered(source, *said)
    assert SAYING.content not in text
    places = [text.index(each) for each in ("hi", "add", "2.5", "42", "so 42", "why?")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "source",
    [ONE_CALL, LOOP + "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}" + END],
    ids=["leaves others out", "refuses others"],
)
def test_a_template_of_single_calls_gets_each_call_before_its_own_answer(source: str) -> None:
    source = (
        source
        if source is ONE_CALL
        else source.replace(END, "{{ m.content }}{{ m.tool_calls | default([]) | tojson }}" + END)
    )
    other = ToolCall("multiply", '{"by": 7}', "second")
    said = [
        *(USER, replace(SAYING, tool_calls=[SUM, other])),
        *(ANSWER, replace(ANSWER, content="forty-nine", tool_call_id="second"), ChatMessage("user", "why?")),
    ]
    text = rendered(source, *said)
    places = [text.index(each) for each in ("add", "42", "multiply", "forty-nine", "why?")]
    assert places == sorted(places)
    unanswered = rendered(source, USER, replace(SAYING, tool_calls=[SUM, other]))
    assert unanswered.index("add") < unanswered.index("multiply")


def test_words_beside_a_call_are_kept_where_a_template_writes_them() -> None:
    assert rendered(AS_THOUGHT, USER, SAYING, ANSWER).startswith("hi(let me see)[{")
    assert "<assistant>let me see<tool_call>" in rendered(CHATML, USER, SAYING, ANSWER)


def test_words_without_a_call_are_not_left_out_for_the_sake_of_those_beside_one() -> None:
    source = CALLS_ALONE.replace("m.content", "m.content if m.content != 'well' else ''")
    with pytest.raises(ChatRefused, match=r"^messages\[3\]: .* what the assistant says"):
        rendered(source, USER, SAYING, ANSWER, ChatMessage("assistant", "well"), USER)


CALL = "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
CONTENT_LAST = (
    LOOP
    + "{% if m.role != 'tool' %}{% set here = loop.index0 %}"
    + CALL
    + "{% for t in messages[here + 1:] %}{% if t.role != 'tool' %}{% break %}{% endif %}{{ t.content }}{% endfor %}"
    + "{{ m.content }}{% endif %}"
    + END
)
ANSWERS_LAST = (
    LOOP
    + "{% if m.role != 'tool' %}{{ m.content }}"
    + CALL
    + "{% if loop.last or loop.nextitem.role == 'user' %}{% for t in messages if t.role == 'tool' %}{{ t.content }}"
    + "{% endfor %}{% endif %}{% endif %}"
    + END
)


@pytest.mark.parametrize("source", [CONTENT_LAST, ANSWERS_LAST], ids=["content last", "answers last"])
def test_the_kinds_of_parts_of_a_turn_may_change_places(source: str) -> None:
    rendered(source, USER, SAYING, ANSWER, ChatMessage("assistant", "so 42"), ChatMessage("user", "let me see"))


def test_a_turn_of_many_steps_may_have_the_contents_last() -> None:
    steps = [
        (replace(SAYING, content=f"step {number}"), replace(ANSWER, content=f"{number}: " + "it is so " * 1000))
        for number in range(300)
    ]
    rendered(CONTENT_LAST, USER, *(message for step in steps for message in step), USER)


@pytest.mark.thorough
@pytest.mark.parametrize("source", [CHATML, CONTENT_LAST, ANSWERS_LAST], ids=["CHATML", "content last", "answers last"])
def test_a_turn_of_many_long_answers_is_found_whatever_its_length(source: str) -> None:
    steps = [(CALLING, replace(ANSWER, content=f"{number}: " + "it is so " * 3000)) for number in range(250)]
    rendered(source, USER, *(message for step in steps for message in step), ChatMessage("assistant", "so 42"))


WORDS = ToolCall("f", '{"a": "token"}')
TWO_CALLS = ChatMessage("assistant", tool_calls=[WORDS, SUM])
SORTED = "{% for m in messages | sort(attribute='content') %}[{{ m.content }}]{% endfor %}"
LAST_FIRST = (
    LOOP + "{% if m.role != 'tool' %}{{ m.content }}" + CALL + "{% if m.tool_calls %}{% for t in messages | reverse %}"
    "{% if t.role == 'tool' %}[{{ t.content }}]{% endif %}{% endfor %}{% endif %}{% endif %}" + END
)
NO_SHORT_ANSWERS = LOOP + "{% if m.role != 'tool' or m.content != 'ok' %}{{ m.content }}{% endif %}" + CALL + END


@pytest.mark.parametrize(
    ("source", "messages", "dropped"),
    [
        (NO_SHORT_ANSWERS, [replace(CALLING, tool_calls=[WORDS]), "ok"], 2),
        (NO_SHORT_ANSWERS, [TWO_CALLS, "ok", "42"], 2),
        (LAST_FIRST, [TWO_CALLS, "rain", "sun"], 3),
        (SORTED, [ChatMessage("assistant", "one"), ChatMessage("assistant", "more")], 2),
    ],
    ids=["answer in its call", "answer in one of its calls", "answers", "contents"],
)
def test_parts_of_one_kind_are_missed_where_they_are_dropped_or_change_places(
    source: str, messages: Sequence[ChatMessage | str], dropped: int
) -> None:
    said = [replace(ANSWER, content=each) if isinstance(each, str) else each for each in messages]
    with pytest.raises(ChatRefused, match=rf"^messages\[{dropped}\]: .* leaves out or changes some of what"):
        rendered(source, USER, *said)


@pytest.mark.parametrize(
    ("source", "messages", "dropped"),
    [
        (
            CALLS_ALONE.replace("m.tool_calls | tojson", "m.tool_calls | map('tojson') | unique | join"),
            [USER, replace(CALLING, tool_calls=[SUM, SUM])],
            r"messages\[1\].tool_calls\[1\]: .* the function's name",
        ),
        (
            LOOP
            + "{% if loop.first or m.content != loop.previtem.content %}{{ m.content }}"
            + CALL
            + "{% endif %}"
            + END,
            [USER, SAYING, ANSWER, ANSWER, USER],
            r"messages\[3\]: .* what the tool says",
        ),
    ],
    ids=["calls", "answers"],
)
def test_of_equal_calls_and_answers_each_is_missed(source: str, messages: Sequence[ChatMessage], dropped: str) -> None:
    with pytest.raises(ChatRefused, match=dropped):
        rendered(source, *messages)


def test_what_an_assistant_only_thought_beside_a_call_may_be_left_out() -> None:
    assert '"add"' in rendered(CALLS_ALONE, USER, replace(CALLING, content="<think>hm</think>"), ANSWER)


def test_a_content_of_blanks_beside_a_call_does_not_hide_it() -> None:
    assert '"add"' in rendered(CONTENT_ALONE, USER, replace(CALLING, content=" "))


def test_a_call_of_what_a_template_keeps_is_not_refused_for_another_s_sake() -> None:
    template = ChatTemplate(ONLY_OBJECTS, {})
    with pytest.raises(ChatRefused):
        template.render([USER, ChatMessage("assistant", tool_calls=[ToolCall("f", "[1]")])])
    assert template.render(ASKED) == 'hiadd{"a": 1, "to": {"é": [2.5]}}42'


def test_a_template_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(str(tmp_path))
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.jinja").write_text(STRINGS)
    assert TextTokenizer.from_directory(tmp_path).chat_template()[0] == STRINGS
