"""Tests of `echo`, `prompt_logprobs` and `max_tokens: 0` in front of a real pair: the fields with which evaluation
harnesses score text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton import Client
from baton.events import PositionLogprobs, PromptToken, TokenLogprob
from baton.v1 import inference_pb2
from common.text.tokenizer import TextTokenizer
from gateway.logprobs import CompletionLogprobs
from tests.client.scripted_inference import ScriptedServer, delta, finished, prompt_tokens, started
from tests.gateway.callers import Caller
from tests.gateway.gateway_here import COMPLETIONS, GatewayHere
from tests.support.reference import prompt_logprobs

TOLERANCE = 1e-4
CONTEXTS = [[10, 11, 12, 13, 14, 15], [20, 30, 40], [99, 98, 97, 96]]
CONTINUATIONS = [[16, 17], [50, 60, 70], [95]]
TEXT = "the other thing is one of them"


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: Callable[[str], Path]) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def text_ids(model_dir: Path) -> Sequence[int]:
    return TextTokenizer.from_directory(model_dir).encode(TEXT)


def own_logprobs(model_dir: Path, token_ids: Sequence[int]) -> list[float]:
    return prompt_logprobs(model_dir, token_ids)[range(len(token_ids) - 1), list(token_ids[1:])].tolist()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_s_request_scores_continuations_as_transformers_does(
    max_tokens: int, gateway: GatewayHere, model_dir: Path
) -> None:
    """Sends the request that lm-eval sends for log-likelihood tasks, and reads the answer as lm-eval does."""
    prompts = [context + continuation for context, continuation in zip(CONTEXTS, CONTINUATIONS, strict=True)]
    request = {"model": "tiny", "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = gateway.ask("POST", COMPLETIONS, {**request, "temperature": 0, "seed": 1234})
    assert answer.status == 200, answer.body
    choices = sorted(answer.json["choices"], key=lambda choice: choice["index"])
    for choice, context, prompt in zip(choices, CONTEXTS, prompts, strict=True):
        columns = choice["logprobs"]
        assert {len(column) for column in columns.values()} == {len(prompt) + max_tokens}
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        scored = slice(len(context), -max_tokens or None)
        found = columns["token_logprobs"][scored]
        assert found == pytest.approx(own_logprobs(model_dir, prompt)[len(context) - 1 :], abs=TOLERANCE)
        tops = columns["top_logprobs"][scored]
        is_greedy = all(own == max(top.values()) for own, top in zip(found, tops, strict=True))
        best = prompt_logprobs(model_dir, prompt).argmax(dim=-1)[len(context) - 1 :].tolist()
        assert is_greedy is (best == prompt[len(context) :])
    assert answer.json["usage"]["completion_tokens"] == len(prompts) * max_tokens


def test_a_greedy_continuation_is_seen_as_one(gateway: GatewayHere, pair: Client) -> None:
    output = pair.complete(token_ids=CONTEXTS[0], temperature=0.0, max_tokens=4, ignore_eos=True).token_ids
    request = {"model": "tiny", "prompt": [*CONTEXTS[0], *output], "echo": True, "logprobs": 1, "max_tokens": 0}
    columns = gateway.ask("POST", COMPLETIONS, request).json["choices"][0]["logprobs"]
    found, tops = columns["token_logprobs"][-4:], columns["top_logprobs"][-4:]
    assert [own == max(top.values()) for own, top in zip(found, tops, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("logprobs", "as_ids", "n"),
    [(None, False, 2), (None, True, 1), (0, False, 1), (0, True, 2), (2, False, 2), (2, True, 1)],
)
def test_an_echoed_prompt_comes_before_its_output_whole_and_streamed(
    logprobs: int | None, as_ids: bool, n: int, caller: Caller, pair: Client, text_ids: Sequence[int], model_dir: Path
) -> None:
    options: dict[str, Any] = {"prompt": list(text_ids) if as_ids else TEXT, "echo": True, "logprobs": logprobs, "n": n}
    options |= {"temperature": 0, "max_tokens": 6}
    output = pair.complete(TEXT, temperature=0.0, max_tokens=6, logprobs=0)
    answer = caller.complete(**options)
    chunks = [chunk.choices[0] for chunk in caller.completion_chunks(**options)]
    for index in range(n):
        (choice,) = [choice for choice in answer.choices if choice.index == index]
        assert choice.text == TEXT + output.text
        parts = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert (choice.logprobs is None) is (logprobs is None)
        if logprobs is None:
            continue
        columns = choice.logprobs
        assert columns.token_logprobs[1 : len(text_ids)] == pytest.approx(
            own_logprobs(model_dir, text_ids), abs=TOLERANCE
        )
        assert columns.token_logprobs[len(text_ids) :] == pytest.approx(
            [each.chosen.logprob for each in output.logprobs], abs=TOLERANCE
        )
        for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
            if not token.startswith("bytes:"):
                assert choice.text[offset : offset + len(token)] == token
        assert columns.text_offset[len(text_ids)] == len(TEXT)
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
            if name == "token_logprobs":
                assert streamed[1:] == pytest.approx(columns.token_logprobs[1:], abs=TOLERANCE)
            elif name != "top_logprobs" or logprobs == 0:
                assert [each if name != "top_logprobs" else None for each in streamed] == [
                    each if name != "top_logprobs" else None for each in getattr(columns, name)
                ]
        assert all(len(top) <= max(logprobs, 1) + 1 for top in columns.top_logprobs[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_a_cut_prompt_is_the_text_that_counts(
    stream: bool, gateway: GatewayHere, text_ids: Sequence[int], model_dir: Path
) -> None:
    expected = TextTokenizer.from_directory(model_dir).decode(text_ids[-4:])
    assert TEXT.endswith(expected) and len(expected) < len(TEXT)
    request = {"model": "tiny", "prompt": TEXT, "echo": True, "max_tokens": 0, "truncate_prompt_tokens": 4}
    for fields in ({}, {"logprobs": 1}):
        body = gateway.ask("POST", COMPLETIONS, {**request, "stream": stream, **fields}).body.decode()
        events = [line.removeprefix("data: ") for line in body.split("\n\n") if line and "[DONE]" not in line]
        choices = [json.loads(event)["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == expected
        offsets = [each for choice in choices for each in (choice["logprobs"] or {"text_offset": ()})["text_offset"]]
        assert len(offsets) == (4 if fields else 0)
        assert offsets == sorted(set(offsets)), "they are those of this text"


def assert_vllms_form(found: list[Any], model_dir: Path, token_ids: Sequence[int], num_top: int) -> None:
    first, *others = found
    assert first is None and len(others) == len(token_ids) - 1
    expected = prompt_logprobs(model_dir, token_ids)
    for place, (entries, token_id) in enumerate(zip(others, token_ids[1:], strict=True)):
        own, *_ = entries
        assert own == str(token_id)
        assert num_top <= len(entries) <= num_top + 1
        for name, entry in entries.items():
            assert set(entry) == {"logprob", "rank", "decoded_token"}
            assert entry["logprob"] == pytest.approx(float(expected[place, int(name)]), abs=TOLERANCE)
        ranks = sorted(entry["rank"] for entry in entries.values())
        assert ranks[:num_top] == list(range(1, num_top + 1))


def test_prompt_logprobs_of_a_completion(gateway: GatewayHere, model_dir: Path, text_ids: Sequence[int]) -> None:
    request = {"model": "tiny", "prompt": [TEXT, TEXT], "prompt_logprobs": 3, "n": 2, "logprobs": 1}
    choices = gateway.ask("POST", COMPLETIONS, {**request, "max_tokens": 2, "ignore_eos": True}).json["choices"]
    assert len(choices) == 4
    for choice in choices:
        assert_vllms_form(choice["prompt_logprobs"], model_dir, text_ids, 3)
        assert len(choice["logprobs"]["tokens"]) == 2, "they are not echoed"


def test_prompt_logprobs_beside_an_echo_have_their_own_number(gateway: GatewayHere) -> None:
    request = {"model": "tiny", "prompt": TEXT, "prompt_logprobs": 3, "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = gateway.ask("POST", COMPLETIONS, request).json["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert {len(entries) for entries in choice["prompt_logprobs"][1:]} <= {3, 4}


def test_prompt_logprobs_of_a_chat_are_the_answer_s(gateway: GatewayHere) -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "prompt_logprobs": 0, "n": 2}
    answer = gateway.ask("POST", "/v1/chat/completions", {**request, "max_tokens": 2}).json
    first, *others = answer["prompt_logprobs"]
    assert first is None and len(others) + 1 == answer["usage"]["prompt_tokens"]
    text = "".join(entry["decoded_token"] for entries in others for entry in entries.values())
    assert TEXT in text
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])


def test_one_choice_asks_for_the_prompt_and_the_others_wait_for_it(edge: GatewayHere, scripted: ScriptedServer) -> None:
    first, second = (5, b"a", None), (6, b"b", -0.5)

    def script(request: inference_pb2.GenerateRequest) -> Sequence[Any]:
        if request.choice_index:
            return [started(), delta([9], "e"), finished()]
        return [started(), prompt_tokens(0, first), prompt_tokens(1, second), delta([8], "d"), finished()]

    scripted.inference.script = script
    body = {"model": "demo", "prompt": [5, 6], "echo": True, "logprobs": 0, "max_tokens": 1, "n": 2, "stream": True}
    events = edge.ask("POST", COMPLETIONS, body).body.decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "abd", 1: "abe"}
    requests = [scripted.inference.requests.get(timeout=10.0) for _ in range(2)]
    assert [each.choice_index for each in requests if each.sampling.HasField("prompt_logprobs")] == [0]


def test_a_token_that_the_tokenizer_adds_has_no_place_in_the_text() -> None:
    columns = CompletionLogprobs("ab c")
    tokens = [PromptToken(1, b"<s>", None, None, ()), PromptToken(2, b"ab", -1.0, 1, ())]
    first = columns.of_prompt([*tokens, PromptToken(3, b" c", -2.0, 2, ())], num_top=0)
    output = [PositionLogprobs(TokenLogprob(4, -0.5, token), ()) for token in (b"<s>", b"d")]
    then = columns.of(output)
    assert first["text_offset"] == [0, 0, 2]
    assert then is not None and then["text_offset"] == [4, 7]
