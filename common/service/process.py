"""A service's process: it checks the settings, loads the model, serves in one role after another, and ends at once if
its engine is lost.

    load ─▶ Runtime: weights, programs, ranks ──────────────────────────────────────────▶ end
            serve as prefill ── order ─▶ drain, stop ─▶ serve as decode ── order ─▶ ...
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import structlog
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from common.checkpoints.source import check_draft, check_model
from common.config.fast_paths import FastPath
from common.config.load import other_settings
from common.config.settings import ServiceSettings
from common.errors import EngineLost, StartupError
from common.host.cores import spin_briefly, switch_threads_early, wait_for_computing
from common.host.memory import keep_freed_memory, return_freed_memory
from common.role import Role
from common.service.program import EXIT_ENGINE_LOST, run_program, termination_signals
from common.service.roles import RoleSwitch
from common.telemetry.logs import configure_logs, only_log_lines
from common.telemetry.metrics import RoleMetrics
from common.telemetry.tracing import NO_TRACER, process_tracer

if TYPE_CHECKING:
    from common.service.runtime import Runtime

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The parts that a service is built from: the loaded models and their device, its metrics and its tracer.

    `instance_id` is new for each start of the process and each change of its role, so that others notice. `switch` says
    when the service leaves. The service calls `on_serving` once it answers clients.
    """

    instance_id: str
    runtime: Runtime
    registry: CollectorRegistry
    switch: RoleSwitch
    tracer: Tracer = NO_TRACER
    on_serving: Callable[[], None] = lambda: None


Serve = Callable[[SettingsT, Process], Awaitable[None]]

_PROGRAMS = {Role.PREFILL: "prefill_service", Role.DECODE: "decode_service"}


@dataclass(frozen=True, slots=True)
class RolePart:
    """What a process needs to serve in one role: the settings, and the function that serves."""

    settings: ServiceSettings
    serve: Serve[Any]

    @property
    def program(self) -> str:
        return _PROGRAMS[self.settings.role]


def run_service(
    program: str, kind: type[SettingsT], import_serve: Callable[[], Serve[SettingsT]], argv: Sequence[str]
) -> int:
    """Reads the settings, loads the model, and serves until SIGTERM or SIGINT. Returns `run_program`'s exit status.

    `import_serve` imports the service and returns its function that serves. `kind` is the class of its settings. If
    the engine is lost, this ends the process with status 1. gRPC and the libraries of models are imported only after
    the settings are validated and the named model and draft head seem to exist. So `--help` and mistakes are answered
    at once, and gRPC writes no log lines of its own.
    """

    def work(settings: SettingsT, instance_id: str) -> None:
        try:
            _load_and_serve(settings, instance_id, import_serve)
        except EngineLost as error:
            _log.critical("ended", reason=str(error))
            _end_process(EXIT_ENGINE_LOST)

    with only_log_lines():
        return run_program(program, kind, argv, work)


def _load_and_serve(settings: SettingsT, instance_id: str, import_serve: Callable[[], Serve[SettingsT]]) -> None:
    other = other_settings(settings)
    if other is not None:
        _log.info("config_other_role", **other.model_dump(mode="json"))
    check_model(settings.model)
    if settings.draft:
        check_draft(settings.draft)
    spin_briefly()
    if settings.uses(FastPath.KEPT_MEMORY):
        keep_freed_memory()
    if settings.uses(FastPath.FORWARDS_FIRST) and settings.device == "cpu":
        wait_for_computing()
    if settings.uses(FastPath.SHORT_SWITCH_INTERVAL):
        switch_threads_early()
    with _all_kept():
        from common.rpc.aio import run
        from common.service.runtime import open_runtime
        from common.telemetry.exposition import MetricsServer

        parts = {settings.role: RolePart(settings, import_serve())}
        if other is not None:
            # By its name: the two services do not import each other, and this module imports neither.
            main = importlib.import_module(f"{_PROGRAMS[other.role]}.main")
            parts[other.role] = RolePart(other, main.serve)
    runtime, registry = open_runtime(settings, other), CollectorRegistry()
    with (
        contextlib.closing(runtime),
        MetricsServer(settings.metrics_listen, registry, tokens=_metrics_tokens(settings)),
    ):
        if other is not None:
            with _other_role_named(settings):
                main.check(other, runtime)
        metrics = RoleMetrics(registry)
        run(serve_roles(parts, runtime, metrics, instance_id=instance_id, on_role=_name_in_logs))


