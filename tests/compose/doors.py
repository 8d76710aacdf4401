"""The two ways into a running project, HTTP at the gateway and gRPC at the decode services, and loads sent through
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.compose.chats import Chat, Outcome, ask, over_grpc, over_http
from tests.compose.project import Container, Project
from tests.compose.report import Report

NUM_AT_A_TIME = 16
_SERVED = re.compile(r'^baton_requests_total\{outcome="(?:prebuilt|eos|length|stop_\w+)"\} (\S+)$', re.MULTILINE)


def http(project: Project, *, num_fillings: int = 4) -> Chat:
    (gateway,) = project.containers("gateway")
    return over_http(gateway.port(8000), num_fillings=num_fillings)


def grpc(project: Project, *, num_fillings: int = 4) -> Chat:
    addresses = [f"127.0.0.1:{container.port(50051)}" for container in project.containers("decode")]
    return over_grpc(addresses, num_fillings=num_fillings)


def load(
    *chats: Chat, num_requests: int, report: Report, first: int = 0, on_answer: Callable[[int], None] | None = None
) -> Outcome:
    """Sends `num_requests` questions from number `first` on. Each one that is not answered is a problem in the
    report.
    """
    outcome = ask(chats, num_requests=num_requests, num_at_a_time=NUM_AT_A_TIME, first=first, on_answer=on_answer)
    report.expect(len(outcome.answers) == num_requests, f"{num_requests} chats: {outcome}")
    for failure in sorted(set(outcome.failures)):
        report.problem(failure)
    return outcome


def rows_served(container: Container) -> int:
    """Returns the number of rows that the container served, by its own metrics."""
    return sum(int(float(count)) for count in _SERVED.findall(container.metrics()))
