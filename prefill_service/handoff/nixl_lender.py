"""The prefill service's end of NIXL: a process that has mapped the KV pool and lets receivers read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from baton.v1 import prefill_pb2
from common.nixl.backoff import Backoff
from common.nixl.child import NixlError, TransferProcess

_MAX_DOUBLINGS = 9
"""Doublings of the time until an ended process restarts: each end costs receivers' calls an attempt."""
_TIMEOUT_S = 10.0
_SERVING_INTERVAL_S = 0.0005
_IDLE_INTERVAL_S = 0.02  # new receivers connect at such a look

_log = structlog.get_logger(__name__)


class NixlLender:
    """Event loop only. Baton's receivers only read; the library cannot forbid others to write."""

    def __init__(self, file: int, *, restart_s: float = 0.5) -> None:
        """`file` is the pool's memory and stays open as long as this object. `restart_s`: see `follow`."""
        self._file = file
        self._backoff = Backoff(first_s=restart_s, max_doublings=_MAX_DOUBLINGS)
        self._process: TransferProcess | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def offer(self) -> prefill_pb2.NixlPool:
        """What a receiver needs to read the pool; empty while nobody can."""
        if self._process is None or not self._process.is_usable:
            return prefill_pb2.NixlPool()
        return prefill_pb2.NixlPool(agent_metadata=self._process.metadata, address=self._process.address)

    async def open(self) -> None:
        """Raises NixlError."""
        self._process = await TransferProcess.started(self._file, timeout_s=_TIMEOUT_S)
        self._backoff.succeeded()

    def follow(self, is_serving: Callable[[], bool]) -> None:
        """Serve receivers, less often while not `is_serving`. An ended process restarts after `restart_s`, each time
        after twice as long, unless it has lasted longer than that.
        """
        self._following = asyncio.create_task(self._follow(is_serving), name="nixl")

    async def close(self) -> None:
        """No receiver can read any more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        if self._process is not None:
            await self._process.close()

    async def _follow(self, is_serving: Callable[[], bool]) -> None:
        while True:
            try:
                if self._process is None or not self._process.is_usable:
                    await self.open()
                assert self._process is not None
                await _keep_pace(self._process, is_serving)
            except NixlError as error:
                wait_s = self._backoff.next_wait_s()
                _log.warning("kv_over_grpc", reason=str(error), seconds=wait_s)
                await asyncio.sleep(wait_s)


async def _keep_pace(process: TransferProcess, is_serving: Callable[[], bool]) -> None:
    """Raises NixlError when the process has ended, which it does not by itself."""
    told_s = 0.0
    while process.is_usable:
        interval_s = _SERVING_INTERVAL_S if is_serving() else _IDLE_INTERVAL_S
        if interval_s != told_s:
            await process.serve(interval_s)
            told_s = interval_s
        await asyncio.sleep(_IDLE_INTERVAL_S)
    raise NixlError("NIXL: its process ended")
