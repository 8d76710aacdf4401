"""Shows one generation while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.cli.output import print_event, print_text
from baton.client import EventStream
from baton.client.event_order import CompletionBuilder
from baton.events import Completion, Delta, Event, Finished


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
        return _follow(events, print_event)
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
