"""What every process of ours exits with, and how a signal ends one that serves nothing yet."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import structlog

from common.errors import ConfigError, StartupError

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

    previous = {number: signal.signal(number, exit_now) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
