"""A service's process: it checks the settings, loads the model, serves, and ends at once if its engine is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

import structlog
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from common.checkpoints.draft_source import check_draft
from common.checkpoints.source import check_model
from common.config.fast_paths import FastPath
from common.config.settings import ServiceSettings
from common.errors import EngineLost
from common.host.cores import spin_briefly, switch_threads_early, wait_for_computing
from common.host.memory import keep_freed_memory
from common.service.program import EXIT_ENGINE_LOST, run_program
from common.telemetry.logs import only_log_lines
from common.telemetry.tracing import NO_TRACER, process_tracer

if TYPE_CHECKING:
    from common.service.runtime import Runtime

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The parts that a service is built from: the loaded models and their device, its metrics and its tracer.

    `instance_id` is new for each start of the process, so that others notice a restart.
    """

    instance_id: str
    runtime: Runtime
    registry: CollectorRegistry
    tracer: Tracer = NO_TRACER


Serve = Callable[[SettingsT, Process], Awaitable[None]]


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
            _load_and_serve(program, settings, instance_id, import_serve)
        except EngineLost as error:
            _log.critical("ended", reason=str(error))
            _end_process(EXIT_ENGINE_LOST)

    with only_log_lines():
        return run_program(program, kind, argv, work)


def _load_and_serve(
    program: str, settings: SettingsT, instance_id: str, import_serve: Callable[[], Serve[SettingsT]]
) -> None:
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
        from common.rpc.event_loop import run
        from common.service.runtime import open_runtime
        from common.telemetry.exposition import MetricsServer

        serve = import_serve()
    runtime, registry = open_runtime(settings), CollectorRegistry()
    with (
        contextlib.closing(runtime),
        MetricsServer(settings.metrics_listen, registry, tokens=_metrics_tokens(settings)),
        process_tracer(settings, service=program, instance_id=instance_id) as tracer,
    ):
        process = Process(instance_id=instance_id, runtime=runtime, registry=registry, tracer=tracer)
        run(_serve(serve, settings, process))


def _metrics_tokens(settings: ServiceSettings) -> tuple[str, ...]:
    from common.rpc.bearer_tokens import read_tokens

    file = settings.metrics_token_file
    return () if file is None else read_tokens("metrics_token_file", file)


async def _serve(serve: Serve[SettingsT], settings: SettingsT, process: Process) -> None:
    await serve(settings, process)


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
