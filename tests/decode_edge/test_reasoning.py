"""Tests of reasoning at the edge: a request whose reasoning is restricted gets a matcher, and the usage counts its
tokens.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2
from common.grammar.reasoning import Reasoning
from decode_service.messages import FinishReason
from tests.decode_edge.edge_under_test import Edge, error_of, events_of, running_edge, tokens_of
from tests.decode_edge.fake_engine import until
from tests.decode_edge.test_generate import finished
from tests.decode_edge.tokenizers_for_tests import byte_level, eos_id

A, B, C = ord("a"), ord("b"), ord("c")
EOS = eos_id(byte_level())
OPEN = {"end": "bc", "is_open": True}


@pytest.mark.parametrize(
    ("field", "reasoning"),
    [
        ("end", {}),
        ("end", {"start": "a"}),
        ("end", {"start": "a", "end": "b" * 33}),
        ("start", {"end": "b"}),
        ("start", {"end": "b", "is_open": False}),
        ("start", {"start": " a", "end": "b"}),
        ("start", {"start": "a" * 33, "end": "b"}),
    ],
)
async def test_a_wrong_marker_is_refused_by_name(edge: Edge, field: str, reasoning: dict[str, Any]) -> None:
    code, _, metadata = await error_of(edge.generate(sampling={"reasoning": reasoning}))
    assert (code, metadata) == (grpc.StatusCode.INVALID_ARGUMENT, {"field": f"sampling.reasoning.{field}"})


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("x<é>", True), ("x<é> \n\n", True), ("<é>x", False), ("<é", False), (" " * 40 + "<é>" + "\n" * 9, True)],
)
async def test_the_prompts_end_says_whether_the_reasoning_is_open(edge: Edge, prompt: str, is_open: bool) -> None:
    call = edge.generate(text=prompt, sampling={"reasoning": {"start": "<é>", "end": "b"}})
    submit = await edge.engine.submitted()
    reasoning = submit.sampling.reasoning
    assert reasoning is not None and reasoning.is_open is is_open
    edge.deliver(finished(submit.request_id, 0))
    assert (await events_of(call))[0].started.is_reasoning_open is is_open


async def test_a_continued_answer_says_whether_its_reasoning_is_open() -> None:
    contents = {"<é>one": True, "<é>obe": False, "one": False, "one <é>two": False, "one<é>": True}
    async with running_edge([], serves_chats=True) as edge:
        for number, (content, is_open) in enumerate(contents.items(), start=1):
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
            call = edge.generate(
                chat={"messages": messages, "continue_final_message": True},
                sampling={"reasoning": {"start": "<é>", "end": "b"}},
            )
            submit = await edge.engine.submitted(number)
            reasoning = submit.sampling.reasoning
            assert reasoning is not None and reasoning.is_open is is_open, content
            edge.deliver(finished(submit.request_id, 0))
            await events_of(call)


async def test_reasoning_that_nothing_bounds_or_follows_has_no_matcher(edge: Edge) -> None:
    edge.generate(sampling={"reasoning": OPEN})
    submit = await edge.engine.submitted()
    assert submit.sampling.reasoning == Reasoning("", "bc", is_open=True)
    assert submit.matcher is None


@pytest.mark.parametrize("more", [{"reasoning": {**OPEN, "max_tokens": 3}}, {"reasoning": OPEN, "regex": "a"}])
async def test_the_matcher_has_accepted_what_was_brought(edge: Edge, more: dict[str, Any]) -> None:
    edge.generate(generated_token_ids=[A, B, C], sampling=more)
    matcher = (await edge.engine.submitted()).matcher
    assert matcher is not None
    assert matcher.copy().accept(A)
    assert matcher.accept(B) == ("regex" not in more)


async def test_brought_reasoning_past_its_limit_is_refused(edge: Edge) -> None:
    call = edge.generate(generated_token_ids=[A, A, A], sampling={"reasoning": {**OPEN, "max_tokens": 2}})
    assert (await error_of(call))[2] == {"field": "generated_token_ids"}


@pytest.mark.parametrize(
    ("reasoning", "tokens", "num_reasoning"),
    [
        (OPEN, [A, B, C, A], 3),
        (OPEN, [A, B], 2),
        ({"start": "ab", "end": "c"}, [A, B, A, C, C], 4),
        ({"start": "ab", "end": "c"}, [A, C, A], 0),
        ({"start": "ab", "end": "c"}, [A], 0),
        ({**OPEN, "max_tokens": 0}, [B, C, A], 2),
    ],
)
async def test_the_usage_counts_the_tokens_up_to_the_end_of_the_reasoning(
    edge: Edge, reasoning: dict[str, Any], tokens: list[int], num_reasoning: int
) -> None:
    call = edge.generate(request_id="r", generated_token_ids=tokens[:1], sampling={"reasoning": reasoning})
    submit = await edge.engine.submitted()
    edge.deliver(tokens_of(submit.request_id, tokens[1:]), finished(submit.request_id, len(tokens)))
    usage = (await events_of(call))[-1].finished.usage
    assert usage == inference_pb2.Usage(
        num_prompt_tokens=3, num_completion_tokens=len(tokens), num_reasoning_tokens=num_reasoning
    )
    await until(lambda: any(line["event"] == "request_finished" for line in edge.log))
    (line,) = [line for line in edge.log if line["event"] == "request_finished"]
    assert line["num_reasoning_tokens"] == num_reasoning


async def test_what_looks_like_reasoning_that_there_may_not_be_counts_for_nothing(edge: Edge) -> None:
    call = edge.generate(sampling={"reasoning": {"start": "a", "end": "c", "max_tokens": 0}, "regex": "abc"})
    submit = await edge.engine.submitted()
    assert submit.matcher is not None and submit.matcher.accept(A)
    edge.deliver(tokens_of(submit.request_id, [A, B, C]), finished(submit.request_id, 3))
    assert (await events_of(call))[-1].finished.usage.num_reasoning_tokens == 0


async def test_reasoning_ends_with_a_stop_string(edge: Edge) -> None:
    """Tokens that come after the stop string do not count as reasoning."""
    call = edge.generate(sampling={"reasoning": {"end": "cc", "is_open": True}, "stop": ["ab"]})
    submit = await edge.engine.submitted()
    edge.deliver(tokens_of(submit.request_id, [A, B, C, C, A]))
    await edge.engine.stopped()
    edge.deliver(finished(submit.request_id, 2, FinishReason.STOP_STRING))
    assert (await events_of(call))[-1].finished.usage.num_reasoning_tokens == 2


async def test_reasoning_of_output_that_is_complete_is_counted(edge: Edge) -> None:
    call = edge.generate(generated_token_ids=[A, B, C, A, EOS], sampling={"reasoning": OPEN})
    assert (await events_of(call))[-1].finished.usage.num_reasoning_tokens == 3
