"""Events of requests that their edge has not taken yet, with the tokens of each request merged."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat

from common.sampling.params import TokenLogprobs
from decode_service.messages import Event, Failed, Finished, Tokens


class UnreadEvents:
    """Collects the engine's events until the edge takes them.

    An edge that is slower than the engine takes the tokens of several steps at once, which costs it little more than
    those of one. So what waits here is at most the output of the live requests. All events keep their
    order, but the tokens of all requests come together: after other events that are taken with them, and before the
    ends of requests.
    """

    def __init__(self) -> None:
        self._others: list[Event] = []
        self._tokens: dict[str, tuple[list[int], list[TokenLogprobs | None]]] = {}
        self._ends: list[Event] = []

    def __bool__(self) -> bool:
        return bool(self._others or self._tokens or self._ends)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self._add_tokens(event)
                case Finished() | Failed():
                    self._ends.append(event)
                case _:
                    self._others.append(event)

    def take(self) -> list[Event]:
        """Removes and returns all events."""
        events = [*self._others, *([_merged(self._tokens)] if self._tokens else []), *self._ends]
        self._others, self._tokens, self._ends = [], {}, []
        return events

    def _add_tokens(self, event: Tokens) -> None:
        stop = 0
        for request_id, num_tokens in zip(event.request_ids, event.num_tokens, strict=True):
            start, stop = stop, stop + num_tokens
            token_ids, logprobs = self._tokens.setdefault(request_id, ([], []))
            token_ids += event.token_ids[start:stop]
            logprobs += event.logprobs[start:stop] or repeat(None, num_tokens)


def _merged(tokens: dict[str, tuple[list[int], list[TokenLogprobs | None]]]) -> Tokens:
    """Returns one event with the tokens of these requests."""
    logprobs = tuple(chain.from_iterable(logprobs for _, logprobs in tokens.values()))
    return Tokens(
        request_ids=tuple(tokens),
        num_tokens=tuple(len(token_ids) for token_ids, _ in tokens.values()),
        token_ids=tuple(chain.from_iterable(token_ids for token_ids, _ in tokens.values())),
        logprobs=logprobs if any(entry is not None for entry in logprobs) else (),
    )
