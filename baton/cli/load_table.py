"""Reads the load of a pair's services and shows it as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Self

from rich.table import Table

from baton.client import Client, PrefillClient
from baton.errors import BatonError
from baton.local_pair import LocalPair
from baton.server_info import InferenceLoad, PoolLoad, PrefillLoad

LOAD_TIMEOUT_S = 2.0

ServiceLoad = InferenceLoad | PrefillLoad | BatonError


class LoadReader:
    """Asks every service of a pair for its load. If a service does not answer, its error takes the
    place of its load.
    """

    def __init__(self, pair: LocalPair) -> None:
        self._stack = ExitStack()
        self._clients: dict[str, Client | PrefillClient] = {}
        for service in pair.services:
            client: Client | PrefillClient = (
                PrefillClient(service.address, rpc_timeout_s=LOAD_TIMEOUT_S)
                if service.role == "prefill"
                else Client(service.address, rpc_timeout_s=LOAD_TIMEOUT_S)
            )
            self._stack.callback(client.close)
            self._clients[service.name] = client

    def read(self) -> dict[str, ServiceLoad]:
        loads: dict[str, ServiceLoad] = {}
        for name, client in self._clients.items():
            try:
                loads[name] = client.load()
            except BatonError as error:
                loads[name] = error
        return loads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def load_table(addresses: Mapping[str, str], loads: Mapping[str, ServiceLoad]) -> Table:
    table = Table("service", "address", "requests", "rows", "KV slots", box=None)
    for name, address in addresses.items():
        match loads.get(name):
            case InferenceLoad() as load:
                requests = f"{load.num_running} running, {load.num_queued} queued"
            case PrefillLoad() as load:
                requests = f"{load.num_computing} computing, {load.num_queued} queued"
            case error:
                table.add_row(name, address, "" if error is None else str(error))
                continue
        table.add_row(name, address, requests, pool_text(load.rows), pool_text(load.slots))
    return table


def pool_text(pool: PoolLoad) -> str:
    """Formats how many rows or slots of the pool are in each state. States that hold none are left out."""
    states = ("cached", "reserved", "transferring", "running", "quarantined")
    in_use = [f"{getattr(pool, state)} {state}" for state in states if getattr(pool, state)]
    return ", ".join([f"{pool.free} of {pool.total} free", *in_use])
