"""A fake engine. All of its events come from the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.service.engine_thread import EnginePort
from common.telemetry.stats import EngineLoad, PoolCounts
from decode_service.messages import Abort, Command, FinishAtStop, Submit

BOUND_S = 30.0
CommandT = TypeVar("CommandT", bound=Command)


class FakeEngine(EnginePort[Command]):
    """Keeps the commands that were posted to it. The test sets `is_alive`."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self._is_alive = True
        self._load = EngineLoad(
            rows=PoolCounts(total=4, free=2, running=1, transferring=1),
            slots=PoolCounts(total=64, free=60, quarantined=4),
            num_queued=1,
            num_running=1,
            num_steps=9,
            num_row_retries=3,
            is_degraded=True,
            num_known_tokens={"127.0.0.1:1": 5},
        )

    def post(self, command: Command) -> None:
        self.commands.append(command)

    @property
    def load(self) -> EngineLoad:
        return self._load

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    def die(self) -> None:
        self._is_alive = False

    def of_type(self, kind: type[CommandT]) -> Sequence[CommandT]:
        return [command for command in self.commands if isinstance(command, kind)]

    async def submitted(self, num: int = 1) -> Submit:
        """Waits for the `num`th submitted request and returns it."""
        await until(lambda: len(self.of_type(Submit)) >= num)
        return self.of_type(Submit)[num - 1]

    async def aborted(self, num: int = 1) -> Abort:
        await until(lambda: len(self.of_type(Abort)) >= num)
        return self.of_type(Abort)[num - 1]

    async def stopped(self) -> FinishAtStop:
        await until(lambda: bool(self.of_type(FinishAtStop)))
        return self.of_type(FinishAtStop)[0]


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until `condition` holds; fails after `BOUND_S`."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 - conditions are over plain values of any object
            await asyncio.sleep(0)
