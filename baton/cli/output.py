"""What commands print: text for people, or one JSON object a line."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from baton.errors import BatonError, FailedPrecondition, Unauthenticated

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters but tabs and line feeds."""
_OWN_PACKAGES = frozenset({"baton", "baton_cpu", "common", "training"})


def print_json(event: str, **fields: Any) -> None:
    """One line on standard output, written at once."""
    line = json.dumps({"event": event, **fields}, default=_plain, ensure_ascii=False)
    print(_CONTROLS.sub(lambda code: f"\\u{ord(code[0]):04x}", line), flush=True)  # those that JSON does not escape


def print_event(value: Any) -> None:
    """A dataclass as one line; its type's name is the event."""
    print_json(type(value).__name__.lower(), **dataclasses.asdict(value))


def print_text(text: str) -> None:
    """Print the model's text as it arrives. A terminal gets control characters escaped: they could command it."""
    if sys.stdout.isatty():
        text = _CONTROLS.sub(lambda code: code[0].encode("unicode_escape").decode(), text)
    print(text, end="", flush=True)


def text_console() -> Console:
    """A console on standard error for everything but the answer, so that answers can be piped."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def reported_errors(as_json: bool) -> Iterator[None]:
    """Print a BatonError without a traceback and end the command with status 1.

    The same for a missing library, because some commands need the services' libraries.
    """
    try:
        try:
            yield
        except ModuleNotFoundError as missing:
            if missing.name is None or missing.name.partition(".")[0] in _OWN_PACKAGES:
                raise
            raise FailedPrecondition(
                f"this command needs {missing.name}: pip install 'baton-serve[engine,gateway,training]'",
                reason="NOT_INSTALLED",
            ) from missing
    except BatonError as error:
        if as_json:
            print_json(
                "error",
                code=error.code.name,
                reason=error.reason,
                metadata=error.metadata,
                message=str(error),
            )
        else:
            print_error(error)
        raise typer.Exit(1) from None


def print_error(error: BatonError) -> None:
    """Print the error on standard error, after earlier text."""
    sys.stdout.flush()
    remedy = "; give --token-file" if isinstance(error, Unauthenticated) else ""
    text_console().print(f"{error.code.name}: {error}{remedy}", style="red", markup=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"cannot print {type(value).__name__} as JSON")
