"""A model's chat template is rendered as by transformers, and no part of a message is dropped silently."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import text
from transformers.utils.chat_template_utils import render_jinja_template

from common.text.chat_messages import ChatMessage, TemplateOptions, Tool, ToolCall
from common.text.chat_template import ChatRefused, ChatTemplate, TextTooLong
from common.text.tokenizer import TextTokenizer
from tests.support.models import make_tokenizer

USER, SYSTEM = ChatMessage("user", "hi"), ChatMessage("system", "be kind")
ASSISTANT, TOOL = ChatMessage("assistant", "yes"), ChatMessage("tool", "42")


def rendered(source: str, *messages: ChatMessage) -> str:
    return ChatTemplate(source, {}).render(messages)


def each(body: str, of: str = "messages") -> str:
    return "{% for m in " + of + " %}" + body + "{% endfor %}"


def written(expression: str, condition: str = "true", of: str = "messages") -> str:
    """Returns a template that writes this of each message `m` that fulfils a condition."""
    return each("{% if " + condition + " %}[{{ " + expression + " }}]{% endif %}", of)


def each_call(body: str, name: str = "c.function.name") -> str:
    """Returns what writes the name of each of a message's calls, and then `body` with the arguments `a`."""
    return "{% for c in m.tool_calls %}{% set a = c.function.arguments %}{{ " + name + " }}" + body + "{% endfor %}"


def with_calls(body: str, name: str = "c.function.name") -> str:
    return each("{{ m.content }}" + each_call(body, name))


def said(*words: str) -> list[ChatMessage]:
    """Returns a conversation in which the user and the assistant take turns."""
    return [ChatMessage("assistant" if index % 2 else "user", each) for index, each in enumerate(words)]


def calls(*arguments: str, name: str = "f") -> ChatMessage:
    return ChatMessage("assistant", tool_calls=[ToolCall(name, each) for each in arguments])


def answers(*contents: str) -> list[ChatMessage]:
    return [replace(ANSWER, content=each) for each in contents]


STRINGS = each("<{{ m.role }}>{{ m.content }}")
PARTS = "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
SUM = ToolCall("add", '{"a": 1, "to": {"é": [2.50]}}', "call00001")
CALLING = ChatMessage("assistant", tool_calls=[SUM])
SAYING = replace(CALLING, content="let me see")
ANSWER = ChatMessage("tool", "42", tool_call_id="call00001", name="add")
ASKED = [USER, CALLING, ANSWER]
CALLS = each_call("{{ a | tojson }}")
CALLS_ALONE = each("{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}")
CONTENT_ALONE = each("{% if m.content %}{{ m.content }}{% else %}{{ m.tool_calls | tojson }}{% endif %}")
ONLY_OBJECTS = with_calls("{{ a | tojson if a is mapping }}")


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",
        PARTS,
        "{% if m.content is string %}{{ m.content }}{% else %}parts: {{ m.content[0].text }}{% endif %}",
        "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}",
        "{{ m.content[0].text }}",
        "{% if m.role == 'system' %}{{ m.content[0]['text'] }}{% else %}{{ m.content }}{% endif %}",
    ],
    ids=["strings", "parts", "strings if it reads both", "a user's parts", "the first part", "a system's first part"],
)
def test_every_word_is_kept_in_whatever_form_a_template_reads_it(content: str) -> None:
    text = rendered(each("<{{ m.role }}>" + content), SYSTEM, USER, ASSISTANT, TOOL, ChatMessage("developer", "why?"))
    assert text == "<system>be kind<user>hi<assistant>yes<tool>42<developer>why?"


@pytest.mark.parametrize(
    "source",
    ["a fixed text", *map(written, ["m.role", "m.text", "m.content | length", "m.content[:3]", "m.content | upper"])],
)
def test_a_template_that_drops_what_a_user_says_is_refused_at_once(source: str) -> None:
    with pytest.raises(ChatRefused, match="leaves out what a user says"):
        ChatTemplate(source, {})


