"""Runs prefill and decode services, and optionally a gateway, as child processes on this machine."""

from __future__ import annotations

import http.client
import json
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from baton.client.blocking import Client
from baton.errors import BatonError, PairMismatch, StartTimedOut, invalid_field
from baton.free_ports import LOOPBACK, HeldPorts
from baton.server_info import HealthStatus
from baton.service_log import ServiceLog
from baton.service_process import READY_SERVICE, TLS_SETTINGS, ProcessRole, ServiceProcess
from common.addresses import address_of, host_and_port, why_not_listen
from common.peer_text import peer_text

POLL_INTERVAL_S = 0.1
HEALTH_TIMEOUT_S = 1.0
GATEWAY_HEALTH_TIMEOUT_S = 3.0
KILL_TIMEOUT_S = 10.0
MODULES: Mapping[ProcessRole, str] = {"prefill": "prefill_service", "decode": "decode_service", "gateway": "gateway"}
_AWAITS: Mapping[ProcessRole, ProcessRole] = {"decode": "prefill", "gateway": "decode"}
"""Maps each kind of process to the kind of service it waits for."""
_MISMATCH = "FINGERPRINT_MISMATCH"
_READ_LOGS = {"log-format": "json"}  # overrides the environment, because the logs are parsed here


class ProcessPhase(Enum):
    """The state of a process, according to its health check."""

    STARTING = "starting"
    ALIVE = "alive"
    READY = "ready"


OnPhase = Callable[[ServiceProcess, ProcessPhase, str], None]
"""A callback that receives the new phase of a process. The text says why a live process is not ready: what it
waits for while it starts, later what it says itself; "" if unknown.
"""
OnWords = Callable[[ServiceProcess, str], None]


