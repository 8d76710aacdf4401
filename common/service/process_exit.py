"""How a process of ours ends: by what signals, and with what status."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import structlog

from common.errors import ConfigError, StartupError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_OK, EXIT_STARTUP, EXIT_ENGINE_LOST, EXIT_CONFIG = 0, 1, 1, 2

_log = structlog.get_logger(__name__)


def exit_status_of(error: Exception) -> int:
    """Logs why a process cannot start or go on, in one line, and with a traceback what nobody foresaw."""
    if isinstance(error, StartupError):
        _log.debug("cannot_start_because", exc_info=error)
        _log.critical("cannot_start", error=str(error))
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_STARTUP
    _log.critical("crashed", error=f"{type(error).__name__}: {error}", exc_info=error)
    return EXIT_STARTUP


@contextlib.contextmanager
def exit_on_termination() -> Iterator[None]:
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
