"""Tests of prompts at the edge: prompts that are too long are refused at once, short ones do not wait for long ones,
and endless templates are stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2
from common.errors import ContextExceeded, InvalidRequest, Overloaded
from common.text.chat_messages import ChatMessage, TemplateOptions, Tool, ToolCall
from common.text.tokenizer import TextTokenizer
from decode_service.edge.request_checks import MAX_CONTEXTS, ChatPrompt, ModelLimits, TextPrompt
from decode_service.edge.text.chat_rendering import ChatRendering
from decode_service.edge.text.prompts import Prompts
from decode_service.edge.text.text_threads import TextThreads
from tests.decode_edge.children import children_running
from tests.decode_edge.edge_under_test import CONTEXT as EDGE_CONTEXT
from tests.decode_edge.edge_under_test import MAX_LIVE, Edge, error_of, running_edge
from tests.decode_edge.fake_engine import BOUND_S, until
from tests.decode_edge.tokenizers_for_tests import CHAT_TEMPLATE, byte_fallback, byte_level

ONE = ("one client", "")
CONTEXT = 2000
LIMITS = ModelLimits(vocab_size=300, max_context_tokens=CONTEXT, eos_token_ids=())
EACH = "{% for m in messages %}{{ m.content }}{% endfor %}"
HI = ChatPrompt((ChatMessage("user", "hi"),))


class Watched(TextTokenizer):
    """A tokenizer that records the lengths of its texts. Before a text of `held` characters it waits for `go_on`."""

    seen: list[int]
    held: int
    go_on: threading.Event

    def _encode(self, text: str, adds_special_tokens: bool) -> tuple[int, ...]:
        self.seen.append(len(text))
        if len(text) == self.held:
            assert self.go_on.wait(BOUND_S)
        return super()._encode(text, adds_special_tokens)


def watched(tokenizer: TextTokenizer | None = None, *, held: int = -1) -> Watched:
    tokenizer = tokenizer or byte_level()
    tokenizer.__class__ = Watched
    assert isinstance(tokenizer, Watched)
    tokenizer.seen, tokenizer.held, tokenizer.go_on = [], held, threading.Event()
    return tokenizer


async def within_bound(work: Awaitable[Sequence[int]]) -> Sequence[int]:
    async with asyncio.timeout(BOUND_S):
        return await work


async def test_a_text_with_more_bytes_than_its_tokens_can_have_is_refused_unseen() -> None:
    tokenizer = watched()
    assert tokenizer.longest_token_bytes == len("<tool call>")
    most = MAX_CONTEXTS * CONTEXT * len("<tool call>")
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        for prompt in (
            TextPrompt("é" * (most // 2 + 1)),
            ChatPrompt((ChatMessage("user", "é" * (most // 4 + 1)),) * 2),
            ChatPrompt((ChatMessage("assistant", tool_calls=[ToolCall("f", "é" * (most // 4 + 1))]),) * 2),
        ):
            with pytest.raises(ContextExceeded) as refusal:
                await prompts.encode(prompt, caller=ONE)
            assert (refusal.value.field, refusal.value.tokens) == ("prompt", {"max_context_tokens": CONTEXT})
    assert not tokenizer.seen


async def test_tokenising_stops_past_the_bound() -> None:
    tokenizer = watched()
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        with pytest.raises(ContextExceeded, match="more than 8000 tokens do not fit a context of 2000"):
            await prompts.encode(TextPrompt("a" * 10 * MAX_CONTEXTS * CONTEXT), caller=ONE)
    assert tokenizer.seen == [8 * MAX_CONTEXTS * CONTEXT]


async def test_a_long_text_of_long_tokens_fits_exactly() -> None:
    tokenizer = byte_level()
    token = tokenizer.encode("<tool call>")
    assert len(token) == 1
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        assert await prompts.encode(TextPrompt("<tool call>" * CONTEXT), caller=ONE) == token * CONTEXT


async def test_a_text_that_need_not_fit_has_a_bound_too(edge: Edge) -> None:
    most = MAX_CONTEXTS * EDGE_CONTEXT
    assert len((await edge.stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * most))).token_ids) == most
    assert (await edge.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[65] * most))).text
    assert (await edge.generate(text="a" * most, truncate_prompt_tokens=2).read()).started.num_prompt_tokens == 2
    for field, call in (
        ("prompt", lambda: edge.stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * (most + 1)))),
        ("prompt", lambda: edge.stub.Tokenize(inference_pb2.TokenizeRequest(text="a" * 100 * most))),
        ("token_ids", lambda: edge.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[65] * (most + 1)))),
        ("prompt", lambda: edge.generate(text="a" * (most + 1), truncate_prompt_tokens=2)),
        ("prompt", lambda: edge.generate(text="a" * (most + 1))),
    ):
        code, reason, told = await error_of(call())
        assert (code, told["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert reason == ("CONTEXT_EXCEEDED" if field == "prompt" else "INVALID_FIELD")
    _, _, told = await error_of(edge.generate(text="a" * most))
    assert told["num_prompt_tokens"] == str(most), "a prompt longer than the context is refused with its length"


async def test_tokenising_takes_a_place_among_the_requests(edge: Edge) -> None:
    def calls() -> list[Any]:
        detokenize = inference_pb2.DetokenizeRequest(token_ids=[65])
        return [edge.stub.Tokenize(inference_pb2.TokenizeRequest(text="a")), edge.stub.Detokenize(detokenize)]

    for _ in range(MAX_LIVE + 1):
        for call in calls():
            await call
    assert len(edge.live_requests) == 0, "each gives its place back"
    for num in range(MAX_LIVE):
        edge.generate()
        await edge.engine.submitted(num + 1)
    assert [(await error_of(call))[1] for call in calls()] == ["QUEUE_FULL"] * 2
    edge.live_requests.drain()
    assert [(await error_of(call))[1] for call in calls()] == ["DRAINING"] * 2


@pytest.mark.parametrize("new_tokenizer", [byte_level, byte_fallback])
def test_the_longest_token_is_no_shorter_than_any_token_s_text(new_tokenizer: Any) -> None:
    tokenizer = new_tokenizer()
    assert tokenizer.longest_token_bytes >= max(len(tokenizer.bytes_of(i)) for i in range(400))


async def test_bytes_that_wait_are_bounded_and_given_back() -> None:
    tokenizer = watched(held=3400)
    async with Prompts(tokenizer=tokenizer, limits=LIMITS, max_waiting_bytes=14_000) as prompts:
        waiting = [asyncio.create_task(prompts.encode(TextPrompt("a" * 3400), caller=ONE)) for _ in range(2)]
        await until(lambda: bool(tokenizer.seen))
        with pytest.raises(Overloaded, match="wait to be tokenised: there is no room for 3400 bytes more"):
            await prompts.encode(TextPrompt("a" * 3400), caller=ONE)
        waiting[1].cancel()  # its client left before its work began
        with pytest.raises(asyncio.CancelledError):
            await waiting[1]
        waiting[1] = asyncio.create_task(prompts.encode(TextPrompt("a" * 3400), caller=ONE))
        tokenizer.go_on.set()
        for task in waiting:
            await within_bound(task)
        assert len(await prompts.encode(TextPrompt("a" * 7900), caller=ONE)) == 7900  # alone, whatever its length


async def test_a_client_waits_for_no_other_ones_queue() -> None:
    tokenizer = watched(held=4500)
    async with Prompts(tokenizer=tokenizer, limits=LIMITS, max_waiting_bytes=80_000) as prompts:
        held = asyncio.create_task(prompts.encode(TextPrompt("a" * 4500), caller=("greedy", "")))
        await until(lambda: bool(tokenizer.seen))
        rest = [
            asyncio.create_task(prompts.encode(TextPrompt("a" * 4400), caller=("greedy", each))) for each in "abcdefgh"
        ]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await prompts.encode(TextPrompt("a" * 4400), caller=("greedy", "i"))
        other = asyncio.create_task(prompts.encode(TextPrompt("a" * 4300), caller=("other", "")))
        await asyncio.sleep(0)
        tokenizer.go_on.set()
        await within_bound(other)
        await asyncio.gather(held, *rest)
    assert tokenizer.seen.index(4300) <= 3, "one is tokenised and one waits for the thread when it comes"


async def test_a_client_has_used_only_the_time_in_which_its_texts_were_worked_on() -> None:
    now_s, may_end, had = 0.0, threading.Semaphore(0), []

    def work(name: str, took_s: float) -> None:
        nonlocal now_s
        assert may_end.acquire(timeout=BOUND_S)
        now_s += took_s
        had.append(name)

    threads = TextThreads(timeline=None, max_bytes=1 << 20, clock=lambda: now_s)
    asked = (("slow", 10.0), ("quick", 1.0), *[("quick", 1.0), ("other", 5.0)] * 2, ("quick", 1.0), ("other", 5.0))
    tasks = []
    for name, took_s in asked:
        tasks.append(
            asyncio.create_task(threads.run("work", partial(work, name, took_s), num_bytes=5000, caller=(name, "")))
        )
        await asyncio.sleep(0)
    for num_done in range(1, 1 + len(tasks)):
        may_end.release()
        await until(lambda num_done=num_done: sum(task.done() for task in tasks) == num_done)  # type: ignore[misc]
    threads.shut_down()
    assert had == ["slow", "quick", "quick", "other", "other", "quick", "quick", "other"]


async def test_texts_that_wait_for_their_turn_at_the_end_are_cancelled() -> None:
    threads, may_end = TextThreads(timeline=None, max_bytes=1 << 20), threading.Event()
    tasks = [
        asyncio.create_task(threads.run("work", partial(may_end.wait, BOUND_S), num_bytes=5000, caller=ONE))
        for _ in range(4)
    ]
    await asyncio.sleep(0)
    may_end.set()
    threads.shut_down()
    *_, third, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(third, asyncio.CancelledError) and isinstance(last, asyncio.CancelledError)


async def test_bytes_that_wait_in_one_lane_are_none_of_another() -> None:
    tokenizer = watched(held=5000)
    async with Prompts(tokenizer=tokenizer, limits=LIMITS, max_waiting_bytes=5000) as prompts:
        long = asyncio.create_task(prompts.encode(TextPrompt("a" * 5000), caller=ONE))
        await until(lambda: bool(tokenizer.seen))
        try:
            with pytest.raises(Overloaded) as refusal:
                await prompts.encode(TextPrompt("a" * 5000), caller=ONE)
            assert refusal.value.retry_after_s == 1
            assert await within_bound(prompts.encode(TextPrompt("hi"), caller=ONE)) == tokenizer.encode("hi")
        finally:
            tokenizer.go_on.set()
        await within_bound(long)


def chat(*contents: str) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=each) for each in contents])


CALL = {"name": "f", "arguments": '{"a": 1}', "id": "x"}
ASKED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "x"},
]


async def test_calls_of_tools_their_answers_and_options_go_through_the_template() -> None:
    tool = "{{ t.function.name }}{{ t.function.description }}{{ t.function.parameters.properties | join }}"
    source = "{{ mood }}{% for t in tools or [] %}" + tool + "{% endfor %}" + CHAT_TEMPLATE
    async with running_edge([], tokenizer=byte_level(chat_template=source), serves_chats=True) as edge:
        chat = {
            "messages": ASKED,
            "tools": [{"name": "f", "parameters": '{"properties": {"x": {}}}'}],
            "chat_template_kwargs": '{"mood": "ok "}',
        }
        call = edge.generate(chat=chat)
        submit = await edge.engine.submitted()
        assert edge.tokenizer.decode(submit.token_ids) == 'ok fx<user>hi<assistant>[f {"a": 1}]<tool>7<assistant>'
        call.cancel()


async def test_what_the_template_drops_or_does_not_read_is_named_on_the_wire() -> None:
    call = "{{ c.function.name }}{{ c.function.arguments | tojson if messages[0].content != 'hi' }}"
    source = EACH.replace("{% endfor %}", "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}{% endfor %}")
    async with running_edge([], tokenizer=byte_level(chat_template=source), serves_chats=True) as edge:
        call = edge.generate(chat={"messages": ASKED})
        code, _, metadata = await error_of(call)
        assert (code, metadata) == (grpc.StatusCode.INVALID_ARGUMENT, {"field": "chat.messages[1].tool_calls[0]"})
        assert ": the model's chat template leaves out" in (await call.details())
        call = edge.generate(chat={"messages": ASKED[:1], "chat_template_kwargs": '{"mood": 1}'})
        assert (await error_of(call))[2] == {"field": "chat.chat_template_kwargs"}
        assert not edge.engine.commands


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "the model has no chat template"),
        ({"tool_use": EACH}, "several chat templates, and none of them is named default"),
        (5, "the model's chat_template is no text"),
        ("{% for m in messages", "is none: TemplateSyntaxError"),
        ("{% for m in messages %}{{ m.thinking | tojson }}{% endfor %}", "fails on it: TypeError"),
        ("{% for m in messages %}<{{ m.role }}>{% endfor %}", "leaves out what a user says"),
    ],
    ids=["none", "no default", "no text", "syntax", "undefined", "drops"],
)
async def test_a_template_that_serves_no_chat_refuses_each_by_its_reason(template: Any, reason: str) -> None:
    async with running_edge([], tokenizer=byte_level(chat_template=template), serves_chats=True) as edge:
        call = edge.generate(chat=chat("hi"))
        code, _, metadata = await error_of(call)
        assert (code, metadata) == (grpc.StatusCode.INVALID_ARGUMENT, {"field": "chat"})
        assert reason in (await call.details())
        assert not edge.engine.commands


async def test_of_several_templates_tool_use_is_for_chats_with_tools_and_default_for_others(
    log: list[dict[str, Any]],
) -> None:
    tool_use = "{# <tool_call> #}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + EACH
    tokenizer = byte_level(chat_template={"default": EACH, "tool_use": tool_use, "rag": "none"})
    tools = TemplateOptions((Tool("f"),))
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        assert await prompts.encode(HI, caller=ONE) == tokenizer.encode("hi")
        told = await prompts.encode(replace(HI, options=tools), caller=ONE)
    assert told == tokenizer.encode_chat(HI.messages, tools)
    assert tokenizer.decode(told) == json.dumps(tools.tools[0].as_read()) + "hi"
    assert not log
    unread = byte_level(chat_template={"default": EACH, "tool_use": tool_use.replace("<tool_call>", "Action:")})
    assert unread.chat_template().tool_use is None, "calls in its form would be told as text"


async def test_the_start_says_why_no_chat_is_served(log: list[dict[str, Any]]) -> None:
    async with Prompts(tokenizer=byte_level(chat_template="fixed"), limits=LIMITS):
        (line,) = log
    assert (line["event"], line["log_level"]) == ("chat_refused", "warning")
    assert "leaves out what a user says" in line["reason"]


def harming(harm: str) -> TextTokenizer:
    """Returns a tokenizer whose template runs `harm` if the last message is the word "harm". The probe at start-up does
    not contain that word.
    """
    return byte_level(chat_template=EACH + "{% if messages[-1].content == 'harm' %}" + harm + "{% endif %}")


HARM = ChatPrompt((ChatMessage("user", "harm"),))
BIG_LIST = "{% set ns = namespace(l=[0]) %}{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("{{ 'x' * 2 ** 31 }}", "memory"),
        ("{{ '%2000000000d' % messages | length }}", "memory"),
        (BIG_LIST, "memory"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ '\\ud800' }}", "makes what is no text"),
    ],
    ids=["2 GiB", "2 GiB by format", "list", "recursion", "surrogate"],
)
async def test_what_a_conversation_makes_of_a_template_is_its_own_error(harm: str, reason: str) -> None:
    tokenizer = harming(harm)
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        with pytest.raises(InvalidRequest, match=reason) as refusal:
            await within_bound(prompts.encode(HARM, caller=ONE))
        assert refusal.value.field == "chat"
        assert await within_bound(prompts.encode(HI, caller=ONE)) == tokenizer.encode("hi")


async def test_what_a_template_says_is_cut_and_escaped() -> None:
    tokenizer = harming("{{ raise_exception('\\x1b[2J\\n{} \\ud800' + 'x' * 10000000) }}")
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        with pytest.raises(InvalidRequest, match=r"refuses it: \\x1b\[2J\\n\{\} \\ud800x") as refusal:
            await within_bound(prompts.encode(HARM, caller=ONE))
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 600


def rendering_pids() -> list[int]:
    return children_running("common.text.chat_template_process")


def told_of(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_text()


def is_rendering(pid: int) -> bool:
    """Whether the process, which has been probed, does something."""
    with suppress(OSError):  # it has ended meanwhile
        return told_of(pid, "stat").split()[2] == "R"
    return False


async def stop_renderers(num: int, may_stop: Callable[[int], bool] = lambda _: True) -> list[int]:
    """Waits for `num` processes and stops each (SIGSTOP) once it may stop, so that none reaches its time limit."""
    await until(lambda: len(rendering_pids()) == num)
    pids = rendering_pids()
    for pid in pids:
        await until(partial(may_stop, pid))
        os.kill(pid, signal.SIGSTOP)
    return pids


def go_on(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def test_a_template_that_does_not_end_is_stopped_while_others_are_rendered() -> None:
    """One template runs for ever between two bytecodes of Python, and the other within a single one. Both are
    stopped.
    """
    nested = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = harming(
        "{% if messages | length > 1 %}{{ (messages | length + 5) ** (7 ** 10) }}{% else %}" + nested + "{% endif %}"
    )
    async with Prompts(tokenizer=tokenizer, limits=LIMITS, render_cpu_s=0.5) as prompts:
        await asyncio.gather(
            *(within_bound(prompts.encode(HI, caller=ONE)) for _ in range(2))
        )  # now there are two processes
        harmed = [
            asyncio.create_task(prompts.encode(prompt, caller=ONE))
            for prompt in (HARM, ChatPrompt(HI.messages + HARM.messages))
        ]
        stopped = await stop_renderers(2, is_rendering)
        assert await within_bound(prompts.encode(HI, caller=ONE)) == tokenizer.encode("hi")
        assert not any(task.done() for task in harmed)
        go_on(stopped)
        for task in harmed:
            with pytest.raises(InvalidRequest, match=r"takes more than 0\.5 s of the processor"):
                await within_bound(task)
        assert await within_bound(prompts.encode(HI, caller=ONE)) == tokenizer.encode("hi")


async def test_a_text_that_a_template_makes_too_long_does_not_fit_the_context() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    source = EACH + "{% if messages[-1].content == 'harm' %}" + endless + "{% endif %}"
    async with Prompts(tokenizer=byte_level(chat_template=source), limits=LIMITS) as prompts:
        with pytest.raises(ContextExceeded):
            await within_bound(prompts.encode(ChatPrompt((ChatMessage("user", "harm"),)), caller=ONE))


async def test_a_process_that_was_killed_is_replaced_and_none_is_left_at_the_end() -> None:
    tokenizer = byte_level(chat_template=EACH)
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        (killed,) = rendering_pids()
        os.kill(killed, signal.SIGKILL)
        await until(lambda: not rendering_pids())
        assert await within_bound(prompts.encode(HI, caller=ONE)) == tokenizer.encode("hi")
        (other,) = rendering_pids()
        assert other != killed
    assert not rendering_pids()


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LONG_HARM = ChatPrompt((ChatMessage("user", "-"),) * 70 + HARM.messages)
"""A chat with few characters and many messages."""
NUM_PLACES = 4
"""The number of processes that render short conversations."""
NUM_LONGER_PLACES = 2
"""The number of processes that render conversations as long as LONG_HARM."""


def renderings() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "render_chat"]


async def cancelled(tasks: Sequence[asyncio.Task[Sequence[int]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


@pytest.mark.thorough
async def test_a_chat_that_waits_for_a_process_goes_with_its_client_and_one_that_has_it_counts_to_its_end() -> None:
    max_bytes = 2 * (NUM_PLACES + 2) * (64 + len("harm"))
    async with Prompts(
        tokenizer=harming(NESTED), limits=LIMITS, max_waiting_bytes=max_bytes, render_cpu_s=0.25
    ) as prompts:
        tasks = [asyncio.create_task(prompts.encode(HARM, caller=ONE)) for _ in range(NUM_PLACES + 2)]
        await until(lambda: len(renderings()) == NUM_PLACES)
        stopped = await stop_renderers(NUM_PLACES)
        with pytest.raises(Overloaded, match="prompts wait to be rendered"):
            await prompts.encode(HARM, caller=ONE)
        await cancelled(tasks[NUM_PLACES:])
        others = [asyncio.create_task(prompts.encode(HARM, caller=ONE)) for _ in range(2)]
        await cancelled(tasks[:NUM_PLACES])
        assert len(renderings()) == NUM_PLACES
        with pytest.raises(Overloaded):
            await prompts.encode(HARM, caller=ONE)
        await cancelled(others)
        go_on(stopped)
        await asyncio.wait(renderings(), timeout=8 * BOUND_S)
        assert not renderings()
        assert await within_bound(prompts.encode(HI, caller=ONE))


async def test_a_short_chat_waits_for_no_longer_ones() -> None:
    tokenizer = harming(NESTED)
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        harmed = [asyncio.create_task(prompts.encode(LONG_HARM, caller=ONE)) for _ in range(12)]
        stopped = await stop_renderers(NUM_LONGER_PLACES)
        assert await within_bound(prompts.encode(HI, caller=ONE)) == tokenizer.encode("hi")
        assert not any(task.done() for task in harmed)
        go_on(stopped)
        await cancelled(harmed)


async def test_a_client_s_chat_waits_for_no_other_ones_queue() -> None:
    had: list[str] = []
    async with Prompts(tokenizer=harming(""), limits=LIMITS) as prompts:
        (stopped,) = rendering_pids()
        os.kill(stopped, signal.SIGSTOP)
        tasks = []
        for name in (*["greedy"] * 6, "other"):
            tasks.append(asyncio.create_task(prompts.encode(LONG_HARM, caller=(name, ""))))
            tasks[-1].add_done_callback(lambda _, name=name: had.append(name))
        await asyncio.sleep(0)
        go_on([stopped])
        await asyncio.gather(*tasks)
    assert had.index("other") <= NUM_LONGER_PLACES + 1, "it waits for those only that are rendered when it comes"


async def test_chats_are_served_once_there_is_a_process_for_the_template(
    log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_level(chat_template=EACH)
    with monkeypatch.context() as without_processes:
        without_processes.setattr(sys, "executable", "/no/such/file")
        prompts = await Prompts(tokenizer=tokenizer, limits=LIMITS).__aenter__()
        try:
            assert [line["event"] for line in log] == ["chat_not_probed"]
            with pytest.raises(Overloaded, match="no process can be started") as refusal:
                await prompts.encode(HI, caller=ONE)
            assert refusal.value.retry_after_s == 1
            without_processes.undo()
            assert await within_bound(prompts.encode(HI, caller=ONE)) == tokenizer.encode("hi")
        finally:
            await prompts.__aexit__()


async def test_a_template_that_is_first_probed_by_a_chat_refuses_for_good(
    log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without_processes:
        without_processes.setattr(sys, "executable", "/no/such/file")
        prompts = await Prompts(tokenizer=byte_level(chat_template="fixed"), limits=LIMITS).__aenter__()
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="leaves out what a user says"):
                await within_bound(prompts.encode(HI, caller=ONE))
        assert [line["event"] for line in log] == ["chat_not_probed", "chat_refused"]
    finally:
        await prompts.__aexit__()


async def test_a_chat_whose_process_is_killed_over_it_may_come_again() -> None:
    tokenizer = harming(NESTED)
    async with Prompts(tokenizer=tokenizer, limits=LIMITS) as prompts:
        harmed = asyncio.create_task(prompts.encode(HARM, caller=ONE))
        killed: set[int] = set()
        while not harmed.done():
            await asyncio.wait({harmed}, timeout=0.05)
            for pid in rendering_pids():
                if pid not in killed and is_rendering(pid):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        with pytest.raises(Overloaded, match="its process ended"):
            await harmed
        assert len(killed) >= 2
        assert await within_bound(prompts.encode(HI, caller=ONE)) == tokenizer.encode("hi")


async def test_a_machine_that_gives_a_process_no_time_refuses_no_chat() -> None:
    tokenizer = byte_level(chat_template=EACH)
    async with Prompts(tokenizer=tokenizer, limits=LIMITS, render_cpu_s=0.1) as prompts:
        (pid,) = rendering_pids()
        os.kill(pid, signal.SIGSTOP)
        slow = asyncio.create_task(prompts.encode(HI, caller=ONE))
        assert not (await asyncio.wait({slow}, timeout=0.3))[0]
        os.kill(pid, signal.SIGCONT)
        assert await within_bound(slow) == tokenizer.encode("hi")
        assert rendering_pids() == [pid]


async def test_a_process_has_memory_beyond_python_s_own_and_the_system_s_policy() -> None:
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        async with Prompts(tokenizer=byte_level(chat_template=EACH), limits=LIMITS):
            (pid,) = rendering_pids()
            assert os.sched_getscheduler(pid) == os.SCHED_OTHER
            (line,) = (each for each in told_of(pid, "limits").splitlines() if "address space" in each)
            assert int(line.split()[3]) > (256 << 20) + (10 << 20)
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


async def test_processes_that_nothing_is_asked_of_end_but_for_two() -> None:
    tokenizer = byte_level(chat_template=EACH)
    chats = ChatRendering(tokenizer.chat_template, max_chars=CONTEXT, spare_s=0.3)
    await chats.open()
    try:
        await asyncio.gather(*(chats.render(HI.messages, num_bytes=2, caller=ONE) for _ in range(NUM_PLACES)))
        assert len(rendering_pids()) > 2
        await until(lambda: len(rendering_pids()) == 2)
        assert await chats.render(HI.messages, num_bytes=2, caller=ONE) == "hi"
    finally:
        await chats.close()