class LocalPair:
    """Runs prefill services, decode services that know all of them, and optionally a gateway, as child processes.

    Use it as a context manager: entering waits until all processes are ready, leaving until all have ended. The
    processes end with this one, even if it is killed.

    Options that are None keep the services' defaults. `modules` names the Python module of each kind of service, and
    `new_service` builds the process. With `gateway_listen` the OpenAI-compatible gateway runs too. With
    `exposes_metrics`, or with a gateway, each service has a port for metrics. The first decode service listens on
    `decode_port` if that is free. No process gets one of `taken_ports`, because other pairs will listen on them. Logs
    go to `log_dir`, or else to a temporary directory, which is removed at the end unless the pair failed. While the
    pair is watched, `on_phase` receives changes of health, and `on_words` receives log lines as text.
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
        modules: Mapping[ProcessRole, str] = MODULES,
        exposes_metrics: bool = False,
        decode_port: int | None = None,
        taken_ports: Collection[int] = (),
        gateway_listen: str | None = None,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 40.0,  # longer than the grace period that services give requests
        on_phase: OnPhase = lambda service, phase, why: None,
        on_words: OnWords = lambda service, words: None,
        new_service: Callable[..., ServiceProcess] = ServiceProcess,
    ) -> None:
        self._modules = modules
        self._new_service = new_service
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._on_phase = on_phase
        self._on_words = on_words
        gateway = None if gateway_listen is None else _place(gateway_listen, taken_ports)
        self._owns_log_dir = log_dir is None
        self.log_dir = _writable(log_dir)
        num_services = num_prefill + num_decode
        exposes_metrics = exposes_metrics or gateway is not None
        asked_for = [port for port in (decode_port, gateway and gateway[1]) if port]
        num_ports = num_services * (2 if exposes_metrics else 1)
        self._held = HeldPorts(num_ports + 1, taken={*taken_ports, *asked_for})
        *ports, spare = self._held.numbers
        gateway_address = None if gateway is None else address_of(gateway[0], gateway[1] or spare)
        gateway_ports = [] if gateway is None else [gateway[1] or spare]
        if decode_port is not None and decode_port not in (*taken_ports, *gateway_ports):
            ports[num_prefill] = ports[num_prefill] if why_not_listen(f"{LOOPBACK}:{decode_port}") else decode_port
        self.ports = (*ports, *gateway_ports)
        addresses = [f"{LOOPBACK}:{port}" for port in ports]
        self.prefill_addresses = tuple(addresses[:num_prefill])
        self.decode_addresses = tuple(addresses[num_prefill:num_services])
        self.metrics_addresses = tuple(addresses[num_services:])
        metrics = dict(zip(addresses, self.metrics_addresses, strict=False))
        shared = {"model": model, "draft": draft, "device": device, "dtype": dtype, **_READ_LOGS}
        peers = {"prefill": ",".join(self.prefill_addresses), "config": decode_config}
        shares = _memory_shares(
            ("prefill", num_prefill, [*_flags({**shared, "config": prefill_config}), *prefill_args]),
            ("decode", num_decode, [*_flags({**shared, **peers}), *decode_args]),
        )
        self.prefill = tuple(
            self._service(
                "prefill",
                f"prefill-{index}",
                address,
                {**shared, "config": prefill_config, "metrics-listen": metrics.get(address, ""), **shares["prefill"]},
                prefill_args,
            )
            for index, address in enumerate(self.prefill_addresses)
        )
        self.decode = tuple(
            self._service(
                "decode",
                f"decode-{index}",
                address,
                {**shared, **peers, "metrics-listen": metrics.get(address, ""), **shares["decode"]},
                decode_args,
            )
            for index, address in enumerate(self.decode_addresses)
        )
        self.gateway: ServiceProcess | None = None
        if gateway_address is not None:
            behind = {
                "decode": ",".join(self.decode_addresses),
                "metrics-targets": ",".join(self.metrics_addresses),
                **_READ_LOGS,
            }
            self.gateway = self._service("gateway", "gateway", gateway_address, behind)
        self._logs = {process: ServiceLog(process.log_file) for process in self.processes}

    @property
    def services(self) -> tuple[ServiceProcess, ...]:
        return (*self.prefill, *self.decode)

    @property
    def processes(self) -> tuple[ServiceProcess, ...]:
        """The processes of all services, and of the gateway if there is one."""
        return self.services if self.gateway is None else (*self.services, self.gateway)

    @property
    def gateway_url(self) -> str | None:
        return None if self.gateway is None else f"http://{self.gateway.address}"

    def start(self) -> None:
        """Starts all processes at once, because the order does not matter. Does not wait until they are ready."""
        for process in self.processes:
            process.start()

    def wait_ready(self) -> None:
        """Waits until every process is ready.

        Raises ServiceDied if one has ended, PairMismatch if the services cannot work together, and StartTimedOut after
        `start_timeout_s`.
        """
        deadline = time.monotonic() + self._start_timeout_s
        idle = threading.Event()
        with self.watch() as watch:
            while waiting := [process for process, phase in watch.phases.items() if phase is not ProcessPhase.READY]:
                self.check()
                watch.read_logs()
                for process in waiting:
                    watch.look_at(process)
                    watch.require_agreement(process)
                if time.monotonic() > deadline:
                    why = {process.name: watch.why_not_ready(process) for process in waiting}
                    raise StartTimedOut(why, self._start_timeout_s, self.log_dir)
                idle.wait(POLL_INTERVAL_S)

    def watch(self) -> PairWatch:
        """Returns a new PairWatch of all processes, to be used as a context manager.

        It does nothing by itself: its `look_at` tells the pair's `on_phase` of changes of health, and its `read_logs`
        passes new log lines to the pair's `on_words`.
        """
        return PairWatch(self._logs, self._on_phase, self._on_words)

    def check(self) -> None:
        """Raises ServiceDied when a process has ended."""
        for process in self.processes:
            process.check()

    def stop(self, *, keeps_logs: bool = False) -> None:
        """Ends every process: first the gateway, then the decode services, then the prefill services.

        Each kind has `stop_timeout_s` to finish its requests. Processes that have not ended by then are killed. A
        temporary log directory is removed unless `keeps_logs`.
        """
        try:
            for processes in ((self.gateway,) if self.gateway else (), self.decode, self.prefill):
                for process in processes:
                    process.terminate()
                deadline = time.monotonic() + self._stop_timeout_s
                for process in processes:
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.wait(KILL_TIMEOUT_S)
            self._held.release()
            if self._owns_log_dir and not keeps_logs:
                shutil.rmtree(self.log_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException as error:
            self.stop(keeps_logs=isinstance(error, Exception))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(keeps_logs=isinstance(error, Exception))

    def _service(
        self, role: ProcessRole, name: str, address: str, options: Mapping[str, object], arguments: Sequence[str] = ()
    ) -> ServiceProcess:
        return self._new_service(
            name=name,
            role=role,
            address=address,
            arguments=(
                "-m",
                self._modules[role],
                *_flags({"listen": address, **options}),
                *arguments,
            ),
            log_file=self.log_dir / f"{name}.log",
        )


class PairWatch:
    """Watches processes through their health checks and their logs. Use it as a context manager.

    It has no thread: `look_at` checks one process's health now, and `read_logs` passes on new log lines.
    """

    def __init__(self, logs: Mapping[ServiceProcess, ServiceLog], on_phase: OnPhase, on_words: OnWords) -> None:
        self.phases = dict.fromkeys(logs, ProcessPhase.STARTING)
        self._logs = logs
        self._on_phase = on_phase
        self._on_words = on_words
        self._healths: dict[ServiceProcess, _ProcessHealth] = {
            process: _HttpHealth(process) if process.role == "gateway" else _GrpcHealth(process) for process in logs
        }

    def read_logs(self) -> None:
        for process, log in self._logs.items():
            for words in log.new_words():
                self._on_words(process, words)

    def look_at(self, process: ServiceProcess) -> None:
        phase = self._healths[process].phase() if process.is_running else ProcessPhase.STARTING
        before = self.phases[process]
        if phase is not before:
            self.phases[process] = phase
            self._on_phase(process, phase, self._why(process, before) if phase is ProcessPhase.ALIVE else "")

    def require_agreement(self, process: ServiceProcess) -> None:
        """Raises PairMismatch when the decode service has found that no prefill service can ever serve it."""
        if self.phases[process] is ProcessPhase.ALIVE:
            difference = self._healths[process].mismatch()
            if difference:
                raise PairMismatch(f"{process.name}: {difference}; its log: {process.log_file}", reason=_MISMATCH)

    def why_not_ready(self, process: ServiceProcess) -> str:
        """Returns why the process is not ready, or "" if it has not said."""
        return self._healths[process].why_not_ready()

    def _why(self, process: ServiceProcess, before: ProcessPhase) -> str:
        """Returns why `process`, whose phase was `before`, is not ready.

        A starting process waits for others. Its own reason would be that it cannot reach them, as if something were
        wrong.
        """
        awaited = [other.name for other in self.phases if other.role == _AWAITS.get(process.role)]
        if before is ProcessPhase.STARTING and awaited:
            return f"waits for {' or '.join(awaited)}"
        return self.why_not_ready(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for health in self._healths.values():
            health.close()


class _ProcessHealth(Protocol):
    def phase(self) -> ProcessPhase: ...

    def why_not_ready(self) -> str: ...

    def mismatch(self) -> str: ...

    def close(self) -> None: ...


class _GrpcHealth:
    """Checks the health of a prefill or decode service over gRPC."""

    def __init__(self, process: ServiceProcess) -> None:
        reconnect_at_once = {"grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 500}
        self._client = Client(process.address, rpc_timeout_s=HEALTH_TIMEOUT_S, channel_overrides=reconnect_at_once)
        self._role = process.role

    def phase(self) -> ProcessPhase:
        try:
            if self._client.health(READY_SERVICE[self._role]) is HealthStatus.SERVING:
                return ProcessPhase.READY
            return ProcessPhase.ALIVE
        except BatonError:
            return ProcessPhase.STARTING

    def why_not_ready(self) -> str:
        return "; ".join(reason for reason, _ in self._reasons() if reason)

    def mismatch(self) -> str:
        reasons = self._reasons()
        agreeing = [reason for reason, error_reason in reasons if error_reason != _MISMATCH]
        return "" if agreeing or not reasons else reasons[0][0]

    def _reasons(self) -> list[tuple[str, str]]:
        """Returns why each prefill replica of a decode service is not ready: in words, and as an ErrorInfo reason.

        Both are "" for a ready replica. The list is empty for a prefill service, and if the decode service does not
        answer.
        """
        if self._role != "decode":
            return []
        try:
            replicas = self._client.load().prefill_replicas
        except BatonError:
            return []
        return [(replica.reason, replica.error_reason) for replica in replicas]

    def close(self) -> None:
        self._client.close()


class _HttpHealth:
    """Checks the gateway's health over HTTP."""

    def __init__(self, process: ServiceProcess) -> None:
        self._url = f"http://{process.address}/health"
        self._why_not_ready = ""
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def phase(self) -> ProcessPhase:
        try:
            with self._opener.open(self._url, timeout=GATEWAY_HEALTH_TIMEOUT_S) as response:
                return ProcessPhase.READY if response.status == HTTPStatus.OK else ProcessPhase.ALIVE
        except urllib.error.HTTPError as refusal:
            with refusal, suppress(OSError, http.client.HTTPException, ValueError, TypeError, LookupError):
                self._why_not_ready = peer_text(str(json.load(refusal)["reason"]))
            return ProcessPhase.ALIVE
        except (OSError, http.client.HTTPException, ValueError):
            return ProcessPhase.STARTING

    def why_not_ready(self) -> str:
        return self._why_not_ready

    def mismatch(self) -> str:
        return ""

    def close(self) -> None:
        self._opener.close()


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _memory_shares(*kinds: tuple[ProcessRole, int, Sequence[str]]) -> dict[ProcessRole, Mapping[str, object]]:
    """Returns for each role the option that sets `memory_share`, so that services on one device divide its memory.

    Each entry of `kinds` is a role, the number of its services and their arguments. Services with a configured share
    keep it. The others divide the rest equally: what the configured ones leave of one default share on a GPU, and of
    two default shares on a CPU, because there the default is the share of one of two services. The result has no option
    for a role whose share is configured, or whose default is small enough, or for which nothing is left. It is empty
    if a configuration is invalid, which is reported later.
    """
    from common.config.load import load_settings
    from common.config.settings import DecodeSettings, PrefillSettings
    from common.errors import ConfigError

    shares: dict[ProcessRole, Mapping[str, object]] = {role: {} for role, *_ in kinds}
    settings = {}
    try:
        for role, _, arguments in kinds:
            kind = PrefillSettings if role == "prefill" else DecodeSettings
            settings[role] = load_settings(kind, arguments, program=role, without=TLS_SETTINGS)
    except ConfigError:
        return shares  # the checks before the start, or the service itself, report the error
    for device in dict.fromkeys(each.device_key for each in settings.values()):
        here = {role: num for role, num, _ in kinds if settings[role].device_key == device}
        untold = [role for role in here if "memory_share" not in settings[role].model_fields_set]
        told = sum(num * settings[role].memory_share for role, num in here.items() if role not in untold)
        num_untold = sum(here[role] for role in untold)
        for role in untold:
            alone = settings[role].memory_share
            whole = 2 * alone if device == "cpu" else alone
            if 0 < (share := (whole - told) / num_untold) < alone:
                shares[role] = {"memory-share": f"{share:.4f}"}
    return shares


def _place(listen: str, taken_ports: Collection[int]) -> tuple[str, int]:
    """Returns the host and port that the gateway is to listen on; port 0 stands for any.

    Raises InvalidArgument unless `listen` is HOST:PORT and the port is not taken by another pair.
    """
    try:
        host, port = host_and_port(listen)
        if not host.isascii() or "%" in host:  # the host becomes part of a URL
            raise ValueError(f"{listen!r} is not HOST:PORT")
        if port in taken_ports:
            raise ValueError(f"another `baton up` has port {port}; take another, or 0 for a free one")
    except ValueError as error:
        raise invalid_field("gateway_listen", error) from None
    return host, port


def _writable(log_dir: Path | None) -> Path:
    """Returns the directory for logs, and creates it if needed. None makes a temporary one.

    Raises InvalidArgument when no log can be written there.
    """
    try:
        if log_dir is None:
            return Path(tempfile.mkdtemp(prefix="baton-"))
        log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            return log_dir
    except OSError as error:
        raise invalid_field("log_dir", f"{error.filename or log_dir}: {error.strerror}") from None
