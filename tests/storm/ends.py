"""Whether each request ended once in its decode service, and as its client saw it.

A decode service logs one line, `request_finished`, for each call that it admitted. A call that breaks has a successor
where clients resume, and a process that is killed writes no line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.service_process import ServiceProcess
from tests.storm.logs import entries
from tests.storm.storm import LEFT, ClientEnd

PASSING = frozenset({"cancelled", "no_prefill", "draining", "engine_lost", "engine_stalled"})
"""Outcomes of a call that a client which resumes may follow by another. All others are final."""
FINISHED = frozenset({"eos", "stop_token", "stop_string", "length"})


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """`instance_id` is another one each time that a service is started. `outcome`: a reason to finish or to fail."""

    request_id: str
    instance_id: str
    outcome: str
    error: str = ""


def ends_of(services: Iterable[ServiceProcess]) -> list[ServerEnd]:
    """By the services' logs, in their order."""
    return [
        ServerEnd(entry["request_id"], entry["instance_id"], entry["outcome"], entry.get("error", ""))
        for _, entry in entries(services, "request_finished")
    ]


def wrong_ends(seen: Sequence[ClientEnd], logged: Sequence[ServerEnd], *, resumes: bool) -> list[str]:
    """Requests of which a service logged an end too many, none, or another than their client saw.

    Where clients resume a request may have several lines: in one process at most one that is final, and unless its
    client left, one as the client saw it.
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
    """Errors of requests whose clients had gone when they failed."""
    left = {client.request_id for client in seen if client.outcome == LEFT}
    passing = PASSING | FINISHED
    return [end.error for end in logged if end.request_id in left and end.outcome not in passing]


def needless_cancels(seen: Sequence[ClientEnd], logged: Sequence[ServerEnd]) -> list[str]:
    """Requests that a service cancelled whose clients stayed. Only one that is killed or drained may."""
    left = {client.request_id for client in seen if client.outcome == LEFT}
    return [
        f"{end.request_id} was cancelled, and its client had stayed"
        for end in logged
        if end.outcome == "cancelled" and end.request_id not in left
    ]


def _is_right(client: ClientEnd, ends: Sequence[ServerEnd]) -> bool:
    """A client may leave before its request is admitted, and while its request finishes or fails."""
    if client.outcome == LEFT:
        return len(ends) == 1 or (not ends and not client.has_started)
    return [end.outcome for end in ends] == [client.outcome]


def _is_right_resumed(client: ClientEnd, ends: Sequence[ServerEnd]) -> bool:
    final = [end for end in ends if end.outcome not in PASSING]
    if len({end.instance_id for end in final}) < len(final):
        return False
    return client.outcome == LEFT or client.outcome in [end.outcome for end in ends]
