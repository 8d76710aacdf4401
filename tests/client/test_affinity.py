"""Tests of the beginnings of requests, and of a client's memory of which server last had each beginning."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.client.affinity import (
    BLOCK_BYTES,
    BLOCK_SHARE,
    MAX_BYTES,
    NO_BEGINNINGS,
    Beginnings,
    ServersByBeginning,
    beginnings_of,
)
from baton.v1 import inference_pb2

BOTH = ("a", "b")
SYSTEM, QUESTION, ANSWER = ("system", "Be brief."), ("user", "Why is the sky blue?"), ("assistant", "Rayleigh. " * 200)


def chat(*messages: tuple[str, str], **fields: Any) -> inference_pb2.GenerateRequest:
    told = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=told), **fields)


def told(request: inference_pb2.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def text(prompt: str, **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=prompt, **fields)


def token_ids(ids: Sequence[int], **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), **fields)


def letters(num: int) -> str:
    return "".join(random.Random(num).choices("abcdefgh ", k=num))


def num_shared(*requests: inference_pb2.GenerateRequest) -> int:
    first, second = (beginnings_of(request).digests for request in requests)
    num = len(set(first) & set(second))
    assert first[:num] == second[:num]
    return num


def test_the_next_turn_of_a_chat_begins_with_the_turn_before() -> None:
    first = beginnings_of(chat(SYSTEM, QUESTION))
    second = beginnings_of(chat(SYSTEM, QUESTION, ANSWER, ("user", "And red?")))
    assert (len(first.digests), first.sizes[-1]) == (2, first.num_bytes)
    assert second.digests[:2] == first.digests


@pytest.mark.parametrize(
    "other",
    [
        chat(SYSTEM, ("assistant", QUESTION[1])),
        chat(SYSTEM, ("user", "Why is the sky blue!")),
        chat(("system", "Be brief.Why"), ("user", " is the sky blue?")),
    ],
)
def test_another_message_is_another_beginning(other: inference_pb2.GenerateRequest) -> None:
    assert beginnings_of(other).digests[-1] not in beginnings_of(chat(SYSTEM, QUESTION)).digests


@pytest.mark.parametrize("part", ["tool_calls", "reasoning"])
def test_calls_of_tools_and_reasoning_are_part_of_a_message(part: str) -> None:
    def said(words: str) -> inference_pb2.GenerateRequest:
        request = chat(QUESTION, ("assistant", ""), ("tool", "42"))
        if part == "tool_calls":
            request.chat.messages[1].tool_calls.add(id="x", name="add", arguments=words)
        else:
            request.chat.messages[1].reasoning = words
        return request

    assert num_shared(said("1"), said("2")) == 1
    assert num_shared(said("1"), said("1")) == 3


@pytest.mark.parametrize("option", ["tools", "chat_template_kwargs"])
def test_other_options_of_a_chat_are_another_beginning(option: str) -> None:
    first, second = (chat(SYSTEM, QUESTION) for _ in range(2))
    for request, value in ((first, "f"), (second, "g")):
        if option == "tools":
            request.chat.tools.add(name=value)
        else:
            request.chat.chat_template_kwargs = value
    assert num_shared(first, first) == 2
    assert num_shared(first, second) == num_shared(first, chat(SYSTEM, QUESTION)) == 0


def test_long_messages_are_equal_as_far_as_their_blocks_are() -> None:
    document = letters(4 * BLOCK_BYTES)
    assert num_shared(chat(("user", document + "What?")), chat(("user", document + "Why is that so?"))) == 4


@pytest.mark.parametrize("make", [text, lambda it: token_ids([ord(each) for each in it[::4]])], ids=["text", "ids"])
def test_texts_and_token_ids_are_equal_as_far_as_their_blocks_are(
    make: Callable[[str], inference_pb2.GenerateRequest],
) -> None:
    long = letters(10 * BLOCK_BYTES)
    assert len(beginnings_of(make(long)).digests) == 10
    assert num_shared(make(long), make(long[: 5 * BLOCK_BYTES - 4] + 5 * BLOCK_BYTES * "x")) == 4
    assert num_shared(make(long), make(long[: 7 * BLOCK_BYTES + 40])) == 7


def test_a_salt_is_a_namespace_and_so_is_the_kind_of_prompt() -> None:
    long = letters(2 * BLOCK_BYTES)
    assert num_shared(text(long, cache_salt="a"), text(long, cache_salt="a")) == 2
    assert num_shared(text(long, cache_salt="a"), text(long, cache_salt="b")) == 0
    assert num_shared(text(long, cache_salt="a"), text(long)) == 0
    assert num_shared(text(long), chat(("user", long))) == 0


def test_a_request_that_may_not_use_the_cache_has_none() -> None:
    assert beginnings_of(chat(QUESTION, cache_prompt=False)) == NO_BEGINNINGS
    assert beginnings_of(chat(QUESTION, cache_prompt=True)).digests


def test_a_request_has_some_hundreds_however_long_it_is() -> None:
    longest = beginnings_of(text("a" * MAX_BYTES))
    assert longest == beginnings_of(text("a" * (MAX_BYTES + 10 * BLOCK_BYTES)))
    assert len(longest.digests) < 8 * BLOCK_SHARE
    num_messages = 20_000
    short = beginnings_of(chat(*[("user", str(number)) for number in range(num_messages)]))
    assert len(short.digests) < 8 * BLOCK_SHARE and short.sizes[-1] >= short.num_bytes * (1 - 2 / BLOCK_SHARE)


def test_the_longest_beginning_wins_of_the_servers_that_may() -> None:
    known = ServersByBeginning()
    first, second = (beginnings_of(chat(SYSTEM, QUESTION, *more)) for more in ([], [ANSWER, QUESTION]))
    assert known.find(second, BOTH) is None
    known.note(second, "b")
    known.note(first, "a")
    assert (known.find(first, BOTH), known.find(second, BOTH)) == ("a", "b")
    assert known.find(second, ("a",)) == "a", "the next shorter one decides"
    assert known.find(second, ("c",)) is None


def test_what_a_request_ended_with_decides_and_a_small_part_that_is_shared_does_not() -> None:
    known = ServersByBeginning()
    known.note(beginnings_of(chat(SYSTEM, QUESTION)), "a")
    long = ("assistant", letters(5000))
    assert known.find(beginnings_of(chat(SYSTEM, QUESTION, long)), BOTH) == "a", "it continues that request"
    assert known.find(beginnings_of(chat(SYSTEM, ("user", "How is it going?"))), BOTH) is None
    known.note(beginnings_of(chat(SYSTEM, QUESTION, long)), "a")
    assert known.find(beginnings_of(chat(SYSTEM, QUESTION, ("user", letters(90)))), BOTH) == "a", "it still does"

    document = ("system", letters(600))
    known.note(beginnings_of(chat(document, QUESTION)), "b")
    assert known.find(beginnings_of(chat(document, ("user", "How is it going?"))), BOTH) == "b", "it is most of it"


@pytest.mark.parametrize("num_bytes", [250, 300, 5_000, 20_000])
def test_a_shared_system_prompt_is_no_conversation_that_goes_on(num_bytes: int) -> None:
    system, greeting, long = ("system", letters(num_bytes)), ("user", "Hi"), ("user", letters(3 * num_bytes))
    known = ServersByBeginning()
    known.note(beginnings_of(chat(system, greeting)), "a")
    assert known.find(beginnings_of(chat(system, long)), BOTH) is None
    goes_on = chat(system, greeting, ("assistant", "Hello."), long)
    assert known.find(beginnings_of(goes_on), BOTH) == "a"
    known.note(beginnings_of(goes_on), "b")
    assert known.find(beginnings_of(chat(*told(goes_on), ("assistant", "Yes."), ("user", "And?"))), BOTH) == "b"


@pytest.mark.parametrize("rest", [40, 100])
def test_texts_that_share_less_than_half_are_no_continuation(rest: int) -> None:
    shared = letters(3 * BLOCK_BYTES)
    known = ServersByBeginning()
    known.note(beginnings_of(text(shared + "x" * rest)), "a")
    assert known.find(beginnings_of(text(shared + "y" * 6 * BLOCK_BYTES)), BOTH) is None
    assert known.find(beginnings_of(text(shared + "y" * BLOCK_BYTES)), BOTH) == "a"
    known.note(beginnings_of(text(shared)), "b")
    assert known.find(beginnings_of(text(shared + "y" * 6 * BLOCK_BYTES)), BOTH) == "b", "it ended at a block's end"


def test_a_server_that_is_being_asked_counts_first_until_it_is_not() -> None:
    known, beginnings = ServersByBeginning(), beginnings_of(chat(SYSTEM, QUESTION))
    known.note(beginnings, "a")
    for server in ("b", "c", "c", "b"):
        known.note_opening(beginnings, server)
    assert (known.find(beginnings, "abc"), known.find(beginnings, "ac")) == ("b", "c"), "the last asked one"
    for server, expected in (("b", "b"), ("c", "b"), ("b", "c"), ("c", "a"), ("c", "a")):
        known.forget_opening(beginnings, server)
        assert known.find(beginnings, "abc") == expected


def test_a_small_part_that_is_being_asked_for_does_not_decide() -> None:
    known = ServersByBeginning()
    known.note_opening(beginnings_of(chat(SYSTEM)), "a")
    assert known.find(beginnings_of(chat(SYSTEM, QUESTION)), BOTH) is None
    known.note_opening(beginnings_of(chat(SYSTEM, QUESTION)), "b")
    assert known.find(beginnings_of(chat(SYSTEM, QUESTION, ("user", "And?"))), BOTH) == "b"


def test_the_least_recently_sent_are_forgotten_and_of_a_request_its_end_first() -> None:
    def of(*digests: bytes) -> Beginnings:
        return Beginnings(digests, tuple(range(10, 10 + len(digests))), 10)

    known = ServersByBeginning(max_beginnings=4)
    known.note(of(b"1", b"2"), "a")
    known.note(of(b"3", b"4"), "a")
    known.note(of(b"1", b"2"), "a")
    known.note(of(b"5"), "a")
    assert len(known) == 4
    found = {digest for digest in (b"1", b"2", b"3", b"4", b"5") if known.find(of(digest), BOTH)}
    assert found == {b"1", b"2", b"3", b"5"}
