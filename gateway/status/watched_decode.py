"""Asks one decode service over gRPC for its load and the readiness of its prefill replicas."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

from baton.client import AsyncClient, Tls
from baton.errors import BatonError
from baton.server_info import InferenceLoad
from gateway.status.addresses import Address
from gateway.status.snapshot import Decode, ReplicaFigures

MAX_REASON_CHARS = 200


class LoadClient(Protocol):
    async def load(self) -> InferenceLoad:
        """Returns the service's load. Raises BatonError."""

    async def close(self) -> None: ...


OpenClient = Callable[[Address], LoadClient]


def open_clients(*, tls: Tls | None, token: str | None) -> OpenClient:
    """Returns a function that opens a client of one decode service.

    With TLS, the service's certificate must be for the host name that was looked up, unless `tls` names another.
    """

    def open_client(address: Address) -> LoadClient:
        own = tls and dataclasses.replace(tls, server_name=tls.server_name or address.host)
        return AsyncClient(address.numeric, tls=own, token=token)

    return open_client


class WatchedDecode:
    """A decode service whose load is asked for once a round, for at most `timeout_s`."""

    def __init__(self, address: Address, *, open_client: OpenClient, timeout_s: float) -> None:
        self._address = address
        self._client = open_client(address)
        self._timeout_s = timeout_s
        self._load: InferenceLoad | None = None
        self._reason = "not asked yet"

    async def sample(self, now_s: float) -> None:
        self._load = None
        try:
            async with asyncio.timeout(self._timeout_s):
                self._load = await self._client.load()
        except TimeoutError:
            self._reason = f"no answer within {self._timeout_s:g} s"
        except BatonError as error:
            self._reason = str(error)[:MAX_REASON_CHARS]
        else:
            self._reason = ""

    async def close(self) -> None:
        await self._client.close()

    def view(self) -> Decode:
        load = self._load
        return Decode(
            target=self._address.target,
            address=self._address.numeric,
            is_reachable=load is not None,
            reason=self._reason,
            instance_id="" if load is None else load.instance_id,
            num_queued=None if load is None else load.num_queued,
            num_running=None if load is None else load.num_running,
            is_degraded=load is not None and load.is_degraded,
            prefill_replicas=() if load is None else _replicas(load),
        )


def unknown_decode(target: str, reason: str) -> Decode:
    """Returns what the status page shows of a decode target that has no address."""
    return Decode(target, "", False, reason, "", None, None, False, ())


def _replicas(load: InferenceLoad) -> tuple[ReplicaFigures, ...]:
    return tuple(
        ReplicaFigures(each.address, each.is_ready, each.num_rows, each.num_known_tokens, each.reason)
        for each in load.prefill_replicas
    )
