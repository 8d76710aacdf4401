"""Injects faults into Handoff calls: into frames that the prefill service sends and commands that it receives."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.faults.injector import Injector
from tests.faults.plan import Action, Fault

FRAME, COMMAND = "handoff.frame", "handoff.command"


class FaultyContext:
    """Wraps the ServicerContext of a streaming call of bytes. Reads and writes may be damaged; everything else
    passes through.
    """

    def __init__(self, context: Any, injector: Injector) -> None:
        self._context = context
        self._injector = injector
        self._overtaken: bytes | None = None
        self._arrived: list[object] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, data: bytes) -> None:
        """Writes a frame, possibly with a fault. A reordered frame is held back and goes out after the next one."""
        fault = self._injector.visit(FRAME)
        late, self._overtaken = self._overtaken, None
        if fault is not None and fault.action is Action.REORDER:
            self._overtaken = data
            parts = []
        else:
            parts = await self._changed(fault, data)
        for part in (*parts, *([] if late is None else [late])):
            await self._context.write(part)

    async def read(self) -> object:
        while not self._arrived:
            data = await self._context.read()
            is_command = isinstance(data, bytes)
            self._arrived = list(await self._changed(self._injector.visit(COMMAND), data)) if is_command else [data]
        return self._arrived.pop(0)

    async def end(self) -> None:
        """Writes the frame that is still held back for reordering, if there is one: no other frame follows it."""
        if self._overtaken is not None:
            await self._context.write(self._overtaken)

    async def _changed(self, fault: Fault | None, data: bytes) -> list[bytes]:
        if fault is None:
            return [data]
        match fault.action:
            case Action.DROP:
                return []
            case Action.DUPLICATE:
                return [data, data]
            case Action.DELAY:
                await asyncio.sleep(fault.seconds)
                return [data]
            case _:
                return [self._injector.damage(fault, data)]
