"""Chats with a running project: over HTTP with the gateway, and over gRPC with the decode services."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from baton import ChatMessage, Client
from baton.client import Tls
from baton.errors import BatonError
from baton.requests import SamplingOptions

MAX_TOKENS = 24
_TIMEOUT_S = 180.0
_FILLING = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    finish_reason: str


Chat = Callable[[int], Answer]
"""A function that asks question number i and returns its answer. It raises any error."""


@dataclass(frozen=True)
class Outcome:
    """The result of many chats: `answers`, each with the number of its question, and the errors of those that
    failed.
    """

    answers: Sequence[tuple[int, Answer]]
    failures: Sequence[str]

    def __str__(self) -> str:
        tokens = sum(len(answer.token_ids) for _, answer in self.answers)
        return f"{len(self.answers)} answers, {tokens} tokens, {len(self.failures)} failures"


def answered_differently(*outcomes: Outcome) -> Mapping[int, int]:
    """Returns the questions that got more than one answer, each with the number of different answers. Decoding is
    greedy, so there should be none.
    """
    answers: dict[int, set[tuple[int, ...]]] = {}
    for number, answer in (each for outcome in outcomes for each in outcome.answers):
        answers.setdefault(number, set()).add(answer.token_ids)
    return {number: len(given) for number, given in answers.items() if len(given) > 1}


def question(number: int, *, num_fillings: int = 4) -> str:
    """Returns the text of question `number`. Different questions share no beginning, so nothing of a new one is
    cached.
    """
    return f"{number}. {_FILLING * num_fillings}What is {number} plus {number + 1}? Explain."


def grammar_of(number: int) -> SamplingOptions:
    """Returns the sampling options that bind the answer to question `number` to a grammar of its own. Every third
    question has one; for the others it returns none.
    """
    return {"regex": rf"{number} plus {number + 1} is \d{{1,4}}\. [A-Z][a-z ]+\."} if number % 3 == 0 else {}


def over_http(port: int, *, num_fillings: int = 4) -> Chat:
    """Returns a function that asks the gateway a question over HTTP. Every second answer is streamed."""

    def chat(number: int) -> Answer:
        streams = number % 2 == 1
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": question(number, num_fillings=num_fillings)}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": streams,
            "return_token_ids": True,
            **grammar_of(number),
        }
        if streams:
            body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}: {text[:300]}")
        return _streamed(text) if streams else _whole(text)

    return chat


def over_grpc(addresses: Sequence[str], *, num_fillings: int = 4, tls: Tls | None = None) -> Chat:
    """Returns a function that asks the decode services questions in turn over gRPC. It does not resume, so that a lost
    stream shows.
    """

    def chat(number: int) -> Answer:
        messages = [ChatMessage("user", question(number, num_fillings=num_fillings))]
        with Client(addresses[number % len(addresses)], tls=tls) as client:
            completion = client.complete(
                chat=messages, max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=_TIMEOUT_S, **grammar_of(number)
            )
        return Answer(completion.token_ids, completion.finish_reason.value)

    return chat


def ask(
    chats: Sequence[Chat],
    *,
    num_requests: int,
    num_at_a_time: int,
    first: int = 0,
    on_answer: Callable[[int], None] | None = None,
) -> Outcome:
    """Asks `num_requests` questions, numbered from `first` on, and shared out to `chats` in turn. `on_answer` is called
    on this thread with the number of questions that have been answered or have failed.
    """
    answers, failures = [], []
    with ThreadPoolExecutor(num_at_a_time) as executor:
        futures = {
            executor.submit(chats[i % len(chats)], first + i // len(chats)): first + i // len(chats)
            for i in range(num_requests)
        }
        for num_ended, future in enumerate(as_completed(futures), start=1):
            try:
                answers.append((futures[future], _checked(future.result())))
            except (OSError, http.client.HTTPException, BatonError, ValueError) as error:
                failures.append(f"{type(error).__name__}: {error}")
            if on_answer is not None:
                on_answer(num_ended)
    return Outcome(answers, failures)


def _checked(answer: Answer) -> Answer:
    num_tokens = len(answer.token_ids)
    if answer.finish_reason not in ("stop", "length", "eos") or not 0 < num_tokens <= MAX_TOKENS:
        raise ValueError(f"not an answer: {answer}")
    if answer.finish_reason == "length" and num_tokens != MAX_TOKENS:
        raise ValueError(f"cut off: {answer}")
    return answer


def _whole(text: str) -> Answer:
    body = json.loads(text)
    (choice,) = body["choices"]
    return _counted(choice["token_ids"], body["usage"], choice["finish_reason"])


def _streamed(text: str) -> Answer:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream was cut off: {lines[-1:]}")
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (reason,) = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return _counted([token_id for choice in choices for token_id in choice["token_ids"]], usage, reason)


def _counted(token_ids: Sequence[int], usage: Mapping[str, int], finish_reason: str) -> Answer:
    if usage["completion_tokens"] != len(token_ids):
        raise ValueError(f"{len(token_ids)} token ids came, and the usage says {usage}")
    return Answer(tuple(token_ids), finish_reason)
