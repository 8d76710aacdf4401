"""Checks that each request ended once in its decode service, and as its client saw it.

A decode service logs one line, `request_finished`, for each call it admitted. Where clients resume, a call that breaks
is followed by another. A process that is killed writes no line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.service_process import ServiceProcess
from tests.storm.logs import entries
from tests.storm.storm import LEFT, ClientEnd

PASSING = frozenset({"cancelled", "no_prefill", "draining", "engine_lost", "engine_stalled"})
"""Outcomes after which a client that resumes may make another call. All other outcomes are final."""
FINISHED = frozenset({"eos", "stop_token", "stop_string", "length"})


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """One `request_finished` line of a log. `instance_id` changes each time a service is started, and `outcome` is the
    reason why the request finished or failed.
    """

    request_id: str
    instance_id: str
    outcome: str
    error: str = ""


def ends_of(services: Iterable[ServiceProcess]) -> list[ServerEnd]:
    """Returns the ends of requests that the services logged, in the order of their logs."""
    return [
        ServerEnd(entry["request_id"], entry["instance_id"], entry["outcome"], entry.get("error", ""))
        for _, entry in entries(services, "request_finished")
    ]


def wrong_ends(seen: Sequence[ClientEnd], logged: Sequence[ServerEnd], *, resumes: bool) -> list[str]:
    """Describes the requests for which services logged too many ends, none, or another end than the client saw.

    Where clients resume, a request may have several lines: at most one final line per process, and, unless its client
    left, one that matches what the client saw.
    """
    by_request: dict[str, list[ServerEnd]] = defaultdict(list)
    for end in logged:
        by_request[end.request_id].append(end)
    problems = [f"{name}: nobody sent it" for name in sorted(by_request.keys() - {end.request_id for end in seen})]
    for client in seen:
        ends = by_request[client.request_id]
        is_right = _is_right_resumed(client, ends) if resumes else _is_right(client, ends)
        if not is_right:
            outcomes = [end.outcome for end in ends]
            problems.append(f"{client.request_id}: its client saw {client.outcome}, the log has {outcomes}")
    return problems


def unseen_failures(seen: Sequence[ClientEnd], logged: Sequence[ServerEnd]) -> list[str]:
    """Returns the errors of requests that failed after their clients had left."""
    left = {client.request_id for client in seen if client.outcome == LEFT}
    passing = PASSING | FINISHED
    return [end.error for end in logged if end.request_id in left and end.outcome not in passing]


def needless_cancels(seen: Sequence[ClientEnd], logged: Sequence[ServerEnd]) -> list[str]:
    """Describes the requests that a service cancelled although their clients had stayed. Only a service that is
    killed or drained may do so.
    """
    left = {client.request_id for client in seen if client.outcome == LEFT}
    return [
        f"{end.request_id} was cancelled, and its client had stayed"
        for end in logged
        if end.outcome == "cancelled" and end.request_id not in left
    ]


def _is_right(client: ClientEnd, ends: Sequence[ServerEnd]) -> bool:
    """Returns whether the logged ends fit the end that the client saw. A client may leave before its request is
    admitted, or while it finishes or fails.
    """
    if client.outcome == LEFT:
        return len(ends) == 1 or (not ends and not client.has_started)
    return [end.outcome for end in ends] == [client.outcome]


def _is_right_resumed(client: ClientEnd, ends: Sequence[ServerEnd]) -> bool:
    final = [end for end in ends if end.outcome not in PASSING]
    if len({end.instance_id for end in final}) < len(final):
        return False
    return client.outcome == LEFT or client.outcome in [end.outcome for end in ends]