def _name_in_logs(part: RolePart, instance_id: str) -> None:
    settings = part.settings
    configure_logs(settings.log_level, settings.log_format, service=part.program, instance_id=instance_id)


async def serve_roles(
    parts: Mapping[Role, RolePart],
    runtime: Runtime,
    metrics: RoleMetrics,
    *,
    instance_id: str,
    on_role: Callable[[RolePart, str], None] = lambda part, instance_id: None,
) -> None:
    """Serves in the first role of `parts`, then in the one that is ordered, and so on, until SIGTERM or SIGINT.

    If a role cannot begin, the process goes back to the one before. Raises the error that ends a service that has
    begun, or keeps a role from beginning if there is none to go back to. `instance_id` is that of the first role.
    `on_role` is called before each later role begins, with its part and instance id.
    """
    switch = RoleSwitch(tuple(parts))
    turn = _RoleTurn(parts[switch.role], instance_id, runtime)
    with contextlib.ExitStack() as signals:
        while True:
            could_not = await turn.serve(switch, metrics, signals)
            role = switch.changing_to
            if switch.is_ending or role is None:
                return
            if could_not:
                assert turn.before is not None
                turn = _RoleTurn(turn.before, uuid.uuid4().hex, runtime, failure=could_not)
            else:
                turn = _RoleTurn(parts[role], uuid.uuid4().hex, runtime, before=turn.part)
            _free()
            on_role(turn.part, turn.instance_id)


def _free() -> None:
    """Frees the memory of a role that has ended. Its parts refer to each other, so only a garbage collection frees
    them.
    """
    gc.collect()
    return_freed_memory()


@dataclass(frozen=True, slots=True)
class _RoleTurn:
    """One turn of a process in a role. `runtime` is that of `open_runtime`.

    `before` is the part to go back to if this one cannot begin, None if there is none. `failure` says why the process
    has gone back to this role, if it has.
    """

    part: RolePart
    instance_id: str
    runtime: Runtime
    before: RolePart | None = None
    failure: str = ""

    async def serve(self, switch: RoleSwitch, metrics: RoleMetrics, signals: contextlib.ExitStack) -> str:
        """Serves until `switch` says that the service leaves. Returns "" then, or why the role could not begin.

        From when the first role serves until `signals` is closed, SIGTERM and SIGINT end the service in order. Before
        that they end the process at once.
        """
        settings, role = self.part.settings, self.part.settings.role
        is_first = switch.changing_to is None
        has_begun = False

        def on_serving() -> None:
            nonlocal has_begun
            has_begun = True
            if is_first:
                signals.enter_context(termination_signals(switch.end))
            else:
                seconds = switch.settle(self.failure)
                metrics.on_change("failed" if self.failure else "changed")
                _log.info("role_settled", role=role, seconds=round(seconds, 3), failure=self.failure)

        switch.begin(role)
        registry = metrics.begin(role)
        runtime = self.runtime
        try:
            if not is_first:
                runtime = self.runtime.in_role(settings)
            with process_tracer(settings, service=self.part.program, instance_id=self.instance_id) as tracer:
                process = Process(
                    instance_id=self.instance_id,
                    runtime=runtime,
                    registry=registry,
                    switch=switch,
                    tracer=tracer,
                    on_serving=on_serving,
                )
                await self.part.serve(settings, process)
        except EngineLost:
            raise
        except Exception as error:
            if has_begun or self.before is None:
                raise
            _log.error("role_not_changed", to=role, error=str(error), exc_info=not isinstance(error, StartupError))
            return str(error) or type(error).__name__
        finally:
            try:
                await asyncio.to_thread(runtime.leave_role)  # it may wait for seconds
            finally:
                metrics.end()
        return ""


@contextlib.contextmanager
def _other_role_named(settings: ServiceSettings) -> Iterator[None]:
    try:
        yield
    except StartupError as error:
        raise type(error)(f"other_role: {settings.other_role}: {error}") from error


def _metrics_tokens(settings: ServiceSettings) -> tuple[str, ...]:
    from common.rpc.bearer_tokens import read_tokens

    file = settings.metrics_token_file
    return () if file is None else read_tokens("metrics_token_file", file)


def _end_process(status: int) -> NoReturn:
    """Ends the process without the interpreter's own shutdown, which may wait for a thread that hangs on a stream or
    device.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def _all_kept() -> Iterator[None]:
    """Excludes from garbage collection the objects that imports inside this context make: they live as long as the
    process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
