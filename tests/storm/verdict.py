"""Whether the ends of a storm are what its faults explain."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from baton.service_process import ServiceProcess
from tests.faults.plan import Action
from tests.storm.pairs import MAX_ROWS
from tests.storm.storm import StormReport

Faults = Counter[tuple[str, str]]
"""How many happened, by point and action."""

_FAILS: dict[tuple[str, str], int] = {
    ("handoff.frame", Action.DUPLICATE): 1,  # the row that the frame names
    ("stream.landing.land", Action.RAISE): 1,
    ("stream.forward.decode", Action.RAISE): MAX_ROWS,  # a decode step takes its requests along
    ("stream.forward.verify", Action.RAISE): MAX_ROWS,
    ("memory.host", Action.FAIL): MAX_ROWS,
}
"""The most requests that one fault fails. All others cost time, or a retry."""


def faults_of(services: Iterable[ServiceProcess]) -> Faults:
    """Those that have happened, by the services' logs."""
    lines = [line for service in services for line in service.log_file.read_text().splitlines()]
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return Counter((entry["point"], entry["action"]) for entry in entries if entry["event"] == "fault")


def problems_of(report: StormReport, faults: Faults, *, num_requests: int, speculates: bool) -> list[str]:
    """What is wrong with outputs and ends; and what should have happened in a storm and did not."""
    num_explained = sum(number * _FAILS.get(fault, 0) for fault, number in faults.items())
    num_failed = report.failed.total()
    problems = [
        *report.wrong,
        *(f"{number} failed with {name}" for name, number in report.failed.items() if name != "INTERNAL ENGINE_FAULT"),
    ]
    if report.num_ended != num_requests:
        problems.append(f"{report.num_ended} ends of {num_requests} requests")
    if num_failed > num_explained:
        problems.append(f"{num_failed} failed, {faults} explain {num_explained}: {sorted(set(report.texts))}")
    happened = {
        "was finished": report.num_finished,
        "was left by its client": report.num_aborted,
        "was retracted": report.num_retractions,
        "was handed over again": report.num_attempts - report.num_finished,
        "met a fault": faults.total(),
        "had a draft accepted": report.num_accepted or not speculates,
    }
    return problems + [f"no request {what}" for what, number in happened.items() if not number]
