"""Describes a generating endpoint by the parts in which such endpoints differ: its fields and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.events import Event, Started
from gateway.errors import ApiError
from gateway.fields import RequestFields
from gateway.plan import Plan
from gateway.sending import ServerEvent
from gateway.served_model import ModelCard
from gateway.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request whose generations have all been admitted. `started` has the first event of each.

    `tally` counts each event before the answer gets it.
    """

    plan: Plan
    card: ModelCard
    request_id: str
    created_s: int
    started: Sequence[Started]
    tally: Tally


class Answer(Protocol):
    """Makes the answer to one request from the events of its generations: the events of a stream, or one JSON object.

    It gets every event in the order of arrival, whether the answer is streamed or not.
    """

    def opening(self) -> Sequence[ServerEvent]:
        """Returns what a stream begins with, before the first token."""

    def add(self, index: int, event: Event) -> Sequence[ServerEvent]:
        """Takes the next event of the generation with this index, and returns what a stream has of it."""

    def ending(self) -> Sequence[ServerEvent]:
        """Returns what a stream ends with, once all generations have finished."""

    def failing(self, error: ApiError) -> Sequence[ServerEvent]:
        """Returns what a stream ends with if the request fails."""

    def whole(self) -> Mapping[str, Any]:
        """Returns the JSON object, once all generations have finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """Describes a generating endpoint.

    `parse` turns a request's body, which has `fields`, into a plan, or raises ApiError. `begin` makes the answer to
    an admitted request. If the endpoint `parses_output`, the text has the format's markers that are special tokens. If
    it `repeats_streams`, a stream's last event has the whole answer, log-probabilities too.
    """

    path: str
    fields: type[RequestFields]
    parse: Callable[[bytes], Plan]
    parses_output: bool
    repeats_streams: bool = False
    begin: Callable[[Admitted], Answer]
