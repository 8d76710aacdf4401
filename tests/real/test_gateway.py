"""Tests of the demo model with its draft head through the gateway: its tokens equal the gRPC client's, and what the
README shows works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton import ChatMessage, Client
from baton.events import tokens_per_forward
from baton.local_pair import LocalPair
from tests.gateway.gateway_here import GatewayHere, gateway_here
from tests.support.loop_thread import LoopThread

pytestmark = pytest.mark.thorough

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


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", readme_blocks(), ids=lambda block: re.search(r"from (\w+)", block)[1])
def test_what_the_readme_shows_works(
    block: str, pair: LocalPair, gateway: GatewayHere, capsys: pytest.CaptureFixture[str]
) -> None:
    (decode,) = pair.decode_addresses
    code = block.replace("127.0.0.1:50051", decode).replace("http://127.0.0.1:8000", gateway.url)
    assert code != block
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip(), "nothing was answered"