NO_SHORT_ANSWERS = each("{{ m.content if m.role != 'tool' or m.content != 'ok' }}" + CALLS)
LONG = 'what is 2 < 3,\n\tand "why"?   \n' * 300 + "tell me"
CODE = "def f():\n    return 1"
LONG_ARGUMENTS, EQUAL = json.dumps({"terms": [{"value": number} for number in range(100)]}), '{"k": "12", "l": "12"}'
FIRST_CALL = "messages[1].tool_calls[0]"
MISSED: dict[str, tuple[str, Sequence[ChatMessage], int | str]] = {
    "all but the last": ("{{ messages[-1].content }}", said("hi", "yes", "why?"), 0),
    "all but the first": ("{{ messages[0].content }}", said("hi", "yes", "why?"), 1),
    "all but two": (written("m.content", of="messages[-2:]"), said("hi", "yes", "hi"), 0),
    **{
        f"a short word of the {role}": (
            "You are a helpful one." + written("m.content", f"m.role != '{role}'"),
            [USER, ChatMessage(role, "help"), ChatMessage("user", "helps you")],
            1,
        )
        for role in ("system", "developer", "assistant", "tool")
    },
    "a tool's, by another field": (written("m.tool ~ m.content", "m.role != 'tool'"), [TOOL, USER], 0),
    "words of before": (written("m.content", of="messages | unique(attribute='content')"), said("no", "so?", "no"), 2),
    "the order of roles": (written("m.content", of="messages | sort(attribute='role')"), said("no", "so?", "no"), 1),
    "the order": (written("m.content", of="messages | sort(attribute='content')"), said("", "one", "", "more"), 3),
    "a certain word": (written("m.content", "loop.last or m.content != 'no'"), said("no", "so?", "no"), 1),
    "all but the last, if long": (
        written("m.content", "loop.last or messages | tojson | length < 200"),
        said("no", "so?", "well " * 40),
        0,
    ),
    "an answer in its question": (written("m.content", "m.content != 'yes'"), said("yes or no?", "yes"), 1),
    "a user's word in an answer": (written("m.content", "m.content != 'no'"), said("hi", "well, no", "no"), 2),
    "a user's word in a tool's": (
        each("{{ m.content if m.role == 'tool' or m.content != 'no' }}" + CALLS),
        [*ASKED[:2], *answers("no"), ChatMessage("user", "no")],
        3,
    ),
    "a call in the words before": (
        each(
            "{{ m.content }}{% if not m.tool_calls or m.tool_calls[0].function.name != 'add' %}" + CALLS + "{% endif %}"
        ),
        [ChatMessage("user", "add a 1 to é 2.5"), CALLING],
        FIRST_CALL,
    ),
    **{
        f"m.content{change}": (written("m.content" + change), [SYSTEM, *said("hi", "yes", words)], 3)
        for change, words in [
            ("[:8000]", LONG),
            ("[-8000:]", LONG),
            (" | truncate(500)", LONG),
            ("[:100]", LONG),
            (".split('\n')[0]", LONG),
            (".split() | join(' ')", CODE),
            (" | wordwrap(40)", LONG),
            (".replace('\n', '')", CODE),
            (" | replace('\n', ' ')", CODE),
            (" | replace('\n    ', '\n')", CODE),
            (" | indent", LONG),
            (" | striptags", LONG),
            (" | escape", LONG),
            (" | lower", "Who is May?"),
            (" | replace('not', '')", "do not stop"),
            (" | replace('/think', '')", "look into /thinking/me"),
            (".split('</think>')[-1]", "what is </think> for?"),
            (r".replace('\\n', '\n')", r"show \nabla f in C:\new"),
            (r".replace('\\t', '\t')", r"C:\temp"),
            (r".replace('\\\\', '\\')", r"a \\ b, \\\\server\share"),
            (r".replace('\\\'', '\'')", r"say \'no\' to me"),
            (r".replace('\\u00e9', 'é')", r"what is \u00e9?"),
        ]
    },
    "an end after thoughts": (written("m.content.split('</think>')[-1][:9]"), said("hi", f"</think>{LONG}"), 1),
    "an end of arguments": (with_calls("{{ (a | tojson)[:100] }}"), [USER, calls(LONG_ARGUMENTS)], FIRST_CALL),
    "an end of a name": (
        with_calls("{{ a }}", "c.function.name[:5]"),
        [USER, calls("{}", name="calculate")],
        FIRST_CALL,
    ),
    "arguments that are no object": (ONLY_OBJECTS, [USER, calls("[1]"), *answers("[1]")], FIRST_CALL),
    "an equal value": (with_calls("{{ a | join }}{{ a.values() | unique | join }}"), [USER, calls(EQUAL)], FIRST_CALL),
    **{
        f"the number {dropped} beside {kept}": (
            with_calls("{% for k in a %}{{ k }}={{ a[k] if loop.first or a[k] is string }};{% endfor %}"),
            [USER, calls(json.dumps({"limit": kept, "offset": dropped}))],
            FIRST_CALL,
        )
        for kept, dropped in [(10, 0), (0.5, 5), (10.25, 0.25), (-5, 5), (1e22, 22), (205, 5)]
    },
    "a call that equals another": (
        CALLS_ALONE.replace("m.tool_calls | tojson", "m.tool_calls | map('tojson') | unique | join"),
        [USER, replace(CALLING, tool_calls=[SUM, SUM])],
        "messages[1].tool_calls[1]",
    ),
    "an answer that equals another": (
        each("{% if loop.first or m.content != loop.previtem.content %}{{ m.content }}" + CALLS + "{% endif %}"),
        [USER, SAYING, ANSWER, ANSWER, USER],
        3,
    ),
    "an answer in its call": (NO_SHORT_ANSWERS, [USER, calls('{"a": "token"}'), *answers("ok")], 2),
    "an answer in one of its calls": (
        NO_SHORT_ANSWERS,
        [USER, replace(CALLING, tool_calls=[ToolCall("f", '{"a": "token"}'), SUM]), *answers("ok", "42")],
        2,
    ),
    "the order of answers": (
        each(
            "{{ m.content if m.role != 'tool' }}" + CALLS + "{% if m.tool_calls %}{% for t in messages | "
            "sort(attribute='content') if t.role == 'tool' %}[{{ t.content }}]{% endfor %}{% endif %}"
        ),
        [USER, calls("{}", "{}"), *answers("sun", "rain")],
        3,
    ),
    "an end of words beside calls": (
        each("{{ m.content[:8] if m.tool_calls else m.content }}" + CALLS),
        [USER, SAYING],
        1,
    ),
    "words without a call": (
        CALLS_ALONE.replace("m.content", "m.content if m.content != 'well' else ''"),
        [USER, SAYING, ANSWER, ChatMessage("assistant", "well"), USER],
        3,
    ),
}


