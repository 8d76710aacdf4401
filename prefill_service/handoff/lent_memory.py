"""Places a prefill service's KV pool in memory that receivers can read, if the setting `kv_transport` says so: they map
it, or read it through NIXL (a GPU and RDMA transfer library), which runs in a process that has mapped the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hmac import compare_digest

import structlog

from baton.v1 import prefill_pb2
from common.config.settings import KvTransport
from common.errors import StartupError
from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_pool import DIRECTORY, SharedPool, sweep
from common.nixl.backoff import Backoff
from common.nixl.child import NixlError, TransferProcess

_MAX_DOUBLINGS = 9
"""How many times in a row the wait before a restart may double. The wait grows because each end of NIXL's process
breaks calls.
"""
_TIMEOUT_S = 10.0
_SERVING_INTERVAL_S = 0.0005
_IDLE_INTERVAL_S = 0.02  # the longest that a new receiver waits for its connection

_log = structlog.get_logger(__name__)


class LentMemory:
    """The memory of the KV pool, if receivers can read it. `pool` is None if they cannot, and all KV goes over gRPC."""

    def __init__(self, pool: SharedPool | None, lender: NixlLender | None = None) -> None:
        self.pool = pool
        self._lender = lender

    @classmethod
    async def opened(
        cls,
        transport: KvTransport,
        *,
        groups: Sequence[LayerGroupSpec],
        num_slots: int,
        num_window_slots: int,
        is_on_host: bool,
    ) -> LentMemory:
        """Creates the memory for `transport`, and removes memory that killed processes left behind.

        With "auto" and "shared_memory" it is shared memory; with "grpc" there is none. If a GPU computes (`is_on_host`
        is False) or the memory cannot be created, that is logged, and KV goes over gRPC. Raises StartupError if NIXL is
        configured and cannot be started.
        """
        if transport == "grpc":
            return cls(None)
        tell = _log.info if transport == "auto" else _log.warning
        if not is_on_host:
            tell("kv_over_grpc", reason="a GPU computes: its KV is not in the host's memory")
            return cls(None)
        try:
            sweep()
            pool = SharedPool(
                groups=groups,
                num_slots=num_slots,
                num_window_slots=num_window_slots,
                directory=None if transport == "nixl" else DIRECTORY,
            )
        except OSError as error:
            tell("kv_over_grpc", reason=str(error))
            return cls(None)
        if transport != "nixl":
            return cls(pool)
        lender = NixlLender(pool.file)
        try:
            await lender.open()
        except NixlError as error:
            pool.close()
            raise StartupError(f"kv_transport: {error}") from error
        return cls(pool, lender)

    def offer(self, answer: prefill_pb2.GetFingerprintResponse) -> None:
        """Adds to the answer what receivers need to read the pool, if they can: the name by which they map it, or the
        data with which NIXL reads it, which are empty while NIXL's process does not run.
        """
        if self.pool is not None:
            answer.kv_pool = self.pool.name
        if self._lender is not None:
            answer.nixl_pool.CopyFrom(self._lender.offer)

    def is_read_with(self, secret: bytes) -> bool:
        """Returns whether a receiver that knows this secret of the pool can read it now."""
        if self.pool is None or (self._lender is not None and not self._lender.offer.agent_metadata):
            return False
        return compare_digest(secret, self.pool.secret)

    def follow(self, is_serving: Callable[[], bool]) -> None:
        """Starts to serve reads through NIXL, in the background. Does nothing without NIXL.

        While `is_serving` returns False, NIXL's process polls for reads less often.
        """
        if self._lender is not None:
            self._lender.follow(is_serving)

    async def close(self) -> None:
        if self._lender is not None:
            await self._lender.close()
        if self.pool is not None:
            self.pool.close()


class NixlLender:
    """Runs the NIXL process that serves receivers' reads. For the event loop only.

    Baton's receivers only read; the library cannot prevent others from writing.
    """

    def __init__(self, file: int, *, restart_s: float = 0.5, timeout_s: float = _TIMEOUT_S) -> None:
        """Creates a lender whose process is not started yet.

        `file` is the descriptor of the file that holds the pool's memory; keep it open while this object exists.
        `restart_s` is the first wait before a restart, in seconds. The process's start, and each of its answers, may
        take `timeout_s`.
        """
        self._file = file
        self._timeout_s = timeout_s
        self._backoff = Backoff(first_s=restart_s, max_doublings=_MAX_DOUBLINGS)
        self._process: TransferProcess | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def offer(self) -> prefill_pb2.NixlPool:
        """The data that a receiver needs to read the pool. It is empty while the pool cannot be read."""
        if self._process is None or not self._process.is_usable:
            return prefill_pb2.NixlPool()
        return prefill_pb2.NixlPool(agent_metadata=self._process.metadata, address=self._process.address)

    async def open(self) -> None:
        """Starts the process. Raises NixlError if it does not start."""
        self._process = await TransferProcess.started(self._file, timeout_s=self._timeout_s)
        self._backoff.succeeded()

    def follow(self, is_serving: Callable[[], bool]) -> None:
        """Serves receivers from now on. `is_serving` says whether the service has a handoff call.

        While it has none, the process polls for reads less often, and a new receiver waits longer. If the process
        ends, it is restarted after `restart_s`. That wait doubles each time, up to a limit, and starts over if the
        process lasted longer than the wait before it.
        """
        self._following = asyncio.create_task(self._follow(is_serving), name="nixl")

    async def close(self) -> None:
        """Ends the process, after which no receiver can read the pool."""
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
    """Makes the process poll for reads often while `is_serving` returns True, and seldom otherwise.

    Runs until the process has ended, and raises NixlError then.
    """
    told_s = 0.0
    while process.is_usable:
        interval_s = _SERVING_INTERVAL_S if is_serving() else _IDLE_INTERVAL_S
        if interval_s != told_s:
            await process.serve(interval_s)
            told_s = interval_s
        await asyncio.sleep(_IDLE_INTERVAL_S)
    raise NixlError("NIXL: its process ended")
