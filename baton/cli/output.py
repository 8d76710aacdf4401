"""Prints the output of commands: text for people, or one JSON object per line for programs, and generations while they
run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from baton.client import EventStream
from baton.client.generation import CompletionBuilder
from baton.errors import BatonError, FailedPrecondition, Unauthenticated
from baton.events import Completion, Delta, Event, Finished
from common.errors import StartupError

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Matches every control character except tab and line feed."""
_OWN_PACKAGES = frozenset({"baton", "baton_cpu", "common", "training"})


def print_json(event: str, **fields: Any) -> None:
    """Prints one JSON object as a line on standard output, and flushes it."""
    line = json.dumps({"event": event, **fields}, default=_plain, ensure_ascii=False)
    # json.dumps leaves some control characters unescaped.
    print(_CONTROLS.sub(lambda code: f"\\u{ord(code[0]):04x}", line), flush=True)


def _print_event(value: Any) -> None:
    """Prints a dataclass as one JSON line. The name of its type becomes the `event` field."""
    print_json(type(value).__name__.lower(), **dataclasses.asdict(value))


def print_text(text: str) -> None:
    """Prints the model's text as it arrives. On a terminal, control characters are escaped, because they could command
    it.
    """
    if sys.stdout.isatty():
        text = _CONTROLS.sub(lambda code: code[0].encode("unicode_escape").decode(), text)
    print(text, end="", flush=True)


def text_console() -> Console:
    """Returns a console on standard error. Everything but the answer goes there, so that answers can be piped."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def reported_errors(as_json: bool) -> Iterator[None]:
    """Wraps a command: if it raises a BatonError, prints that without a traceback and ends with status 1.

    With `as_json` the error is a JSON line on standard output, else text on standard error. A missing library and a
    StartupError are reported in the same way, because some commands use the services' libraries and models.
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
        except StartupError as error:
            raise FailedPrecondition(str(error), reason=error.reason) from error
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
    """Prints the error on standard error, on a line after any text printed before."""
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


@dataclass(frozen=True, slots=True)
class Shown:
    """A generation that ended without an error, with times measured by the client. `ttft_s` is
    None if no token came.
    """

    completion: Completion
    ttft_s: float | None
    wall_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        """The number of tokens after the first, divided by the seconds from the first to the end; 0 without tokens."""
        if self.ttft_s is None or self.wall_s <= self.ttft_s:
            return 0.0
        return (len(self.completion.token_ids) - 1) / (self.wall_s - self.ttft_s)

    def summary(self) -> str:
        tokens = len(self.completion.token_ids)
        ttft = "no token" if self.ttft_s is None else f"first after {self.ttft_s:.3f} s"
        return (
            f"{tokens} tokens ({self.completion.finish_reason.value}), {ttft}, {self.decode_tokens_per_s:.1f} tokens/s"
        )


def show(events: EventStream, *, as_json: bool) -> Shown:
    """Prints text as it arrives, or every event as a JSON line, and returns the whole generation.

    The last line of text gets its line end even if the stream breaks.
    """
    if as_json:
        return _follow(events, _print_event)
    is_line_open = False

    def print_part(event: Event) -> None:
        nonlocal is_line_open
        if isinstance(event, Delta) and event.text:
            is_line_open = True
            print_text(event.text)
        elif isinstance(event, Finished):
            print(flush=True)
            is_line_open = False

    try:
        return _follow(events, print_part)
    finally:
        if is_line_open:
            print(flush=True)


def measure(events: EventStream) -> Shown:
    """Reads a generation to its end and measures it like `show`, without printing."""
    return _follow(events, lambda event: None)


def _follow(events: EventStream, on_event: Callable[[Event], None]) -> Shown:
    start_s = time.perf_counter()
    ttft_s: float | None = None
    builder = CompletionBuilder()
    completion: Completion | None = None
    with events:
        for event in events:
            if ttft_s is None and isinstance(event, Delta) and event.token_ids:
                ttft_s = time.perf_counter() - start_s
            on_event(event)
            completion = builder.add(event) or completion
    assert completion is not None  # without Finished, EventStream would have raised
    return Shown(completion, ttft_s, time.perf_counter() - start_s)