@pytest.mark.parametrize(("source", "messages", "at"), MISSED.values(), ids=MISSED)
def test_what_a_template_leaves_out_or_changes_is_refused_by_its_place(
    source: str, messages: Sequence[ChatMessage], at: int | str
) -> None:
    place = f"messages[{at}]" if isinstance(at, int) else at
    template = ChatTemplate(source, {})
    assert "hi" in template.render([USER])
    with pytest.raises(ChatRefused) as refusal:
        template.render(messages)
    assert refusal.value.field == f"chat.{place}"
    assert str(refusal.value).startswith(f"{place}: the model's chat template leaves out or changes some of ")


QUOTED = ChatMessage("user", ' \n¿\tQué es \\n, y \\r\\n?  "it\'s"\r\n')
LINES = ChatMessage("user", "def f():\r\n    return 1\n\n\n    # no\r\rf()\n")
LINE_ENDS = ".replace('\r\n', '\n')"
ARGUMENTS = json.dumps({"Zone": "z", "area": {"units": "C", "unitSystem": ["x", "z"]}, "Beta": 2})
QUOTED_ARGUMENTS = json.dumps({"b": 'it\'s \n "é"', "a": {"d": [-2.5, True, None], "c": 1e22}})
SWITCHED = [ChatMessage("system", "be kind {}\nand short"), ChatMessage("user", "hi {}")]
CONTENT_LAST = each(
    "{% if m.role != 'tool' %}{% set here = loop.index0 %}" + CALLS + "{% for t in messages[here + 1:] %}"
    "{% if t.role != 'tool' %}{% break %}{% endif %}{{ t.content }}{% endfor %}{{ m.content }}{% endif %}"
)
ANSWERS_LAST = each(
    "{% if m.role != 'tool' %}{{ m.content }}" + CALLS + "{% if loop.last or loop.nextitem.role == 'user' %}"
    "{% for t in messages if t.role == 'tool' %}{{ t.content }}{% endfor %}{% endif %}{% endif %}"
)


