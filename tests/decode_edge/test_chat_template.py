"""A model's chat template: rendered as transformers renders it, and nothing that somebody said is left out unseen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from common.chat_template import ChatRefused, ChatTemplate, TextTooLong

USER, SYSTEM, ASSISTANT, TOOL = ("user", "hi"), ("system", "be kind"), ("assistant", "yes"), ("tool", "42")
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


def rendered(source: str, *messages: tuple[str, str]) -> str:
    return ChatTemplate(source, {}).render(messages)


@pytest.mark.parametrize("source", [STRINGS, PARTS, EITHER, USERS_PARTS, FIRST_PART, FIRST_PART_OF_SYSTEM])
def test_every_word_is_kept_in_whatever_form_a_template_reads_it(source: str) -> None:
    assert (
        rendered(source, SYSTEM, USER, ASSISTANT, ("user", "why?")) == "<system>be kind<user>hi<assistant>yes<user>why?"
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
        "{% for m in messages %}{{ m.content[:100] }}{% endfor %}",
        "{% for m in messages %}{{ m.content | truncate(200) }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    ],
    ids=["fixed", "roles", "another field", "sliced", "truncated", "length"],
)
def test_a_template_that_drops_what_a_user_says_is_refused_at_once(source: str) -> None:
    with pytest.raises(ChatRefused, match="leaves out what a user says"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "messages", "dropped"),
    [
        ("{{ messages[-1].content }}", [USER, ASSISTANT, ("user", "why?")], "messages[0]"),
        ("{{ messages[-1].content }}", [SYSTEM, USER], "messages[0]"),
        ("{{ messages[0].content }}", [USER, ASSISTANT, ("user", "why?")], "messages[1]"),
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
    source: str, messages: Sequence[tuple[str, str]], dropped: str
) -> None:
    template = ChatTemplate(source, {})
    assert "hi" in template.render([USER])
    with pytest.raises(ChatRefused) as refusal:
        template.render(messages)
    assert str(refusal.value).startswith(f"{dropped}: the model's chat template leaves out")


def test_what_says_nothing_may_be_left_out() -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert rendered(source, ("system", " "), USER, ("assistant", ""), USER) == "hihi"


@pytest.mark.parametrize(
    "change",
    ["trim", "upper", "replace('i', 'o')", "tojson", "e"],
    ids=["trim", "upper", "replace", "tojson", "escape"],
)
def test_a_template_may_change_what_it_keeps(change: str) -> None:
    rendered("{% for m in messages %}{{ m.content | " + change + " }}{% endfor %}", SYSTEM, USER, ASSISTANT, USER)


def test_what_a_model_thought_may_be_cut_from_what_it_said() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert rendered(source, USER, ("assistant", "hm</think>yes"), USER) == "hiyeshi"


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
    messages = [{"role": role, "content": content} for role, content in (USER, ASSISTANT)]
    (expected,), _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, **special_tokens
    )
    assert ChatTemplate(source, special_tokens).render([USER, ASSISTANT]) == expected
