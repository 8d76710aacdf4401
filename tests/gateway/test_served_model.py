"""Tests that the gateway asks for the served model once, however many requests wait for the answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from baton.errors import DeadlineExceeded, Unavailable
from gateway.served_model import ServedModel
from tests.client.scripted_inference import BOUND_S
from tests.gateway.gateway_here import gateway_here
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until


class Info:
    def __init__(self, model: str) -> None:
        self.model, self.digest, self.max_context_tokens, self.output_format = model, "0" * 64, 8, ""
        self.has_reasoning = False
        self.chat_template_variables, self.chat_template, self.special_tokens = (), "", dict[str, str]()


class Decode:
    """A stand-in for the client of the decode service. The test gives its answers."""

    def __init__(self) -> None:
        self.questions: list[asyncio.Future[Any]] = []

    async def model_info(self) -> Any:
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def decode() -> Decode:
    return Decode()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def served(decode: Decode, clock: Clock) -> ServedModel:
    return ServedModel(decode, timeout_s=BOUND_S, max_age_s=30.0, clock=clock)  # type: ignore[arg-type]


async def turns() -> None:
    """Lets the event loop run until nothing can proceed any further."""
    for _ in range(10):
        await asyncio.sleep(0)


async def known(served: ServedModel, decode: Decode, name: str) -> None:
    asking = asyncio.create_task(served.card())
    await turns()
    decode.questions[-1].set_result(Info(name))
    assert (await asking).name == name


async def test_callers_share_one_question(served: ServedModel, decode: Decode) -> None:
    callers = [asyncio.create_task(served.card()) for _ in range(5)]
    await turns()
    (question,) = decode.questions
    question.set_result(Info("demo"))
    assert [card.name for card in await asyncio.gather(*callers)] == ["demo"] * 5
    assert len(decode.questions) == 1


async def test_its_failure_is_that_of_all_and_the_next_asks_again(served: ServedModel, decode: Decode) -> None:
    callers = [asyncio.create_task(served.card()) for _ in range(5)]
    await turns()
    decode.questions[0].set_exception(Unavailable("nobody"))
    for answer in await asyncio.gather(*callers, return_exceptions=True):
        assert isinstance(answer, Unavailable)
    assert len(decode.questions) == 1
    await known(served, decode, "demo")
    assert len(decode.questions) == 2


async def test_a_service_that_does_not_answer_in_time_is_unavailable(served: ServedModel, decode: Decode) -> None:
    asking = asyncio.create_task(served.card())
    await turns()
    decode.questions[0].set_exception(DeadlineExceeded("no answer came in time"))
    with pytest.raises(Unavailable, match="it has not answered in time"):
        await asking


async def test_no_caller_waits_longer_than_for_admission(decode: Decode) -> None:
    served = ServedModel(decode, timeout_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=r"not said within 0\.05 s which model it serves"):
        await served.card()
    decode.questions[0].set_result(Info("demo"))
    await turns()
    assert (await served.card()).name == "demo"


async def test_a_caller_that_leaves_does_not_end_the_question(served: ServedModel, decode: Decode) -> None:
    leaves, stays = (asyncio.create_task(served.card()) for _ in range(2))
    await turns()
    leaves.cancel()
    await turns()
    assert leaves.cancelled()
    decode.questions[0].set_result(Info("demo"))
    assert (await stays).name == "demo"


async def test_an_old_answer_is_given_at_once_and_renewed_behind(
    served: ServedModel, decode: Decode, clock: Clock
) -> None:
    await known(served, decode, "first")
    clock.now_s = 29.0
    assert (await served.card()).name == "first"
    assert len(decode.questions) == 1
    clock.now_s = 31.0
    async with asyncio.timeout(BOUND_S):
        assert [(await served.card()).name for _ in range(3)] == ["first"] * 3
    await turns()
    assert len(decode.questions) == 2
    decode.questions[-1].set_result(Info("second"))
    await turns()
    assert (await served.card()).name == "second"


async def test_what_was_known_stays_while_nobody_answers(served: ServedModel, decode: Decode, clock: Clock) -> None:
    await known(served, decode, "first")
    for clock.now_s, num_questions in ((31.0, 2), (32.0, 2), (62.0, 3)):
        assert (await served.card()).name == "first"
        await turns()
        assert len(decode.questions) == num_questions
        if not decode.questions[-1].done():
            decode.questions[-1].set_exception(Unavailable("nobody"))
        await turns()


async def test_closing_ends_the_question(served: ServedModel, decode: Decode, clock: Clock) -> None:
    await known(served, decode, "first")
    clock.now_s = 31.0
    await served.card()
    await turns()
    await served.close()
    assert decode.questions[-1].cancelled()
    assert len(asyncio.all_tasks()) == 1
    await served.close()


def test_a_client_that_leaves_meanwhile_is_noticed(loop: LoopThread) -> None:
    """The decode service of this test accepts connections and never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as decode,
        gateway_here(loop, f"127.0.0.1:{decode.getsockname()[1]}") as gateway,
    ):
        connection = gateway.connect()
        body = b'{"model": "demo", "prompt": "hi"}'
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        wait_until(lambda: gateway.metric("baton_gateway_open_requests") == 1)
        connection.close()
        wait_until(lambda: gateway.metric("baton_gateway_open_requests") == 0)
        assert gateway.metric("baton_gateway_requests_total", route="/v1/completions", status="499") == 1
        assert "model_info" in loop.run(task_names()), "it is still asked for"
        assert "model_info" not in loop.run(task_names(after=gateway.server.stop())), "no longer than the gateway lives"


async def task_names(*, after: Coroutine[Any, Any, None] | None = None) -> set[str]:
    if after is not None:
        await after
    return {task.get_name() for task in asyncio.all_tasks()}