def steps(count: int, words: str, answer: str) -> list[ChatMessage]:
    """Returns a turn in which the assistant calls and is answered many times."""
    calling = [replace(SAYING, content=f"{words}{number}" if words else "") for number in range(count)]
    answered = answers(*(f"{number}: {answer}" for number in range(count)))
    return [message for step in zip(calling, answered, strict=True) for message in step]


KEPT: dict[str, tuple[str, Sequence[ChatMessage]]] = {
    "nothing": (written("m.content", "m.role != 'system'"), [ChatMessage("system", " "), USER, *said("hi", "", "hi")]),
    "twice": (each("{{ m.content }}{{ m.content }}"), [USER]),
    **{
        f"quoted: {change}": (written("m.content | " + change), [SYSTEM, QUOTED, ASSISTANT, QUOTED])
        for change in ("trim", "tojson", "tojson(ensure_ascii=True)", "string", "pprint")
    },
    **{
        f"lines: {change}{quote}": (written(f"m.content{LINE_ENDS}{change}{quote}"), [SYSTEM, LINES, ASSISTANT, LINES])
        for change in (".replace('\n\n', '\n')", ".replace('\r', '\n')", ".replace('\n', '\r\n')")
        for quote in ("", " | tojson")
    },
    **{
        f"{name} {switch}": (source, [replace(each, content=each.content.format(switch)) for each in SWITCHED])
        for switch in ("/think", "/no_think", "/nothink", "/system_override")
        for name, source in [("no", written(f"m.content | replace('{switch}', '') | trim")), ("the", STRINGS)]
    },
    **{
        f"arguments: {how}": (
            each("{{ m.content }};" + each_call("{{ a | " + how + " }}")),
            [USER, calls(QUOTED_ARGUMENTS), calls(QUOTED_ARGUMENTS), *said("hi", "a b c d", "hi")],
        )
        for how in ("tojson(sort_keys=True)", "string")
    },
    "arguments in any order": (
        with_calls("{% for k, v in a | dictsort %}{{ k }}:{{ v | dictsort if v is mapping else v }},{% endfor %}"),
        2 * [USER, calls(ARGUMENTS, ARGUMENTS), TOOL, ChatMessage("assistant", "z: 2 units, x C")],
    ),
    **{
        name: (source, [USER, SAYING, ANSWER, ChatMessage("assistant", "so 42"), ChatMessage("user", "let me see")])
        for name, source in {"words last": CONTENT_LAST, "answers last": ANSWERS_LAST}.items()
    },
    "the words of many steps last": (CONTENT_LAST, [USER, *steps(300, "step ", "it is so " * 1000), USER]),
    "a system's words in a later turn": (
        written("(messages[0].content ~ '\n' if loop.last else '') ~ m.content", "m.role != 'system'"),
        [SYSTEM, *said("hi", "yes", "why?")],
    ),
    "all systems' words first": (
        written("m.content", "m.role == 'system'") + written("m.content", "m.role != 'system'"),
        [SYSTEM, USER, ASSISTANT, SYSTEM, USER],
    ),
    "quoted and plain": (written("m.content | tojson(ensure_ascii=True) if loop.first else m.content"), said("é", "é")),
    "no markers": (
        written("m.content if loop.length == 1 or 'i' in m.content else raise_exception('')"),
        [SYSTEM, USER],
    ),
    "very many arguments in any order": (
        with_calls("{{ a | tojson(sort_keys=True) }}"),
        [USER, calls(json.dumps({f"{number % 7} {number}": number for number in range(1200)}))],
    ),
    "equal numbers in any order": (with_calls("{{ a | tojson(sort_keys=True) }}"), [USER, calls('{"b": 1, "a": 1.0}')]),
    "numbers beside marks": (
        with_calls("{% for k in a %}{{ k }}-{{ a[k] }}.{% endfor %}"),
        [USER, calls('{"a": 5, "b": -0.5}')],
    ),
    "no null, and True": (
        with_calls("{% for k in a if a[k] is not none %}{{ k }}={{ a[k] }},{% endfor %}"),
        [USER, calls('{"limit": -10, "after": null, "metric": true}')],
    ),
    **{
        f"no thoughts: {words!r}": (written("m.content" + change), said("hi", words, "hi"))
        for change, words in [
            (".split('</think>')[-1]", "hm</think>yes"),
            (".split('</think>')[-1].strip()", "<think>\nhm\n</think>\n\nyes"),
            (".split('</think>')[-1]", "<think>hm</think>yes"),
            (".split('[/THINK]')[-1]", "[THINK]hm[/THINK]yes"),
            (".split('</seed:think>')[-1]", "<seed:think>hm</seed:think>yes"),
            (".split('<answer>')[-1].split('</answer>')[0]", "<think>hm</think>\n<answer>\nyes\n</answer>"),
        ]
    },
}


