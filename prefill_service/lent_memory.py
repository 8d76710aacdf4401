"""Where a prefill service's KV pool lies, by `kv_transport`, so that receivers can read it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import structlog

from baton.v1 import prefill_pb2
from common.errors import StartupError
from common.kv.layer_group import LayerGroupSpec
from common.kv.lent_pool import LentPool
from common.kv.shared_pool import SharedPool, sweep
from common.nixl_agent import NixlError
from prefill_service.nixl_lender import NixlLender

_log = structlog.get_logger(__name__)

KvTransport = Literal["grpc", "shared_memory", "nixl"]


class LentMemory:
    """`pool`: None where nobody can read it, and all KV goes over gRPC."""

    def __init__(
        self, transport: KvTransport, *, groups: Sequence[LayerGroupSpec], num_slots: int, is_on_host: bool
    ) -> None:
        """Raises StartupError when NIXL is asked for and cannot be had."""
        self.pool: LentPool | None = None
        self._shared: SharedPool | None = None
        self._lender: NixlLender | None = None
        if transport != "grpc" and not is_on_host:
            _log.warning("kv_over_grpc", reason="a GPU computes: its KV is not in the host's memory")
        elif transport == "shared_memory":
            self.pool = self._shared = _shared_pool(groups, num_slots)
        elif transport == "nixl":
            try:
                self._lender = NixlLender(groups=groups, num_slots=num_slots)
            except NixlError as error:
                raise StartupError(f"kv_transport: {error}") from error
            self.pool = self._lender.pool

    @property
    def nixl_pool(self) -> prefill_pb2.NixlPool | None:
        """What receivers need to read it through NIXL."""
        return None if self._lender is None else self._lender.offer

    def serve(self, is_serving: Callable[[], bool]) -> None:
        """Answer receivers' reads. Any thread may ask `is_serving`: whether there are calls."""
        if self._lender is not None:
            self._lender.serve(is_serving)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
        if self._lender is not None:
            self._lender.close()


def _shared_pool(groups: Sequence[LayerGroupSpec], num_slots: int) -> SharedPool | None:
    """None when there is no room for it. What killed processes left is removed."""
    try:
        sweep()
        return SharedPool(groups=groups, num_slots=num_slots)
    except OSError as error:
        _log.warning("kv_over_grpc", reason=str(error))
        return None
