"""Judges whether a storm's faults explain how its requests ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.service_process import ProcessRole, ServiceProcess
from tests.faults.plan import Action, FaultPlan
from tests.storm.ends import ServerEnd, unseen_failures, wrong_ends
from tests.storm.logs import entries
from tests.storm.pairs import MAX_ROWS
from tests.storm.storm import StormReport

Faults = Counter[tuple[ProcessRole, str, str]]
"""The numbers of faults that happened, by the service's role, the point and the action."""

SURE = 10.0
"""If a fault is expected at least this many times, it must have happened: with this expectation it fails to happen in
one run of 20,000.
"""


@dataclass(frozen=True, slots=True)
class _FailureClass:
    """Requests that fail with a text that matches `text`. Each time `cause` happens, at most `max_requests` of them
    fail. All other faults cost only a retry.
    """

    text: re.Pattern[str]
    cause: tuple[ProcessRole, str, str]
    max_requests: int


_CLASSES = tuple(
    _FailureClass(re.compile(text), (role, point, action.value), max_requests)
    for text, role, point, action, max_requests in (
        (
            r"the handoff broke the protocol: row \d+: (group .* came twice|a second PrebuiltBatch entry)",
            "prefill",
            "handoff.frame",
            Action.DUPLICATE,
            1,  # the row that the frame names
        ),
        (r"landing KV failed: stream\.landing\.land", "decode", "stream.landing.land", Action.RAISE, 1),
        (r"landing KV failed: injected at memory\.host", "decode", "memory.host", Action.FAIL, 1),
        # A failed decode step fails all of its requests.
        (r"a decode step failed: injected at memory\.host", "decode", "memory.host", Action.FAIL, MAX_ROWS),
        (r"a decode step failed: stream\.forward\.verify", "decode", "stream.forward.verify", Action.RAISE, MAX_ROWS),
    )
)


def faults_of(services: Iterable[ServiceProcess]) -> Faults:
    """Counts the faults in the services' logs."""
    return Counter((service.role, entry["point"], entry["action"]) for service, entry in entries(services, "fault"))


def visits_of(services: Iterable[ServiceProcess]) -> Counter[str]:
    """Returns for each point (a named place where faults are injected) the number of visits in the service that visited
    it most often. With the same seed, all services are hit at the same visits.
    """
    visits: Counter[str] = Counter()
    for service in services:
        own: Counter[str] = Counter()
        for _, entry in entries((service,), "fault_visits"):
            own[entry["point"]] += entry["num_visits"]
        visits |= own
    return visits


def dead_points(plan: FaultPlan, faults: Faults, visits: Counter[str], *, is_long: bool = False) -> list[str]:
    """Describes planned faults that did not happen but should have: those at points that nothing visited, and those
    that are too frequent to have missed all visits.

    With `is_long`, every planned fault must have happened.
    """
    problems = [
        f"nothing came by {point}" for point in dict.fromkeys(f.point for f in plan.faults) if not visits[point]
    ]
    happened: Counter[tuple[str, str]] = Counter()
    expected: Counter[tuple[str, str]] = Counter()
    for (_, point, action), number in faults.items():
        happened[point, action] += number
    for fault in plan.faults:
        num_visits = visits[fault.point]
        is_sure = fault.rate * num_visits >= SURE if fault.at is None else num_visits >= fault.at
        expected[fault.point, fault.action.value] += is_sure or (is_long and num_visits > 0)
    return problems + [
        f"{action} at {point} never happened in {visits[point]} visits or more"
        for (point, action), is_sure in expected.items()
        if is_sure and not happened[point, action]
    ]


def unexplained(texts: Sequence[str], faults: Faults) -> list[str]:
    """Describes the errors among `texts` that no fault can have caused, or that outnumber what the faults explain."""
    problems: list[str] = []
    num_needed: Counter[tuple[ProcessRole, str, str]] = Counter()
    classes = {text: _class_of(text) for text in set(texts)}
    problems += [f"{texts.count(text)} failed with {text!r}" for text in sorted(set(texts)) if classes[text] is None]
    counts = Counter(classes[text] for text in texts)
    for failures, number in counts.items():
        if failures is not None:
            num_needed[failures.cause] += -(-number // failures.max_requests)
    for cause, number in num_needed.items():
        if number > faults[cause]:
            failed = sorted({text for text, kind in classes.items() if kind is not None and kind.cause == cause})
            problems.append(f"{' '.join(cause)}: {faults[cause]} happened, the failures need {number}: {failed}")
    return problems


def _class_of(text: str) -> _FailureClass | None:
    return next((kind for kind in _CLASSES if kind.text.fullmatch(text)), None)


def problems_of(
    report: StormReport,
    ends: Sequence[ServerEnd],
    faults: Faults,
    *,
    num_requests: int,
    speculates: bool,
    resumes: bool = False,
) -> list[str]:
    """Describes all that is wrong: with outputs and ends, and what a storm must contain but this one did not.

    `ends` are those of the decode services. With `resumes`, clients continued broken streams in other calls.
    """
    problems = [
        *report.wrong,
        *(f"{number} failed with {name}" for name, number in report.failed.items() if name != "INTERNAL ENGINE_FAULT"),
        *unexplained([*report.texts, *unseen_failures(report.ends, ends)], faults),
        *wrong_ends(report.ends, ends, resumes=resumes),
    ]
    if len({end.request_id for end in report.ends}) != num_requests:
        problems.append(f"{len(report.ends)} ends of {num_requests} requests")
    happened = {
        "was finished": report.num_finished,
        "was left by its client": report.num_aborted,
        "was retracted": report.num_retractions,
        "was handed over again": report.num_attempts - report.num_handed_off,
        "began with cached KV": report.num_cached_tokens,
        "began with KV of another prompt": report.num_shared_tokens,
        "met a fault": faults.total(),
        "ended in its grammar": report.num_constrained,
        "had a draft accepted": report.num_accepted or not speculates,
    }
    return problems + [f"no request {what}" for what, number in happened.items() if not number]