@pytest.mark.parametrize(("source", "messages"), KEPT.values(), ids=KEPT)
def test_what_templates_do_to_words_that_they_keep_is_served(source: str, messages: Sequence[ChatMessage]) -> None:
    rendered(source, *messages)


WRITINGS = [
    ChatTemplate(each("{{ " + content + " }}"), {})
    for content in ("m.content", "m.content | tojson", "m.content | tojson(ensure_ascii=True)", "[m.content]")
]


@pytest.mark.parametrize("template", WRITINGS, ids=["plain", "JSON", "JSON in ASCII", "Python"])
@given(words=text(alphabet="\\\\\\nrtbfuxU01ed8\n\r\t\x0c\x1b'\" /é\xa0\u2028😀a"))
def test_whatever_is_said_is_found_however_it_is_quoted(template: ChatTemplate, words: str) -> None:
    template.render([USER, ChatMessage("user", words), ASSISTANT])


def test_each_order_of_roles_is_tried_once_while_it_is_remembered_whatever_is_said() -> None:
    bos = CountedToken()
    template = ChatTemplate("{{ bos_token }}{{ x }}{{ tools | tojson }}" + STRINGS, {"bos_token": bos})

    def num_renderings(word: str, x: int) -> int:
        num_before = bos.num_rendered
        options = TemplateOptions((Tool(word),), json.dumps({"x": x}))
        template.render(said("hi", word, word[::-1]), options)
        return bos.num_rendered - num_before

    assert [num_renderings(word, 0) for word in ("ok", "yes", "go on", "tell me more of it")] == [2, 1, 1, 1]
    assert [num_renderings("ok", x) for x in (*range(1, 300), 299, 0)] == [*[2] * 299, 1, 2]


class CountedToken:
    num_rendered = 0

    def __str__(self) -> str:
        self.num_rendered += 1
        return "<s>"


def test_very_many_ends_of_thoughts_take_no_square_of_time() -> None:
    assert rendered(STRINGS, *said("hi", "</think>" * 600_000 + "yes")).endswith(">yes")


def test_very_many_arguments_are_found_in_their_order_only() -> None:
    numbers = {f"the name of argument {number}": number for number in range(10_000)}
    called = [USER, calls(json.dumps(numbers))]
    rendered(with_calls("{{ a | tojson }}"), *called)
    with pytest.raises(ChatRefused, match="some of the call"):
        rendered(with_calls("{{ a | dictsort | reverse | list }}"), *called)


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
        (  # it is asked about strings first
            "{{ raise_exception('too few roles' if messages[-1].content is string else 'no parts') }}",
            "refuses it: too few roles",
        ),
    ],
)
def test_whatever_a_template_raises_refuses_the_conversation(source: str, reason: str) -> None:
    with pytest.raises(ChatRefused, match=f"^the model's chat template {reason}"):
        rendered(source, USER)


