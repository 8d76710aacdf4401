"""The frame of every program of Baton: settings, logs, signals and the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import structlog

from common.config.load import load_settings, log_format_asked
from common.config.settings import ProcessSettings
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
    """Reads the settings, then calls `work` with them and a unique instance id. Returns the exit status.

    It is 0 after an orderly end, 1 if the program could not start or continue, 2 if its configuration is wrong. The log
    states the reason.
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
    """Logs in one line why the process cannot start or continue, and returns its exit status.

    An unexpected error is logged with its traceback.
    """
    if isinstance(error, StartupError):
        _log.debug("cannot_start_because", exc_info=error)
        _log.critical("cannot_start", error=str(error))
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_STARTUP
    _log.critical("crashed", error=f"{type(error).__name__}: {error}", exc_info=error)
    return EXIT_STARTUP


@contextlib.contextmanager
def _exit_on_termination() -> Iterator[None]:
    """Inside this context, SIGTERM and SIGINT end the process at once and with status 0, because nothing is
    served yet.
    """

    def exit_now(_number: int, _frame: object) -> None:
        raise SystemExit(EXIT_OK)

    previous = {number: signal.signal(number, exit_now) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def termination_signals(on_first: Callable[[], None]) -> Iterator[None]:
    """Inside this context the first SIGTERM or SIGINT calls `on_first`, on the event loop. A second signal has the
    system's default effect.
    """
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        on_first()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
