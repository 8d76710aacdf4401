"""What every program of ours does around its work: settings, logs, signals, and the status that it exits with."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import structlog

from common.config.load import load_settings, log_format_asked
from common.config.process_settings import ProcessSettings
from common.errors import ConfigError, StartupError
from common.host.descriptors import raise_descriptor_limit
from common.telemetry.logs import configure_logs

SettingsT = TypeVar("SettingsT", bound=ProcessSettings)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_OK, EXIT_STARTUP, EXIT_ENGINE_LOST, EXIT_CONFIG = 0, 1, 1, 2

_log = structlog.get_logger(__name__)


def run_program(
    program: str, kind: type[SettingsT], argv: Sequence[str], work: Callable[[SettingsT, str], None]
) -> int:
    """Read the settings, then do `work` with them and an instance id that is never used again. Returns the exit status:
    0 after an orderly end, 1 when it could not start or go on, 2 when its configuration is wrong. The log says which.
    """
    with _exit_on_termination():
        configure_logs("info", log_format_asked(argv), service=program)
        try:
            settings = load_settings(kind, argv, program=program)
            instance_id = uuid.uuid4().hex
            configure_logs(settings.log_level, settings.log_format, service=program, instance_id=instance_id)
            _log.info("config", **settings.model_dump(mode="json"))
            raise_descriptor_limit()
            work(settings, instance_id)
        except Exception as error:
            return _exit_status_of(error)
    _log.info("stopped")
    return EXIT_OK


def _exit_status_of(error: Exception) -> int:
    """Logs why a process cannot start or go on, in one line, and with a traceback what nobody foresaw."""
    if isinstance(error, StartupError):
        _log.debug("cannot_start_because", exc_info=error)
        _log.critical("cannot_start", error=str(error))
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_STARTUP
    _log.critical("crashed", error=f"{type(error).__name__}: {error}", exc_info=error)
    return EXIT_STARTUP


@contextlib.contextmanager
def _exit_on_termination() -> Iterator[None]:
    """A signal while nothing is served yet ends the process at once, and in order."""

    def exit_now(_number: int, _frame: object) -> None:
        raise SystemExit(EXIT_OK)

    previous = {number: signal.signal(number, exit_now) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def termination_signals() -> Iterator[asyncio.Event]:
    """The event is set by the first SIGTERM or SIGINT; a further one ends the process as the system has it."""
    loop = asyncio.get_running_loop()
    received = asyncio.Event()

    def on_signal() -> None:
        received.set()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield received
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
