"""Writes to a client's stream. A client that reads nothing for too long counts as gone."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc

from baton.v1 import inference_pb2
from common.errors import RequestCancelled


class ClientWrites:
    """Writes a client's stream with a time-out for slow clients. One task makes all writes, inside a `with` block.

    A single timer watches all writes and is set again when it fires, because a timer for each write would cost as much
    as the write itself.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], *, stall_timeout_s: float) -> None:
        self._context = context
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._began_s: float | None = None
        self._has_stalled = False
        self._timer = self._loop.call_later(stall_timeout_s, self._look)

    async def write(self, event: inference_pb2.GenerateEvent) -> None:
        """Writes one event. Raises RequestCancelled if the client reads nothing for `stall_timeout_s`."""
        self._began_s = self._loop.time()
        try:
            await self._context.write(event)
        except asyncio.CancelledError:
            if not self._has_stalled or self._task.uncancel():
                raise
            raise RequestCancelled(f"the client read nothing for {self._stall_timeout_s} s") from None
        finally:
            self._began_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._began_s is None else self._began_s) + self._stall_timeout_s
        if due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._look)
            return
        self._has_stalled = True
        self._task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
