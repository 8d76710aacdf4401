"""Tests that an edge which falls behind the engine gets everything, with tokens merged, and still writes to clients."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise
from typing import Any, cast

import pytest

from common.errors import EngineFault
from common.sampling.params import TokenLogprobs
from common.telemetry.stats import Timings
from decode_service.edge import decode_edge
from decode_service.edge.decode_edge import EventRouter, UnreadEvents
from decode_service.messages import Failed, Finished, FinishReason, PromptScored, Tokens

LOGPROBS = [TokenLogprobs(-float(number), (number,), (-float(number),)) for number in range(4)]


def test_tokens_of_several_steps_come_as_one_event_between_the_others() -> None:
    scored = cast(PromptScored, object())
    end_of_a = Finished("a", FinishReason.LENGTH, 3, 3, Timings())
    failed = Failed("c", EngineFault("broken"))
    unread = UnreadEvents()
    unread.add([Tokens(("a", "b"), (1, 2), (10, 20, 21))])
    unread.add([failed, scored])
    unread.add([Tokens(("b", "a"), (1, 2), (22, 11, 12)), end_of_a])
    assert unread
    assert unread.take() == [scored, Tokens(("a", "b"), (3, 3), (10, 11, 12, 20, 21, 22)), failed, end_of_a]
    assert not unread
    assert unread.take() == []


def test_logprobs_stay_with_their_tokens() -> None:
    """A step has a column of them only if one of its requests asks for them."""
    unread = UnreadEvents()
    unread.add([Tokens(("plain",), (2,), (1, 2))])
    unread.add([Tokens(("plain", "asks"), (1, 2), (3, 4, 5), (None, LOGPROBS[0], LOGPROBS[1]))])
    unread.add([Tokens(("asks",), (1,), (6,), (LOGPROBS[2],))])
    (merged,) = unread.take()
    assert isinstance(merged, Tokens)
    assert list(merged.each()) == [("plain", (1, 2, 3), ()), ("asks", (4, 5, 6), tuple(LOGPROBS[:3]))]


class _Slow:
    """Live requests that take long over each event."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def dispatch(self, event: Tokens) -> None:
        time.sleep(0.002)
        self.num_tokens += event.num_tokens


def new_router(slow: _Slow) -> EventRouter:
    parts = {"live_requests": slow, "transport": None, "replicas": None}
    return EventRouter(loop=asyncio.get_running_loop(), **cast(Any, parts))


async def test_an_engine_that_is_faster_leaves_the_loop_time_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_edge, "PATIENCE_S", 30.0)
    num_steps, slow = 300, _Slow()
    router = new_router(slow)

    def run_engine() -> None:
        for step in range(num_steps):
            router.deliver([Tokens(("a",), (1,), (step,))])

    engine = threading.Thread(target=run_engine)
    engine.start()
    turns: list[int] = []  # how many tokens had come, each time that the loop did other work
    async with asyncio.timeout(60):
        while sum(slow.num_tokens) < num_steps:
            turns.append(sum(slow.num_tokens))
            await asyncio.sleep(0)
    engine.join()
    assert max(later - earlier for earlier, later in pairwise(turns)) <= decode_edge.MAX_AHEAD + 1


async def test_events_that_nobody_takes_delay_the_engine_by_a_bounded_time() -> None:
    router = new_router(_Slow())
    began_s = time.monotonic()
    for step in range(decode_edge.MAX_AHEAD + 2):
        router.deliver([Tokens(("a",), (1,), (step,))])
    assert 2 * decode_edge.PATIENCE_S <= time.monotonic() - began_s < 300 * decode_edge.PATIENCE_S
