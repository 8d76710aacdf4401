"""Tests that the collector samples only while somebody views the page, and once for all viewers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from structlog.testing import capture_logs

from baton.server_info import InferenceLoad
from gateway.status.collector import StatusCollector
from tests.gateway.status.scene import Clock, Decode


class Rounds:
    """Counts rounds of sampling by their look-ups. The test decides when each pause between them ends."""

    def __init__(self, client: Decode | None = None, first_round_s: float = 60.0) -> None:
        self.clock = Clock()
        self.num_rounds = 0
        self.paused = asyncio.Event()
        self._go_on = asyncio.Event()
        self.client = client or Decode()
        self.collector = StatusCollector(
            metrics_targets=[],
            decode_targets=["decode:50051"],
            open_client=lambda address: self.client,
            look_up=self._look_up,
            clock=self.clock,
            pause=self._pause,
            first_round_s=first_round_s,
        )

    async def next_round(self, after_s: float) -> None:
        """Ends the pause that the collector has begun. Returns at its next pause, or when sampling ends."""
        await self.paused.wait()
        self.paused.clear()
        self.clock.now_s += after_s
        self._go_on.set()

    def _look_up(self, host: str, port: int) -> Sequence[str]:
        self.num_rounds += 1
        return ["10.0.0.1:50051"]

    async def _pause(self, seconds: float) -> None:
        self.paused.set()
        await self._go_on.wait()
        self._go_on.clear()


async def test_nothing_is_sampled_before_somebody_looks() -> None:
    rounds = Rounds()
    await asyncio.sleep(0)
    assert rounds.num_rounds == 0


async def test_the_first_look_waits_for_a_round_but_not_for_one_that_takes_long() -> None:
    rounds = Rounds()
    assert json.loads(await rounds.collector.first_look())["age_s"] == 0
    await rounds.collector.close()

    class Slow(Decode):
        async def load(self) -> InferenceLoad:
            await asyncio.Event().wait()
            raise AssertionError("never answers")

    slow = Rounds(client=Slow(), first_round_s=0.01)
    first = json.loads(await slow.collector.first_look())
    assert (first["age_s"], first["awaited"]) == (None, ["decode:50051"])
    await slow.collector.close()


async def test_many_viewers_share_one_sampling() -> None:
    rounds = Rounds()
    for _ in range(10):
        rounds.collector.look()
    await rounds.paused.wait()
    assert rounds.num_rounds == 1
    assert json.loads(rounds.collector.look())["age_s"] == 0
    await rounds.collector.close()


async def test_sampling_ends_with_its_connections_once_nobody_has_looked_for_a_while_and_begins_again() -> None:
    rounds = Rounds()
    rounds.collector.look()
    await rounds.next_round(after_s=29)
    await rounds.paused.wait()
    assert rounds.num_rounds == 2
    await rounds.next_round(after_s=1)
    for _ in range(100):  # rounds of the event loop, in which connections are closed
        await asyncio.sleep(0)
    assert rounds.num_rounds == 2
    assert rounds.client.is_closed

    assert json.loads(rounds.collector.look())["age_s"] is None
    await rounds.paused.wait()
    assert rounds.num_rounds == 3
    await rounds.collector.close()


async def test_closing_ends_the_sampling() -> None:
    rounds = Rounds()
    rounds.collector.look()
    await rounds.paused.wait()
    await rounds.collector.close()
    await rounds.collector.close()
    assert rounds.client.is_closed
    assert json.loads(rounds.collector.look())["age_s"] is None, "sampling begins again"
    await rounds.collector.close()


async def test_closing_after_the_sampling_has_failed_tells_the_log_and_raises_nothing() -> None:
    class Broken(Decode):
        async def load(self) -> InferenceLoad:
            raise RuntimeError("broken")

    rounds = Rounds(client=Broken())
    before = asyncio.all_tasks()
    rounds.collector.look()
    await asyncio.wait(asyncio.all_tasks() - before)
    assert rounds.client.is_closed
    with capture_logs() as logs:
        await rounds.collector.close()
    (told,) = logs
    assert (told["event"], str(told["exc_info"])) == ("status_sampling_failed", "broken")
