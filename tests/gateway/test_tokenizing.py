"""Tests of /tokenize and /detokenize, and of prompts that are truncated, in front of a real prefill and decode
service.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton import ChatMessage, Client
from tests.gateway.callers import Caller
from tests.gateway.gateway_here import GatewayHere
from tests.support.models import END, START_ID, VOCAB_SIZE

TEXT = "the other thing é"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the other thing"}]
CHAT = [ChatMessage(**each) for each in MESSAGES]
TOOL = {"type": "function", "function": {"name": "look_up"}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
IDS = {"return_token_ids": True}


def test_a_text_becomes_tokens_and_a_text_again(gateway: GatewayHere, pair: Client) -> None:
    answer = gateway.ask("POST", "/tokenize", {"model": "tiny", "prompt": TEXT, "return_token_strs": True})
    tokens, pieces = answer.json["tokens"], answer.json["token_strs"]
    assert answer.json == {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": pieces}
    assert tuple(tokens) == pair.tokenize(TEXT).token_ids
    assert pieces[:2] == ["the", "Ġ"] and "".join(pieces) == "theĠotherĠthingĠÃ©"
    assert gateway.ask("POST", "/detokenize", {"tokens": tokens}).json == {"prompt": TEXT}
    assert gateway.ask("POST", "/tokenize", {"prompt": TEXT}).json["token_strs"] is None
    assert gateway.ask("POST", "/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_what_a_text_says_of_reasoning_is_ignored_and_named(gateway: GatewayHere) -> None:
    for ignored in ("reasoning_effort", "chat_template_kwargs.thinking"):
        name, _, variable = ignored.partition(".")
        answer = gateway.ask("POST", "/tokenize", {"prompt": TEXT, name: {variable: True} if variable else "low"})
        assert (answer.status, answer.headers.get("x-ignored-fields")) == (200, ignored)


def test_a_chat_becomes_the_tokens_that_it_is_answered_from(gateway: GatewayHere, pair: Client, caller: Caller) -> None:
    tokens = gateway.ask("POST", "/tokenize", {"messages": MESSAGES}).json["tokens"]
    answer = caller.chat(messages=MESSAGES, max_tokens=1)
    assert answer.usage.prompt_tokens == len(tokens)
    assert tokens[0] == START_ID
    text = gateway.ask("POST", "/detokenize", {"tokens": tokens}).json["prompt"]
    assert text == f"<|start|>system\nBe brief.{END}\n<|start|>user\nthe other thing{END}\n<|start|>assistant\n"
    assert pair.tokenize(chat=CHAT).token_ids == tuple(tokens)


def test_the_tokenizers_special_tokens_and_chat_template_are_told(gateway: GatewayHere, pair: Client) -> None:
    told = gateway.ask("GET", "/tokenizer_info").json
    info = pair.model_info()
    assert told == {"chat_template": info.chat_template, **info.special_tokens, "model_max_length": 4096}
    assert "messages" in told["chat_template"] and told["eos_token"]


def test_a_text_may_be_longer_than_the_context(gateway: GatewayHere) -> None:
    answer = gateway.ask("POST", "/tokenize", {"prompt": "b" * 10_000})
    assert answer.json["count"] == 10_000 > answer.json["max_model_len"]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", None),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", None),
        ("/tokenize", {"prompt": ["a"]}, "prompt", None),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role", None),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature", "unknown_parameter"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", "model_not_found"),
        ("/tokenize", {"messages": [{"role": "user", "content": "b" * 20_000}]}, "messages", "context_length_exceeded"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools", "unsupported_parameter"),
        ("/tokenize", {"prompt": "a", "tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        (
            "/tokenize",
            {"prompt": "a", "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
            "unsupported_parameter",
        ),
        (
            "/tokenize",
            {"prompt": "a", "continue_final_message": True},
            "continue_final_message",
            "unsupported_parameter",
        ),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": False},
            "add_generation_prompt",
            "unsupported_parameter",
        ),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens", None),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", None),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model", "model_not_found"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    gateway: GatewayHere, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = gateway.ask("POST", path, body)
    assert answer.status == (404 if code == "model_not_found" else 400)
    assert (answer.error["param"], answer.error["code"]) == (param, code)


@pytest.mark.parametrize("most", [1, 3, 4096])
def test_of_a_prompt_only_its_last_tokens_count_when_asked(caller: Caller, pair: Client, most: int) -> None:
    tokens = pair.tokenize(TEXT).token_ids
    expected = pair.complete(token_ids=tokens[-most:], **GREEDY)
    for prompt in (TEXT, list(tokens)):
        answer = caller.complete(prompt=prompt, **GREEDY, extra_body={"truncate_prompt_tokens": most, **IDS})
        assert answer.choices[0].token_ids == list(expected.token_ids)
        assert answer.choices[0].prompt_token_ids == list(tokens[-most:])
        assert answer.usage.prompt_tokens == min(most, len(tokens))

    chat = pair.tokenize(chat=CHAT).token_ids
    expected = pair.complete(token_ids=chat[-most:], **GREEDY)
    extra = {"truncate_prompt_tokens": most, **IDS}
    answer = caller.chat(messages=MESSAGES, **GREEDY, extra_body=extra)
    assert (answer.choices[0].token_ids, answer.prompt_token_ids) == (list(expected.token_ids), list(chat[-most:]))
    first, *others = caller.chat_chunks(messages=MESSAGES, **GREEDY, extra_body=extra)
    assert first.prompt_token_ids == list(chat[-most:])
    assert not any("prompt_token_ids" in (each.model_extra or {}) for each in others)


def test_a_prompt_that_is_too_long_is_cut_to_what_leaves_room(caller: Caller) -> None:
    answer = caller.complete(prompt="b" * 10_000, **GREEDY, extra_body={"truncate_prompt_tokens": -1})
    assert answer.usage.prompt_tokens == 4096 - GREEDY["max_tokens"]
