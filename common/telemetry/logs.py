"""Configures logging to stderr, for structlog and the standard library: one JSON object per line, or text for
people.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import IO, Any, Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from common.peer_text import peer_text

_MAX_FIELD_BYTES = 4096

_log = structlog.get_logger(__name__)


def configure_logs(
    level: str, log_format: Literal["json", "console"] = "json", *, stream: IO[str] | None = None, **bound: str
) -> None:
    """Sets up logging. Call it in `main`, and again once the settings are known.

    `bound` is added to every line of every thread, such as the service's name and instance id.
    """
    stream = stream or sys.stderr

    def add_bound(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        return {**line, **bound}

    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        _bound,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    as_json: list[Processor] = [
        add_bound,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=str),
    ]
    for_people: list[Processor] = [
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
        )
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(as_json if log_format == "json" else for_people),
            ],
        )
    )
    root = logging.getLogger()  # noqa: TID251 - libraries log to it
    root.handlers = [handler]
    root.setLevel(level.upper())
    # httpx2 would log every request of the status page.
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # noqa: TID251 - it is not ours


def _bound(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """Escapes and shortens the text fields of a log line, since any of them may come from a peer.

    It runs before tracebacks are added, which therefore stay as they are.
    """
    return {key: peer_text(value, _MAX_FIELD_BYTES) if isinstance(value, str) else value for key, value in line.items()}


@contextlib.contextmanager
def only_log_lines() -> Iterator[None]:
    """Inside this context, messages that Python and gRPC would write to stderr become log lines, or are dropped.

    Enter it before gRPC is imported. gRPC's own lines are dropped; the errors that it raises have the same text.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    def on_thread(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
            name = failed.thread.name if failed.thread else ""
            _log.error("thread_crashed", thread=name, exc_info=failed.exc_value)

    def on_unraisable(failed: Any) -> None:
        _log.error("exception_ignored", about=failed.err_msg or repr(failed.object), exc_info=failed.exc_value)

    def on_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        _log.warning("python_warning", message=str(message), category=category.__name__, place=f"{filename}:{lineno}")

    before = threading.excepthook, sys.unraisablehook, warnings.showwarning
    threading.excepthook, sys.unraisablehook, warnings.showwarning = on_thread, on_unraisable, on_warning  # type: ignore[assignment]
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook, warnings.showwarning = before