def test_a_template_may_want_a_system_message_first() -> None:
    wanting = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = ChatTemplate(wanting + each("<{{ m.role }}>" + PARTS), {})
    assert template.render([SYSTEM, USER]) == "<system>be kind<user>hi"
    with pytest.raises(ChatRefused, match="no system"):
        template.render([USER])


def test_rendering_ends_where_the_text_is_too_long() -> None:
    template = ChatTemplate(STRINGS, {})
    assert template.render([USER], max_chars=8) == "<user>hi"
    with pytest.raises(TextTooLong):
        template.render([USER], max_chars=7)


CHATML = (
    "{%- for m in messages %}\n  {%- if m.role == 'tool' %}{{- '<tool_response>' + m.content + '</tool_response>' }}\n"
    "  {%- else %}{{- '<' + m.role + '>' }}{%- if m.content %}{{- m.content }}{%- endif %}\n"
    "    {%- for call in m.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}\n"
    """      {{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}\n"""
    "      {{- '}</tool_call>' }}{%- endfor %}\n  {%- endif %}\n{%- endfor %}"
)
FUNCTION = {"name": "add", "arguments": {"a": 1, "to": {"é": [2.5]}}}
SAID: list[dict[str, Any]] = [{"role": each.role, "content": each.content} for each in (USER, ASSISTANT)]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": FUNCTION}]},
    {"role": "tool", "name": "add", "content": "42"},
]


@pytest.mark.parametrize(
    ("source", "as_read", "messages"),
    [
        *(
            (source, SAID, [USER, ASSISTANT])
            for source in [
                STRINGS,
                "{{ bos_token }}" + each("\n  {% if m.role == 'tool' %}{% continue %}{% endif %}\n[{{ m.content }}]\n"),
                "{% set ns = namespace(n=0) %}" + each("{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}"),
                "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'a': '<é>'} | tojson }}",
                each("{% generation %}{{ m.content }}{% set inside = 1 %}{% endgeneration %}{{ inside }}"),
                "{{ messages }}{{ strftime_now('%%') }}{{ dict(a=1) }}{{ dict.fromkeys(['b'], 2) }}",
                "{{ messages }}{{ [tools is none, documents is none, add_generation_prompt, unk_token is defined] }}",
                "{%- for m in messages -%}\n   {{- m['role'] + ': ' + m['content'] | trim -}}\n{%- endfor -%}",
            ]
        ),
        (CHATML, CALLED, ASKED),
    ],
)
def test_the_text_is_the_one_that_transformers_renders(
    source: str, as_read: list[dict[str, Any]], messages: Sequence[ChatMessage]
) -> None:
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        [as_read], chat_template=source, add_generation_prompt=True, **special_tokens
    )
    assert ChatTemplate(source, special_tokens).render(messages) == expected


NULLS = each(
    "{% if m.role == 'assistant' and m.content is none %}{% for call in m.tool_calls %}"
    "{{ call.type + ' ' + call.function.name + ' ' + call.function.arguments }}{% endfor %}"
    "{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}"
)
IDS = each(
    "{% for call in m.tool_calls %}{% if call.id | default('') | length != 9 %}{{ raise_exception('nine characters') }}"
    "{% endif %}{{ call | tojson }}{% else %}{{ m.content + (m.name or '') + (m.tool_call_id or '') }}{% endfor %}"
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
        (with_calls("{{ a }}"), """hiadd{"a": 1, "to": {"é": [2.50]}}42"""),
        (
            with_calls("{{ a.a }}"),
            'hi<tool_call>\n{"name": "add", "arguments": {"a": 1, "to": {"é": [2.50]}}}\n</tool_call>'
            "<tool_response>\n42\n</tool_response>",
        ),
    ],
    ids=["object", "text, content null", "ids", "text", "in no form"],
)
def test_a_call_of_a_tool_is_kept_in_whatever_form_a_template_reads_it(source: str, text: str) -> None:
    assert rendered(source, *ASKED) == text


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
        ('{"a": "\\ud83d"}', '"{\\"a\\": \\"\\\\ud83d\\"}"'),
    ],
    ids=["object", "none", "list", "cut", "twice", "infinite", "NaN", "deep", "half of a pair"],
)
def test_arguments_that_an_object_would_not_keep_stay_text(arguments: str, read: str) -> None:
    assert rendered(CHATML, USER, calls(arguments)) == (
        '<user>hi<assistant><tool_call>{"name": "f", "arguments": ' + read + "}</tool_call>"
    )


