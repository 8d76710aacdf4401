"""What this package needs of a logger. It has no logging library of its own."""

from __future__ import annotations

from typing import Protocol


class Log(Protocol):
    """The part of a structlog logger that this package uses."""

    def info(self, event: str, *values: object, **fields: object) -> object: ...

    def warning(self, event: str, *values: object, **fields: object) -> object: ...


class _NoLog:
    def info(self, event: str, *values: object, **fields: object) -> None: ...

    def warning(self, event: str, *values: object, **fields: object) -> None: ...


NO_LOG: Log = _NoLog()
