"""Chats through both doors: HTTP at the gateway, gRPC at the decode services."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from baton import ChatMessage, Client
from baton.client import Tls
from baton.errors import BatonError

MAX_TOKENS = 24
_TIMEOUT_S = 180.0
_FILLING = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int
    finish_reason: str


Chat = Callable[[int], Answer]
"""Asks the question of a number; raises what goes wrong."""


@dataclass(frozen=True)
class Outcome:
    answers: Sequence[Answer]
    failures: Sequence[str]

    def __str__(self) -> str:
        tokens = sum(answer.num_tokens for answer in self.answers)
        return f"{len(self.answers)} answers, {tokens} tokens, {len(self.failures)} failures"


def question(number: int, *, num_fillings: int = 4) -> str:
    return f"{_FILLING * num_fillings}What is {number} plus {number + 1}? Explain."


def over_http(port: int, *, num_fillings: int = 4) -> Chat:
    """Every second answer is streamed."""

    def chat(number: int) -> Answer:
        streams = number % 2 == 1
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": question(number, num_fillings=num_fillings)}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": streams,
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
    """Takes turns between the decode services, without resuming: what a service loses is seen."""

    def chat(number: int) -> Answer:
        messages = [ChatMessage("user", question(number, num_fillings=num_fillings))]
        with Client(addresses[number % len(addresses)], tls=tls) as client:
            completion = client.complete(chat=messages, max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=_TIMEOUT_S)
        return Answer(completion.text, completion.usage.num_completion_tokens, completion.finish_reason.value)

    return chat


def ask(
    chats: Sequence[Chat], *, num_requests: int, num_at_a_time: int, on_answer: Callable[[int], None] | None = None
) -> Outcome:
    """`num_requests` dealt to the chats in turn. `on_answer` hears how many have ended, on this thread."""
    answers, failures = [], []
    with ThreadPoolExecutor(num_at_a_time) as executor:
        futures = [executor.submit(chats[i % len(chats)], i // len(chats)) for i in range(num_requests)]
        for num_ended, future in enumerate(as_completed(futures), start=1):
            try:
                answers.append(_checked(future.result()))
            except (OSError, http.client.HTTPException, BatonError, ValueError) as error:
                failures.append(f"{type(error).__name__}: {error}")
            if on_answer is not None:
                on_answer(num_ended)
    return Outcome(answers, failures)


def _checked(answer: Answer) -> Answer:
    if answer.finish_reason not in ("stop", "length", "eos") or not 0 < answer.num_tokens <= MAX_TOKENS:
        raise ValueError(f"not an answer: {answer}")
    if answer.finish_reason == "length" and answer.num_tokens != MAX_TOKENS:
        raise ValueError(f"cut off: {answer}")
    return answer


def _whole(text: str) -> Answer:
    body = json.loads(text)
    (choice,) = body["choices"]
    return Answer(choice["message"]["content"], body["usage"]["completion_tokens"], choice["finish_reason"])


def _streamed(text: str) -> Answer:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream was cut off: {lines[-1:]}")
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    (reason,) = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return Answer(content, usage["completion_tokens"], reason)
