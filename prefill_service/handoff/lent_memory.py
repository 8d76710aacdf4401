"""Places a prefill service's KV pool in memory that receivers can read, if the setting `kv_transport` says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from baton.v1 import prefill_pb2
from common.config.settings import KvTransport
from common.errors import StartupError
from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_pool import DIRECTORY, SharedPool, sweep
from common.nixl.child import NixlError
from prefill_service.handoff.nixl_lender import NixlLender

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

    def nixl_offer(self) -> prefill_pb2.NixlPool | None:
        """Returns the data that receivers need to read the pool through NIXL.

        The data are empty while receivers cannot read it, as after NIXL's process has ended. Returns None without NIXL.
        """
        return None if self._lender is None else self._lender.offer

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
