"""Tests of a resumed request whose output was complete when its stream broke. Then only the ending is left to send."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2
from tests.decode_edge.edge_under_test import CONTEXT, Edge, error_of, events_of
from tests.decode_edge.tokenizers_for_tests import byte_level, eos_id

A, B, C = ord("a"), ord("b"), ord("c")
EOS = eos_id(byte_level())


@pytest.mark.parametrize(
    ("brought", "sampling", "reason", "matched"),
    [
        pytest.param([A, B], {"max_tokens": 2}, inference_pb2.FINISH_REASON_LENGTH, None, id="length"),
        pytest.param([A, EOS], {}, inference_pb2.FINISH_REASON_EOS, None, id="eos"),
        pytest.param([A, EOS], {"max_tokens": 2}, inference_pb2.FINISH_REASON_EOS, None, id="eos at the length"),
        pytest.param([A, B], {"stop_token_ids": [B]}, inference_pb2.FINISH_REASON_STOP_TOKEN, B, id="stop token"),
        pytest.param([A, B], {"stop": ["ab"]}, inference_pb2.FINISH_REASON_STOP_STRING, "ab", id="stop string"),
        pytest.param(
            [A, B], {"stop": ["ab"], "max_tokens": 2}, inference_pb2.FINISH_REASON_STOP_STRING, "ab", id="both"
        ),
    ],
)
async def test_whole_output_gets_its_ending_without_the_engine(
    edge: Edge, brought: list[int], sampling: dict[str, Any], reason: int, matched: str | int | None
) -> None:
    events = await events_of(edge.generate(generated_token_ids=brought, sampling={"seed": 7, **sampling}))

    assert [event.WhichOneof("event") for event in events] == ["started", "finished"]
    assert events[0].started.seed == 7
    last = events[1].finished
    kind = last.WhichOneof("matched_stop")
    assert (last.reason, getattr(last, kind) if kind else None) == (reason, matched)
    assert last.usage == inference_pb2.Usage(num_prompt_tokens=3, num_completion_tokens=2)
    assert edge.engine.commands == []
    assert len(edge.live_requests) == 0


@pytest.mark.parametrize(
    ("brought", "sampling"),
    [
        pytest.param([A, B, C], {"max_tokens": 2}, id="length"),
        pytest.param([EOS, A], {}, id="eos"),
        pytest.param([B, A], {"stop_token_ids": [B]}, id="stop token"),
        pytest.param([A, B, C], {"stop": ["ab"]}, id="stop string"),
    ],
)
async def test_ids_past_the_end_are_refused(edge: Edge, brought: list[int], sampling: dict[str, Any]) -> None:
    code, _, metadata = await error_of(edge.generate(generated_token_ids=brought, sampling=sampling))

    assert (code, metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "generated_token_ids")


async def test_output_that_a_larger_context_left_room_for_is_told_from_a_wrong_field(edge: Edge) -> None:
    code, reason, metadata = await error_of(edge.generate(generated_token_ids=[A] * (CONTEXT - 1)))

    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED")
    assert metadata["max_context_tokens"] == str(CONTEXT)


async def test_what_ends_nothing_within_min_tokens_does_not_end_it_again(edge: Edge) -> None:
    edge.generate(generated_token_ids=[A, B], sampling={"stop": ["ab"], "stop_token_ids": [B], "min_tokens": 2})

    assert (await edge.engine.submitted()).token_ids == (1, 2, 3, A, B)
