"""JSON logs on stderr, one object a line, from structlog and the standard library alike."""

from __future__ import annotations

import logging
import sys
from typing import IO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger


def configure_logs(level: str, *, stream: IO[str] | None = None, **bound: str) -> None:
    """Call once, in `main`. `bound` is on every line, of every thread: the service's name, its instance id."""

    def add_bound(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        return {**line, **bound}

    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                add_bound,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
