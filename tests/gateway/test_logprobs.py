"""Log-probabilities in OpenAI's two formats, in front of a real prefill and decode service."""

from __future__ import annotations

from typing import Any

import pytest

from baton import ChatMessage, Client
from baton.events import PositionLogprobs, TokenLogprob
from gateway.logprobs import CompletionLogprobs
from tests.gateway.callers import Caller

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
MESSAGES: list[Any] = [{"role": "user", "content": "the other thing"}]
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def of_chat(pair: Client) -> tuple[PositionLogprobs, ...]:
    chat = [ChatMessage("user", "the other thing")]
    return pair.complete(chat=chat, temperature=0.0, max_tokens=12, logprobs=3).logprobs


@pytest.fixture(scope="module")
def of_text(pair: Client) -> tuple[PositionLogprobs, ...]:
    return pair.complete("the other thing", temperature=0.0, max_tokens=12, logprobs=3).logprobs


def assert_chat_positions(content: list[Any], expected: tuple[PositionLogprobs, ...]) -> None:
    assert len(content) == len(expected)
    for ours, theirs in zip(content, expected, strict=True):
        assert bytes(ours.bytes) == theirs.chosen.token
        assert ours.logprob == pytest.approx(theirs.chosen.logprob, abs=TOLERANCE)
        assert [bytes(entry.bytes) for entry in ours.top_logprobs] == [entry.token for entry in theirs.top]
        assert [e.logprob for e in ours.top_logprobs] == pytest.approx([e.logprob for e in theirs.top], abs=TOLERANCE)


def test_a_chat_has_each_token_its_bytes_and_the_likeliest(
    caller: Caller, of_chat: tuple[PositionLogprobs, ...]
) -> None:
    answer = caller.chat(messages=MESSAGES, **GREEDY, logprobs=True, top_logprobs=3)
    assert_chat_positions(answer.choices[0].logprobs.content, of_chat)
    text = b"".join(bytes(each.bytes) for each in answer.choices[0].logprobs.content)
    assert text.decode(errors="replace") == answer.choices[0].message.content


def test_a_streamed_chat_has_the_same(caller: Caller, of_chat: tuple[PositionLogprobs, ...]) -> None:
    chunks = caller.chat_chunks(messages=MESSAGES, **GREEDY, logprobs=True, top_logprobs=3)
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert_chat_positions([each for part in parts for each in part.content], of_chat)


def test_a_token_that_is_no_text_is_written_with_its_bytes(
    caller: Caller, of_chat: tuple[PositionLogprobs, ...]
) -> None:
    """Most of the model's tokens are single bytes, and many of these are no text by themselves."""
    answer = caller.chat(messages=MESSAGES, **GREEDY, logprobs=True)
    assert [each.top_logprobs for each in answer.choices[0].logprobs.content] == [[]] * 12, "none was asked for"
    written = [each.token for each in answer.choices[0].logprobs.content]
    assert any(token.startswith("\\x") for token in written)
    for token, position in zip(written, of_chat, strict=True):
        raw = position.chosen.token
        assert token == (raw.decode() if raw.isascii() else "".join(f"\\x{byte:02x}" for byte in raw))


def test_a_completion_has_them_in_columns(caller: Caller, of_text: tuple[PositionLogprobs, ...]) -> None:
    answer = caller.complete(prompt="the other thing", **GREEDY, logprobs=3)
    columns = answer.choices[0].logprobs
    assert columns.token_logprobs == pytest.approx([each.chosen.logprob for each in of_text], abs=TOLERANCE)
    assert len(columns.tokens) == len(columns.top_logprobs) == len(columns.text_offset) == 12
    for token, top, position in zip(columns.tokens, columns.top_logprobs, of_text, strict=True):
        raw = position.chosen.token
        assert token == (raw.decode() if raw.isascii() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw))
        assert token in top
        assert sorted(top.values()) == pytest.approx(sorted(entry.logprob for entry in position.top), abs=TOLERANCE)


def position(chosen: tuple[int, bytes, float], *top: tuple[int, bytes, float]) -> PositionLogprobs:
    entry, *entries = (TokenLogprob(token_id=i, token=token, logprob=logprob) for i, token, logprob in (chosen, *top))
    return PositionLogprobs(chosen=entry, top=tuple(entries))


@pytest.mark.parametrize(
    ("positions", "named"),
    [
        pytest.param(
            position((5, b"a", -1.0), (5, b"a", -1.0), (6, b"b", -2.0)), {"a": -1.0, "b": -2.0}, id="no text twice"
        ),
        pytest.param(
            position((5, b"a", -1.0), (5, b"a", -1.0), (6, b"a", -2.0), (7, b"a", -3.0)),
            {"a": -1.0, "token_id:6": -2.0, "token_id:7": -3.0},
            id="the chosen one is the most likely",
        ),
        pytest.param(
            position((7, b"a", -3.0), (5, b"a", -1.0), (6, b"b", -2.0)),
            {"token_id:5": -1.0, "b": -2.0, "a": -3.0},
            id="the chosen one is not among them",
        ),
        pytest.param(
            position((6, b"b", -2.0), (5, b"", -1.0), (6, b"b", -2.0), (9, b"", -4.0)),
            {"": -1.0, "b": -2.0, "token_id:9": -4.0},
            id="ids without text",
        ),
        pytest.param(
            position((5, b"\xe2", -1.0), (5, b"\xe2", -1.0), (300, rb"bytes:\xe2", -2.0), (8, b"\xe2", -3.0)),
            {"bytes:\\xe2": -1.0, "token_id:300": -2.0, "token_id:8": -3.0},
            id="bytes",
        ),
        pytest.param(position((5, b"a", -1.0)), {"a": -1.0}, id="the chosen one alone"),
    ],
)
def test_a_completion_s_tokens_of_one_text_have_names_of_their_own(
    positions: PositionLogprobs, named: dict[str, float]
) -> None:
    columns = CompletionLogprobs().of([positions])
    assert columns is not None
    (top,) = columns["top_logprobs"]
    assert list(top.items()) == list(named.items())
    assert top[columns["tokens"][0]] == columns["token_logprobs"][0]