NOT_BOTH = "{% if m.content and m.tool_calls %}{{ raise_exception('not both') }}{% endif %}"
AS_THOUGHT = each(  # as gpt-oss: the words stand before the call until there is an answer without calls
    "{% set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}"
    "{% if m.tool_calls %}{% if not later | rejectattr('tool_calls') | list %}({{ m.content }}){% endif %}"
    "{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize(
    "source",
    [CALLS_ALONE, AS_THOUGHT, NULLS, CONTENT_ALONE, each(NOT_BOTH) + CHATML],
    ids=["calls alone", "as thought", "nulls", "content alone", "not both"],
)
def test_words_beside_a_call_may_be_left_out_but_no_call_and_no_answer(source: str) -> None:
    text = rendered(source, USER, SAYING, ANSWER, ChatMessage("assistant", "so 42"), ChatMessage("user", "why?"))
    assert re.findall(f"hi|add|2.5|42|why|{SAYING.content}", text) == ["hi", "add", "2.5", "42", "42", "why"]


def test_a_system_s_words_may_be_left_out_before_an_answer_but_not_before_a_user() -> None:
    before_the_last_user = each(
        "{{ messages[0].content if loop.last and m.role == 'user' }}{{ m.content if m.role != 'system' }}" + CALLS
    )
    assert SYSTEM.content not in rendered(before_the_last_user, SYSTEM, USER, CALLING, ANSWER)
    asked = [SYSTEM, USER, CALLING, ANSWER, ASSISTANT, ChatMessage("user", "why?")]
    assert rendered(before_the_last_user, *asked).endswith(f"{SYSTEM.content}why?")
    with pytest.raises(ChatRefused, match=r"messages\[0\]"):
        rendered(each("{{ m.content if m.role != 'system' }}" + CALLS), SYSTEM, USER, CALLING, ANSWER)


def test_words_beside_a_call_are_kept_where_a_template_writes_them() -> None:
    assert rendered(AS_THOUGHT, USER, SAYING, ANSWER).startswith("hi(let me see)[{")
    assert "<assistant>let me see<tool_call>" in rendered(CHATML, USER, SAYING, ANSWER)


@pytest.mark.parametrize(
    ("source", "content"), [(CALLS_ALONE, "<think>hm</think>"), (CONTENT_ALONE, " ")], ids=["thoughts", "blanks"]
)
def test_a_call_is_kept_beside_what_says_nothing(source: str, content: str) -> None:
    assert '"add"' in rendered(source, USER, replace(CALLING, content=content), ANSWER)


@pytest.mark.parametrize(
    "written_calls",
    [
        "{{ m.tool_calls[0] | tojson if m.tool_calls }}",
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        "{{ m.tool_calls | default([]) | tojson }}",
    ],
    ids=["leaves others out", "refuses others"],
)
def test_a_template_of_single_calls_gets_each_call_before_its_own_answer(written_calls: str) -> None:
    source = each("{{ m.content }}" + written_calls)
    saying = replace(SAYING, tool_calls=[SUM, ToolCall("multiply", '{"by": 7}', "second")])
    other = replace(ANSWER, content="forty-nine", tool_call_id="second")
    text = rendered(source, USER, saying, ANSWER, other, ChatMessage("user", "why?"))
    assert re.findall("add|42|multiply|forty|why", text) == ["add", "42", "multiply", "forty", "why"]
    assert re.findall("add|multiply", rendered(source, USER, saying)) == ["add", "multiply"]


SYSTEM_FIRST = each(
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be at the beginning') }}{% endif %}"
    "<{{ m.role }}>{{ m.content if m.content != 'dropped' }}"
)
ONLY_THE_FIRST = written("m.content if m.role != 'system' or loop.first")


