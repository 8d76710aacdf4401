"""Tests of the demo model with its draft head through the gateway: its tokens equal the gRPC client's, and the status
page shows both services.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton import ChatMessage, Client, Reasoning
from baton.events import tokens_per_forward
from baton.local_pair import LocalPair
from tests.gateway.gateway_here import GatewayHere, gateway_here
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until

QUESTIONS = ("Why is the sky blue?", "Name three colours.", "Écris une phrase en français.")
NEW_TOKENS = 24
README = Path(__file__).parents[2] / "README.md"
ARGUMENTS = ("--num-threads=1", "--draft=demo")
ALWAYS_DRAFTS = "--no-adaptive-depth"
"""An argument that makes every step draft. Otherwise a slow machine might find that drafting does not pay, and draft
nothing.
"""


@pytest.fixture(scope="module")
def pair(forked: Callable[..., LocalPair]) -> Iterator[LocalPair]:
    # In bfloat16 two logits are often equal, and the number of drafts then decides which one is chosen.
    decode_args = (*ARGUMENTS, ALWAYS_DRAFTS)
    with forked(dtype="float32", prefill_args=ARGUMENTS, decode_args=decode_args, exposes_metrics=True) as pair:
        yield pair


@pytest.fixture(scope="module")
def gateway(pair: LocalPair) -> Iterator[GatewayHere]:
    loop = LoopThread(bound_s=60.0)
    with gateway_here(loop, *pair.decode_addresses, metrics_targets=pair.metrics_addresses) as gateway:
        yield gateway
    loop.close()


def test_a_short_question_is_answered_without_a_handoff(pair: LocalPair) -> None:
    """The services run with the defaults of a CPU. A question after a long text is handed over. The next question after
    the same text is not, because the text is cached.
    """
    book = "The sea is calm tonight. " * 60
    with Client(pair.decode_addresses[0]) as client:
        answers = [
            client.complete(prompt, max_tokens=2, cache_salt="short")
            for prompt in (QUESTIONS[0], book + QUESTIONS[0], book + QUESTIONS[1])
        ]
    assert [answer.timings.num_handoff_attempts for answer in answers] == [0, 1, 0]


@pytest.mark.parametrize(("prompt", "max_tokens"), [("Two primes as JSON:", 0), ("Two primes as JSON: <think>\n", 8)])
def test_a_schema_begins_after_the_reasoning(prompt: str, max_tokens: int, pair: LocalPair) -> None:
    """In one case the prompt opens the reasoning, and the limit on reasoning ends it."""
    schema = {"type": "array", "items": {"enum": [2, 3, 5, 7]}, "minItems": 2, "maxItems": 2}
    reasoning = Reasoning("<think>", "</think>", max_tokens=max_tokens)
    with Client(pair.decode_addresses[0]) as client:
        answers = [
            client.complete(
                prompt,
                json_schema=schema,
                reasoning=reasoning,
                max_tokens=64,
                temperature=temperature,
                seed=3,
                speculate=drafts,
            )
            for temperature in (0.0, 0.8)
            for drafts in (True, False)
        ]
    for answer in answers:
        assert len(answer.parsed) == 2 and set(answer.parsed) <= {2, 3, 5, 7}
        assert answer.text.count("</think>[") == (max_tokens > 0)
        assert answer.usage.num_reasoning_tokens == (max_tokens + 3 if max_tokens else 0)
    assert answers[0].token_ids == answers[1].token_ids and answers[2].token_ids == answers[3].token_ids


def over_http(gateway: GatewayHere, question: str, **options: Any) -> Any:
    return gateway.openai().chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
        **options,
    )


def token_ids_of(choices: Sequence[Any]) -> tuple[int, ...]:
    return tuple(token_id for choice in choices for token_id in choice.token_ids)


@pytest.mark.timeout(300)
def test_greedy_answers_have_the_tokens_and_the_text_of_the_grpc_client(pair: LocalPair, gateway: GatewayHere) -> None:
    counts = []
    with Client(pair.decode_addresses[0]) as client:
        for question in QUESTIONS:
            chat = [ChatMessage("user", question)]
            expected = client.complete(chat=chat, max_tokens=NEW_TOKENS, temperature=0.0)
            counts.append(expected.speculation)
            (whole,) = over_http(gateway, question).choices
            assert (token_ids_of([whole]), whole.message.content) == (expected.token_ids, expected.text)
            chunks = [choice for chunk in over_http(gateway, question, stream=True) for choice in chunk.choices]
            text = "".join(choice.delta.content or "" for choice in chunks)
            assert (token_ids_of(chunks), text) == (expected.token_ids, expected.text)
    assert tokens_per_forward(count for count in counts if count is not None) > 1.0, "no draft was accepted"


@pytest.mark.timeout(300)
def test_the_status_page_has_what_both_services_expose(gateway: GatewayHere) -> None:
    def snapshot() -> Any:
        return gateway.ask("GET", "/status.json").json

    def replicas() -> list[tuple[bool, int]]:
        return [(each["is_ready"], each["num_rows"]) for each in snapshot()["decode"][0]["prefill_replicas"]]

    wait_until(lambda: [service["is_ready"] for service in snapshot()["services"]] == [True, True])
    over_http(gateway, QUESTIONS[0])
    # A round of sampling asks both services for metrics and load, but not at exactly the same moment.
    wait_until(lambda: sum(snapshot()["pair"]["outcomes"].values()) == 1 and replicas() == [(True, 0)])
    wait_until(lambda: snapshot()["pair"]["phases"]["prefill"]["num_observed"] == 1)
    shown = snapshot()
    assert sorted(service["role"] for service in shown["services"]) == ["decode", "prefill"]
    assert shown["pair"]["acceptance"]["drafted"] > 0


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "description": "The time now."}},
]


def assert_fits(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_time":
        assert arguments == {}
        return
    assert (call.function.name, sorted(arguments)) == ("get_weather", ["city", "unit"])
    assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 20 and arguments["unit"] in ("C", "F")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("choice", "sampling"),
    [
        ("required", {"temperature": 0}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"temperature": 1.0, "seed": 5}),
    ],
    ids=["required", "named"],
)
def test_the_model_calls_what_it_must_with_arguments_that_fit(
    gateway: GatewayHere, choice: Any, sampling: dict[str, Any]
) -> None:
    """The model's chat template does not support tools. Drafts are verified under the grammar's masks."""
    answer = gateway.openai().chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Is it warm in Rome?"}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=64,
        n=2,
        **sampling,
    )
    for each in answer.choices:
        (call,) = each.message.tool_calls
        assert_fits(call)
        assert choice == "required" or call.function.name == "get_weather"


@pytest.mark.timeout(300)
def test_an_answer_of_a_tool_is_read(gateway: GatewayHere) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    answer = gateway.openai().chat.completions.create(
        model="demo",
        messages=[
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "content": "The time is 14:37."},
        ],
        tools=TOOLS,
        max_tokens=24,
        temperature=0,
    )
    assert "14:37" in answer.choices[0].message.content or "2:37" in answer.choices[0].message.content


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", readme_blocks(), ids=lambda block: re.search(r"from (\w+)", block)[1])
def test_what_the_readme_shows_works(
    block: str, pair: LocalPair, gateway: GatewayHere, capsys: pytest.CaptureFixture[str]
) -> None:
    (decode,) = pair.decode_addresses
    code = block.replace("127.0.0.1:50051", decode).replace("http://127.0.0.1:8000", gateway.url)
    assert code != block
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip(), "nothing was answered"
