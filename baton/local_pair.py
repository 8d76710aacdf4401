"""Prefill and decode services as child processes of this one, on loopback."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.client.blocking import Client
from baton.errors import BatonError, StartTimedOut
from baton.free_ports import LOOPBACK, free_ports
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE, Role, ServiceProcess

POLL_INTERVAL_S = 0.1
HEALTH_TIMEOUT_S = 1.0
KILL_TIMEOUT_S = 10.0
MODULES: Mapping[Role, str] = {"prefill": "prefill_service", "decode": "decode_service"}


class Phase(Enum):
    """What a service's health says."""

    STARTING = "starting"
    ALIVE = "alive"
    READY = "ready"


OnPhase = Callable[[ServiceProcess, Phase], None]


class LocalPair:
    """`num_prefill` prefill services and `num_decode` decode services that know them all.

    As a context manager it is entered once all are ready, and left once all have ended. The processes die with the
    thread that starts them, however it ends. Options that are None are left to the services' own defaults. `modules`
    are run as the services. With `exposes_metrics` each has a port for them, else none.
    """

    def __init__(
        self,
        *,
        model: str | None = "demo",
        draft: str | None = None,
        num_prefill: int = 1,
        num_decode: int = 1,
        device: str | None = None,
        dtype: str | None = None,
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        prefill_config: Path | None = None,
        decode_config: Path | None = None,
        log_dir: Path | None = None,
        modules: Mapping[Role, str] = MODULES,
        exposes_metrics: bool = False,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 40.0,  # longer than the grace that services give their requests
        on_phase: OnPhase | None = None,
    ) -> None:
        self._modules = modules
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._on_phase = on_phase
        self._owns_log_dir = log_dir is None
        self.log_dir = Path(tempfile.mkdtemp(prefix="baton-")) if log_dir is None else log_dir
        self.log_dir.mkdir(parents=True, exist_ok=True)
        num_services = num_prefill + num_decode
        ports = free_ports(num_services * (2 if exposes_metrics else 1))
        addresses = [f"{LOOPBACK}:{port}" for port in ports]
        self.prefill_addresses = tuple(addresses[:num_prefill])
        self.decode_addresses = tuple(addresses[num_prefill:num_services])
        self.metrics_addresses = tuple(addresses[num_services:])
        metrics = dict(zip(addresses, self.metrics_addresses, strict=False))
        shared = {"model": model, "draft": draft, "device": device, "dtype": dtype}
        self.prefill = tuple(
            self._service(
                "prefill",
                index,
                address,
                {**shared, "config": prefill_config, "metrics-listen": metrics.get(address, "")},
                prefill_args,
            )
            for index, address in enumerate(self.prefill_addresses)
        )
        peers = {"prefill": ",".join(self.prefill_addresses), "config": decode_config}
        self.decode = tuple(
            self._service(
                "decode", index, address, {**shared, **peers, "metrics-listen": metrics.get(address, "")}, decode_args
            )
            for index, address in enumerate(self.decode_addresses)
        )

    @property
    def services(self) -> tuple[ServiceProcess, ...]:
        return (*self.prefill, *self.decode)

    def start(self) -> None:
        """Start every process. Their order does not matter."""
        for service in self.services:
            service.start()

    def wait_ready(self) -> None:
        """Return once every service is ready. Raises ServiceDied, or StartTimedOut after `start_timeout_s`."""
        deadline = time.monotonic() + self._start_timeout_s
        phases = dict.fromkeys(self.services, Phase.STARTING)
        idle = threading.Event()
        with ExitStack() as stack:
            clients = {service: stack.enter_context(_health_client(service.address)) for service in self.services}
            while waiting := [service for service, phase in phases.items() if phase is not Phase.READY]:
                for service in waiting:
                    service.check()
                    phase = _phase(clients[service], service.role)
                    if phase is not phases[service]:
                        phases[service] = phase
                        if self._on_phase is not None:
                            self._on_phase(service, phase)
                if time.monotonic() > deadline:
                    names = tuple(service.name for service in waiting)
                    raise StartTimedOut(names, self._start_timeout_s, waiting[0].log_tail())
                idle.wait(POLL_INTERVAL_S)

    def check(self) -> None:
        """Raises ServiceDied when a process has ended."""
        for service in self.services:
            service.check()

    def stop(self) -> None:
        """End every process: decode services drain first, prefill services after them; then those left are killed."""
        try:
            for services in (self.decode, self.prefill):
                for service in services:
                    service.terminate()
                deadline = time.monotonic() + self._stop_timeout_s
                for service in services:
                    service.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for service in self.services:
                service.kill()
            for service in self.services:
                service.wait(KILL_TIMEOUT_S)
            if self._owns_log_dir:
                shutil.rmtree(self.log_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _service(
        self, role: Role, index: int, address: str, options: Mapping[str, object], arguments: Sequence[str]
    ) -> ServiceProcess:
        flags = {"listen": address, **options}
        return self._new_service(
            name=f"{role}-{index}",
            role=role,
            address=address,
            arguments=(
                "-m",
                self._modules[role],
                *(f"--{flag}={value}" for flag, value in flags.items() if value is not None),
                *arguments,
            ),
            log_file=self.log_dir / f"{role}-{index}.log",
        )

    _new_service = ServiceProcess
    """Builds one service's process."""


def _health_client(address: str) -> Client:
    reconnect_at_once = {"grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 500}
    return Client(address, rpc_timeout_s=HEALTH_TIMEOUT_S, channel_overrides=reconnect_at_once)


def _phase(client: Client, role: Role) -> Phase:
    try:
        if client.health(READY_SERVICE[role]) is HealthStatus.SERVING:
            return Phase.READY
        return Phase.ALIVE
    except BatonError:
        return Phase.STARTING
