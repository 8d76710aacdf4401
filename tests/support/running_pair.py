"""A running pair of real services on a tiny model, with clients that read the load each service reports."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from baton.client import Client, PrefillClient
from baton.errors import BatonError
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus, InferenceLoad, PrefillLoad
from baton.service_process import READY_SERVICE, ServiceProcess

BOUND_S = 60.0
"""The longest a test waits for anything, in seconds."""
LOOK_INTERVAL_S = 0.01
RECONNECT_AT_ONCE = {"grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 500}
COMMON_ARGS = ("--num-threads=1", "--debug-checks")
HANDS_ALL_OVER = "--local-prefill-tokens=0"
"""An argument for a decode service, so that tiny prompts go to a prefill service as long ones do."""


@dataclass(frozen=True, slots=True)
class RunningPair:
    """Running services, and clients for them. A test may kill and restart `processes`; the clients reconnect."""

    processes: LocalPair
    decodes: tuple[Client, ...]
    prefills: tuple[PrefillClient, ...]

    @property
    def client(self) -> Client:
        return self.decodes[0]

    def load(self) -> InferenceLoad:
        return self.client.load()

    def prefill_load(self, index: int = 0) -> PrefillLoad:
        return self.prefills[index].load()

    def is_ready(self) -> bool:
        """Returns whether every decode service is ready."""
        return all(client.health(READY_SERVICE["decode"]) is HealthStatus.SERVING for client in self.decodes)

    def loads(self) -> list[PrefillLoad | InferenceLoad]:
        """Returns the load that each service reports, prefill services first."""
        clients: tuple[Client | PrefillClient, ...] = (*self.prefills, *self.decodes)
        return [client.load() for client in clients]

    def holds_nothing(self) -> bool:
        """Returns whether no running service holds a row, a slot or a request."""
        clients: tuple[Client | PrefillClient, ...] = (*self.prefills, *self.decodes)
        return all(
            is_empty(client.load())
            for client, process in zip(clients, self.processes.services, strict=True)
            if process.is_running
        )


@contextmanager
def running_pair(
    model: Path | None,
    *,
    kind: Callable[..., LocalPair] = LocalPair,
    shared_args: Sequence[str] = (),
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
    waits_ready: bool = True,
    hands_all_over: bool = True,
    **options: Any,
) -> Iterator[RunningPair]:
    """Runs a pair of processes on a tiny model, and yields it once it is ready, each replica of it for each decode
    service.

    With `waits_ready` False it does not wait until the services are ready. With `hands_all_over` False the decode
    services compute short prompts themselves, as they do by default. `options` are LocalPair's. `model` is None if each
    service's arguments name its model.
    """
    processes = kind(
        model=None if model is None else str(model),
        dtype="float32",
        prefill_args=(*COMMON_ARGS, *shared_args, *prefill_args),
        decode_args=(*COMMON_ARGS, *([HANDS_ALL_OVER] if hands_all_over else []), *shared_args, *decode_args),
        **options,
    )
    with ExitStack() as stack:
        if waits_ready:
            stack.enter_context(processes)
        else:
            stack.callback(processes.stop)
            processes.start()
        decodes = tuple(
            stack.enter_context(Client(address, channel_overrides=RECONNECT_AT_ONCE))
            for address in processes.decode_addresses
        )
        prefills = tuple(
            stack.enter_context(PrefillClient(address, channel_overrides=RECONNECT_AT_ONCE))
            for address in processes.prefill_addresses
        )
        if waits_ready:  # a decode service is ready with its first replica
            wait_until(lambda: all(each.is_ready for decode in decodes for each in decode.load().prefill_replicas))
        yield RunningPair(processes, decodes, prefills)


@contextmanager
def stopped(*services: ServiceProcess) -> Iterator[None]:
    """Stops the services (SIGSTOP) within the block. Their connections stay open, and they are silent."""
    try:
        for service in services:
            os.kill(service.pid, signal.SIGSTOP)
        yield
    finally:
        for service in services:
            with suppress(ProcessLookupError):
                os.kill(service.pid, signal.SIGCONT)


def prefill_counters(pair: RunningPair) -> dict[str, float]:
    """Returns the metrics of handoffs, each summed over the prefill services. The services must expose metrics."""
    counted: dict[str, float] = {}
    for address in pair.processes.metrics_addresses[: len(pair.prefills)]:
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=BOUND_S).read().decode()
        for each in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
            if each.name.startswith("baton_handoff"):
                counted[each.name] = counted.get(each.name, 0.0) + each.value
    return counted


def is_empty(load: InferenceLoad | PrefillLoad) -> bool:
    num_active = load.num_running if isinstance(load, InferenceLoad) else load.num_computing + load.unsent_bytes
    return load.rows.free == load.rows.total and not load.slots.held and load.num_queued == 0 and num_active == 0


def wait_until(condition: Callable[[], bool], *, about: Callable[[], object] = str, bound_s: float = BOUND_S) -> None:
    """Polls until `condition()` is True. Raises AssertionError with `about()` after `bound_s`.

    A condition that cannot reach its service counts as False.
    """
    give_up_s = time.monotonic() + bound_s
    pause = threading.Event()
    while not _holds(condition):
        assert time.monotonic() < give_up_s, f"not within {bound_s} s: {about()}"
        pause.wait(LOOK_INTERVAL_S)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except BatonError:
        return False