@pytest.mark.parametrize("source", [SYSTEM_FIRST, ONLY_THE_FIRST])
def test_a_template_of_one_system_message_gets_the_words_of_all_there(source: str) -> None:
    """Claude Code sends system messages between the others, and the template of Qwen3.5 takes none there."""
    late, blank = ChatMessage("system", "be brief"), ChatMessage("system")
    for chat in ([USER, SYSTEM, late], [SYSTEM, late, USER], [SYSTEM, USER, blank, ASSISTANT, late, USER]):
        assert re.findall("be kind\nbe brief|hi", rendered(source, *chat))[:2] == ["be kind\nbe brief", "hi"]
    assert rendered(CHATML, USER, SYSTEM) == "<user>hi<system>be kind"


NO_TWO_SYSTEMS = each(
    "{% if m.role == 'system' and loop.previtem and loop.previtem.role == 'system' %}{{ raise_exception('two') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}"
)


def test_a_later_system_message_keeps_its_place_where_only_two_in_a_row_are_refused() -> None:
    late = ChatMessage("system", "be brief")
    chat = [SYSTEM, late, USER, ASSISTANT, late, USER]
    joined = "<system>be kind\nbe brief<user>hi<assistant>yes<system>be brief<user>hi"
    assert rendered(NO_TWO_SYSTEMS, *chat) == joined


IN_TURN = (
    "{% set talk = messages | rejectattr('role', 'equalto', 'system') | list %}"
    "{% for m in talk %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% endfor %}" + each("<{{ m.role }}>{{ m.content if m.content != 'dropped' }}")
)


def test_neighbours_of_one_role_are_one_message_where_roles_take_turns() -> None:
    chat = [SYSTEM, USER, ChatMessage("user", "why?"), ASSISTANT, ChatMessage("assistant"), ASSISTANT, USER]
    assert rendered(IN_TURN, *chat) == "<system>be kind<user>hi\nwhy?<assistant>yes\nyes<user>hi"
    assert rendered(CHATML, USER, USER) == "<user>hi<user>hi"
    with pytest.raises(ChatRefused, match="turns"):
        rendered(IN_TURN, ASSISTANT, USER)
    with pytest.raises(ChatRefused) as refused:
        rendered(IN_TURN, USER, USER, ASSISTANT, ChatMessage("user", "dropped"))
    assert refused.value.field == "chat.messages[3]"


def test_an_error_names_a_message_by_its_place_before_a_system_message_was_moved() -> None:
    with pytest.raises(ChatRefused) as refused:
        rendered(SYSTEM_FIRST, SYSTEM, USER, SYSTEM, ASSISTANT, ChatMessage("user", "dropped"))
    assert refused.value.field == "chat.messages[4]"


def test_a_call_of_what_a_template_keeps_is_not_refused_for_another_s_sake() -> None:
    template = ChatTemplate(ONLY_OBJECTS, {})
    with pytest.raises(ChatRefused):
        template.render([USER, calls("[1]")])
    assert template.render(ASKED) == 'hiadd{"a": 1, "to": {"é": [2.5]}}42'


@pytest.mark.thorough
@pytest.mark.parametrize("source", [CHATML, CONTENT_LAST, ANSWERS_LAST], ids=["CHATML", "content last", "answers last"])
def test_a_turn_of_many_long_answers_is_found_whatever_its_length(source: str) -> None:
    rendered(source, USER, *steps(250, "", "it is so " * 3000), ChatMessage("assistant", "so 42"))


def test_a_template_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(str(tmp_path))
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.jinja").write_text(STRINGS)
    assert TextTokenizer.from_directory(tmp_path).chat_template()[0] == STRINGS


def test_a_template_may_need_tools_and_a_description_of_each_parameter() -> None:
    parameters = "{% for name, p in t.function.parameters.properties | items %}{{ name + p.description }}{% endfor %}"
    body = "{{ t.function.name + t.function.description }}" + parameters
    template = ChatTemplate("{% for t in tools %}" + body + "{% endfor %}" + STRINGS, {})
    schema = {"type": "object", "properties": {"a": {"type": "integer", "description": " is added"}}}
    options = TemplateOptions((Tool("add", " adds ", json.dumps(schema)),))
    assert template.render([USER], options) == "add adds a is added<user>hi"
